"""People who walk from room to room (families 1, 6, 11, 12), and carry things (families 2, 3, 7, 8).

No words or sentences are taken from bAbI, only the kinds of questions are.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from implicit_llm_data.babi.simulator.telling import YES_NO, Dice, Question, World

PRONOUNS = {"Nora": "she", "Pavel": "he", "Iris": "she", "Tomas": "he"}
PERSONS = tuple(PRONOUNS)
ROOMS = ("attic", "cellar", "library", "workshop", "balcony", "pantry")
THINGS = ("lantern", "compass", "kettle", "scarf")
COUNTS = ("none", "one", "two", "three")
NOTHING = "nothing"
MOST_LISTED = 2

MOVES = tuple(f"{{who}} {verb} into the {{room}}." for verb in ("walked", "hurried", "stepped", "strolled"))
MOVES_TOGETHER = tuple(f"{{who}} and {{other}} {verb} into the {{room}}." for verb in ("walked", "hurried", "strolled"))
MOVES_AGAIN = ("Soon {pronoun} walked into the {room}.", "Next {pronoun} hurried into the {room}.")
TAKES = ("{who} fetched the {thing}.", "{who} lifted up the {thing}.")
PUTS = ("{who} parted with the {thing}.", "{who} set the {thing} aside.")
GIVES = ("{who} entrusted {to} with the {thing}.", "{who} lent the {thing} to {to}.")
ASK_ROOM_OF_PERSON = "In which room is {who}?"
ASK_ROOM_OF_THING = "In which room is the {thing}?"
ASK_ROOM_BEFORE = "In which room was the {thing} until it came into the {room}?"
ASK_IS_IN = "Would one find {who} in the {room}?"
ASK_COUNT = "How many things does {who} hold?"
ASK_LIST = "Which things does {who} hold?"

TEXTS = (
    *(*PERSONS, *PRONOUNS.values(), *ROOMS, *THINGS, *COUNTS, NOTHING),
    *map(",".join, itertools.permutations(THINGS, MOST_LISTED)),
    *(*MOVES, *MOVES_TOGETHER, *MOVES_AGAIN, *TAKES, *PUTS, *GIVES),
    *(ASK_ROOM_OF_PERSON, ASK_ROOM_OF_THING, ASK_ROOM_BEFORE, ASK_IS_IN, ASK_COUNT, ASK_LIST),
)


Action = tuple[Callable[..., None], Sequence[tuple[Any, ...]]]  # and the ways to do it


class Walks(World):
    """Family 1: one person walks at a time; the last statement about a person tells the room."""

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        self.rooms: dict[str, str] = {}
        self.supports: dict[str, tuple[int, ...]] = {}  # the lines that tell the room
        self.former_rooms: dict[str, set[str]] = {person: set() for person in PERSONS}

    def tell(self) -> None:
        self.walk(self.dice.pick(PERSONS))

    def ask(self) -> Question | None:
        who = self.dice.pick(list(self.rooms))
        return ASK_ROOM_OF_PERSON.format(who=who), self.rooms[who], self.supports[who]

    def walk(self, who: str) -> int:
        """Let a person walk, by name, into another room; return the line."""
        room = self.other_room(who)
        line = self.state(MOVES, who=who, room=room)
        self.move(who, room, line)
        return line

    def other_room(self, *people: str) -> str:
        """A room in which none of these people is."""
        taken = {self.rooms.get(who) for who in people}
        return self.dice.pick([room for room in ROOMS if room not in taken])

    def move(self, who: str, room: str, *supports: int) -> None:
        if who in self.rooms:
            self.former_rooms[who].add(self.rooms[who])
        self.rooms[who], self.supports[who] = room, supports


class YesOrNo(Walks):
    """Family 6: is this person in that room? Half of the answers are yes, half of the others ask for a former room."""

    def ask(self) -> Question | None:
        who = self.dice.pick(list(self.rooms))
        is_there = self.dice.chance(50)
        room = self.rooms[who] if is_there else self._wrong_room(who)
        return ASK_IS_IN.format(who=who, room=room), YES_NO[is_there], self.supports[who]

    def _wrong_room(self, who: str) -> str:
        former = sorted(self.former_rooms[who] - {self.rooms[who]})
        return self.dice.pick(former) if former and self.dice.chance(50) else self.other_room(who)


class Coreference(Walks):
    """Family 11: a person is named, then meant by a pronoun; both statements are needed."""

    def tell(self) -> None:
        who = self.dice.pick(PERSONS)
        named = self.walk(who)
        room = self.other_room(who)
        self.move(who, room, named, self.state(MOVES_AGAIN, pronoun=PRONOUNS[who], room=room))


class Conjunction(Walks):
    """Family 12: two people walk together."""

    def tell(self) -> None:
        who, other = self.dice.draw(PERSONS, 2)
        room = self.other_room(who, other)
        line = self.state(MOVES_TOGETHER, who=who, other=other, room=room)
        for person in (who, other):
            self.move(person, room, line)


@dataclass
class Person:
    """held: in the order of taking; held_lines: every line that changed it; walk_line: the line that tells the room."""

    name: str
    room: str = ""  # not told yet
    walk_line: int = 0
    held: list[str] = field(default_factory=list)
    held_lines: list[int] = field(default_factory=list)


class Carrying(World):
    """Everybody who takes, gives or puts down a thing is in a room that the story has told."""

    hands = 2  # a person holds at most so many things
    walk_percent = 50
    can_give = False

    def __init__(self, dice: Dice, length: int) -> None:
        super().__init__(dice, length)
        self.people = [Person(name) for name in PERSONS]
        self.take_lines: dict[str, int] = {}  # of what somebody holds
        self.lying: dict[str, tuple[str, tuple[int, ...]]] = {}  # room of a thing put down, and the lines that prove it
        # Of a thing, by the room that it came into: the room where it was until then, the last time, and the proof.
        self.arrivals: dict[str, dict[str, tuple[str, list[int]]]] = {thing: {} for thing in THINGS}

    def tell(self) -> None:
        actions = [] if self.dice.chance(self.walk_percent) else self._possible_actions()
        if not actions:
            self._walk()
            return
        action, choices = self.dice.pick(actions)
        action(*self.dice.pick(choices))

    def _possible_actions(self) -> list[Action]:
        """Each action that somebody can do, with the ways to do it. Taking stands twice, so that hands fill up."""
        present = [person for person in self.people if person.room]
        free = [thing for thing in THINGS if thing not in self.take_lines]
        takes = [
            (person, thing)
            for person in present
            for thing in free
            if len(person.held) < self.hands and self.lying.get(thing, (person.room,))[0] == person.room
        ]
        puts = [(person, thing) for person in present for thing in person.held]
        gives = [
            (person, thing, to)
            for person, thing in puts
            for to in present
            if self.can_give and to is not person and to.room == person.room and len(to.held) < self.hands
        ]
        actions: list[Action] = [(self._take, takes), (self._take, takes), (self._put, puts), (self._give, gives)]
        return [(action, choices) for action, choices in actions if choices]

    def _walk(self) -> None:
        carriers = [person for person in self.people if person.held]
        person = self.dice.pick(carriers if carriers and self.dice.chance(50) else self.people)
        rooms = [room for room in ROOMS if room != person.room]
        visited = [other.room for other in self.people if other.room not in ("", person.room)]
        room = self.dice.pick(visited if self.can_give and visited and self.dice.chance(50) else rooms)
        line = self.state(MOVES, who=person.name, room=room)
        for thing in person.held:
            self.arrivals[thing][room] = (person.room, sorted((self.take_lines[thing], person.walk_line, line)))
        person.room, person.walk_line = room, line

    def _take(self, person: Person, thing: str) -> None:
        self.lying.pop(thing, None)
        self._hold(person, thing, self.state(TAKES, who=person.name, thing=thing))

    def _put(self, person: Person, thing: str) -> None:
        line = self.state(PUTS, who=person.name, thing=thing)
        self._let_go(person, thing, line)
        self.lying[thing] = (person.room, (person.walk_line, line))

    def _give(self, person: Person, thing: str, to: Person) -> None:
        line = self.state(GIVES, who=person.name, to=to.name, thing=thing)
        self._let_go(person, thing, line)
        self._hold(to, thing, line)

    def _hold(self, person: Person, thing: str, line: int) -> None:
        person.held.append(thing)
        person.held_lines.append(line)
        self.take_lines[thing] = line

    def _let_go(self, person: Person, thing: str, line: int) -> None:
        person.held.remove(thing)
        person.held_lines.append(line)
        del self.take_lines[thing]


class RoomOfThing(Carrying):
    """Family 2: a thing is where it was put down, or where the one who holds it is."""

    def ask(self) -> Question | None:
        known = dict(self.lying)
        for person in self.people:
            known |= {thing: (person.room, (self.take_lines[thing], person.walk_line)) for thing in person.held}
        if not known:
            return None
        thing = self.dice.pick([thing for thing in THINGS if thing in known])
        room, lines = known[thing]
        return ASK_ROOM_OF_THING.format(thing=thing), room, sorted(lines)


class RoomBefore(Carrying):
    """Family 3: where a thing was until it came, the last time, into a room."""

    def ask(self) -> Question | None:
        moved = [thing for thing in THINGS if self.arrivals[thing]]
        if not moved:
            return None
        thing = self.dice.pick(moved)
        room, (origin, lines) = self.dice.pick(list(self.arrivals[thing].items()))
        return ASK_ROOM_BEFORE.format(thing=thing, room=room), origin, lines


class Counting(Carrying):
    """Family 7: how many things a person holds. Asked are people whose hands the story has told of."""

    hands = len(COUNTS) - 1
    walk_percent = 35
    can_give = True
    question = ASK_COUNT

    def ask(self) -> Question | None:
        told = [person for person in self.people if person.held_lines]
        if not told:
            return None
        number = self.dice.pick(sorted({len(person.held) for person in told}))  # else most people would hold nothing
        person = self.dice.pick([person for person in told if len(person.held) == number])
        return self.question.format(who=person.name), self.answer(person.held), person.held_lines

    def answer(self, held: list[str]) -> str:
        return COUNTS[len(held)]


class Lists(Counting):
    """Family 8: what a person holds, in the order in which it came into the hands."""

    hands = MOST_LISTED
    question = ASK_LIST

    def answer(self, held: list[str]) -> str:
        return ",".join(held) or NOTHING
