"""Small corpora and simulated stories, and stages that are run on them without the frame of a job around them."""

import gzip
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.run_directory import RunDirectory
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult
from implicit_llm_data.stages import babi_text, catbabi, token_shard, token_stream, tokenizer

BOOKS = "public_domain_books.jsonl.gz"
NEOX = "gpt-neox-20b_tokenizer.json"
VOCAB_SIZE = 300
STAGES = {"tokenizer": tokenizer, "token_shard": token_shard, "token_stream": token_stream}
SIMULATED: dict[str, Any] = {
    "kind": "babi_text",
    "source": "simulated",
    "seed": 0,
    "families": [1, 8, 19],
    "stories": {"train": 12, "valid": 4, "test": 5},
    "story_length": 6,
}
CATBABI: dict[str, Any] = {
    "kind": "catbabi",
    "collection": "simulated",
    "split": "train",
    "mode": "qa",
    "length": 50,
    "vocab_size": 192,
    "seed": 0,
    "drop_last_story": True,
}


def real_file(name: str) -> Path:
    """A file of real data; skips the test where there is none."""
    folder = os.environ.get("IMPLICIT_LLM_DATA")
    if not folder:
        pytest.skip("IMPLICIT_LLM_DATA is unset: set it to the folder of the real data")
    return Path(folder) / name


def sentence(number: int) -> str:
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "Zoë", "read", "12 books;", "it's\n\n", "\t", "naïve!"]
    return " ".join(words[(number * k + k * k) % len(words)] for k in range(1, 4 + number % 7))


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """JSON lines with the field `text`, compressed when the name says so; equal texts give equal bytes."""
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def write_corpus(folder: Path, num_files: int = 3, documents_per_file: int = 40) -> dict[str, Any]:
    """Files below `folder`; returns the corpus as a configuration names it."""
    for number in range(num_files):
        texts = [sentence(number * documents_per_file + k) + f" ({number}, {k})" for k in range(documents_per_file)]
        write_jsonl(folder / f"part-{number}.jsonl.gz", texts)
    return {"source": "files", "files": ["part-*.jsonl.gz"]}


def context_in(work: Path, config: dict[str, Any], **changes: Any) -> StageContext:
    """What a data stage works with in the folder `work`."""
    fields = {"name": f"babi-{work.name}", "fingerprint": "0" * 64, "inputs": {}, "runtime": {}, "run_dir": work.parent}
    fields |= {"journal": Journal(None), "log": logging.getLogger("implicit_llm.data")}
    return StageContext("data", config=config, work=work, is_main=True, **(fields | changes))


def make_text(work: Path, downloads: Path | None = None, **config: Any) -> StageResult:
    """Simulated stories, or those of the archive in a folder."""
    given = SIMULATED if downloads is None else {"kind": "babi_text", "source": "archive"}
    return babi_text.run(context_in(work, {**given, **config}, runtime={"downloads": downloads}))


def make_catbabi(work: Path, text: Path, **config: Any) -> StageResult:
    return catbabi.run(context_in(work, {**CATBABI, **config}, inputs={"text": SimpleNamespace(work=text)}))


class Project:
    """Runs stages below `root / "results"` as the workflow does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.downloads = root / "downloads"

    def context(self, name: str, config: dict[str, Any], upstream: dict[str, str]) -> StageContext:
        """What the stage works with; `upstream` maps roles to names of finished runs."""
        inputs = {role: self.input(given) for role, given in upstream.items()}
        run = self._directory(name, config, inputs)
        run.work.mkdir(parents=True, exist_ok=True)
        about = {"fingerprint": run.identity.fingerprint, "run_dir": run.path, "journal": Journal(run.journal)}
        runtime = {"downloads": str(self.downloads)}
        return context_in(run.work, config, name=name, inputs=inputs, runtime=runtime, **about)

    def run(self, name: str, config: dict[str, Any], upstream: dict[str, str] | None = None) -> Path:
        """Run the stage of the configuration's kind and write its manifest; return its work directory."""
        context = self.context(name, config, upstream or {})
        result = STAGES[config["kind"]].run(context)
        self._directory(name, config, context.inputs).publish(result.files, result.summary)
        return context.work

    def input(self, name: str) -> Input:
        run_dir = self.root / "results" / "data" / name
        return Input(run_dir, Manifest.read(run_dir / MANIFEST))

    def run_all(self, corpus: dict[str, Any], num_shards: int = 3) -> None:
        """The tokenizer, the shards and both streams, in rows of 16."""
        trained = {"kind": "tokenizer", "source": "trained", "vocab_size": VOCAB_SIZE, "max_bytes": 100_000}
        self.run("x-tokenizer", {**trained, "corpus": corpus, "test_fraction": 0.2, "seed": 1})
        roles = {f"shard-{shard:05d}": f"x-shard-{shard:05d}" for shard in range(num_shards)}
        for shard, name in enumerate(roles.values()):
            self.run(name, shard_config(corpus, shard, num_shards), {"tokenizer": "x-tokenizer"})
        for name in ("train", "test"):
            self.run(f"x-{name}", {"kind": "token_stream", "split": name, "length": 16}, roles)

    def _directory(self, name: str, config: dict[str, Any], inputs: dict[str, Input]) -> RunDirectory:
        upstream = {role: given.manifest.fingerprint for role, given in inputs.items()}
        return RunDirectory(self.root / "results" / "data" / name, Identity("data", name, config, "c0de", upstream))


def shard_config(corpus: dict[str, Any], shard: int, num_shards: int) -> dict[str, Any]:
    return {
        "kind": "token_shard",
        "corpus": corpus,
        "shard": shard,
        "num_shards": num_shards,
        "vocab_size": VOCAB_SIZE,
        "test_fraction": 0.2,
        "seed": 1,
    }


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
