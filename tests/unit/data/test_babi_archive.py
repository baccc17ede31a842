from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from implicit_llm_data.babi import archive as babi_archive
from implicit_llm_data.babi.archive import (
    ARCHIVES,
    FOLDER,
    BabiArchiveError,
    find_archive,
    official_files,
    read_archive,
)
from implicit_llm_data.babi.stories import SPLITS

NOT_THERE = "en-valid-10k/qa3_train.txt"
# Of an invented archive: sha256 of b"1 A b.\n" and the git identity of b"1 C d.\n".
ONE, TWO = "en-valid/qa1_train.txt", NOT_THERE
CONTENTS = {ONE: b"1 A b.\n", TWO: b"1 C d.\n"}
DIGESTS = {
    ONE: "a457cf4bfda6c1a5069944a96a9763ef86bc6b4132ad788301084ac20c4dd6a4",
    TWO: "git:21916160eef737675ce2a041c681e53171ab3a6e",
}


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(babi_archive, "official_files", lambda: DIGESTS)


def write_archive(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def in_folder(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{FOLDER}/{name}": content for name, content in contents.items()}


def refused(archive: Path, missing_files: tuple[str, ...] = ()) -> str:
    with pytest.raises(BabiArchiveError) as caught:
        read_archive(archive, missing_files)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_digests_are_of_the_hundred_and_twenty_files() -> None:
    names = {
        f"{folder}/qa{task}_{split}.txt"
        for folder in ("en-valid", "en-valid-10k")
        for task in range(1, 21)
        for split in SPLITS
    }
    assert set(official_files()) == names
    assert Counter(len(digest.removeprefix("git:")) for digest in official_files().values()) == {64: 119, 40: 1}


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("prefix", ["", "./"])
def test_known_files_are_read_and_checked_and_others_passed_over(tmp_path: Path, prefix: str) -> None:
    others = {"README.txt": b"x", "en/qa1_train.txt": b"y", f"{FOLDER}/../{ONE}": b"z"}
    members = {prefix + name: content for name, content in {**in_folder(CONTENTS), **others}.items()}
    assert read_archive(write_archive(tmp_path / "a.tar.gz", members)) == CONTENTS
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


@pytest.mark.usefixtures("official")
def test_a_file_named_as_missing_is_left_out_whether_it_is_there_or_not(tmp_path: Path) -> None:
    full = write_archive(tmp_path / "full.tar.gz", in_folder(CONTENTS))
    part = write_archive(tmp_path / "part.tar.gz", in_folder({ONE: CONTENTS[ONE]}))
    assert read_archive(full, [TWO]) == read_archive(part, [TWO]) == {ONE: CONTENTS[ONE]}


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("name", [ONE, TWO])
def test_a_file_of_which_one_byte_differs_is_named(tmp_path: Path, name: str) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", in_folder({**CONTENTS, name: CONTENTS[name].replace(b".", b"!")}))
    message = refused(archive)
    assert f"{name} is damaged" in message
    assert "remove a.tar.gz and type `implicit-llm prefetch" in message


@pytest.mark.usefixtures("official")
def test_a_link_under_the_name_of_a_file_is_not_followed(tmp_path: Path) -> None:
    link = tarfile.TarInfo(f"{FOLDER}/{ONE}")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    archive = write_archive(tmp_path / "a.tar.gz", {**in_folder({TWO: CONTENTS[TWO]}), "link": link})
    message = refused(archive)
    assert f"a.tar.gz: {ONE} is not in the archive; type `implicit-llm prefetch" in message
    assert "text.missing_files" in message


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("keep", [0, 5, 60, -200, None])
def test_a_truncated_archive_and_what_is_none_are_named(tmp_path: Path, keep: int | None) -> None:
    noise = os.urandom(3000)  # does not compress, so that the cut is inside of it
    archive = write_archive(tmp_path / "a.tar.gz", {**in_folder(CONTENTS), "noise": noise})
    archive.write_bytes(b"<html>404</html>" if keep is None else archive.read_bytes()[:keep])
    assert refused(archive).startswith(f"{archive}: the archive is truncated or damaged")


def test_the_published_archive_is_preferred(tmp_path: Path) -> None:
    (tmp_path / ARCHIVES[1]).touch()
    assert find_archive(tmp_path).name == ARCHIVES[1]
    (tmp_path / ARCHIVES[0]).touch()
    assert find_archive(tmp_path).name == ARCHIVES[0]


def test_without_an_archive_both_names_and_the_command_are_said(tmp_path: Path) -> None:
    with pytest.raises(BabiArchiveError) as caught:
        find_archive(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert all(name in message for name in (*ARCHIVES, "`implicit-llm prefetch", "--downloads"))
    assert "\n" not in message


def test_the_real_archive_is_read_but_for_the_file_it_lacks() -> None:
    folder = os.environ.get("IMPLICIT_LLM_DATA")
    if not folder:
        pytest.skip(f"IMPLICIT_LLM_DATA is not set; it names the folder with {ARCHIVES[1]}")
    archive = find_archive(Path(folder))
    if archive.name != ARCHIVES[1]:
        assert len(read_archive(archive)) == 120
        return
    assert f"{NOT_THERE} is not in the archive" in refused(archive)
    assert len(read_archive(archive, [NOT_THERE])) == 119
