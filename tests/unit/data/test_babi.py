"""The archive of bAbI stories and the counts of the real one, stories that are simulated, and the rows of CatbAbI."""

import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.text import SIMULATED_FAMILIES, CatbabiConfig, SimulatedText, Stories
from implicit_llm_data.babi import archive as babi_archive
from implicit_llm_data.babi.archive import (
    ARCHIVES,
    FOLDER,
    BabiArchiveError,
    find_archive,
    official_files,
    read_archive,
)
from implicit_llm_data.babi.simulator import CONTAINERS, FAMILIES, THINGS, all_words, simulate
from implicit_llm_data.babi.stories import (
    SPLITS,
    Story,
    StoryLine,
    file_name,
    find_files,
    format_stories,
    parse_stories,
    vocabulary_of,
    words_of,
)
from implicit_llm_data.shards import open_dataset
from implicit_llm_data.stages import babi_text, catbabi
from implicit_llm_data.stages.catbabi import (
    InvalidCatbabi,
    TaskStory,
    join,
    read_stories,
    rows,
    shuffled,
)
from tests.pages import ROOT
from tests.refusals import refused
from tests.unit.data.text_samples import CATBABI, SIMULATED, contents, context_in, make_catbabi, make_text, real_file

TEXT = (
    "1 Ann and Bob went up.\n"
    "2 Where is Ann? \tup\t1\n"
    "3 The Box of Nails fell.\n"
    "4 What does Bob hold?\tNail,Hammer\t1 3\n"
    "1 Bob slept.\n"
    "2 Who slept?\tbob\t\n"
)
STORIES = [
    [
        StoryLine(1, "Ann and Bob went up."),
        StoryLine(2, "Where is Ann?", "up", (1,)),
        StoryLine(3, "The Box of Nails fell."),
        StoryLine(4, "What does Bob hold?", "Nail,Hammer", (1, 3)),
    ],
    [StoryLine(1, "Bob slept."), StoryLine(2, "Who slept?", "bob", ())],
]


@pytest.mark.parametrize(
    "text", [TEXT, TEXT.removesuffix("\n"), TEXT.replace("\n", "\r\n"), format_stories(STORIES)], ids=range(4)
)
def test_stories_begin_at_lines_numbered_one_whatever_the_line_ends(text: str) -> None:
    assert parse_stories(text.encode()) == STORIES


def test_words_are_lower_case_with_the_mark_apart_and_the_answer_as_one_word() -> None:
    assert " ".join(words_of(STORIES[0])) == (
        "ann and bob went up . where is ann ? up the box of nails fell . what does bob hold ? nail,hammer"
    )


def test_the_vocabulary_does_not_depend_on_the_order_of_the_words() -> None:
    assert vocabulary_of(["b", "?", "a", "b", "."]) == ["<pad>", "<eos>", ".", "?", "a", "b"]


def test_files_of_a_split_come_by_task_number(tmp_path: Path) -> None:
    names = [file_name(task, split) for task in (10, 2, 1) for split in ("train", "test")]
    for name in [*names, "qa3_train.txt.bak", "xqa4_train.txt"]:
        (tmp_path / name).touch()
    assert list(find_files(tmp_path, "train").items()) == [
        (task, tmp_path / f"qa{task}_train.txt") for task in (1, 2, 10)
    ]


# Of an invented archive: sha256 of b"1 A b.\n" and the git identity of b"1 C d.\n".
ONE, TWO = "en-valid/qa1_train.txt", "en-valid-10k/qa3_train.txt"
CONTENTS = {ONE: b"1 A b.\n", TWO: b"1 C d.\n"}
DIGESTS = {
    ONE: "a457cf4bfda6c1a5069944a96a9763ef86bc6b4132ad788301084ac20c4dd6a4",
    TWO: "git:21916160eef737675ce2a041c681e53171ab3a6e",
}


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where to write an archive of the two files, which then are the official ones."""
    monkeypatch.setattr(babi_archive, "official_files", lambda: DIGESTS)
    return tmp_path / "a.tar.gz"


def write_archive(path: Path, members: dict[str, bytes], link: tarfile.TarInfo | None = None) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            tar.addfile(link)


def in_folder(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{FOLDER}/{name}": content for name, content in contents.items()}


def test_the_digests_are_of_the_hundred_and_twenty_files() -> None:
    collections = [f"{folder}/qa{task}" for folder in ("en-valid", "en-valid-10k") for task in range(1, 21)]
    assert set(official_files()) == {f"{start}_{split}.txt" for start in collections for split in SPLITS}
    assert Counter(len(digest.removeprefix("git:")) for digest in official_files().values()) == {64: 119, 40: 1}


@pytest.mark.parametrize("prefix", ["", "./"])
def test_known_files_are_read_and_checked_and_others_passed_over(archive: Path, prefix: str) -> None:
    others = {"README.txt": b"x", "en/qa1_train.txt": b"y", f"{FOLDER}/../{ONE}": b"z"}
    write_archive(archive, {prefix + name: content for name, content in {**in_folder(CONTENTS), **others}.items()})
    assert read_archive(archive) == CONTENTS
    assert [path.name for path in archive.parent.iterdir()] == ["a.tar.gz"]


@pytest.mark.parametrize("names", [(ONE,), (ONE, TWO)])
def test_a_file_named_as_missing_is_left_out_whether_it_is_there_or_not(archive: Path, names: tuple[str, ...]) -> None:
    write_archive(archive, in_folder({name: CONTENTS[name] for name in names}))
    assert read_archive(archive, [TWO]) == {ONE: CONTENTS[ONE]}


@pytest.mark.parametrize("name", [ONE, TWO])
def test_a_file_of_which_one_byte_differs_is_named(archive: Path, name: str) -> None:
    write_archive(archive, in_folder({**CONTENTS, name: CONTENTS[name].replace(b".", b"!")}))
    with refused(f"{name} is damaged.*remove a.tar.gz and type `implicit-llm prefetch", BabiArchiveError):
        read_archive(archive)


def test_a_link_under_the_name_of_a_file_is_not_followed(archive: Path) -> None:
    link = tarfile.TarInfo(f"{FOLDER}/{ONE}")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    write_archive(archive, in_folder({TWO: CONTENTS[TWO]}), link)
    message = f"a.tar.gz: {ONE} is not in the archive; type `implicit-llm prefetch.*text.missing_files"
    with refused(message, BabiArchiveError):
        read_archive(archive)


@pytest.mark.parametrize("keep", [0, 5, 60, -200, None])
def test_a_truncated_archive_and_what_is_none_are_named(archive: Path, keep: int | None) -> None:
    write_archive(archive, {**in_folder(CONTENTS), "noise": os.urandom(3000)})  # noise, as that does not compress
    archive.write_bytes(b"<html>404</html>" if keep is None else archive.read_bytes()[:keep])
    with refused(f"^{archive}: the archive is truncated or damaged", BabiArchiveError):
        read_archive(archive)


def test_the_published_archive_is_preferred_and_without_any_both_names_and_the_command_are_said(tmp_path: Path) -> None:
    message = f"{tmp_path}: neither {ARCHIVES[0]} nor {ARCHIVES[1]} is there; type `implicit-llm prefetch.*--downloads"
    with refused(message, BabiArchiveError):
        find_archive(tmp_path)
    for name in reversed(ARCHIVES):
        (tmp_path / name).touch()
        assert find_archive(tmp_path).name == name


NOT_THERE = "en-valid-10k/qa3_train.txt"
# Stories, words, questions; en-valid-10k train without the file that is missing.
COUNTS = {
    ("en-valid", "train"): (5_622, 509_246, 17_925),
    ("en-valid", "valid"): (605, 54_202, 1_891),
    ("en-valid", "test"): (6_247, 565_653, 19_910),
    ("en-valid-10k", "train"): (54_577, 4_263_959, 170_914),
    ("en-valid-10k", "valid"): (6_245, 570_894, 19_907),
}
LONGEST = {("en-valid", "train"): 1_378, ("en-valid-10k", "valid"): 1_397}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """The text of the real archive, and whether the archive has all files."""
    archive = real_file(ARCHIVES[0])
    work = tmp_path_factory.mktemp("real") / "text"
    make_text(work, downloads=archive.parent, missing_files=[] if archive.is_file() else [NOT_THERE])
    return work, archive.is_file()


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


def test_the_real_vocabulary_has_180_words_of_which_24_are_lists(real: tuple[Path, bool]) -> None:
    words = json.loads((real[0] / "vocabulary.json").read_text())
    assert len(words) == len(set(words)) == 180
    assert sum("," in word for word in words) == 24
    assert words[:2] == ["<pad>", "<eos>"]


def test_no_simulated_line_is_one_of_the_real_text(real: tuple[Path, bool], tmp_path: Path) -> None:
    make_text(tmp_path, families=[1, 2, 3, 6, 7, 8, 11, 12, 15, 18, 19], story_length=20)

    def lines(folder: Path) -> set[str]:
        files = [parse_stories(path.read_bytes()) for path in folder.rglob("*.txt")]
        return {line.text for stories in files for story in stories for line in story}

    assert not lines(tmp_path / "text") & lines(real[0] / "text" / "en-valid")


LENGTHS = (1, 2, 3, 5, 10, 25, 60)
ROOMS = {"attic", "cellar", "library", "workshop", "balcony", "pantry"}
PAIRS = {f"{first},{second}" for first in THINGS for second in THINGS if first != second}
TURNS = {
    f"{first},{second}"
    for first in ("north", "east", "south", "west")
    for second in ("north", "east", "south", "west")
    if {first, second} not in ({"north", "south"}, {"east", "west"})
}
ANSWERS = {
    **dict.fromkeys((1, 2, 3, 11, 12), ROOMS),
    6: {"yes", "no"},
    7: {"none", "one", "two", "three"},
    8: {"nothing", *THINGS, *PAIRS},
    15: {"baker", "miner", "tailor", "sailor", "painter", "farmer", "piper", "weaver"},
    18: {"yes", "no"},
    19: TURNS,
}


@cache
def stories(family: int, length: int, count: int = 40, seed: int = 0, split: str = "train") -> list[Story]:
    """Stories that went through a file, so that what is checked is what a reader sees."""
    config = SimulatedText("simulated", SIMULATED_FAMILIES, Stories(count, count, count), seed, length)
    return parse_stories(format_stories(simulate(config, family, split)).encode())


def asked(family: int, length: int, count: int = 40) -> Iterator[tuple[dict[int, str], StoryLine]]:
    """Each question, with the statements before it by their number."""
    for story in stories(family, length, count):
        for index, question in enumerate(story):
            if question.answer is not None:
                yield {line.number: line.text for line in story[:index] if line.answer is None}, question


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_story_has_the_wanted_length_questions_in_between_and_one_at_the_end(family: int, length: int) -> None:
    for story in stories(family, length):
        kinds = [line.answer is not None for line in story]
        num_statements = kinds.count(False)
        assert num_statements >= length
        if length >= {2: 10, 3: 25, 7: 10, 8: 10}.get(family, 3):
            assert num_statements <= length + (family == 11)
        assert kinds[-1]
        assert not any(first and second for first, second in itertools.pairwise(kinds))
        if length >= 25:
            assert kinds.count(True) >= length // 5


@pytest.mark.parametrize("length", [10, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_a_family_occurs_and_none_is_a_safe_guess(family: int, length: int) -> None:
    count = 400 if family in (8, 19) else 150
    found = Counter(line.answer for story in stories(family, length, count) for line in story if line.answer)
    assert set(found) == ANSWERS[family]
    share = max(found.values()) / found.total()
    if ANSWERS[family] == {"yes", "no"}:
        assert share < 0.5 + 2.5 / found.total() ** 0.5  # five standard deviations of a fair coin
    else:
        assert share < (0.6 if family == 7 else 0.45 if family == 8 else 2.0 / len(ANSWERS[family]))


@pytest.mark.parametrize("family", [6, 18])
def test_yes_and_no_do_not_depend_on_the_form_of_the_question(family: int) -> None:
    by_form: dict[str, Counter[str]] = {}
    for _, question in asked(family, 10, 400):
        by_form.setdefault(question.text.split()[0], Counter())[str(question.answer)] += 1
    for found in by_form.values():
        assert abs(found["yes"] / found.total() - 0.5) < 2.5 / found.total() ** 0.5


def test_a_question_on_sizes_is_never_answered_by_one_statement() -> None:
    for told, question in asked(18, 16):
        pairs = [set(CONTAINERS) & set(text[:-1].split()) for text in (question.text, *told.values())]
        assert pairs[0] not in pairs[1:]


def test_the_vocabulary_is_all_that_the_stories_use_and_nothing_more() -> None:
    used = {
        word
        for family in FAMILIES
        for length, count in ((10, 400 if family in (8, 19) else 150), (40, 400 if family in (8, 19) else 150))
        for story in stories(family, length, count)
        for word in words_of(story)
    }
    assert used == all_words()
    assert len(used) + 2 <= 192  # with <pad> and <eos> it fits the model of the real CatbAbI


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_and_seeds_have_other_stories(family: int) -> None:
    train = {format_stories([story]) for story in stories(family, 10)}
    for other in (stories(family, 10, split="valid"), stories(family, 10, split="test"), stories(family, 10, seed=1)):
        assert not train & {format_stories([story]) for story in other}


def test_more_stories_leave_the_first_ones_as_they_are() -> None:
    assert stories(3, 10, 12)[:5] == stories(3, 10, 5)


def test_stories_of_a_seed_never_change() -> None:
    text = "".join(
        format_stories(stories(family, length, 20, seed=7, split="test")) for family in FAMILIES for length in (5, 30)
    )
    # A new value here means that every simulated data set of a seed is another one: do not change it lightly. The
    # answers in this text were checked, family by family, by reasoning from the lines of each story alone.
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "6af297a718b482e2124f39a7cc8512230ccff7099544cbfc76126901df3b5e17"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("families", [], "; give "),
        ("families", [1, 4], "; give "),
        ("families", [1, 1], "; give "),
        ("stories", {"train": 3, "valid": 3}, "'test' is missing"),
        ("stories", {"train": 3, "valid": 3, "test": 0}, "; give "),
        ("story_length", 0, "; give "),
        ("seed", -1, "; give "),
        ("story_lenght", 5, "did you mean 'story_length'"),
    ],
)
def test_a_wrong_configuration_gives_one_line_that_names_the_key_and_the_fix(
    key: str, value: Any, message: str
) -> None:
    given = {"source": "simulated", "seed": 0, "families": [1], "stories": dict.fromkeys(SPLITS, 3), "story_length": 5}
    with refused(rf"^babi-text.*{key}.*{message}"):
        fill(SimulatedText, given | {key: value}, where="babi-text")


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


TOLD = [story(2, "a b . who ? a,b"), story(10, "b c . c d ."), story(2, "d .")]
VOCABULARY = vocabulary_of(word for told in TOLD for word in told.words)


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
    return rows(*join(TOLD, VOCABULARY), VOCABULARY.index("?"), replace(BASE, mode=mode, length=length))


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


def test_the_script_of_the_page_prints_the_sequences_of_the_page(
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
