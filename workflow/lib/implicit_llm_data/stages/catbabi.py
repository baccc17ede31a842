"""Run the stage `data` of kind `catbabi`: join the stories of all bAbI tasks, shuffled, into a stream of words.

    input   <eos> nora walked into the attic . in which room is nora ?     attic <eos> ...
    label   nora  walked ...                                         attic <eos> ...

The label of a position is the next word. In the mode `lm` every word has a label; in the mode `qa` only the positions
with the input "?" do. Other labels, and all labels of padding, are `<pad>`, which training ignores.

Source: Schlag et al. 2021 (catbAbI), preprocessing and data set of ischlag/Fast-Weight-Memory-public. Unlike in that
code, the shuffle is seeded, and the vocabulary has a fixed order and no task numbers.
Dimensions: T tokens of the stream, S stories, N sequences, L their length.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm_contracts.config.text import CatbabiConfig
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.babi.stories import (
    EOS_ID,
    PAD_ID,
    SPLITS,
    VOCABULARY_NAME,
    find_files,
    parse_stories,
    words_of,
)
from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetSpec, token_dtype

SHARD_ROWS = 8192
COLUMNS = ("input_ids", "labels", "task")


class InvalidCatbabi(UserError, ValueError):
    """A CatbAbI configuration is invalid or does not fit the text; the message names the key."""


@dataclass(frozen=True)
class TaskStory:
    """A story as words, with the number of its task."""

    task: int
    words: tuple[str, ...]


def run(context: StageContext) -> StageResult:
    """Build the data set that the configuration describes; finished shards of an interrupted attempt are used.

    Raises: ConfigError for a wrong configuration; InputMissing; InvalidCatbabi; StorageError.
    """
    config = context.settings(CatbabiConfig)
    upstream = context.given("text").work
    vocabulary = json.loads((upstream / VOCABULARY_NAME).read_text(encoding="utf-8"))
    if len(vocabulary) > config.vocab_size:
        raise InvalidCatbabi(
            f"{context.name}.vocab_size: the text has {len(vocabulary)} words, {config.vocab_size} are too few; "
            f"use at least {len(vocabulary)}"
        )
    stories = read_stories(upstream / "text", config)
    tokens_T, task_T = join(stories, vocabulary)
    columns = rows(tokens_T, task_T, vocabulary.index("?"), config)
    num_rows = len(columns["input_ids"])
    source = {"kind": "catbabi", **asdict(config)}
    spec = DatasetSpec(config.vocab_size, config.length, COLUMNS, source, ignored_id=PAD_ID)

    def columns_of(shard: int) -> dict[str, np.ndarray]:
        part = slice(shard * SHARD_ROWS, (shard + 1) * SHARD_ROWS)
        return {column: values_NL[part] for column, values_NL in columns.items()}

    files = write_shards(context, spec, -(-num_rows // SHARD_ROWS), columns_of)
    write_atomic(context.work / VOCABULARY_NAME, (upstream / VOCABULARY_NAME).read_bytes())
    context.log.info("joined %d stories, %d tokens with <eos>", len(stories), len(tokens_T))
    tasks = sorted({story.task for story in stories})
    summary = {
        **_counts(stories),
        "by_task": {str(task): _counts([story for story in stories if story.task == task]) for task in tasks},
        "num_rows": num_rows,
        "num_tokens": len(tokens_T),
        "vocab_size": config.vocab_size,
        "vocab_size_of_text": len(vocabulary),
    }
    return StageResult([*files, context.work / VOCABULARY_NAME], summary)


def _counts(stories: Sequence[TaskStory]) -> dict[str, Any]:
    """Return the counts for these stories; words do not include the <eos> of each story."""
    return {
        "num_stories": len(stories),
        "num_words": sum(len(story.words) for story in stories),
        "num_questions": sum(story.words.count("?") for story in stories),
        "longest_story": max(len(story.words) for story in stories),
    }


def read_stories(text: Path, config: CatbabiConfig) -> list[TaskStory]:
    """Return the stories of a split in shuffled order; `text` is the folder of the collections.

    Raises: InvalidCatbabi if the collection does not exist or no story of the split is left.
    """
    collections = sorted(path.name for path in text.iterdir())
    if config.collection not in collections:
        raise InvalidCatbabi(f"collection: {config.collection!r} is not in the text; use {' or '.join(collections)}")
    stories = []
    for task, path in find_files(text / config.collection, config.split).items():
        in_file = parse_stories(path.read_bytes())
        kept = in_file[:-1] if config.drop_last_story else in_file
        stories += [TaskStory(task, tuple(words_of(story))) for story in kept]
    if not stories:
        raise InvalidCatbabi(
            f"collection: {config.collection} has no story for the split {config.split}; make more stories, or set "
            f"drop_last_story: false"
        )
    return [stories[place] for place in shuffled(len(stories), config.seed, SPLITS.index(config.split))]


def shuffled(count: int, *key: int) -> np.ndarray:
    """Return the numbers 0..count - 1 in a random order that depends only on `key`, non-negative integers.

    The numbers are sorted by 64 random bits each, whose values numpy promises for every version.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key[0], spawn_key=key[1:])).random_raw(count)
    return np.argsort(bits, kind="stable")


def join(stories: Sequence[TaskStory], vocabulary: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encode the stories one after another, each after <eos>; a word's id is its position in the vocabulary.

    Returns: the tokens (T,) and the task of each (T,).
    """
    id_of = {word: number for number, word in enumerate(vocabulary)}
    ids = [number for story in stories for number in (EOS_ID, *(id_of[word] for word in story.words))]
    lengths_S = [1 + len(story.words) for story in stories]
    return np.array(ids), np.repeat([story.task for story in stories], lengths_S)


def rows(tokens_T: np.ndarray, task_T: np.ndarray, question_mark: int, config: CatbabiConfig) -> dict[str, np.ndarray]:
    """Cut the stream into sequences: input_ids, labels and task, each (N, L) in the vocabulary's token type.

    In the mode `lm`, the last token has the label <eos>. The last sequence is padded with 0 (<pad>) in all columns.
    """
    labels_T = np.append(tokens_T[1:], EOS_ID)
    if config.mode == "qa":
        labels_T = np.where(tokens_T == question_mark, labels_T, PAD_ID)
    num_rows = -(-len(tokens_T) // config.length)
    padding = (0, num_rows * config.length - len(tokens_T))
    dtype = token_dtype(config.vocab_size)
    return {
        column: np.pad(values_T, padding, constant_values=PAD_ID).reshape(num_rows, -1).astype(dtype)
        for column, values_T in zip(COLUMNS, (tokens_T, labels_T, task_T), strict=True)
    }
