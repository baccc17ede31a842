"""People who carry things: two and three supporting facts, counting, lists (families 2, 3, 7, 8)."""

from dataclasses import dataclass

from implicit_llm_data.babi.simulator import lexicon
from implicit_llm_data.babi.simulator.telling import Dice, Question, StoryWriter


@dataclass
class Person:
    """held: in the order of taking; held_lines: every line that changed it; walk_line: the line that tells the room."""

    name: str
    held: list[str]
    held_lines: list[int]
    room: str = ""  # not told yet
    walk_line: int = 0


@dataclass(frozen=True)
class Arrival:
    """A thing came into a room; `origin` is where it was until then, `lines` prove it."""

    room: str
    origin: str
    lines: tuple[int, ...]


class Carrying:
    """Everybody who takes, gives or puts down a thing is in a room that the story has told."""

    hands = 2  # a person holds at most so many things
    walk_percent = 50
    can_give = False

    def __init__(self, dice: Dice, length: int) -> None:
        self.dice = dice
        self.people = [Person(name, [], []) for name in lexicon.PERSONS]
        self.take_lines: dict[str, int] = {}  # of what somebody holds
        self.lying: dict[str, tuple[str, tuple[int, ...]]] = {}  # room of a thing put down, and the lines that prove it
        self.arrivals: dict[str, list[Arrival]] = {thing: [] for thing in lexicon.THINGS}

    def tell(self, story: StoryWriter) -> None:
        actions = [] if self.dice.chance(self.walk_percent) else self._possible_actions()
        if not actions:
            self._walk(story)
            return
        action, choices = self.dice.pick(actions)
        getattr(self, action)(story, *self.dice.pick(choices))

    def ask(self) -> Question | None:
        raise NotImplementedError

    def _possible_actions(self) -> list[tuple[str, list[tuple]]]:
        """Each action that somebody can do, with the ways to do it. Taking stands twice, so that hands fill up."""
        present = [person for person in self.people if person.room]
        free = [thing for thing in lexicon.THINGS if thing not in self.take_lines]
        takes = [
            (person, thing)
            for person in present
            for thing in free
            if len(person.held) < self.hands and self.lying.get(thing, (person.room,))[0] == person.room
        ]
        puts = [(person, thing) for person in present for thing in person.held]
        gives = [
            (person, to, thing)
            for person, thing in puts
            for to in present
            if self.can_give and to is not person and to.room == person.room and len(to.held) < self.hands
        ]
        actions: list[tuple[str, list[tuple]]] = [("_take", takes), ("_take", takes), ("_put", puts), ("_give", gives)]
        return [(action, choices) for action, choices in actions if choices]

    def _walk(self, story: StoryWriter) -> None:
        carriers = [person for person in self.people if person.held]
        person = self.dice.pick(carriers if carriers and self.dice.chance(50) else self.people)
        rooms = [room for room in lexicon.ROOMS if room != person.room]
        visited = [other.room for other in self.people if other.room not in ("", person.room)]
        room = self.dice.pick(visited if self.can_give and visited and self.dice.chance(50) else rooms)
        line = story.state(lexicon.MOVES, who=person.name, room=room)
        for thing in person.held:
            lines = (self.take_lines[thing], person.walk_line, line)
            self.arrivals[thing].append(Arrival(room, person.room, lines))
        person.room, person.walk_line = room, line

    def _take(self, story: StoryWriter, person: Person, thing: str) -> None:
        self.lying.pop(thing, None)
        self._hold(person, thing, story.state(lexicon.TAKES, who=person.name, thing=thing))

    def _put(self, story: StoryWriter, person: Person, thing: str) -> None:
        line = story.state(lexicon.PUTS, who=person.name, thing=thing)
        self._let_go(person, thing, line)
        self.lying[thing] = (person.room, (person.walk_line, line))

    def _give(self, story: StoryWriter, person: Person, to: Person, thing: str) -> None:
        line = story.state(lexicon.GIVES, who=person.name, to=to.name, thing=thing)
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
        thing = self.dice.pick([thing for thing in lexicon.THINGS if thing in known])
        room, lines = known[thing]
        return lexicon.ASK_ROOM_OF_THING.format(thing=thing), room, sorted(lines)


class RoomBefore(Carrying):
    """Family 3: where a thing was until it came, the last time, into a room."""

    def ask(self) -> Question | None:
        moved = [thing for thing in lexicon.THINGS if self.arrivals[thing]]
        if not moved:
            return None
        thing = self.dice.pick(moved)
        last_by_room = {arrival.room: arrival for arrival in self.arrivals[thing]}
        arrival = self.dice.pick(list(last_by_room.values()))
        question = lexicon.ASK_ROOM_BEFORE.format(thing=thing, room=arrival.room)
        return question, arrival.origin, sorted(arrival.lines)


class Counting(Carrying):
    """Family 7: how many things a person holds. Asked are people whose hands the story has told of."""

    hands = len(lexicon.COUNTS) - 1
    walk_percent = 35
    can_give = True
    question = lexicon.ASK_COUNT

    def ask(self) -> Question | None:
        numbers = sorted({len(person.held) for person in self.people if person.held_lines})
        if not numbers:
            return None
        number = self.dice.pick(numbers)  # first the number: otherwise most people would hold nothing
        person = self.dice.pick([person for person in self.people if person.held_lines and len(person.held) == number])
        return self.question.format(who=person.name), self._answer(person.held), person.held_lines

    def _answer(self, held: list[str]) -> str:
        return lexicon.COUNTS[len(held)]


class Lists(Counting):
    """Family 8: what a person holds, in the order in which it came into the hands."""

    hands = lexicon.MOST_LISTED
    question = lexicon.ASK_LIST

    def _answer(self, held: list[str]) -> str:
        return lexicon.listed(held) or lexicon.NOTHING
