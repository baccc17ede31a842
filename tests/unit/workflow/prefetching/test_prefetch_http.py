"""Resumable fetching, against a real server on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from implicit_llm_workflow.prefetching.prefetch_http import ATTEMPTS, Download, FetchError, fetch
from tests.unit.workflow.prefetching.file_server import FileServer, serving

CONTENT = bytes(range(256)) * 4000
PATH = "/data/archive.bin"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving() as state:
        state.files[PATH] = CONTENT
        yield state


def must_be(content: bytes) -> Callable[[Path], None]:
    """A check by digest."""

    def check(path: Path) -> None:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != hashlib.sha256(content).hexdigest():
            raise FetchError(f"{path.name}: has the wrong digest {found[:16]}")

    return check


def download(server: FileServer, folder: Path, content: bytes = CONTENT, **options: int) -> Download:
    return Download(server.url + PATH, folder / "new" / "archive.bin", must_be(content), **options)


def run(wanted: Download, waits: list[float] | None = None) -> None:
    fetch(wanted, wait=(waits if waits is not None else []).append, shows_bar=False)


def leftovers(wanted: Download) -> list[str]:
    return sorted(path.name for path in wanted.target.parent.iterdir() if path != wanted.target)


def test_a_file_is_fetched_into_a_new_folder(server: FileServer, tmp_path: Path) -> None:
    wanted = download(server, tmp_path)
    run(wanted)
    assert wanted.target.read_bytes() == CONTENT
    assert leftovers(wanted) == []


def test_a_cut_connection_is_taken_up_where_it_ended(server: FileServer, tmp_path: Path) -> None:
    server.cuts = [300_000, 1, 500_000]
    wanted, waits = download(server, tmp_path), []
    run(wanted, waits)
    assert wanted.target.read_bytes() == CONTENT
    assert server.ranges() == ["", "bytes=300000-", "bytes=300001-", "bytes=800001-"]
    assert waits == [2.0, 4.0, 8.0]


def test_a_later_call_goes_on_after_one_that_gave_up(server: FileServer, tmp_path: Path) -> None:
    server.cuts = [1000] * ATTEMPTS
    wanted = download(server, tmp_path)
    with pytest.raises(FetchError, match=r"cut 5 times .* 5000 bytes are kept in .*archive\.bin\.part; run it again"):
        run(wanted)
    assert not wanted.target.exists()
    run(wanted)
    assert wanted.target.read_bytes() == CONTENT
    assert server.ranges()[-1] == "bytes=5000-"


def test_what_arrived_of_an_older_version_is_not_mixed_with_a_newer_one(server: FileServer, tmp_path: Path) -> None:
    server.cuts = [1000] * ATTEMPTS
    newer = CONTENT[::-1]
    wanted = download(server, tmp_path, newer)
    with pytest.raises(FetchError):
        run(wanted)
    server.files[PATH] = newer
    run(wanted)
    assert wanted.target.read_bytes() == newer


def test_a_server_without_ranges_is_asked_for_all_of_it(server: FileServer, tmp_path: Path) -> None:
    server.knows_ranges, server.cuts = False, [300_000]
    wanted = download(server, tmp_path)
    run(wanted)
    assert wanted.target.read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_not_sent_again(server: FileServer, tmp_path: Path) -> None:
    server.cuts = [300_000] + [0] * (ATTEMPTS - 1)
    wanted = download(server, tmp_path)
    with pytest.raises(FetchError):
        run(wanted)
    wanted.part.write_bytes(CONTENT)
    run(wanted)
    assert wanted.target.read_bytes() == CONTENT
    assert server.ranges()[-1] == f"bytes={len(CONTENT)}-"


@pytest.mark.parametrize("extra", [b"x", b"x" * 5000])
def test_a_part_that_is_too_long_is_thrown_away(server: FileServer, tmp_path: Path, extra: bytes) -> None:
    server.cuts = [1000] * ATTEMPTS
    wanted = download(server, tmp_path)
    with pytest.raises(FetchError):
        run(wanted)
    wanted.part.write_bytes(CONTENT + extra)
    run(wanted)
    assert wanted.target.read_bytes() == CONTENT


def test_a_wrong_digest_leaves_no_file_and_nothing_to_go_on_from(server: FileServer, tmp_path: Path) -> None:
    server.files[PATH] = CONTENT[:-1] + b"\0"
    wanted = download(server, tmp_path)
    with pytest.raises(FetchError, match="wrong digest"):
        run(wanted)
    assert not wanted.target.exists()
    assert leftovers(wanted) == []
    server.files[PATH] = CONTENT
    run(wanted)
    assert wanted.target.read_bytes() == CONTENT


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(server: FileServer, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    wanted = download(server, tmp_path)
    run(wanted)
    assert wanted.target.read_bytes() == CONTENT
    server.requests.clear()
    missing = Download(f"{server.url}/none", tmp_path / "none", must_be(CONTENT))
    with pytest.raises(FetchError, match=r"404 .*fetch it where there is a network and put it at .*none"):
        run(missing)
    assert len(server.requests) == 1


def test_no_network_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with serving() as state:
        url = state.url  # of a server that is gone
    wanted, waits = Download(f"{url}/x.gz", tmp_path / "x.gz", must_be(CONTENT)), []
    with pytest.raises(FetchError) as caught:
        run(wanted, waits)
    assert "Connection refused" in str(caught.value)
    assert f"put it at {tmp_path / 'x.gz'}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert waits == []


def test_a_file_larger_than_expected_is_refused_before_it_fills_the_disk(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=f"has {len(CONTENT)} bytes, at most 1000 are expected"):
        run(download(server, tmp_path, max_bytes=1000))


def test_a_folder_that_cannot_be_written_is_named(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "new").write_text("a file in the way")
    with pytest.raises(FetchError, match=r"new/archive\.bin: cannot be written .*another --downloads"):
        run(download(server, tmp_path))
