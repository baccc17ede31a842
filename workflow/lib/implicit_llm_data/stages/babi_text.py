"""Run the stage `data` of kind `babi_text`: write bAbI's text files from the simulator or the official archive."""

from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from implicit_llm_contracts.config.text import ArchiveText, SimulatedText
from implicit_llm_contracts.runs.atomic import write_atomic, write_json
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.babi.archive import find_archive, read_archive
from implicit_llm_data.babi.simulator import all_words, simulate
from implicit_llm_data.babi.stories import (
    SPLITS,
    VOCABULARY_NAME,
    Story,
    file_name,
    format_stories,
    parse_stories,
    vocabulary_of,
    words_of,
)

SIMULATED = "simulated"  # the name of the simulator's collection


def run(context: StageContext) -> StageResult:
    """Write `text/<collection>/qa<task>_<split>.txt` and `vocabulary.json`, a list of words by id.

    Raises: ConfigError for a wrong configuration; BabiArchiveError; StorageError.
    """
    if context.config.get("source") == "simulated":
        files, words = _simulated(context.settings(SimulatedText), context.name), all_words()
    else:
        files, words = _archived(context, context.settings(ArchiveText)), set()
    counts: dict[str, dict[str, int]] = {}
    for name, data, stories in files:
        write_atomic(context.work / "text" / name, data)
        words.update(word for story in stories for word in words_of(story))
        _count(counts, name, stories)
    vocabulary = vocabulary_of(words)
    write_json(context.work / VOCABULARY_NAME, vocabulary)
    summary: dict[str, Any] = {"vocab_size": len(vocabulary), "by_split": counts}
    context.log.info("wrote %d collections and splits, %d words", len(counts), len(vocabulary))
    return StageResult(["text", VOCABULARY_NAME], summary)


def _simulated(config: SimulatedText, name: str) -> Iterator[tuple[str, bytes, list[Story]]]:
    wanted = [(family, split) for family in config.families for split in SPLITS]
    for family, split in tqdm(wanted, desc=name, unit="file", disable=None):  # None: a bar only on a terminal
        stories = simulate(config, family, split)
        yield f"{SIMULATED}/{file_name(family, split)}", format_stories(stories).encode(), stories


def _archived(context: StageContext, config: ArchiveText) -> Iterator[tuple[str, bytes, list[Story]]]:
    archive = find_archive(context.downloads)
    context.log.info("reading %s", archive)
    contents: Mapping[str, bytes] = read_archive(archive, config.missing_files)
    for name, data in tqdm(contents.items(), desc=context.name, unit="file", disable=None):
        yield name, data, parse_stories(data)


def _count(counts: dict[str, dict[str, int]], name: str, stories: list[Story]) -> None:
    collection, file = name.split("/")
    split = file.rpartition("_")[2].removesuffix(".txt")
    entry = counts.setdefault(f"{collection}-{split}", {"files": 0, "stories": 0, "questions": 0})
    entry["files"] += 1
    entry["stories"] += len(stories)
    entry["questions"] += sum(line.answer is not None for story in stories for line in story)
