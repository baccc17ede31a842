"""The stage `data` of kind `catbabi`: a split as rows of a stream of stories, from the text of a `babi_text` stage."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from implicit_llm_contracts.config.text import CatbabiConfig
from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.babi.catbabi import (
    COLUMNS,
    PAD_ID,
    InvalidCatbabi,
    TaskStory,
    join,
    read_stories,
    rows,
)
from implicit_llm_data.babi.stories import VOCABULARY_NAME
from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetSpec

SHARD_ROWS = 8192


def run(context: StageContext) -> StageResult:
    """Make the data set that the configuration describes; shards of an interrupted attempt are kept.

    Raises: ConfigError for a wrong configuration; InvalidCatbabi.
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
    summary = {
        **_counts(stories),
        "by_task": {task: _counts(of_task) for task, of_task in _by_task(stories).items()},
        "num_rows": num_rows,
        "num_tokens": len(tokens_T),
        "vocab_size": config.vocab_size,
        "vocab_size_of_text": len(vocabulary),
    }
    return StageResult([*files, context.work / VOCABULARY_NAME], summary)


def _by_task(stories: Sequence[TaskStory]) -> dict[str, list[TaskStory]]:
    tasks = sorted({story.task for story in stories})
    return {str(task): [story for story in stories if story.task == task] for task in tasks}


def _counts(stories: Sequence[TaskStory]) -> dict[str, Any]:
    """Words are without the <eos> of each story."""
    return {
        "num_stories": len(stories),
        "num_words": sum(len(story.words) for story in stories),
        "num_questions": sum(story.words.count("?") for story in stories),
        "longest_story": max(len(story.words) for story in stories),
    }
