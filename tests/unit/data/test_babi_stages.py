"""From a configuration to CatbAbI on disk, with simulated text and with the real archive: the same path."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from implicit_llm.data.babi import parse_stories, words_of
from implicit_llm.data.babi_archive import ARCHIVES
from implicit_llm.data.babi_simulator.lexicon import all_words
from implicit_llm.data.catbabi import STORIES_NAME
from implicit_llm.data.shards import open_dataset
from implicit_llm.data.stages import babi_text, catbabi
from implicit_llm.data.story_batches import StoryBatcher, StoryStream
from implicit_llm.runs.errors import UserError
from implicit_llm.runs.stage import StageContext, StageResult
from implicit_llm.tracking.journal import Journal

SIMULATED: dict[str, Any] = {
    "kind": "babi_text",
    "source": "simulated",
    "seed": 0,
    "families": [1, 8, 19],
    "stories": {"train": 12, "valid": 4, "test": 5},
    "story_length": 6,
}
CATBABI: dict[str, Any] = {
    "kind": "catbabi",
    "collection": "simulated",
    "split": "train",
    "mode": "qa",
    "length": 50,
    "vocab_size": 192,
    "seed": 0,
    "drop_last_story": True,
}
ARCHIVE = {"kind": "babi_text", "source": "archive"}
NOT_THERE = "en-valid-10k/qa3_train.txt"


def context_in(work: Path, config: dict[str, Any], **changes: Any) -> StageContext:
    fields: dict[str, Any] = {"inputs": {}, "runtime": {}, **changes}
    log, name = logging.getLogger("implicit_llm.data"), f"babi-{work.name}"
    return StageContext(
        *("data", name, "0" * 64, config),
        **{**fields, "run_dir": work.parent, "work": work, "journal": Journal(None), "log": log, "is_main": True},
    )


def make_text(work: Path, downloads: Path | None = None, **config: Any) -> StageResult:
    return babi_text.run(
        context_in(
            work,
            {**SIMULATED, **config} if downloads is None else {**ARCHIVE, **config},
            runtime={"downloads": downloads},
        )
    )


def make_catbabi(work: Path, text: Path, **config: Any) -> StageResult:
    return catbabi.run(context_in(work, {**CATBABI, **config}, inputs={"text": SimpleNamespace(work=text)}))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("simulated") / "text"
    make_text(work)
    return work


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """The text of the real archive, and whether the archive has all files."""
    folder = os.environ.get("IMPLICIT_LLM_DATA")
    if not folder:
        pytest.skip(f"IMPLICIT_LLM_DATA is not set; it names the folder with {ARCHIVES[1]}")
    is_whole = (Path(folder) / ARCHIVES[0]).is_file()
    work = tmp_path_factory.mktemp("real") / "text"
    make_text(work, downloads=Path(folder), missing_files=[] if is_whole else [NOT_THERE])
    return work, is_whole


def test_simulated_text_is_written_in_the_layout_of_the_archive(tmp_path: Path) -> None:
    result = make_text(tmp_path)
    names = {f"text/simulated/qa{family}_{split}.txt" for family in (1, 8, 19) for split in ("train", "valid", "test")}
    assert set(contents(tmp_path)) == {*names, "vocabulary.json"}
    assert list(map(str, result.files)) == ["text", "vocabulary.json"]
    for name in names:
        stories = parse_stories((tmp_path / name).read_bytes(), name)
        assert len(stories) == SIMULATED["stories"][name.rpartition("_")[2].removesuffix(".txt")]
    counts = result.summary["by_split"]["simulated-train"]
    assert (counts["files"], counts["stories"]) == (3, 36)
    assert counts["questions"] > 36


def test_the_vocabulary_of_simulated_text_is_the_same_for_all_of_it(tmp_path: Path) -> None:
    make_text(tmp_path / "a")
    make_text(tmp_path / "b", seed=9, families=[15], story_length=30)
    words = json.loads((tmp_path / "a" / "vocabulary.json").read_text())
    assert words == json.loads((tmp_path / "b" / "vocabulary.json").read_text())
    assert words == ["<pad>", "<eos>", *sorted(all_words())]


def test_two_runs_give_equal_bytes_and_equal_summaries(tmp_path: Path, text: Path) -> None:
    first, second = make_text(tmp_path / "a"), make_text(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert first.summary == second.summary
    first, second = make_catbabi(tmp_path / "c", text), make_catbabi(tmp_path / "d", text)
    assert contents(tmp_path / "c") == contents(tmp_path / "d")
    assert first.summary == second.summary
    json.dumps(first.summary, allow_nan=False)


@pytest.mark.parametrize("mode", ["qa", "lm"])
def test_the_data_set_holds_the_words_of_the_text_in_shuffled_order(tmp_path: Path, text: Path, mode: str) -> None:
    result = make_catbabi(tmp_path, text, mode=mode)
    dataset = open_dataset(tmp_path)
    dataset.verify()
    batch = dataset.fetch(np.arange(len(dataset)))
    words = json.loads((tmp_path / "vocabulary.json").read_text())
    found = " ".join(words[number] for number in batch["input_ids"].ravel() if number).split("<eos> ")[1:]
    files = {family: (text / "text" / "simulated" / f"qa{family}_train.txt").read_bytes() for family in (1, 8, 19)}
    stories = {family: parse_stories(data, "file")[:-1] for family, data in files.items()}  # the last is dropped
    expected = [" ".join(words_of(story)) for of_family in stories.values() for story in of_family]
    assert sorted(map(str.strip, found)) == sorted(expected)
    assert list(map(str.strip, found)) != expected
    is_question = batch["input_ids"] == words.index("?")
    has_label = batch["labels"] != -100
    num_tokens = sum(len(story.split()) + 1 for story in expected)
    assert has_label.sum() == (is_question.sum() if mode == "qa" else num_tokens)
    assert (has_label[is_question]).all()
    assert result.summary["num_questions"] == is_question.sum()
    assert result.summary["num_stories"] == len(expected) == 33
    assert (result.summary["num_tokens"], result.summary["num_words"]) == (num_tokens, num_tokens - 33)
    assert dataset.source == CATBABI | {"mode": mode}


def test_the_summary_counts_by_task(tmp_path: Path, text: Path) -> None:
    summary = make_catbabi(tmp_path, text).summary
    assert list(summary["by_task"]) == ["1", "8", "19"]
    for key in ("num_stories", "num_words", "num_questions"):
        assert summary[key] == sum(counts[key] for counts in summary["by_task"].values())
    assert all(counts["num_stories"] == 11 for counts in summary["by_task"].values())


def test_the_list_of_stories_says_where_each_starts_and_what_its_task_is(tmp_path: Path, text: Path) -> None:
    result = make_catbabi(tmp_path, text, mode="lm")
    assert str(tmp_path / STORIES_NAME) in map(str, result.files)
    stories = np.load(tmp_path / STORIES_NAME, allow_pickle=False)
    stream = StoryStream.open(tmp_path)
    assert (np.flatnonzero(stream.columns["input_ids"] == 1) == stories[:, 0]).all()
    assert (stream.columns["task"][stories[:, 0]] == stories[:, 1]).all()
    assert stream.bounds[-1] == result.summary["num_tokens"]


def test_all_files_but_the_shards_records_are_vouched_for(tmp_path: Path, text: Path) -> None:
    result = make_catbabi(tmp_path, text)
    listed = {str(Path(path).relative_to(tmp_path)) for path in result.files}
    assert listed == {path for path in contents(tmp_path) if not path.startswith("shards/0")}


def test_only_a_damaged_shard_is_made_again(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catbabi, "SHARD_ROWS", 10)
    make_catbabi(tmp_path, text)
    undisturbed = contents(tmp_path)
    assert sum(name.startswith("shards/labels") for name in undisturbed) >= 3
    path = tmp_path / "shards" / "labels-00001.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in undisturbed if name.startswith("shards/")}
    make_catbabi(tmp_path, text)
    assert contents(tmp_path) == undisturbed
    changed = {name for name, time in times.items() if (tmp_path / name).stat().st_mtime_ns != time}
    assert changed == {f"shards/{column}-00001.npy" for column in ("input_ids", "labels", "task")} | {
        "shards/00001.json"
    }


@pytest.mark.parametrize("point", ["shard.before_file", "shard.before_record", "dataset.before_index"])
def test_a_killed_stage_goes_on_and_ends_with_the_same_data_set(
    tmp_path: Path, text: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_catbabi(tmp_path / "undisturbed", text)
    monkeypatch.setenv("FAULT", f"{point}:kill9@1")
    child = multiprocessing.get_context("fork").Process(target=make_catbabi, args=(tmp_path / "killed", text))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "index.json").exists()
    monkeypatch.delenv("FAULT")
    make_catbabi(tmp_path / "killed", text)
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, r"babi-out\.vocab_size: the text has 147 words, 100 are too few; use at least 147"),
        ({"collection": "en-valid"}, "collection: 'en-valid' is not in the text; use simulated"),
        ({"mode": "all"}, "babi-out.mode"),
    ],
)
def test_a_configuration_that_does_not_fit_the_text_is_refused(
    tmp_path: Path, text: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_catbabi(tmp_path / "out", text, **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SIMULATED, "source": "internet"}, "babi-out.source: 'internet' is unknown; use simulated or archive"),
        ({**SIMULATED, "families": [4]}, "families: .* use some of 1, 2, 3"),
        ({**SIMULATED, "missing_files": []}, "unknown key 'missing_files'"),
        ({**ARCHIVE, "families": [1]}, "unknown key 'families'"),
        ({**ARCHIVE, "missing_files": ["qa3"]}, "missing_files: bAbI has no file 'qa3'"),
        (ARCHIVE, r"en-valid-10k/qa10_test.txt is not in the archive; .*text\.missing_files"),
    ],
)
def test_a_wrong_text_configuration_leaves_nothing_behind(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    tarfile.open(tmp_path / ARCHIVES[1], "w:gz").close()  # with nothing in it
    with pytest.raises(UserError, match=message) as caught:
        babi_text.run(context_in(tmp_path / "out", config, runtime={"downloads": tmp_path}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_without_downloads_option_the_environment_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_DATA", str(tmp_path / "fetched"))
    with pytest.raises(UserError, match=f"{tmp_path}/fetched: neither"):
        babi_text.run(context_in(tmp_path / "out", ARCHIVE))


# Stories, words, questions; en-valid-10k train without the file that is missing.
COUNTS = {
    ("en-valid", "train"): (5_622, 509_246, 17_925),
    ("en-valid", "valid"): (605, 54_202, 1_891),
    ("en-valid", "test"): (6_247, 565_653, 19_910),
    ("en-valid-10k", "train"): (54_577, 4_263_959, 170_914),
    ("en-valid-10k", "valid"): (6_245, 570_894, 19_907),
    ("en-valid-10k", "test"): (6_247, 565_653, 19_910),
}
LONGEST = {("en-valid", "train"): 1_378, ("en-valid-10k", "valid"): 1_397, ("en-valid-10k", "test"): 1_393}
MISSING_FILE = (1_799, 8_995)  # stories and questions of en-valid-10k/qa3_train.txt, by the published sums


@pytest.mark.parametrize(("collection", "split"), COUNTS)
def test_the_real_archive_gives_the_known_counts(
    tmp_path: Path, real: tuple[Path, bool], collection: str, split: str
) -> None:
    text, is_whole = real
    summary = make_catbabi(tmp_path, text, collection=collection, split=split, mode="lm", length=200).summary
    num_stories, num_words, num_questions = COUNTS[collection, split]
    if is_whole and (collection, split) == ("en-valid-10k", "train"):
        num_stories, num_questions, num_words = 56_376, 179_909, summary["num_words"]
    assert (summary["num_stories"], summary["num_questions"]) == (num_stories, num_questions)
    assert summary["num_words"] == num_words
    assert summary["longest_story"] == LONGEST.get((collection, split), summary["longest_story"])
    assert summary["num_tokens"] == num_words + num_stories  # an <eos> for every story
    if split == "test":
        assert all(992 <= counts["num_questions"] <= 999 for counts in summary["by_task"].values())


def test_the_published_counts_follow_with_the_missing_file() -> None:
    num_stories, _, num_questions = COUNTS["en-valid-10k", "train"]
    assert (num_stories + MISSING_FILE[0], num_questions + MISSING_FILE[1]) == (56_376, 179_909)


def test_without_the_dropped_story_every_file_has_one_more(tmp_path: Path, real: tuple[Path, bool]) -> None:
    config = {"collection": "en-valid", "split": "valid", "mode": "lm", "length": 200}
    summary = make_catbabi(tmp_path, real[0], **config, drop_last_story=False).summary
    assert summary["num_stories"] == COUNTS["en-valid", "valid"][0] + 20


def test_the_real_vocabulary_has_180_words_of_which_24_are_lists(real: tuple[Path, bool]) -> None:
    words = json.loads((real[0] / "vocabulary.json").read_text())
    assert len(words) == len(set(words)) == 180
    assert sum("," in word for word in words) == 24
    assert words[:2] == ["<pad>", "<eos>"]


def test_no_simulated_line_is_one_of_the_real_text(real: tuple[Path, bool], tmp_path: Path) -> None:
    make_text(tmp_path, families=[1, 2, 3, 6, 7, 8, 11, 12, 15, 18, 19], story_length=20)

    def lines(folder: Path) -> set[str]:
        files = [parse_stories(path.read_bytes(), path.name) for path in folder.rglob("*.txt")]
        return {line.text for stories in files for story in stories for line in story}

    assert not lines(tmp_path / "text") & lines(real[0] / "text")


def test_batches_with_carried_state_come_from_both_texts_alike(
    tmp_path: Path, text: Path, real: tuple[Path, bool]
) -> None:
    make_catbabi(tmp_path / "simulated", text)
    make_catbabi(tmp_path / "real", real[0], collection="en-valid", split="valid")
    for name in ("simulated", "real"):
        batcher = StoryBatcher(StoryStream.open(tmp_path / name), 4, 50, "shuffled", seed=0)
        words = json.loads((tmp_path / name / "vocabulary.json").read_text())
        first, second = batcher.at_step(0), batcher.at_step(1)
        assert all(words[row[0]] == "<eos>" for row in first.input_ids)
        asked = first.input_ids[:, :-1] == words.index("?")
        assert (first.labels[:, :-1][asked] == first.input_ids[:, 1:][asked]).all()
        ends_with_question = first.input_ids[:, -1] == words.index("?")
        assert (first.labels[:, -1][ends_with_question] == second.input_ids[:, 0][ends_with_question]).all()
