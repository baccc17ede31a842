"""Relations between things: deduction, size, path finding (families 15, 18, 19).

What will be told is fixed at the start and told in random order. Stories longer than what there is to say repeat
themselves; in family 15 people take up other work instead.
"""

import itertools

from implicit_llm_data.babi.simulator.telling import YES_NO, Dice, Question, World

# Deduction.
MEMBERS = ("Pip", "Quill", "Rusk", "Sorrel", "Tansy", "Umber", "Vesper", "Wren")
KINDS = ("baker", "miner", "tailor", "sailor", "painter", "farmer", "piper", "weaver")
RULES = ("Every {kind} greets the {other}.",)
MEMBERSHIPS = ("{who} works as {kind}.",)
CHANGES = ("{who} now works as {kind}.",)
ASK_GREETED = "Whom does {who} greet?"

# Sizes.
CONTAINERS = ("crate", "flask", "basket", "barrel", "drawer", "pouch", "trunk", "jar", "wagon", "purse", "tub", "vase")
LARGER = ("The {larger} is roomier than the {smaller}.",)
SMALLER = ("The {smaller} goes inside the {larger}.",)
ASK_LARGER = "Is the {larger} roomier than the {smaller}?"
ASK_SMALLER = "Can the {smaller} go inside the {larger}?"

# Path finding; directions by their step on the map.
SITES = (
    *("mill", "inn", "chapel", "market", "harbour", "bakery", "school", "fountain"),
    *("stable", "tower", "bridge", "orchard"),
)
DIRECTIONS = {(0, 1): "north", (1, 0): "east", (0, -1): "south", (-1, 0): "west"}
NEIGHBOURS = ("The {first} lies {direction} of the {second}.",)
ASK_PATH = "Which way leads from the {first} to the {second}?"

TEXTS = (
    *(*MEMBERS, *KINDS, *CONTAINERS, *SITES, *DIRECTIONS.values()),
    *(f"{DIRECTIONS[x, y]},{word}" for x, y in DIRECTIONS for step, word in DIRECTIONS.items() if step != (-x, -y)),
    *(*RULES, *MEMBERSHIPS, *CHANGES, *LARGER, *SMALLER, *NEIGHBOURS),
    *(ASK_GREETED, ASK_LARGER, ASK_SMALLER, ASK_PATH),
)


class Deduction(World):
    """Family 15: each kind of person greets one other kind; a person is of one kind at a time."""

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        num_rules = max(1, min(len(KINDS), (length + 1) // 2))
        self._kinds = dice.draw(KINDS, num_rules)
        self._new_members = dice.draw(MEMBERS)
        self._plan = dice.draw([*self._kinds, *[None] * max(1, length - num_rules)])  # None: a member
        self._rules: dict[str, tuple[str, int]] = {}
        self._members: dict[str, tuple[str, int]] = {}

    def tell(self) -> None:
        kind = self._plan.pop()
        if kind is None:
            self._tell_member()
            return
        other = self.dice.pick([other for other in KINDS if other != kind])
        self._rules[kind] = (other, self.state(RULES, kind=kind, other=other))

    def ask(self) -> Question | None:
        known = [who for who, (kind, _) in self._members.items() if kind in self._rules]
        if not known:
            return None
        who = self.dice.pick(known)
        kind, line = self._members[who]
        answer, rule_line = self._rules[kind]
        return ASK_GREETED.format(who=who), answer, (line, rule_line)

    def _tell_member(self) -> None:
        if self._new_members:
            who, sentences = self._new_members.pop(), MEMBERSHIPS
            kind = self.dice.pick(self._kinds)
        else:
            who, sentences = self.dice.pick(MEMBERS), CHANGES
            kind = self.dice.pick([kind for kind in self._kinds if kind != self._members[who][0]])
        self._members[who] = (kind, self.state(sentences, who=who, kind=kind))


class Sizes(World):
    """Family 18: containers in one order of size; questions are about pairs that no statement compares."""

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        count = max(3, min(len(CONTAINERS), length // 2 + 2))
        self._by_size = dice.draw(CONTAINERS, count)  # the largest first
        pairs = [(rank, rank + 1) for rank in range(count - 1)]
        # With three containers, (0, 2) is the only pair to ask for.
        more = [*pairs, *((rank, rank + 2) for rank in range(count - 2))] if count > 3 else pairs
        pairs += [dice.pick(more) for _ in range(length - len(pairs))]
        self._plan = dice.draw(pairs)
        self._told: dict[tuple[int, int], int] = {}  # line of each pair, the larger one first

    def tell(self) -> None:
        pair = self._plan.pop()
        larger, smaller = (self._by_size[rank] for rank in pair)
        line = self.state(LARGER if self.dice.chance(50) else SMALLER, larger=larger, smaller=smaller)
        self._told.setdefault(pair, line)

    def ask(self) -> Question | None:
        proofs = self._proofs()
        if not proofs:
            return None
        pair = self.dice.pick(list(proofs))
        is_true = self.dice.chance(50)
        larger, smaller = (self._by_size[rank] for rank in (pair if is_true else pair[::-1]))
        question = ASK_LARGER if self.dice.chance(50) else ASK_SMALLER
        return question.format(larger=larger, smaller=smaller), YES_NO[is_true], proofs[pair]

    def _proofs(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The lines that prove each pair, as few as possible, where no line alone does."""
        found: dict[tuple[int, int], tuple[int, ...]] = {pair: (line,) for pair, line in self._told.items()}
        newest = dict(found)
        while newest:  # each round adds the pairs that need one line more
            longer = {
                (larger, smallest): (*lines, line)
                for (larger, smaller), lines in newest.items()
                for (also, smallest), line in self._told.items()
                if smaller == also
            }
            newest = {pair: lines for pair, lines in longer.items() if pair not in found}
            found |= newest
        return {pair: lines for pair, lines in found.items() if pair not in self._told}


class Village(World):
    """Family 19: sites on a map, each told with a neighbour; paths of two steps, of which there is never a second.

    The sites form a tree, and those that are neighbours on the map are neighbours in it, so that no other path follows
    from the statements either.
    """

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        count = max(3, min(len(SITES), length + 1))
        self._steps: dict[tuple[str, str], str] = {}  # direction from one site to its neighbour
        roads = self._build(dice.draw(SITES, count))
        roads += [dice.pick(roads) for _ in range(length - len(roads))]
        self._plan = dice.draw(roads)
        self._told: dict[tuple[str, str], int] = {}  # line of each road, in both directions

    def tell(self) -> None:
        ends = self.dice.draw(self._plan.pop())
        direction = self._steps[ends[1], ends[0]]
        line = self.state(NEIGHBOURS, first=ends[0], direction=direction, second=ends[1])
        for start, end in itertools.permutations(ends):
            self._told.setdefault((start, end), line)

    def ask(self) -> Question | None:
        paths = [
            (start, middle, end)
            for (start, middle), (also, end) in itertools.permutations(self._told, 2)
            if middle == also and start != end
        ]
        if not paths:
            return None
        start, middle, end = self.dice.pick(paths)
        answer = ",".join((self._steps[start, middle], self._steps[middle, end]))
        lines = (self._told[start, middle], self._told[middle, end])
        return ASK_PATH.format(first=start, second=end), answer, lines

    def _build(self, sites: list[str]) -> list[tuple[str, str]]:
        """Put the sites on the map, one after another; return the pairs of neighbours."""
        first, *others = sites
        site_at = {(0, 0): first}
        roads = []
        for site in others:
            while True:
                x, y = self.dice.pick(list(site_at))
                step_x, step_y = self.dice.pick(list(DIRECTIONS))
                place = (x + step_x, y + step_y)
                num_neighbours = sum((place[0] + dx, place[1] + dy) in site_at for dx, dy in DIRECTIONS)
                if place not in site_at and num_neighbours == 1:
                    break
            neighbour = site_at[x, y]
            site_at[place] = site
            self._steps[neighbour, site] = DIRECTIONS[step_x, step_y]
            self._steps[site, neighbour] = DIRECTIONS[-step_x, -step_y]
            roads.append((neighbour, site))
        return roads
