"""How a story is told: statements with a question after every few of them, and one at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from implicit_llm_data.babi.simulator.dice import Dice
from implicit_llm_data.babi.stories import Line, Story

_MOST_STATEMENTS_BETWEEN_QUESTIONS = 3


class StoryWriter:
    """The lines of a story so far."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.num_statements = 0

    @property
    def ends_with_question(self) -> bool:
        return bool(self.lines) and self.lines[-1].answer is not None

    def state(self, text: str) -> int:
        """Add a statement and return its number, by which questions name it."""
        self.lines.append(Line(len(self.lines) + 1, text))
        self.num_statements += 1
        return len(self.lines)

    def ask(self, text: str, answer: str, supports: Iterable[int]) -> None:
        """Add a question."""
        self.lines.append(Line(len(self.lines) + 1, text, answer, tuple(supports)))


class World(Protocol):
    """What a story of one family is about."""

    def tell(self, story: StoryWriter) -> None:
        """Let something happen, or tell of something: one or two statements."""
        ...

    def ask(self, story: StoryWriter) -> bool:
        """Ask a question that the story so far answers; False, and none, if there is none of the family's kind yet."""
        ...


def tell_story(world: World, dice: Dice, length: int) -> Story:
    """A story of `length` statements, and a few more where the family needs them for its first question."""
    story = StoryWriter()
    left_until_question = 1 + dice.below(_MOST_STATEMENTS_BETWEEN_QUESTIONS)
    while story.num_statements < length or not story.ends_with_question:
        world.tell(story)
        left_until_question -= 1
        is_due = left_until_question <= 0 or story.num_statements >= length
        if is_due and world.ask(story):
            left_until_question = 1 + dice.below(_MOST_STATEMENTS_BETWEEN_QUESTIONS)
    return tuple(story.lines)
