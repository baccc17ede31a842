"""Small corpora and finished text stages for the tests."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.identity import compute_fingerprint
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import FILE_NAME, FileRecord, Manifest
from implicit_llm_contracts.runs.run_directory import work_directory
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult
from implicit_llm_data.stages import token_shard, token_stream, tokenizer

BOOKS = "public_domain_books.jsonl.gz"
NEOX = "gpt-neox-20b_tokenizer.json"
VOCAB_SIZE = 300
STAGES = {"tokenizer": tokenizer, "token_shard": token_shard, "token_stream": token_stream}


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


class Project:
    """Runs stages below `root / "results"` as the workflow does, without the frame around them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.downloads = root / "downloads"

    def context(self, name: str, config: dict[str, Any], upstream: dict[str, str]) -> StageContext:
        """What the stage works with; `upstream` maps roles to names of finished runs."""
        inputs = {role: self.input(given) for role, given in upstream.items()}
        fingerprints = {role: given.manifest.fingerprint for role, given in inputs.items()}
        fingerprint = compute_fingerprint("data", config, "c0de", fingerprints)
        run_dir = self.root / "results" / "data" / name
        work = work_directory(run_dir, fingerprint)
        work.mkdir(parents=True, exist_ok=True)
        journal = Journal(work / "journal.jsonl")
        log = logging.getLogger("implicit_llm.data")
        runtime = {"downloads": str(self.downloads)}
        return StageContext(
            "data", name, fingerprint, config, inputs, run_dir, work, journal, log, runtime, is_main=True
        )

    def run(self, name: str, config: dict[str, Any], upstream: dict[str, str] | None = None) -> Path:
        """Run the stage of the configuration's kind and write its manifest; return its work directory."""
        context = self.context(name, config, upstream or {})
        result = STAGES[config["kind"]].run(context)
        self.publish(context, result)
        return context.work

    def publish(self, context: StageContext, result: StageResult) -> None:
        fingerprints = {role: given.manifest.fingerprint for role, given in context.inputs.items()}
        identity = {"config": context.config, "code": "c0de", "upstream": fingerprints}
        files = tuple(FileRecord.of(context.work / file, context.run_dir) for file in result.files)
        manifest = Manifest("data", context.name, context.fingerprint, identity, files, result.summary)
        manifest.write(context.run_dir / FILE_NAME)

    def input(self, name: str) -> Input:
        run_dir = self.root / "results" / "data" / name
        return Input(run_dir, Manifest.read(run_dir / FILE_NAME))

    def run_all(self, corpus: dict[str, Any], num_shards: int = 3, test_fraction: float = 0.2) -> None:
        """The tokenizer, the shards and both streams, in rows of 16."""
        split = {"test_fraction": test_fraction, "seed": 1}
        trained = {"kind": "tokenizer", "source": "trained", "vocab_size": VOCAB_SIZE, "max_bytes": 100_000}
        self.run("x-tokenizer", {**trained, "corpus": corpus, **split})
        roles = {}
        for shard in range(num_shards):
            roles[f"shard-{shard:05d}"] = f"x-shard-{shard:05d}"
            self.run(
                f"x-shard-{shard:05d}", shard_config(corpus, shard, num_shards) | split, {"tokenizer": "x-tokenizer"}
            )
        for name in ("train", "test"):
            self.run(f"x-{name}", {"kind": "token_stream", "split": name, "length": 16}, roles)

    def work(self, name: str) -> Path:
        return self.input(name).work


def shard_config(corpus: dict[str, Any], shard: int, num_shards: int) -> dict[str, Any]:
    place = {"shard": shard, "num_shards": num_shards}
    return {"kind": "token_shard", "corpus": corpus, **place, "vocab_size": VOCAB_SIZE, "test_fraction": 0.2, "seed": 1}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
