"""From the real archive to CatbAbI on disk: by the path of simulated text, to the known counts."""

import json
from pathlib import Path

import pytest

from implicit_llm_data.babi.archive import ARCHIVES
from implicit_llm_data.babi.stories import parse_stories
from tests.unit.data.text_samples import make_catbabi, make_text, real_file

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
