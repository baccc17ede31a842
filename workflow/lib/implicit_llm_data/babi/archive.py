"""Read the official bAbI v1.2 text from its archive: only the known files, each checked by its digest.

The digests are in `babi_files.sha256`, in the format of sha256sum; one file has only a git blob id.
"""

import hashlib
import tarfile
import zlib
from collections.abc import Collection
from functools import cache
from pathlib import Path

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.fetched_files import FETCH

# bAbI's authors published the first archive. The second has only the collections en-valid and en-valid-10k, and lacks
# the file in _GIT_BLOBS.
ARCHIVES = ("tasks_1-20_v1-2.tar.gz", "babi_en_valid_10k.tar.gz")
FOLDER = "tasks_1-20_v1-2"
_SHA256_FILE = Path(__file__).with_name("babi_files.sha256")
_GIT_BLOBS = {"en-valid-10k/qa3_train.txt": "458387a5aeb1aa11fd075d6a2f1c2bb13a1b08b4"}
_LARGEST_FILE_BYTES = 1 << 24  # four times the largest official file, so that a damaged header cannot fill the memory


class BabiArchiveError(UserError):
    """The archive or a file in it is missing or damaged; the message names it and what to do."""


@cache
def official_files() -> dict[str, str]:
    """Return the digests of the 120 files by name, for example "en-valid/qa1_train.txt"; "git:" marks a git blob id."""
    pairs = (line.split() for line in _SHA256_FILE.read_text(encoding="ascii").splitlines())
    digests = {name: digest for digest, name in pairs}
    return digests | {name: f"git:{blob}" for name, blob in _GIT_BLOBS.items()}


def find_archive(downloads: Path) -> Path:
    """Return the archive in the folder `downloads`. Raises: BabiArchiveError if there is none."""
    for name in ARCHIVES:
        if (downloads / name).is_file():
            return downloads / name
    raise BabiArchiveError(
        f"{downloads}: neither {ARCHIVES[0]} nor {ARCHIVES[1]} is there; {FETCH}, or give --downloads"
    )


def read_archive(archive: Path, missing_files: Collection[str] = ()) -> dict[str, bytes]:
    """Return the checked content of every official file except `missing_files`, by name.

    Nothing is extracted to disk, and unknown members are ignored.
    Raises: BabiArchiveError for a damaged archive, and for a file that is missing or has another digest.
    """
    wanted, again = official_files().keys() - set(missing_files), f"remove {archive.name} and {FETCH}"
    try:
        contents = _read_members(archive, wanted)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BabiArchiveError(f"{archive}: the archive is truncated or damaged ({reason}); {again}") from error
    for name in sorted(wanted):
        expected = official_files()[name]
        found = _digest(contents[name], is_git=expected.startswith("git:")) if name in contents else ""
        if found != expected:
            damage = f"is damaged (digest {found[:16]}, expected {expected[:16]}); {again}"
            what = damage if found else f"is not in the archive; {FETCH}"
            raise BabiArchiveError(f"{archive}: {name} {what}, or list it under text.missing_files to do without it")
    return {name: contents[name] for name in sorted(wanted)}


def _read_members(archive: Path, wanted: Collection[str]) -> dict[str, bytes]:
    contents = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = member.name.removeprefix("./").removeprefix(f"{FOLDER}/")
            file = tar.extractfile(member) if member.isfile() and name in wanted else None
            if file is not None and member.size <= _LARGEST_FILE_BYTES:
                contents[name] = file.read()
    return contents


def _digest(content: bytes, *, is_git: bool) -> str:
    """Return the sha256, or with `is_git` "git:" and the git blob id."""
    if is_git:
        return "git:" + hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return hashlib.sha256(content).hexdigest()
