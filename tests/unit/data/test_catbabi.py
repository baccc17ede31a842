from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from implicit_llm_data.babi.catbabi import (
    CatbabiConfig,
    InvalidCatbabi,
    Stream,
    TaskStory,
    join,
    read_stories,
    rows,
    shuffled,
)
from implicit_llm_data.babi.stories import vocabulary_of

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


def test_stories_of_all_tasks_of_a_split_are_in_one_list(text: Path) -> None:
    found = read_stories(text, BASE)
    expected = [story(2, "a b . who ? a,b"), story(2, "a c ."), story(2, "a d ."), story(10, "b c . c d .")]
    expected.append(story(10, "c b ."))
    assert sorted(map(asdict, found), key=str) == sorted(map(asdict, expected), key=str)


def test_the_last_story_of_every_file_can_be_dropped(text: Path) -> None:
    found = read_stories(text, replace(BASE, drop_last_story=True))
    expected = [story(2, "a b . who ? a,b"), story(2, "a c ."), story(10, "b c . c d .")]
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


def test_every_story_begins_with_eos_and_the_stream_tells_where() -> None:
    stream = join(STORIES, VOCABULARY)
    assert decoded(stream.tokens_T) == "<eos> a b . who ? a,b <eos> b c . c d . <eos> d ."
    assert stream.starts_S.tolist() == [0, 7, 14]
    assert stream.tasks_S.tolist() == [2, 10, 2]


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
    stream: Stream = join(STORIES, VOCABULARY)
    return rows(stream, VOCABULARY.index("?"), replace(BASE, mode=mode, length=length))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collection": "en-valid"}, "collection: 'en-valid' is not in the text; use small"),
        ({"split": "valid"}, "has no story for the split valid"),
        ({"collection": "../small"}, "use small"),
    ],
)
def test_text_that_is_not_there_is_named(text: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCatbabi, match=message) as caught:
        read_stories(text, replace(BASE, **changes))
    assert str(caught.value).startswith("collection: ")
    assert "\n" not in str(caught.value)


def test_a_split_of_which_all_stories_are_dropped_is_refused(text: Path) -> None:
    for path in (text / "small").iterdir():
        path.write_text("1 A b.\n")
    with pytest.raises(InvalidCatbabi, match="drop_last_story: false"):
        read_stories(text, replace(BASE, drop_last_story=True))
