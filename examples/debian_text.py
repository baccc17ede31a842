"""Make a corpus of text and code from Debian packages: a few hundred million tokens without an account or a hub.

    python examples/debian_text.py FOLDER [--packages examples/debian_text.csv] [--part-mb 45]

Needs `apt-get` and `dpkg-deb` on a Debian 12 with its package lists. Each package is fetched at the version that the
table names and compared with its sha256. Documents become lines of `FOLDER/debian/{prose,code}-NN.jsonl.gz`, with the
fields text, package and directory, each document once; the parts are at most `--part-mb` megabytes. `FOLDER/debian/
packages.csv` says what each package gave and under which licences. With `IMPLICIT_LLM_DATA=FOLDER` an experiment reads
them by

    corpus: {source: files, files: ["debian/*.jsonl.gz"]}
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import html
import json
import logging
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO

CODE = {
    *{".c", ".cc", ".cpp", ".cxx", ".el", ".erl", ".go", ".h", ".hpp", ".java", ".js", ".lisp", ".ml"},
    *{".pl", ".pm", ".py", ".r", ".rb", ".rs", ".S", ".sh", ".ts", ".v"},
}
PROSE = {".adoc", ".htm", ".html", ".md", ".rst", ".tex", ".texi", ".txt"}
FEWEST_BYTES, MOST_BYTES = 400, 1_000_000
ENGLISH_SHARE = 0.95  # of a document of prose, ASCII characters: others are mostly translations
HTML_TO_TEXT = (
    (re.compile(r"<!--.*?-->|<(script|style|nav|head|footer)\b.*?</\1>", re.DOTALL | re.IGNORECASE), ""),
    (re.compile(r"</(p|div|li|tr|dd|dt|h\d|pre)>|<br\b", re.IGNORECASE), "\n<"),
    (re.compile(r"<[^>]*>"), ""),
)
LICENCE = re.compile(r"^License: *(\S.*)$", re.MULTILINE)
log = logging.getLogger("debian_text")


@dataclass
class Package:
    """A row of the table; `kind` is that of its documents, prose or code."""

    package: str
    version: str
    sha256: str
    kind: str
    licences: str = ""
    documents: int = 0
    bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--part-mb", type=int, default=45)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = options.folder / "debian"
    cache = out / ".packages"
    cache.mkdir(parents=True, exist_ok=True)
    with options.packages.open(newline="") as file:
        packages = [Package(**row) for row in csv.DictReader(file)]
    parts = {kind: Parts(out, kind, options.part_mb * 10**6) for kind in ("prose", "code")}
    seen: set[bytes] = set()
    for package in packages:
        add(package, fetch(package, cache), parts[package.kind], seen)
        log.info("%s: %d documents, %.1f MB", package.package, package.documents, package.bytes / 1e6)
    for writer in parts.values():
        writer.close()
    with (out / "packages.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(vars(packages[0])), lineterminator="\n")
        table.writeheader()
        table.writerows(map(vars, packages))


def fetch(package: Package, cache: Path) -> Path:
    """The package's file. Raises: SystemExit if it has another digest than the table says."""
    path = cache / f"{package.sha256}.deb"
    if not path.exists():
        name = f"{package.package}={package.version}"
        subprocess.run(["apt-get", "download", "-qq", name], cwd=cache, check=True)
        found = next(file for file in cache.glob(f"{package.package}_*.deb"))
        digest = hashlib.sha256(found.read_bytes()).hexdigest()
        if digest != package.sha256:
            raise SystemExit(f"error: {name} has sha256 {digest}, not {package.sha256}; correct the table")
        found.rename(path)
    return path


def add(package: Package, path: Path, part: Parts, seen: set[bytes]) -> None:
    """Write the package's documents that are not in `seen` yet."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as dpkg:
        assert dpkg.stdout is not None
        for name, data in files_of_tar(dpkg.stdout):
            if name.endswith(f"/doc/{package.package}/copyright"):
                package.licences = "; ".join(sorted(set(LICENCE.findall(data.decode(errors="replace")))))
            text = text_of(name, data, package.kind)
            digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
            if not text or digest in seen:
                continue
            seen.add(digest)
            directory = f"{package.package}/{PurePosixPath(name).parent}"
            part.write({"text": text, "package": package.package, "directory": directory})
            package.documents += 1
            package.bytes += len(text.encode())


def files_of_tar(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file that may be text, those of archives within it too."""
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            name = member.name.removeprefix("./")
            if re.search(r"\.tar(\.\w+)?$", name):
                with suppress(tarfile.ReadError):  # a sample of an empty or damaged archive
                    yield from files_of_tar(content)
            elif name.endswith(".zip"):
                with suppress(zipfile.BadZipFile), zipfile.ZipFile(BytesIO(content.read())) as inner:
                    yield from ((f"{name}/{item}", inner.read(item)) for item in inner.namelist())
            elif member.size <= MOST_BYTES:
                yield name, content.read()


def text_of(name: str, data: bytes, kind: str) -> str:
    """The document, "" for a file that is none."""
    if name.endswith(".gz"):
        name, data = name.removesuffix(".gz"), gzip.decompress(data)
    suffix = PurePosixPath(name).suffix
    if suffix not in (CODE if kind == "code" else PROSE) or not FEWEST_BYTES <= len(data) <= MOST_BYTES:
        return ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ""
    if suffix in (".html", ".htm"):
        text = text_of_html(text)
    is_english = kind == "code" or sum(map(str.isascii, text)) >= ENGLISH_SHARE * len(text)
    return text if is_english and len(text) >= FEWEST_BYTES else ""


def text_of_html(page: str) -> str:
    """What a reader of the page sees, a line for each block."""
    for pattern, text in HTML_TO_TEXT:
        page = pattern.sub(text, page)
    lines = (" ".join(line.split()) for line in html.unescape(page).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


@dataclass
class Parts:
    """Compressed files of JSON lines, a new one before `most_bytes` are reached."""

    folder: Path
    kind: str
    most_bytes: int
    number: int = -1
    files: list[IO[bytes]] = field(default_factory=list)

    def write(self, document: dict[str, str]) -> None:
        if not self.files or self.files[-1].tell() > self.most_bytes - 2 * MOST_BYTES:
            self._next()
        self.packed.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")

    def _next(self) -> None:
        self.close()
        self.number += 1
        path = self.folder / f"{self.kind}-{self.number:02}.jsonl.gz"
        self.files.append(path.open("wb"))
        self.packed = gzip.GzipFile(filename="", fileobj=self.files[-1], mode="wb", compresslevel=9, mtime=0)

    def close(self) -> None:
        if self.files:
            self.packed.close()
            self.files.pop().close()


if __name__ == "__main__":
    main()
