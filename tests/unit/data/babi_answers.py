"""Answers to the simulator's questions, derived from the lines of a story alone.

Written without the simulator's own code: sentences are taken apart by patterns, and each family has its own reasoning.
`answer(lines, question)` takes the statements before a question in order. With `is_strict` it also insists that the
story is consistent: nobody takes what lies elsewhere, gives what he does not hold, or walks to where he is.
"""

import itertools
import re
from collections import defaultdict, deque
from collections.abc import Sequence

NUMBERS = ("none", "one", "two", "three")
PRONOUNS = {"Nora": "she", "Iris": "she", "Pavel": "he", "Tomas": "he"}
STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


class Contradiction(AssertionError):
    """The story does not make sense, or does not answer the question."""


def answer(lines: Sequence[str], question: str, is_strict: bool = True) -> str:
    """The only right answer. Raises: Contradiction."""
    for pattern, reasoning in REASONINGS:
        match = re.fullmatch(pattern, question)
        if match:
            return reasoning(lines, **match.groupdict(), is_strict=is_strict)
    raise Contradiction(f"no such question: {question}")


class Diary:
    """What one learns by reading the statements about people and things one after another."""

    def __init__(self, lines: Sequence[str], is_strict: bool) -> None:
        self.is_strict = is_strict
        self.where: dict[str, str] = {}
        self.hands: dict[str, list[str]] = defaultdict(list)
        self.trail: dict[str, list[str]] = defaultdict(list)  # rooms of a thing, one after another
        self.last_named = ""
        for line in lines:
            self._read(line)

    def _read(self, line: str) -> None:
        for pattern, happens in STATEMENTS:
            if match := re.fullmatch(pattern, line):
                return happens(self, line, **match.groupdict())
        raise Contradiction(f"what does this say? {line}")

    def walk_alone(self, line: str, who: str, room: str) -> None:
        self.last_named = who
        self._walk(line, who, room)

    def walk_on(self, line: str, pronoun: str, room: str) -> None:
        if PRONOUNS.get(self.last_named) != pronoun:
            raise Contradiction(f"who is meant? {line}")
        self._walk(line, self.last_named, room)

    def walk_together(self, line: str, who: str, other: str, room: str) -> None:
        self._check(who != other, line)
        self._walk(line, who, room)
        self._walk(line, other, room)

    def _check(self, is_right: bool, line: str) -> None:
        if self.is_strict and not is_right:
            raise Contradiction(line)

    def _walk(self, line: str, who: str, room: str) -> None:
        self._check(self.where.get(who) != room, line)
        self.where[who] = room
        for thing in self.hands[who]:
            self.trail[thing].append(room)

    def take(self, line: str, who: str, thing: str) -> None:
        trail, room = self.trail[thing], self.where.get(who)
        self._check(room is not None and trail[-1:] in ([], [room]), line)
        self._check(all(thing not in held for held in self.hands.values()), line)
        if not trail and room is not None:
            trail.append(room)
        self.hands[who].append(thing)

    def _let_go(self, line: str, who: str, thing: str) -> None:
        self._check(thing in self.hands[who], line)
        self.hands[who] = [held for held in self.hands[who] if held != thing]

    def put(self, line: str, who: str, thing: str) -> None:
        self._let_go(line, who, thing)
        if who in self.where:
            self.trail[thing].append(self.where[who])

    def give(self, line: str, who: str, to: str, thing: str) -> None:
        self._let_go(line, who, thing)
        self._check(who != to and self.where.get(who) == self.where.get(to), line)
        self.hands[to].append(thing)


WALKED = r"(?:walked|hurried|stepped|strolled) into the (?P<room>\w+)\."
STATEMENTS = (
    (rf"(?P<who>\w+) and (?P<other>\w+) {WALKED}", Diary.walk_together),
    (rf"(?:Soon|Next) (?P<pronoun>he|she) {WALKED}", Diary.walk_on),
    (rf"(?P<who>\w+) {WALKED}", Diary.walk_alone),
    (r"(?P<who>\w+) (?:fetched|lifted up) the (?P<thing>\w+)\.", Diary.take),
    (r"(?P<who>\w+) parted with the (?P<thing>\w+)\.", Diary.put),
    (r"(?P<who>\w+) set the (?P<thing>\w+) aside\.", Diary.put),
    (r"(?P<who>\w+) entrusted (?P<to>\w+) with the (?P<thing>\w+)\.", Diary.give),
    (r"(?P<who>\w+) lent the (?P<thing>\w+) to (?P<to>\w+)\.", Diary.give),
)


def room_of_person(lines: Sequence[str], who: str, *, is_strict: bool) -> str:
    return _known(Diary(lines, is_strict).where.get(who), who)


def room_of_thing(lines: Sequence[str], thing: str, *, is_strict: bool) -> str:
    return _known(next(reversed(Diary(lines, is_strict).trail[thing]), None), thing)


def room_before(lines: Sequence[str], thing: str, room: str, *, is_strict: bool) -> str:
    trail = Diary(lines, is_strict).trail[thing]
    arrivals = [before for before, after in itertools.pairwise(trail) if after == room != before]
    return _known(next(reversed(arrivals), None), f"{thing} in {room}")


def is_in(lines: Sequence[str], who: str, room: str, *, is_strict: bool) -> str:
    return "yes" if room_of_person(lines, who, is_strict=is_strict) == room else "no"


def count_held(lines: Sequence[str], who: str, *, is_strict: bool) -> str:
    return NUMBERS[len(Diary(lines, is_strict).hands[who])]


def list_held(lines: Sequence[str], who: str, *, is_strict: bool) -> str:
    return ",".join(Diary(lines, is_strict).hands[who]) or "nothing"


def greeted(lines: Sequence[str], who: str, *, is_strict: bool) -> str:
    greets, work = {}, {}
    for line in lines:
        if match := re.fullmatch(r"Every (\w+) greets the (\w+)\.", line):
            if greets.setdefault(match[1], match[2]) != match[2]:
                raise Contradiction(line)
        elif match := re.fullmatch(r"(\w+) (now )?works as (\w+)\.", line):
            if is_strict and (bool(match[2]) != (match[1] in work) or work.get(match[1]) == match[3]):
                raise Contradiction(line)
            work[match[1]] = match[3]
        else:
            raise Contradiction(line)
    return _known(greets.get(work.get(who, "")), who)


def is_roomier(lines: Sequence[str], first: str, second: str, *, is_strict: bool) -> str:
    inside: dict[str, set[str]] = {}  # what is smaller by one statement
    for line in lines:
        if match := re.fullmatch(r"The (\w+) is roomier than the (\w+)\.", line):
            larger, smaller = match.groups()
        elif match := re.fullmatch(r"The (\w+) goes inside the (\w+)\.", line):
            smaller, larger = match.groups()
        else:
            raise Contradiction(line)
        inside.setdefault(larger, set()).add(smaller)
    is_larger, is_smaller = second in _reachable(inside, first), first in _reachable(inside, second)
    if is_larger == is_smaller:
        raise Contradiction(f"{first} and {second}: neither or both")
    return "yes" if is_larger else "no"


def path(lines: Sequence[str], start: str, end: str, *, is_strict: bool) -> str:
    """The shortest way, which must be the only one of its length; all positions on the map must agree."""
    steps: dict[str, dict[str, str]] = defaultdict(dict)
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    for line in lines:
        match = re.fullmatch(r"The (\w+) lies (\w+) of the (\w+)\.", line)
        if match is None or steps[match[3]].setdefault(match[1], match[2]) != match[2]:
            raise Contradiction(line)
        steps[match[1]][match[3]] = opposite[match[2]]
    position, ways = {start: (0, 0)}, {start: [()]}
    waiting = deque([start])
    while waiting:
        site = waiting.popleft()
        for neighbour, direction in steps[site].items():
            there = tuple(a + b for a, b in zip(position[site], STEPS[direction], strict=True))
            if position.setdefault(neighbour, there) != there:
                raise Contradiction(f"{neighbour} is in two places")
            longer = [(*way, direction) for way in ways[site]]
            if neighbour not in ways:
                ways[neighbour] = longer
                waiting.append(neighbour)
            elif len(ways[neighbour][0]) == len(longer[0]):
                ways[neighbour] += longer
    if len(set(position.values())) != len(position):
        raise Contradiction("two sites in one place")
    # Sites side by side on the map are told to be neighbours, so that the map offers no way that the text does not.
    for (first, (x, y)), (second, (u, v)) in itertools.permutations(position.items(), 2):
        if is_strict and abs(x - u) + abs(y - v) == 1 and second not in steps[first]:
            raise Contradiction(f"{first} and {second} are neighbours, and no line says so")
    if len(ways.get(end, [])) != 1:
        raise Contradiction(f"{len(ways.get(end, []))} ways from {start} to {end}")
    return ",".join(ways[end][0])


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _known(value: str | None, what: str) -> str:
    if value is None:
        raise Contradiction(f"the story does not tell of {what}")
    return value


REASONINGS = (
    (r"In which room is the (?P<thing>\w+)\?", room_of_thing),
    (r"In which room is (?P<who>\w+)\?", room_of_person),
    (r"In which room was the (?P<thing>\w+) until it came into the (?P<room>\w+)\?", room_before),
    (r"Would one find (?P<who>\w+) in the (?P<room>\w+)\?", is_in),
    (r"How many things does (?P<who>\w+) hold\?", count_held),
    (r"Which things does (?P<who>\w+) hold\?", list_held),
    (r"Whom does (?P<who>\w+) greet\?", greeted),
    (r"Is the (?P<first>\w+) roomier than the (?P<second>\w+)\?", is_roomier),
    (r"Can the (?P<second>\w+) go inside the (?P<first>\w+)\?", is_roomier),
    (r"Which way leads from the (?P<start>\w+) to the (?P<end>\w+)\?", path),
)
