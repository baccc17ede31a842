"""Fetching one file over HTTP so that an interrupted fetch goes on where it stopped.

FILE.part holds what has arrived, FILE.part.json the validator of the version it is of. The file gets its name only
after its content has been checked.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from implicit_llm_contracts.runs.errors import UserError

BLOCK_BYTES = 1 << 18
ATTEMPTS = 5
WAIT_S = 2.0  # before the second attempt, doubled for each further one
TIMEOUT_S = 60.0
_VALIDATORS = ("ETag", "Last-Modified")


class FetchError(UserError):
    """A file could not be fetched; the message says what to do by hand."""


@dataclass(frozen=True)
class Download:
    """A file to fetch: `check` raises UserError for content that is not what is wanted; max_bytes guards the disk."""

    url: str
    target: Path
    check: Callable[[Path], None]
    max_bytes: int = 1 << 30

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def validator_file(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part.json")

    @property
    def by_hand(self) -> str:
        return f"fetch it where there is a network and put it at {self.target}"


class _Cut(Exception):
    """The connection ended before the file did."""


def fetch(download: Download, *, wait: Callable[[float], None] = time.sleep, shows_bar: bool | None = None) -> None:
    """Fetch, going on from an earlier attempt, and again when the connection is cut.

    Args: shows_bar None shows a progress bar on a terminal.
    Raises: FetchError; what `check` raises, after the content that it refused has been removed.
    """
    with _storage_errors(download):
        download.target.parent.mkdir(parents=True, exist_ok=True)
        cut: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                wait(WAIT_S * 2 ** (attempt - 1))
            try:
                _receive(download, shows_bar)
                break
            except (_Cut, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                cut = error
            except urllib.error.URLError as error:
                if not _may_pass(error, has_begun=download.part.exists()):
                    _refuse(download, error)
                cut = error
        else:
            got = _size(download.part)
            raise FetchError(
                f"{download.url}: the connection was cut {ATTEMPTS} times ({cut}), {got} bytes are kept in "
                f"{download.part}; run it again to go on, or {download.by_hand}"
            )
        _commit(download)


def _commit(download: Download) -> None:
    try:
        download.check(download.part)
    except UserError:
        _forget(download)  # it would be taken up again
        raise
    download.part.replace(download.target)
    download.validator_file.unlink(missing_ok=True)


def _receive(download: Download, shows_bar: bool | None) -> None:
    """One request, for what is missing. Raises: _Cut when the connection ends early."""
    start = _size(download.part)
    request = urllib.request.Request(download.url, headers={"User-Agent": "implicit-llm", **_range(download, start)})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # the scheme is that of a constant
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            if error.headers.get("Content-Range", "") == f"bytes */{start}":
                return  # all of it had arrived
            _forget(download)
            raise _Cut("what had arrived is longer than the file") from error
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            _forget(download)  # another version, or a server that knows no ranges: from the start
            start = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            _forget(download)
            raise _Cut("the server sent another range")
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        if total is not None and total > download.max_bytes:
            raise FetchError(
                f"{download.url}: has {total} bytes, at most {download.max_bytes} are expected; see the URL"
            )
        download.validator_file.write_text(json.dumps(_validator(response.headers)), encoding="utf-8")
        with open(download.part, "ab") as file:
            _copy(response, file, download, (start, total), shows_bar)
    if total is not None and _size(download.part) < total:
        raise _Cut(f"{_size(download.part)} of {total} bytes arrived")


def _copy(
    response: Any, file: IO[bytes], download: Download, span: tuple[int, int | None], shows_bar: bool | None
) -> None:
    from tqdm import tqdm

    start, total = span
    hidden = None if shows_bar is None else not shows_bar
    with tqdm(
        total=total,
        initial=start,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc=download.target.name,
        disable=hidden,
    ) as bar:
        received = start
        while block := response.read(BLOCK_BYTES):
            received += len(block)
            if received > download.max_bytes:
                raise FetchError(f"{download.url}: sends more than the {download.max_bytes} bytes that are expected")
            file.write(block)
            bar.update(len(block))


def _range(download: Download, start: int) -> dict[str, str]:
    """Ask for the rest, but for all of it if the file is no longer the one that the first part is of."""
    if not start:
        return {}
    try:
        validator = json.loads(download.validator_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        validator = {}
    value = next((validator[name] for name in _VALIDATORS if validator.get(name)), None)
    return {"Range": f"bytes={start}-", "If-Range": value} if value else {}


def _validator(headers: Any) -> dict[str, str]:
    """What tells versions apart; a weak ETag does not."""
    found = {name: headers[name] for name in _VALIDATORS if headers.get(name)}
    return {name: value for name, value in found.items() if not value.startswith("W/")}


def _forget(download: Download) -> None:
    download.part.unlink(missing_ok=True)
    download.validator_file.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _may_pass(error: urllib.error.URLError, *, has_begun: bool) -> bool:
    """Whether to try again: a busy server, or a network that was there a moment ago."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == http.client.TOO_MANY_REQUESTS or error.code >= http.client.INTERNAL_SERVER_ERROR
    return has_begun and isinstance(error.reason, (ConnectionError, TimeoutError))


def _refuse(download: Download, error: urllib.error.URLError) -> NoReturn:
    reason = f"{error.code} {error.reason}" if isinstance(error, urllib.error.HTTPError) else error.reason
    raise FetchError(f"{download.url}: cannot be fetched ({reason}); {download.by_hand}") from error


@contextmanager
def _storage_errors(download: Download) -> Iterator[None]:
    """Turn errors of the local file system into one line. URLError is an OSError too, and is let through."""
    try:
        yield
    except urllib.error.URLError as error:
        _refuse(download, error)
    except OSError as error:
        raise FetchError(
            f"{download.target}: cannot be written ({error.strerror or error}); free space or give another --downloads"
        ) from error
