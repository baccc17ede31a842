"""Simulate stories of any length in the format of bAbI; each of eleven families has the number of a bAbI task.

A family is a class. Its `tell` adds an event to the story, `subjects` returns possible subjects of a question, and
`ask` returns a question about one of them. The families follow the description of the tasks in Weston et al. 2015
(arXiv:1502.05698). Words and sentences are the simulator's own; only the kinds of questions are those of bAbI.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from implicit_llm_contracts.config.text import SimulatedText
from implicit_llm_data.babi.stories import SPLITS, Story, StoryLine

T = TypeVar("T")
Lines = tuple[int, ...]  # line numbers of statements
Question = tuple[str, str, Iterable[int]]  # text, answer, and the lines that prove the answer

PRONOUNS = {"Nora": "she", "Pavel": "he", "Iris": "she", "Tomas": "he"}
PERSONS = tuple(PRONOUNS)
ROOMS = ("attic", "cellar", "library", "workshop", "balcony", "pantry")
THINGS = ("lantern", "compass", "kettle", "scarf")
COUNTS = ("none", "one", "two", "three")
NOTHING, MOST_LISTED = "nothing", 2
YES_NO = ("no", "yes")  # answers, indexed by whether the question's statement is true
MEMBERS = ("Pip", "Quill", "Rusk", "Sorrel", "Tansy", "Umber", "Vesper", "Wren")
KINDS = ("baker", "miner", "tailor", "sailor", "painter", "farmer", "piper", "weaver")
CONTAINERS = ("crate", "flask", "basket", "barrel", "drawer", "pouch", "trunk", "jar", "wagon", "purse", "tub", "vase")
SITES = (
    *("mill", "inn", "chapel", "market", "harbour", "bakery", "school", "fountain"),
    *("stable", "tower", "bridge", "orchard"),
)
# Directions by step on the map, where a place is a complex number.
DIRECTIONS: Mapping[complex, str] = {1j: "north", 1: "east", -1j: "south", -1: "west"}
STATEMENTS = {
    "walks": [f"{{who}} {verb} into the {{room}}." for verb in ("walked", "hurried", "stepped", "strolled")],
    "walk together": [f"{{who}} and {{to}} {verb} into the {{room}}." for verb in ("walked", "hurried", "strolled")],
    "walks again": ["Soon {pronoun} walked into the {room}.", "Next {pronoun} hurried into the {room}."],
    "takes": ["{who} fetched the {thing}.", "{who} lifted up the {thing}."],
    "puts": ["{who} parted with the {thing}.", "{who} set the {thing} aside."],
    "gives": ["{who} entrusted {to} with the {thing}.", "{who} lent the {thing} to {to}."],
    "rule": ["Every {kind} greets the {other}."],
    "works": ["{who} works as {kind}."],
    "works now": ["{who} now works as {kind}."],
    "larger": ["The {larger} is roomier than the {smaller}."],
    "smaller": ["The {smaller} goes inside the {larger}."],
    "lies": ["The {first} lies {direction} of the {second}."],
}
QUESTIONS = {
    "room": "In which room is {who}?",
    "room of thing": "In which room is the {thing}?",
    "room before": "In which room was the {thing} until it came into the {room}?",
    "is in": "Would one find {who} in the {room}?",
    "count": "How many things does {who} hold?",
    "list": "Which things does {who} hold?",
    "greeted": "Whom does {who} greet?",
    "larger": "Is the {larger} roomier than the {smaller}?",
    "smaller": "Can the {smaller} go inside the {larger}?",
    "path": "Which way leads from the {first} to the {second}?",
}

_MOST_STATEMENTS_BETWEEN_QUESTIONS = 3
_WORDS_AT_ONCE = 64


class Dice:
    """A source of uniform choices, whose random bits depend only on `key`, a tuple of non-negative integers.

    The choices are the same in every version of numpy, because they use only the bit generator's `random_raw`, which
    numpy promises never to change.
    """

    def __init__(self, *key: int) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=key[1:]))
        self._words: list[int] = []

    def below(self, count: int) -> int:
        """Return a uniformly random integer from 0 to count - 1."""
        # Random numbers of at least this bound are rejected: they would make some results more likely than others.
        accepted = (1 << 64) // count * count
        while True:
            if not self._words:
                self._words = self._generator.random_raw(_WORDS_AT_ONCE).tolist()
            word = self._words.pop()
            if word < accepted:
                return word % count

    def chance(self, percent: int) -> bool:
        """Return True with a probability of `percent` / 100."""
        return self.below(100) < percent

    def pick(self, items: Sequence[T]) -> T:
        """Return a random item of `items`."""
        return items[self.below(len(items))]

    def draw(self, items: Iterable[T], count: int | None = None) -> list[T]:
        """Return `count` different `items` in random order, by default all."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(len(left) if count is None else count)]


@dataclass
class Family:
    """A story of one family: its lines so far and, in the subclasses, the state that they describe."""

    dice: Dice
    length: int
    lines: Story = field(default_factory=list)
    num_statements: int = 0

    def tell(self) -> None:
        """Add one or two statements about an event or a fact."""
        raise NotImplementedError

    def subjects(self) -> Sequence[Any]:
        """Return the possible subjects of a question about the story so far; `ask` gets one of them."""
        raise NotImplementedError

    def ask(self, subject: Any) -> Question:
        """Return a question that the story so far answers."""
        raise NotImplementedError

    def state(self, statement: str, **words: str) -> int:
        """Add a statement; return its line number, by which questions refer to it. `statement`: a key of STATEMENTS."""
        self.lines.append(StoryLine(len(self.lines) + 1, self.dice.pick(STATEMENTS[statement]).format(**words)))
        self.num_statements += 1
        return len(self.lines)

    def story(self) -> Story:
        """Return a story of at least `length` statements that ends with a question.

        It has more than `length` if the last event adds two statements, or if a question needs more.
        """
        left_until_question = 1 + self.dice.below(_MOST_STATEMENTS_BETWEEN_QUESTIONS)
        while self.num_statements < self.length or self.lines[-1].answer is None:
            self.tell()
            left_until_question -= 1
            is_due = left_until_question <= 0 or self.num_statements >= self.length
            if is_due and (subjects := self.subjects()):
                text, answer, supports = self.ask(self.dice.pick(subjects))
                self.lines.append(StoryLine(len(self.lines) + 1, text, answer, tuple(supports)))
                left_until_question = 1 + self.dice.below(_MOST_STATEMENTS_BETWEEN_QUESTIONS)
        return self.lines


@dataclass
class Walks(Family):
    """Family 1: one person walks at a time; the last statement about a person names the room."""

    rooms: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, Lines] = field(default_factory=dict)  # the lines that prove the room of a person
    visited: dict[str, set[str]] = field(default_factory=lambda: {person: set() for person in PERSONS})

    def tell(self) -> None:
        who = self.dice.pick(PERSONS)
        self.walk("walks", self.other_room(who), who)

    def subjects(self) -> Sequence[Any]:
        return list(self.rooms)

    def ask(self, who: Any) -> Question:
        return QUESTIONS["room"].format(who=who), self.rooms[who], self.proofs[who]

    def other_room(self, *people: str) -> str:
        """Return a room that contains none of these people."""
        taken = {self.rooms.get(who) for who in people}
        return self.dice.pick([room for room in ROOMS if room not in taken])

    def walk(self, kind: str, room: str, *people: str, named: Lines = ()) -> Lines:
        """Let people walk into a room; return the lines that prove this: the earlier lines `named`, and the new one."""
        who = people[0]
        lines = (*named, self.state(kind, room=room, who=who, to=people[-1], pronoun=PRONOUNS[who]))
        for person in people:
            self.visited[person].add(room)
            self.rooms[person], self.proofs[person] = room, lines
        return lines


class YesOrNo(Walks):
    """Family 6: is this person in that room? Half of the answers are yes.

    Half of the questions with the answer "no" name a room in which the person was before, if there is one.
    """

    def ask(self, who: str) -> Question:
        is_there = self.dice.chance(50)
        room = self.rooms[who] if is_there else self._wrong_room(who)
        return QUESTIONS["is in"].format(who=who, room=room), YES_NO[is_there], self.proofs[who]

    def _wrong_room(self, who: str) -> str:
        former = sorted(self.visited[who] - {self.rooms[who]})
        return self.dice.pick(former) if former and self.dice.chance(50) else self.other_room(who)


class Coreference(Walks):
    """Family 11: a person is named, and then a pronoun refers to the person; both statements are needed."""

    def tell(self) -> None:
        who = self.dice.pick(PERSONS)
        named = self.walk("walks", self.other_room(who), who)
        self.walk("walks again", self.other_room(who), who, named=named)


class Conjunction(Walks):
    """Family 12: two people walk together."""

    def tell(self) -> None:
        people = self.dice.draw(PERSONS, 2)
        self.walk("walk together", self.other_room(*people), *people)


Handover = tuple[str, str, str, str]  # the kind of statement, giver and taker ("": none), and thing


@dataclass
class Carrying(Walks):
    """Families 2, 3, 7 and 8: people carry things; the story has named the room of everybody who handles a thing."""

    hands = 2  # the number of things that a person can hold
    walk_percent = 50
    can_give = False
    # By person: `held` has the things in order of receipt, each with the line that proves it; `changes` has all lines
    # that changed `held`.
    held: dict[str, dict[str, int]] = field(default_factory=lambda: {person: {} for person in PERSONS})
    changes: dict[str, list[int]] = field(default_factory=lambda: {person: [] for person in PERSONS})
    # lying: the room of each thing on the floor. arrivals: by thing and room, the room from which the thing last came
    # there. Both also have the lines that prove this.
    lying: dict[str, tuple[str, Lines]] = field(default_factory=dict)
    arrivals: dict[str, dict[str, tuple[str, Lines]]] = field(default_factory=lambda: {thing: {} for thing in THINGS})

    def tell(self) -> None:
        handovers = [] if self.dice.chance(self.walk_percent) else self._handovers()
        if not handovers:
            self._walk()
            return
        kind, giver, taker, thing = self.dice.pick(self.dice.pick(handovers))
        line = self.state(kind, who=giver or taker, to=taker, thing=thing)
        self.lying.pop(thing, None)
        if giver:
            del self.held[giver][thing]
            self.changes[giver].append(line)
        if taker:
            self.held[taker][thing] = line
            self.changes[taker].append(line)
        else:
            self.lying[thing] = self.rooms[giver], (*self.proofs[giver], line)

    def _handovers(self) -> list[list[Handover]]:
        """Return the possible handovers, a list for each kind; that of takes occurs twice, so takes are likelier."""
        present = [person for person in PERSONS if person in self.rooms]
        takers = [person for person in present if len(self.held[person]) < self.hands]
        free = [thing for thing in THINGS if not any(thing in held for held in self.held.values())]
        takes = [
            ("takes", "", taker, thing)
            for taker in takers
            for thing in free
            if thing not in self.lying or self.lying[thing][0] == self.rooms[taker]
        ]
        puts = [("puts", person, "", thing) for person in present for thing in self.held[person]]
        gives = [
            ("gives", giver, taker, thing)
            for _, giver, _, thing in puts
            for taker in takers
            if self.can_give and taker != giver and self.rooms[taker] == self.rooms[giver]
        ]
        return [ways for ways in (takes, takes, puts, gives) if ways]

    def _walk(self) -> None:
        carriers = [person for person in PERSONS if self.held[person]]
        who = self.dice.pick(carriers if carriers and self.dice.chance(50) else PERSONS)
        origin, proof = self.rooms.get(who, ""), self.proofs.get(who, ())
        others = [self.rooms[person] for person in PERSONS if self.rooms.get(person, origin) != origin]
        is_to_others = self.can_give and others and self.dice.chance(50)
        lines = self.walk("walks", self.dice.pick(others) if is_to_others else self.other_room(who), who)
        for thing, line in self.held[who].items():
            self.arrivals[thing][self.rooms[who]] = origin, (line, *proof, *lines)


class RoomOfThing(Carrying):
    """Family 2: a thing is where it was put down, or with the person who holds it."""

    def subjects(self) -> Sequence[tuple[str, str, Lines]]:
        """Return the things whose room the story determines, with the room and the proof."""
        known = dict(self.lying)
        for who, held in self.held.items():
            known |= {thing: (self.rooms[who], (line, *self.proofs[who])) for thing, line in held.items()}
        return [(thing, *known[thing]) for thing in THINGS if thing in known]

    def ask(self, subject: tuple[str, str, Lines]) -> Question:
        thing, room, lines = subject
        return QUESTIONS["room of thing"].format(thing=thing), room, sorted(lines)


class RoomBefore(Carrying):
    """Family 3: where was a thing before it entered a room for the last time?"""

    def subjects(self) -> Sequence[str]:
        return [thing for thing in THINGS if self.arrivals[thing]]

    def ask(self, thing: str) -> Question:
        room, (origin, lines) = self.dice.pick(list(self.arrivals[thing].items()))
        return QUESTIONS["room before"].format(thing=thing, room=room), origin, sorted(lines)


class Counting(Carrying):
    """Family 7: how many things does a person hold? Questions are about people who got or gave up a thing before."""

    hands = len(COUNTS) - 1
    walk_percent = 35
    can_give = True
    question = "count"

    def subjects(self) -> Sequence[int]:
        """Return the numbers of things that people hold, each number once; otherwise most answers would be zero."""
        return sorted({len(self.held[person]) for person in PERSONS if self.changes[person]})

    def ask(self, number: int) -> Question:
        who = self.dice.pick([who for who in PERSONS if self.changes[who] and len(self.held[who]) == number])
        return QUESTIONS[self.question].format(who=who), self.answer(list(self.held[who])), self.changes[who]

    def answer(self, held: list[str]) -> str:
        return COUNTS[len(held)]


class Lists(Counting):
    """Family 8: which things does a person hold, in the order of receipt?"""

    hands = MOST_LISTED
    question = "list"

    def answer(self, held: list[str]) -> str:
        return ",".join(held) or NOTHING


# Families 18 and 19 choose facts at the start, state them in random order, and repeat them in longer stories. In family
# 15 people change their work instead.


class Deduction(Family):
    """Family 15: each kind of person greets one other kind; a person is of one kind at a time."""

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        num_rules = max(1, min(len(KINDS), (length + 1) // 2))
        self._kinds, self._new_members = dice.draw(KINDS, num_rules), dice.draw(MEMBERS)
        self._plan = dice.draw([*self._kinds, *[""] * max(1, length - num_rules)])  # "": a statement about a member
        self._rules: dict[str, tuple[str, int]] = {}
        self._members: dict[str, tuple[str, int]] = {}

    def tell(self) -> None:
        if kind := self._plan.pop():
            other = self.dice.pick([other for other in KINDS if other != kind])
            self._rules[kind] = (other, self.state("rule", kind=kind, other=other))
            return
        who = self._new_members.pop() if self._new_members else self.dice.pick(MEMBERS)
        before, _ = self._members.get(who, ("", 0))
        kind = self.dice.pick([kind for kind in self._kinds if kind != before])
        self._members[who] = (kind, self.state("works now" if before else "works", who=who, kind=kind))

    def subjects(self) -> Sequence[str]:
        return [who for who, (kind, _) in self._members.items() if kind in self._rules]

    def ask(self, who: str) -> Question:
        kind, line = self._members[who]
        answer, rule_line = self._rules[kind]
        return QUESTIONS["greeted"].format(who=who), answer, (line, rule_line)


class Sizes(Family):
    """Family 18: statements order containers by size; questions are about pairs that no single statement compares."""

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        count = max(3, min(len(CONTAINERS), length // 2 + 2))
        self._by_size = dice.draw(CONTAINERS, count)  # the largest first
        pairs = [(rank, rank + 1) for rank in range(count - 1)]
        # With three containers, no statement may compare (0, 2), because it is the only pair for a question.
        more = [*pairs, *((rank, rank + 2) for rank in range(count - 2))] if count > 3 else pairs
        self._plan = dice.draw([*pairs, *(dice.pick(more) for _ in range(length - len(pairs)))])
        self._told: dict[tuple[int, int], int] = {}  # the first line about a pair (larger, smaller)

    def tell(self) -> None:
        pair = self._plan.pop()
        line = self.state("larger" if self.dice.chance(50) else "smaller", **self._words(pair))
        self._told.setdefault(pair, line)

    def ask(self, subject: tuple[tuple[int, int], Lines]) -> Question:
        (pair, lines), is_true = subject, self.dice.chance(50)
        question = QUESTIONS["larger" if self.dice.chance(50) else "smaller"]
        return question.format(**self._words(pair if is_true else pair[::-1])), YES_NO[is_true], lines

    def _words(self, pair: tuple[int, int]) -> dict[str, str]:
        return {"larger": self._by_size[pair[0]], "smaller": self._by_size[pair[1]]}

    def subjects(self) -> Sequence[tuple[tuple[int, int], Lines]]:
        """Return the pairs whose order only several lines together prove, each with the fewest such lines."""
        found: dict[tuple[int, int], Lines] = {pair: (line,) for pair, line in self._told.items()}
        newest = found
        while newest:  # each round adds the pairs that need one more line
            newest = {
                (larger, smallest): (*lines, line)
                for (larger, smaller), lines in newest.items()
                for (also, smallest), line in self._told.items()
                if smaller == also and (larger, smallest) not in found
            }
            found = found | newest
        return [(pair, lines) for pair, lines in found.items() if pair not in self._told]


class Village(Family):
    """Family 19: statements give directions between neighbours on a map; questions ask for paths of two steps.

    The sites form a tree, in which all neighbours on the map are connected, so the paths are unique.
    """

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        sites = dice.draw(SITES, max(3, min(len(SITES), length + 1)))
        self._place_of = {sites[0]: 0j}
        roads: list[tuple[str, str]] = []
        while len(self._place_of) < len(sites):  # each site except the first gets one neighbour
            neighbour, place = dice.pick(list(self._place_of.items()))
            place += dice.pick(list(DIRECTIONS))
            taken = self._place_of.values()
            if place not in taken and sum(place + step in taken for step in DIRECTIONS) == 1:
                site = sites[len(self._place_of)]
                self._place_of[site] = place
                roads.append((neighbour, site))
        self._plan = dice.draw([*roads, *(dice.pick(roads) for _ in range(length - len(roads)))])
        self._told: dict[tuple[str, str], int] = {}  # the first line about each road, in both directions

    def tell(self) -> None:
        first, second = self.dice.draw(self._plan.pop())
        line = self.state("lies", first=first, direction=self._direction(second, first), second=second)
        self._told.setdefault((first, second), line)
        self._told.setdefault((second, first), line)

    def subjects(self) -> Sequence[tuple[str, str, str]]:
        """Return the paths over two roads that the story states, each as start, middle and end."""
        roads = itertools.permutations(self._told, 2)
        return [(start, middle, end) for (start, middle), (also, end) in roads if middle == also and start != end]

    def ask(self, path: tuple[str, str, str]) -> Question:
        start, middle, end = path
        answer = f"{self._direction(start, middle)},{self._direction(middle, end)}"
        lines = (self._told[start, middle], self._told[middle, end])
        return QUESTIONS["path"].format(first=start, second=end), answer, lines

    def _direction(self, start: str, end: str) -> str:
        return DIRECTIONS[self._place_of[end] - self._place_of[start]]


FAMILIES: Mapping[int, type[Family]] = {
    1: Walks,
    2: RoomOfThing,
    3: RoomBefore,
    6: YesOrNo,
    7: Counting,
    8: Lists,
    11: Coreference,
    12: Conjunction,
    15: Deduction,
    18: Sizes,
    19: Village,
}


def simulate(config: SimulatedText, family: int, split: str) -> list[Story]:
    """Return the stories of the file of one family and split."""
    numbers = range(getattr(config.stories, split))
    all_dice = (Dice(config.seed, family, SPLITS.index(split), number) for number in numbers)
    return [FAMILIES[family](dice, config.story_length).story() for dice in all_dice]


def all_words() -> set[str]:
    """Return all words that a story can contain, in lower case, with the marks "." and "?".

    The words are the same for every seed, family and story length.
    """
    texts = [
        *(*PERSONS, *PRONOUNS.values(), *ROOMS, *THINGS, *COUNTS, NOTHING, *YES_NO),
        *(*MEMBERS, *KINDS, *CONTAINERS, *SITES, *DIRECTIONS.values()),
        *map(",".join, itertools.permutations(THINGS, MOST_LISTED)),
        *(f"{DIRECTIONS[step]},{DIRECTIONS[turn]}" for step in DIRECTIONS for turn in DIRECTIONS if step != -turn),
        *itertools.chain(*STATEMENTS.values(), QUESTIONS.values()),
    ]
    return {".", "?"}.union(*(re.sub(r"{\w+}|[.?]$", " ", text).lower().split() for text in texts))
