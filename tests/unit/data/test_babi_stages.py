"""From a configuration to CatbAbI on disk, with simulated text."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_data.babi.archive import ARCHIVES
from implicit_llm_data.babi.catbabi import STORIES_NAME
from implicit_llm_data.babi.stories import parse_stories, words_of
from implicit_llm_data.babi.story_batches import StoryStream
from implicit_llm_data.shards import open_dataset
from implicit_llm_data.stages import babi_text
from tests.unit.data.babi_runs import ARCHIVE, CATBABI, SIMULATED, contents, context_in, make_catbabi, make_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("simulated") / "text"
    make_text(work)
    return work


def test_simulated_text_is_written_in_the_layout_of_the_archive(tmp_path: Path) -> None:
    result = make_text(tmp_path)
    names = {f"text/simulated/qa{family}_{split}.txt" for family in (1, 8, 19) for split in ("train", "valid", "test")}
    assert set(contents(tmp_path)) == {*names, "vocabulary.json"}
    assert list(map(str, result.files)) == ["text", "vocabulary.json"]
    for name in names:
        stories = parse_stories((tmp_path / name).read_bytes())
        assert len(stories) == SIMULATED["stories"][name.rpartition("_")[2].removesuffix(".txt")]
    counts = result.summary["by_split"]["simulated-train"]
    assert (counts["files"], counts["stories"]) == (3, 36)
    assert counts["questions"] > 36


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
    batch = dataset.fetch(np.arange(len(dataset)))
    words = json.loads((tmp_path / "vocabulary.json").read_text())
    found = " ".join(words[number] for number in batch["input_ids"].ravel() if number).split("<eos> ")[1:]
    files = {family: (text / "text" / "simulated" / f"qa{family}_train.txt").read_bytes() for family in (1, 8, 19)}
    stories = {family: parse_stories(data)[:-1] for family, data in files.items()}  # the last is dropped
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


def test_the_list_of_stories_says_where_each_starts_and_what_its_task_is(tmp_path: Path, text: Path) -> None:
    result = make_catbabi(tmp_path, text, mode="lm")
    assert str(tmp_path / STORIES_NAME) in map(str, result.files)
    stories = np.load(tmp_path / STORIES_NAME, allow_pickle=False)
    stream = StoryStream.open(tmp_path)
    assert (np.flatnonzero(stream.columns["input_ids"] == 1) == stories[:, 0]).all()
    assert (stream.columns["task"][stories[:, 0]] == stories[:, 1]).all()
    assert stream.bounds[-1] == result.summary["num_tokens"]


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
        ({**SIMULATED, "families": [4]}, "families.* give some of 1, 2, 3"),
        ({**SIMULATED, "missing_files": []}, "unknown key 'missing_files'"),
        ({**ARCHIVE, "families": [1]}, "unknown key 'families'"),
        (ARCHIVE, r"en-valid-10k/qa10_test.txt is not in the archive; .*text\.missing_files"),
    ],
)
def test_a_wrong_text_configuration_leaves_nothing_behind(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    tarfile.open(tmp_path / ARCHIVES[1], "w:gz").close()  # with nothing in it
    with pytest.raises(UserError, match=message) as caught:
        babi_text.run(context_in(tmp_path / "out", config, runtime={"downloads": tmp_path}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
