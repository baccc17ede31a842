"""The file format of bAbI: stories of statements and questions, one a line.

    1 Nora walked into the attic.
    2 In which room is Nora?<tab>attic<tab>1

A line numbered 1 begins a story. A question has an answer and the numbers of the statements that prove it. A file is
called qa<task>_<split>.txt. Downloaded and simulated files are read by the functions of this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from implicit_llm_contracts.runs.errors import UserError

SPLITS = ("train", "valid", "test")
VOCABULARY_NAME = "vocabulary.json"  # the list of words by id, beside a text and beside every data set made of it
PAD, EOS = "<pad>", "<eos>"  # the ids 0 and 1 of every vocabulary


class BabiFormatError(UserError):
    """A line is not in bAbI's format; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a story; `text` is without its number, `answer` is None for a statement.

    supports: the lines that prove the answer, in the file's order.
    """

    number: int
    text: str
    answer: str | None = None
    supports: tuple[int, ...] = ()


Story = tuple[Line, ...]


def file_name(task: int, split: str) -> str:
    """The name of a task's file."""
    return f"qa{task}_{split}.txt"


def find_files(directory: Path, split: str) -> dict[int, Path]:
    """The files of a split below `directory`, by task in ascending order."""
    found = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := re.fullmatch(rf"qa(\d+)_{split}\.txt", path.name))
    }
    return dict(sorted(found.items()))


def parse_stories(data: bytes, where: str) -> list[Story]:
    """Read the stories of one file; `where` names it in messages.

    Raises: BabiFormatError for the first line that is wrong, and for a file without lines.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(where, data.count(b"\n", 0, error.start) + 1, "this is no UTF-8") from None
    stories: list[Story] = []
    lines: list[Line] = []
    for line_number, raw in enumerate(text.removesuffix("\n").split("\n"), start=1):
        try:
            line = _parse_line(raw, lines)
        except ValueError as error:
            raise _refusal(where, line_number, str(error)) from None
        if line.number == 1 and lines:
            stories.append(tuple(lines))
            lines = []
        lines.append(line)
    return [*stories, tuple(lines)]


def format_stories(stories: Iterable[Story]) -> str:
    """Write stories in the format that `parse_stories` reads."""
    return "".join(f"{_format_line(line)}\n" for story in stories for line in story)


def words_of(story: Story) -> list[str]:
    """The story as lower-case words, each sentence followed by its full stop or question mark, then the answer.

    An answer is one word, also a list with commas. Supports are left out.
    Source: the preprocessing of catbAbI (ischlag/Fast-Weight-Memory-public).
    """
    words: list[str] = []
    for line in story:
        text = line.text.lower()
        words += text[:-1].split()
        words.append(text[-1])
        if line.answer is not None:
            words.append(line.answer.lower())
    return words


def vocabulary_of(words: Iterable[str]) -> list[str]:
    """The vocabulary of `words`, whose ids are their places: <pad>, <eos>, then the words in alphabetical order."""
    return [PAD, EOS, *sorted(set(words))]


def _parse_line(raw: str, lines: list[Line]) -> Line:
    """The line that follows `lines`, the lines so far of the story. Raises: ValueError."""
    digits, _, text = raw.partition(" ")
    if not re.fullmatch(r"[0-9]{1,9}", digits):
        raise ValueError(f"expected a line number and a space, found {raw[:40]!r}")
    number = int(digits)
    if number != 1 and number != len(lines) + 1:
        raise ValueError(f"expected line number {len(lines) + 1}, or 1 for a new story, found {number}")
    if "\t" not in text:
        text = text.strip()
        if not re.search(r"[^ ]\.$", text):
            raise ValueError(f"expected a statement that ends with a full stop, found {text[-40:]!r}")
        return Line(number, text)
    fields = [field.strip() for field in text.split("\t")]
    if len(fields) != 3 or not re.search(r"[^ ]\?$", fields[0]) or not re.fullmatch(r"\S+", fields[1]):
        raise ValueError(f"expected question?<tab>answer<tab>supporting lines, found {text[:60]!r}")
    return Line(number, fields[0], fields[1], _parse_supports(fields[2], [] if number == 1 else lines))


def _parse_supports(field: str, lines: list[Line]) -> tuple[int, ...]:
    supports = []
    for word in field.split():
        is_statement = word.isdecimal() and 1 <= int(word) <= len(lines) and lines[int(word) - 1].answer is None
        if not is_statement:
            raise ValueError(f"expected the numbers of earlier statements as supporting lines, found {field[:40]!r}")
        supports.append(int(word))
    return tuple(supports)


def _format_line(line: Line) -> str:
    if line.answer is None:
        return f"{line.number} {line.text}"
    return f"{line.number} {line.text}\t{line.answer}\t{' '.join(map(str, line.supports))}"


def _refusal(where: str, line_number: int, what: str) -> BabiFormatError:
    return BabiFormatError(f"{where}, line {line_number}: {what}; fetch or make the file again")
