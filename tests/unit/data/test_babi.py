"""Files of stories, the archive that they come in and the counts of the real one, and stories that are simulated."""

import hashlib
import io
import itertools
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.config.text import SIMULATED_FAMILIES, SimulatedText, Stories
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_data.babi import archive as babi_archive
from implicit_llm_data.babi.archive import (
    ARCHIVES,
    FOLDER,
    BabiArchiveError,
    find_archive,
    official_files,
    read_archive,
)
from implicit_llm_data.babi.simulator.households import THINGS
from implicit_llm_data.babi.simulator.relations import CONTAINERS
from implicit_llm_data.babi.simulator.simulate import FAMILIES, all_words, simulate
from implicit_llm_data.babi.stories import (
    SPLITS,
    Line,
    Story,
    file_name,
    find_files,
    format_stories,
    parse_stories,
    vocabulary_of,
    words_of,
)
from tests.refusals import refused
from tests.unit.data.babi_answers import Contradiction, answer
from tests.unit.data.text_samples import make_catbabi, make_text, real_file

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
        Line(1, "Ann and Bob went up."),
        Line(2, "Where is Ann?", "up", (1,)),
        Line(3, "The Box of Nails fell."),
        Line(4, "What does Bob hold?", "Nail,Hammer", (1, 3)),
    ],
    [Line(1, "Bob slept."), Line(2, "Who slept?", "bob", ())],
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
NUM_FACTS = {1: 1, 6: 1, 12: 1, 2: 2, 11: 2, 15: 2, 18: 2, 19: 2, 3: 3}  # 18: at least
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


def asked(family: int, length: int, count: int = 40) -> Iterator[tuple[dict[int, str], Line]]:
    """Each question, with the statements before it by their number."""
    for story in stories(family, length, count):
        for index, question in enumerate(story):
            if question.answer is not None:
                yield {line.number: line.text for line in story[:index] if line.answer is None}, question


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_follows_from_the_text_and_from_the_supporting_lines_alone(family: int, length: int) -> None:
    for told, question in asked(family, length):
        assert answer([*told.values()], question.text) == question.answer, (told, question)
        proof = [told[number] for number in sorted(question.supports)]
        assert answer(proof, question.text, is_strict=False) == question.answer, (proof, question)
        assert len(set(question.supports)) == len(question.supports) >= NUM_FACTS.get(family, 1)
        assert family == 18 or len(proof) == NUM_FACTS.get(family, len(proof))


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {7, 8}))  # a count or a list may stay right by chance
def test_without_any_one_of_its_supporting_lines_an_answer_is_not_proved(family: int) -> None:
    for told, question in asked(family, 10):
        for left_out in question.supports:
            proof = [told[number] for number in sorted(question.supports) if number != left_out]
            try:
                found = answer(proof, question.text, is_strict=False)
            except Contradiction:
                continue
            assert found != question.answer, (proof, question)


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
    # A new value here means that every simulated data set of a seed is another one: do not change it lightly.
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
