"""Relations between things: deduction, size, path finding (families 15, 18, 19).

What will be told is fixed at the start and told in random order. Stories longer than what there is to say repeat
themselves; in family 15 people take up other work instead.
"""

import itertools

from implicit_llm_data.babi.simulator import lexicon
from implicit_llm_data.babi.simulator.telling import Dice, Question, StoryWriter


class Deduction:
    """Family 15: each kind of person greets one other kind; a person is of one kind at a time."""

    def __init__(self, dice: Dice, length: int) -> None:
        self.dice = dice
        num_rules = max(1, min(len(lexicon.KINDS), (length + 1) // 2))
        self._kinds = dice.draw(lexicon.KINDS, num_rules)
        self._new_members = dice.draw(lexicon.MEMBERS, len(lexicon.MEMBERS))
        plan: list[str | None] = [*self._kinds, *[None] * max(1, length - num_rules)]  # None: a member
        self._plan = dice.draw(plan, len(plan))
        self._rules: dict[str, tuple[str, int]] = {}
        self._members: dict[str, tuple[str, int]] = {}

    def tell(self, story: StoryWriter) -> None:
        kind = self._plan.pop()
        if kind is None:
            self._tell_member(story)
            return
        other = self.dice.pick([other for other in lexicon.KINDS if other != kind])
        self._rules[kind] = (other, story.state(lexicon.RULES, kind=kind, other=other))

    def ask(self) -> Question | None:
        known = [who for who, (kind, _) in self._members.items() if kind in self._rules]
        if not known:
            return None
        who = self.dice.pick(known)
        kind, line = self._members[who]
        answer, rule_line = self._rules[kind]
        return lexicon.ASK_GREETED.format(who=who), answer, (line, rule_line)

    def _tell_member(self, story: StoryWriter) -> None:
        if self._new_members:
            who, sentences = self._new_members.pop(), lexicon.MEMBERSHIPS
            kind = self.dice.pick(self._kinds)
        else:
            who, sentences = self.dice.pick(lexicon.MEMBERS), lexicon.CHANGES
            kind = self.dice.pick([kind for kind in self._kinds if kind != self._members[who][0]])
        self._members[who] = (kind, story.state(sentences, who=who, kind=kind))


class Sizes:
    """Family 18: containers in one order of size; questions are about pairs that no statement compares."""

    def __init__(self, dice: Dice, length: int) -> None:
        self.dice = dice
        count = max(3, min(len(lexicon.CONTAINERS), length // 2 + 2))
        self._by_size = dice.draw(lexicon.CONTAINERS, count)  # the largest first
        pairs = [(rank, rank + 1) for rank in range(count - 1)]
        # With three containers, (0, 2) is the only pair to ask for.
        more = [*pairs, *((rank, rank + 2) for rank in range(count - 2))] if count > 3 else pairs
        pairs += [dice.pick(more) for _ in range(length - len(pairs))]
        self._plan = dice.draw(pairs, len(pairs))
        self._told: dict[tuple[int, int], int] = {}  # line of each pair, the larger one first

    def tell(self, story: StoryWriter) -> None:
        pair = self._plan.pop()
        larger, smaller = (self._by_size[rank] for rank in pair)
        if self.dice.chance(50):
            line = story.state(lexicon.LARGER, first=larger, second=smaller)
        else:
            line = story.state(lexicon.SMALLER, first=smaller, second=larger)
        self._told.setdefault(pair, line)

    def ask(self) -> Question | None:
        proofs = self._proofs()
        if not proofs:
            return None
        pair = self.dice.pick(list(proofs))
        larger, smaller = (self._by_size[rank] for rank in pair)
        is_true = self.dice.chance(50)
        first, second = (larger, smaller) if is_true else (smaller, larger)
        if self.dice.chance(50):
            question = lexicon.ASK_LARGER.format(first=first, second=second)
        else:
            question = lexicon.ASK_SMALLER.format(first=second, second=first)
        return question, lexicon.YES_NO[is_true], proofs[pair]

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


class Village:
    """Family 19: sites on a map, each told with a neighbour; paths of two steps, of which there is never a second.

    The sites form a tree, and those that are neighbours on the map are neighbours in it, so that no other path follows
    from the statements either.
    """

    def __init__(self, dice: Dice, length: int) -> None:
        self.dice = dice
        count = max(3, min(len(lexicon.SITES), length + 1))
        self._steps: dict[tuple[str, str], str] = {}  # direction from one site to its neighbour
        roads = self._build(dice.draw(lexicon.SITES, count))
        roads += [dice.pick(roads) for _ in range(length - len(roads))]
        self._plan = dice.draw(roads, len(roads))
        self._told: dict[tuple[str, str], int] = {}  # line of each road, in both directions

    def tell(self, story: StoryWriter) -> None:
        ends = self.dice.draw(self._plan.pop(), 2)
        direction = self._steps[ends[1], ends[0]]
        line = story.state(lexicon.NEIGHBOURS, first=ends[0], direction=direction, second=ends[1])
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
        answer = lexicon.listed((self._steps[start, middle], self._steps[middle, end]))
        lines = (self._told[start, middle], self._told[middle, end])
        return lexicon.ASK_PATH.format(first=start, second=end), answer, lines

    def _build(self, sites: list[str]) -> list[tuple[str, str]]:
        """Put the sites on the map, one after another; return the pairs of neighbours."""
        first, *others = sites
        site_at = {(0, 0): first}
        roads = []
        for site in others:
            while True:
                x, y = self.dice.pick(list(site_at))
                dx, dy = self.dice.pick(list(lexicon.DIRECTIONS))
                place = (x + dx, y + dy)
                if place not in site_at and len(self._neighbours(place, site_at)) == 1:
                    break
            neighbour = site_at[x, y]
            site_at[place] = site
            self._steps[neighbour, site] = lexicon.DIRECTIONS[dx, dy]
            self._steps[site, neighbour] = lexicon.DIRECTIONS[-dx, -dy]
            roads.append((neighbour, site))
        return roads

    @staticmethod
    def _neighbours(place: tuple[int, int], site_at: dict[tuple[int, int], str]) -> list[str]:
        around = ((place[0] + dx, place[1] + dy) for dx, dy in lexicon.DIRECTIONS)
        return [site_at[other] for other in around if other in site_at]
