"""Define the file format of bAbI: stories of statements and questions, one per line.

    1 Nora walked into the attic.
    2 In which room is Nora?<tab>attic<tab>1

A line with number 1 starts a story. A question has an answer and the numbers of the statements that prove it. A file is
called qa<task>_<split>.txt. This module reads both downloaded and simulated files.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "valid", "test")
VOCABULARY_NAME = "vocabulary.json"  # a list of words by id, stored with a text and with every data set built from it
PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1  # in every vocabulary


@dataclass(frozen=True, slots=True)
class StoryLine:
    """A line of a story; `text` does not contain the number, and `answer` is None for a statement.

    supports: the numbers of the lines that prove the answer, in the order of the file.
    """

    number: int
    text: str
    answer: str | None = None
    supports: tuple[int, ...] = ()


Story = list[StoryLine]


def file_name(task: int, split: str) -> str:
    """Return the name of a task's file."""
    return f"qa{task}_{split}.txt"


def find_files(directory: Path, split: str) -> dict[int, Path]:
    """Return the files of a split in `directory`, by task in ascending order."""
    found = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := re.fullmatch(rf"qa(\d+)_{split}\.txt", path.name))
    }
    return dict(sorted(found.items()))


def parse_stories(data: bytes) -> list[Story]:
    """Parse the stories of one file, which is not checked: it must be the simulator's or an official one."""
    stories: list[list[StoryLine]] = []
    for raw in data.decode("utf-8").removesuffix("\n").split("\n"):
        number, _, rest = raw.partition(" ")
        if number == "1":
            stories.append([])
        text, *proof = (field.strip() for field in rest.split("\t"))
        answer, supports = proof or (None, "")
        stories[-1].append(StoryLine(int(number), text, answer, tuple(map(int, supports.split()))))
    return stories


def format_stories(stories: Iterable[Story]) -> str:
    """Return stories as text in the format that `parse_stories` parses."""
    text = ""
    for line in itertools.chain.from_iterable(stories):
        proof = "" if line.answer is None else f"\t{line.answer}\t{' '.join(map(str, line.supports))}"
        text += f"{line.number} {line.text}{proof}\n"
    return text


def words_of(story: Story) -> list[str]:
    """Return the story as lower-case words: each sentence, its full stop or question mark, and then the answer.

    An answer is always one word, even a list with commas. Supports are omitted.
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
    """Return the vocabulary, whose ids are positions: <pad>, <eos>, then `words` in alphabetical order."""
    return [PAD, EOS, *sorted(set(words))]
