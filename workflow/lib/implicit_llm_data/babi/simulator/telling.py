"""The plan of a story, statements with questions between them and one at the end, and its random choices."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from implicit_llm_data.babi.stories import Story, StoryLine

T = TypeVar("T")

Question = tuple[str, str, Iterable[int]]  # its text, its answer, and the lines that prove it
YES_NO = ("no", "yes")  # by whether it is true

_MOST_STATEMENTS_BETWEEN_QUESTIONS = 3
_WORDS_AT_ONCE = 64


class Dice:
    """Uniform choices from the stream of random bits that `key`, a tuple of integers of at least 0, names.

    They are the same in every version of numpy: of the bit generator only `random_raw` is used, which numpy promises
    never to change.
    """

    def __init__(self, *key: int) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=key[1:]))
        self._words: list[int] = []

    def below(self, count: int) -> int:
        """One of 0..count - 1."""
        accepted = (1 << 64) // count * count  # above it some numbers would be more likely than others
        while True:
            if not self._words:
                self._words = self._generator.random_raw(_WORDS_AT_ONCE).tolist()
            word = self._words.pop()
            if word < accepted:
                return word % count

    def chance(self, percent: int) -> bool:
        """True with a probability of `percent` / 100."""
        return self.below(100) < percent

    def pick(self, items: Sequence[T]) -> T:
        """One of `items`."""
        return items[self.below(len(items))]

    def draw(self, items: Iterable[T], count: int | None = None) -> list[T]:
        """`count` of `items`, by default all, in random order, none twice."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(len(left) if count is None else count)]


class World:
    """What a story of one family is about, and the lines of the story so far."""

    def __init__(self, dice: Dice, length: int) -> None:
        self.dice = dice
        self.length = length
        self.lines: Story = []
        self.num_statements = 0

    def tell(self) -> None:
        """Let something happen, or tell of something: one or two statements."""
        raise NotImplementedError

    def ask(self) -> Question | None:
        """A question that the story so far answers, None if there is none of the family's kind yet."""
        raise NotImplementedError

    def state(self, sentences: Sequence[str], **words: str) -> int:
        """Add one of `sentences` with these words as a statement; return its number, by which questions name it."""
        self.lines.append(StoryLine(len(self.lines) + 1, self.dice.pick(sentences).format(**words)))
        self.num_statements += 1
        return len(self.lines)

    def story(self) -> Story:
        """A story of `length` statements, and a few more where the family needs them for its first question."""
        left_until_question = 1 + self.dice.below(_MOST_STATEMENTS_BETWEEN_QUESTIONS)
        while self.num_statements < self.length or self.lines[-1].answer is None:
            self.tell()
            left_until_question -= 1
            is_due = left_until_question <= 0 or self.num_statements >= self.length
            if is_due and (question := self.ask()) is not None:
                text, answer, supports = question
                self.lines.append(StoryLine(len(self.lines) + 1, text, answer, tuple(supports)))
                left_until_question = 1 + self.dice.below(_MOST_STATEMENTS_BETWEEN_QUESTIONS)
        return self.lines
