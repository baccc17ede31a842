"""People who walk from room to room: one fact, yes or no, coreference, conjunction (families 1, 6, 11, 12)."""

from implicit_llm_data.babi.simulator import lexicon
from implicit_llm_data.babi.simulator.telling import Dice, Question, StoryWriter


class Walks:
    """Family 1: one person walks at a time; the last statement about a person tells the room."""

    def __init__(self, dice: Dice, length: int) -> None:
        self.dice = dice
        self.rooms: dict[str, str] = {}
        self.supports: dict[str, tuple[int, ...]] = {}  # the lines that tell the room
        self.former_rooms: dict[str, set[str]] = {person: set() for person in lexicon.PERSONS}

    def tell(self, story: StoryWriter) -> None:
        self.walk(story, self.dice.pick(lexicon.PERSONS))

    def ask(self) -> Question | None:
        who = self.dice.pick(list(self.rooms))
        return lexicon.ASK_ROOM_OF_PERSON.format(who=who), self.rooms[who], self.supports[who]

    def walk(self, story: StoryWriter, who: str) -> int:
        """Let a person walk, by name, into another room; return the line."""
        room = self.other_room(who)
        line = story.state(lexicon.MOVES, who=who, room=room)
        self.move(who, room, (line,))
        return line

    def other_room(self, *people: str) -> str:
        """A room in which none of these people is."""
        taken = {self.rooms.get(who) for who in people}
        return self.dice.pick([room for room in lexicon.ROOMS if room not in taken])

    def move(self, who: str, room: str, supports: tuple[int, ...]) -> None:
        if who in self.rooms:
            self.former_rooms[who].add(self.rooms[who])
        self.rooms[who] = room
        self.supports[who] = supports


class YesOrNo(Walks):
    """Family 6: is this person in that room? Half of the answers are yes, half of the others ask for a former room."""

    def ask(self) -> Question | None:
        who = self.dice.pick(list(self.rooms))
        is_there = self.dice.chance(50)
        room = self.rooms[who] if is_there else self._wrong_room(who)
        return lexicon.ASK_IS_IN.format(who=who, room=room), lexicon.YES_NO[is_there], self.supports[who]

    def _wrong_room(self, who: str) -> str:
        former = sorted(self.former_rooms[who] - {self.rooms[who]})
        return self.dice.pick(former) if former and self.dice.chance(50) else self.other_room(who)


class Coreference(Walks):
    """Family 11: a person is named, then meant by a pronoun; both statements are needed."""

    def tell(self, story: StoryWriter) -> None:
        who = self.dice.pick(lexicon.PERSONS)
        named = self.walk(story, who)
        room = self.other_room(who)
        line = story.state(lexicon.MOVES_AGAIN, pronoun=lexicon.PRONOUNS[who], room=room)
        self.move(who, room, (named, line))


class Conjunction(Walks):
    """Family 12: two people walk together."""

    def tell(self, story: StoryWriter) -> None:
        who, other = self.dice.draw(lexicon.PERSONS, 2)
        room = self.other_room(who, other)
        line = story.state(lexicon.MOVES_TOGETHER, who=who, other=other, room=room)
        for person in (who, other):
            self.move(person, room, (line,))
