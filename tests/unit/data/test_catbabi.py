"""From the stories of tasks to CatbAbI: its rows, both of its stages, and its batches."""

import json
import re
import tarfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from implicit_llm_data.babi.archive import ARCHIVES
from implicit_llm_data.babi.catbabi import (
    CatbabiConfig,
    InvalidCatbabi,
    TaskStory,
    join,
    read_stories,
    rows,
    shuffled,
)
from implicit_llm_data.babi.stories import parse_stories, vocabulary_of, words_of
from implicit_llm_data.shards import open_dataset
from implicit_llm_data.stages import babi_text, catbabi
from tests.pages import ROOT
from tests.refusals import refused
from tests.unit.data.text_samples import CATBABI, SIMULATED, contents, context_in, make_catbabi, make_text

BASE = CatbabiConfig(
    collection="small", split="train", mode="lm", length=8, vocab_size=20, seed=0, drop_last_story=False
)
TEXTS = {
    "qa2_train.txt": "1 A b.\n2 Who?\ta,b\t1\n1 A c.\n1 A d.\n",
    "qa10_train.txt": "1 B c.\n2 C d.\n1 C b.\n",
    "qa2_test.txt": "1 D b.\n1 E c.\n",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    for name, content in TEXTS.items():
        (tmp_path / "small" / name).write_text(content)
    return tmp_path


def story(task: int, words: str) -> TaskStory:
    return TaskStory(task, tuple(words.split()))


STORIES = [story(2, "a b . who ? a,b"), story(10, "b c . c d ."), story(2, "d .")]
VOCABULARY = vocabulary_of(word for told in STORIES for word in told.words)


def decoded(ids: np.ndarray) -> str:
    return " ".join(VOCABULARY[number] for number in ids.ravel())


@pytest.mark.parametrize(("drop_last_story", "last"), [(False, [story(2, "a d ."), story(10, "c b .")]), (True, [])])
def test_stories_of_all_tasks_of_a_split_are_in_one_list_and_the_last_of_each_file_can_be_dropped(
    text: Path, drop_last_story: bool, last: list[TaskStory]
) -> None:
    found = read_stories(text, replace(BASE, drop_last_story=drop_last_story))
    expected = [story(2, "a b . who ? a,b"), story(2, "a c ."), story(10, "b c . c d ."), *last]
    assert sorted(map(asdict, found), key=str) == sorted(map(asdict, expected), key=str)


def test_the_order_depends_on_seed_and_split_alone(text: Path) -> None:
    (text / "small" / "qa1_train.txt").write_text("".join(f"1 N{number}.\n" for number in range(30)))
    first = read_stories(text, BASE)
    assert read_stories(text, replace(BASE, mode="qa", length=3)) == first
    other = read_stories(text, replace(BASE, seed=1))
    assert other != first
    assert sorted(map(str, other)) == sorted(map(str, first))


def test_a_shuffle_is_a_permutation_and_stays_the_same_for_ever() -> None:
    assert sorted(shuffled(1000, 0, 1)) == list(range(1000))
    assert len({tuple(shuffled(1000, *key)) for key in ((0, 0), (0, 1), (1, 0), (1, 1), (0,), (0, 0, 1))}) == 6
    # A new value here means that every data set ever made with a seed is another one: do not change it lightly.
    assert shuffled(10, 5, 2).tolist() == [4, 6, 1, 8, 2, 0, 7, 5, 9, 3]


@pytest.mark.parametrize("length", [1, 4, 5, 17, 30])
def test_in_lm_mode_the_label_of_a_position_is_the_next_word(length: int) -> None:
    columns = made("lm", length)
    assert decoded(columns["input_ids"].ravel()[:17]) == "<eos> a b . who ? a,b <eos> b c . c d . <eos> d ."
    assert decoded(columns["labels"].ravel()[:17]) == "a b . who ? a,b <eos> b c . c d . <eos> d . <eos>"
    assert columns["task"].ravel()[:17].tolist() == [2] * 7 + [10] * 7 + [2] * 3
    assert not any(values.ravel()[17:].any() for values in columns.values())
    assert all(values.shape == (-(-17 // length), length) for values in columns.values())


@pytest.mark.parametrize("length", [4, 6, 17])
def test_in_qa_mode_only_the_position_of_a_question_mark_has_a_label(length: int) -> None:
    columns = made("qa", length)
    assert (columns["input_ids"] == made("lm", length)["input_ids"]).all()
    labels = decoded(columns["labels"]).split()
    assert [(place, word) for place, word in enumerate(labels) if word != "<pad>"] == [(5, "a,b")]


def made(mode: Any, length: int) -> dict[str, np.ndarray]:
    return rows(*join(STORIES, VOCABULARY), VOCABULARY.index("?"), replace(BASE, mode=mode, length=length))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collection": "en-valid"}, "'en-valid' is not in the text; use small"),
        ({"split": "valid"}, ".*has no story for the split valid"),
        ({"collection": "../small"}, ".*use small"),
    ],
)
def test_text_that_is_not_there_is_named(text: Path, changes: dict[str, Any], message: str) -> None:
    with refused(f"^collection: {message}", InvalidCatbabi):
        read_stories(text, replace(BASE, **changes))


def test_a_split_of_which_all_stories_are_dropped_is_refused(text: Path) -> None:
    for path in (text / "small").iterdir():
        path.write_text("1 A b.\n")
    with refused("drop_last_story: false", InvalidCatbabi):
        read_stories(text, replace(BASE, drop_last_story=True))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_two_runs_give_equal_bytes_and_equal_summaries(tmp_path: Path, simulated: Path) -> None:
    texts = [make_text(tmp_path / "text" / name).summary for name in ("a", "b")]
    made = [make_catbabi(tmp_path / "data" / name, simulated).summary for name in ("a", "b")]
    for kind, (first, second) in {"text": texts, "data": made}.items():
        assert contents(tmp_path / kind / "a") == contents(tmp_path / kind / "b")
        assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)


@pytest.mark.parametrize("mode", ["qa", "lm"])
def test_the_data_set_holds_the_words_of_the_text_in_shuffled_order(tmp_path: Path, simulated: Path, mode: str) -> None:
    result = make_catbabi(tmp_path, simulated, mode=mode)
    dataset = open_dataset(tmp_path)
    batch = dataset.fetch(np.arange(len(dataset)))
    words = json.loads((tmp_path / "vocabulary.json").read_text())
    found = " ".join(words[number] for number in batch["input_ids"].ravel() if number).split("<eos> ")[1:]
    files = [simulated / "text" / "simulated" / f"qa{family}_train.txt" for family in (1, 8, 19)]
    told = [story for path in files for story in parse_stories(path.read_bytes())[:-1]]  # the last is dropped
    expected = [" ".join(words_of(story)) for story in told]
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, r"babi-out\.vocab_size: the text has 147 words, 100 are too few; use at least 147"),
        ({"collection": "en-valid"}, "collection: 'en-valid' is not in the text; use simulated"),
        ({"mode": "all"}, "babi-out.mode"),
    ],
)
def test_a_configuration_that_does_not_fit_the_text_is_refused(
    tmp_path: Path, simulated: Path, changes: dict[str, Any], message: str
) -> None:
    with refused(message):
        make_catbabi(tmp_path / "out", simulated, **changes)
    assert not (tmp_path / "out").exists()


ARCHIVE = {"kind": "babi_text", "source": "archive"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**ARCHIVE, "source": "internet"}, "babi-out.source: the text 'internet' is not one of archive"),
        ({**SIMULATED, "families": [4]}, "families.* give some of 1, 2, 3"),
        ({**SIMULATED, "missing_files": []}, "unknown key 'missing_files'"),
        ({**ARCHIVE, "families": [1]}, "unknown key 'families'"),
        (ARCHIVE, r"en-valid-10k/qa10_test.txt is not in the archive; .*text\.missing_files"),
    ],
)
def test_a_wrong_text_configuration_leaves_nothing_behind(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    tarfile.open(tmp_path / ARCHIVES[1], "w:gz").close()  # with nothing in it
    with refused(message):
        babi_text.run(context_in(tmp_path / "out", config, runtime={"downloads": tmp_path}))
    assert not (tmp_path / "out").exists()


def test_the_script_of_the_page_prints_the_rows_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "catbabi.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(yaml|python|text)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE))
    experiment = yaml.safe_load(blocks["yaml"])["data"]["babi"]
    text, train = tmp_path / "babi-text", tmp_path / "babi-train"
    babi_text.run(context_in(text, {"kind": "babi_text", **experiment.pop("text")}))
    upstream = SimpleNamespace(work=text)
    result = catbabi.run(context_in(train, {**experiment, "split": "train"}, inputs={"text": upstream}))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(blocks["python"], "docs/catbabi.md", "exec"), {})
    assert capsys.readouterr().out == blocks["text"]
    assert f"{result.summary['vocab_size_of_text']} for the simulator" in page
