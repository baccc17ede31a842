"""Tokens per second from compressed JSON lines to a shard, against `datasets.map(batched=True)` on the same two cores.

    IMPLICIT_LLM_DATA=DIR python tests/benchmarks/tokenisation.py [--save results/benchmarks/tokenisation-cpu.json]

Both read the same file, encode it with the same tokenizer (GPT-NeoX), load it anew each time and write the ids to disk.
The peer has the better of one and two processes and of two batch sizes; its rate is also given without reading the
file. Medians of runs taken in turn, so that a busy machine slows all. The goal is a ratio of 1.5.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
CORES = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, CORES)  # before the libraries count the cores

import datasets  # noqa: E402
import tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from implicit_llm_contracts.config.text import LibraryCorpus  # noqa: E402
from implicit_llm_contracts.runs.journal import Journal  # noqa: E402
from implicit_llm_contracts.runs.manifest import Manifest  # noqa: E402
from implicit_llm_contracts.runs.stage_context import Input, StageContext  # noqa: E402
from implicit_llm_data.stages import token_shard, tokenizer  # noqa: E402
from implicit_llm_data.text.corpus import open_share  # noqa: E402

BOOKS, TOKENIZER = "public_domain_books.jsonl.gz", "gpt-neox-20b_tokenizer.json"
VOCAB_SIZE = 50_288
REPEATS = 3
RATIOS = ("ratio", "to map", "CPU")
GOAL = 1.5
HEADS = (("tokens", 10), ("ours", 8), ("min", 7), ("max", 7), ("peer", 8), ("map", 8), *((h, 8) for h in RATIOS))


@dataclass(frozen=True)
class Timing:
    """wall and cpu: seconds, of child processes too; inner: seconds without reading the file."""

    wall_s: float
    cpu_s: float
    inner_s: float
    tokens: int


class Project:
    """Our shard writer, on a folder with a corpus file in it."""

    def __init__(self, root: Path, data: Path) -> None:
        self.root = root
        self.data = data
        config = {"kind": "tokenizer", "source": "file", "file": TOKENIZER, "vocab_size": VOCAB_SIZE}
        context = self._context("tokenizer", config, {})
        summary = tokenizer.run(context).summary
        self._tokenizer = Input(context.run_dir, Manifest("data", "tokenizer", "0" * 64, {}, (), summary))

    def make_shard(self, files: list[Path]) -> int:
        """Run the stage; return the number of tokens without the ends of texts."""
        corpus = {"source": "files", "files": [str(path) for path in files]}
        place = {"shard": 0, "num_shards": 1, "test_fraction": 0.001, "seed": 0, "vocab_size": VOCAB_SIZE}
        config = {"kind": "token_shard", "corpus": corpus, **place}
        summary = token_shard.run(self._context("shard", config, {"tokenizer": self._tokenizer})).summary
        documents = summary["train_documents"] + summary["test_documents"]
        return summary["train_tokens"] + summary["test_tokens"] - documents

    def _context(self, name: str, config: dict[str, Any], inputs: dict[str, Input]) -> StageContext:
        run_dir = self.root / name
        work = run_dir / "work" / ("0" * 16)
        work.mkdir(parents=True, exist_ok=True)
        log, runtime = logging.getLogger("benchmark"), {"downloads": str(self.data)}
        return StageContext("data", name, "0" * 64, config, inputs, run_dir, work, Journal(None), log, runtime, True)


def main() -> None:
    arguments = parse()
    data = os.environ.get("IMPLICIT_LLM_DATA")
    if not data:
        sys.exit("IMPLICIT_LLM_DATA is unset: set it to the folder of the real data")
    datasets.disable_progress_bars()
    datasets.disable_caching()
    about = {
        "tokenizers": tokenizers.__version__,
        "datasets": datasets.__version__,
        "python": platform.python_version(),
    }
    print(f"{processor()}, {len(CORES)} cores; {about}; million tokens/s")
    heads = "".join(f"{head:>{width}}" for head, width in HEADS)
    print(f"{'corpus':22}{heads}   peer")
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(case, path, Path(folder), Path(data)) for case, path in cases(Path(folder), Path(data))]
    if arguments.save:
        what = " ".join(str(__doc__).split("\n\n")[0].split()) + " Medians; rates in million tokens/s."
        machine = {"cpu": processor(), "cores": len(CORES), "load_average": os.getloadavg()[1], **about}
        result = {"what": what, "machine": machine, "commit": commit(), "rows": rows}
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the tokenisation with that of datasets.")
    parser.add_argument("--save", type=Path, help="write the numbers to this JSON file")
    return parser.parse_args()


def cases(folder: Path, data: Path) -> Iterator[tuple[str, Path]]:
    """Prose; and the Python library, of which much is code."""
    yield "books", data / BOOKS
    path = folder / "library.jsonl.gz"
    with path.open("wb") as file:
        subprocess.run(["gzip", "-c"], input=library_lines(), stdout=file, check=True)
    yield "Python library", path


def library_lines() -> bytes:
    documents = open_share(LibraryCorpus("python_library"), Path()).documents()
    return b"".join(json.dumps({"text": document.text}).encode() + b"\n" for document in documents)


def measure(case: str, path: Path, folder: Path, data: Path) -> dict[str, Any]:
    project = Project(folder, data)
    peers = {
        (processes, batch_size): partial(run_peer, path, data, processes, batch_size)
        for processes, batch_size in product((None, 2), (1000, 100))
    }
    ours: list[Timing] = []
    theirs: dict[Any, list[Timing]] = {setting: [] for setting in peers}
    for _ in range(REPEATS):
        ours.append(timed(lambda: (project.make_shard([path]), 0.0)))
        for setting, peer in peers.items():
            theirs[setting].append(timed(peer))
    best = min(theirs, key=lambda setting: median_of(theirs[setting], "wall_s"))
    best_map = min(theirs, key=lambda setting: median_of(theirs[setting], "inner_s"))
    tokens = ours[0].tokens
    if any(timing.tokens != tokens for timing in [*ours, *(timing for runs in theirs.values() for timing in runs)]):
        sys.exit(f"{case}: the numbers of tokens differ")
    our_s, peer_s = median_of(ours, "wall_s"), median_of(theirs[best], "wall_s")
    map_s = median_of(theirs[best_map], "inner_s")
    walls = [timing.wall_s for timing in ours]
    our_cpu_s, peer_cpu_s = median_of(ours, "cpu_s"), median_of(theirs[best], "cpu_s")
    rates = [tokens / seconds / 1e6 for seconds in (our_s, max(walls), min(walls), peer_s, map_s)]
    print(
        f"{case:22}{tokens:10}{rates[0]:8.2f}{rates[1]:7.2f}{rates[2]:7.2f}{rates[3]:8.2f}{rates[4]:8.2f}"
        f"{peer_s / our_s:7.1f}x{map_s / our_s:7.1f}x{peer_cpu_s / our_cpu_s:7.1f}x"
        f"   processes {best[0]}, batch {best[1]}"
    )
    return {
        "corpus": case,
        "tokens": tokens,
        "ours": round(tokens / our_s / 1e6, 3),
        "peer": round(tokens / peer_s / 1e6, 3),
        "peer_map_only": round(tokens / map_s / 1e6, 3),
        "ratio": round(peer_s / our_s, 2),
        "ratio_to_map_only": round(map_s / our_s, 2),
        "cpu_s": {"ours": round(our_cpu_s, 2), "peer": round(peer_cpu_s, 2)},
        "peer_num_proc": best[0],
        "peer_batch_size": best[1],
    }


def run_peer(path: Path, data: Path, processes: int | None, batch_size: int) -> tuple[int, float]:
    """Tokens, and the seconds of `map` alone."""
    fast = PreTrainedTokenizerFast(tokenizer_file=str(data / TOKENIZER))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], return_attention_mask=False)["input_ids"]}

    with tempfile.TemporaryDirectory() as cache:
        loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
        start_s = time.perf_counter()
        mapped = loaded.map(
            encode, batched=True, batch_size=batch_size, num_proc=processes, remove_columns=loaded.column_names
        )
        inner_s = time.perf_counter() - start_s
        tokens = sum(len(chunk.flatten()) for chunk in mapped.data.column("input_ids").chunks)
        del loaded, mapped
    return tokens, inner_s


def timed(action: Callable[[], tuple[int, float]]) -> Timing:
    gc.collect()
    start_s, start_cpu_s = time.perf_counter(), cpu_s()
    tokens, inner_s = action()
    return Timing(time.perf_counter() - start_s, cpu_s() - start_cpu_s, inner_s, tokens)


def cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def median_of(timings: list[Timing], field: str) -> float:
    return statistics.median(getattr(timing, field) for timing in timings)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
