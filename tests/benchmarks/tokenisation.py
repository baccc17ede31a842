"""Tokens per second from compressed JSON lines to a shard, against `datasets.map(batched=True)` on the same two cores.

    IMPLICIT_LLM_DATA=DIR python -m tests.benchmarks.tokenisation [--out results/benchmarks/tokenisation-cpu.json]

Both read the same file, encode it with the same tokenizer (GPT-NeoX), load it anew each time and write the ids to disk.
The peer has the better of one and two processes and of two batch sizes. Medians of runs taken in turn, so that a busy
machine slows all.
"""

import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
CORES = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, CORES)  # before the libraries count the cores

import datasets  # noqa: E402
import pandas as pd  # noqa: E402
import tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from implicit_llm_contracts.config.text import LibraryCorpus  # noqa: E402
from implicit_llm_data.stages import token_shard  # noqa: E402
from implicit_llm_data.text.corpus import open_share  # noqa: E402
from tests.measuring import keep, options_of, show, spread  # noqa: E402
from tests.unit.data.text_samples import BOOKS, NEOX, Project, shard_config  # noqa: E402

VOCAB_SIZE = 50_288
REPEATS = 3
PEERS = list(product((None, 2), (1000, 100)))  # processes and batch size


def main() -> None:
    options = options_of(__doc__)
    data = Path(os.environ["IMPLICIT_LLM_DATA"])
    datasets.disable_progress_bars()
    datasets.disable_caching()
    versions = {"tokenizers": tokenizers.__version__, "datasets": datasets.__version__}
    machine = {"cpu": processor(), "cores": len(CORES), "load_average": os.getloadavg()[1], **versions}
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(case, path, Path(folder), data) for case, path in cases(Path(folder), data)]
    show(rows, f"{machine}; million tokens/s")
    keep(options.out, rows, machine=machine, commit=commit())


def cases(folder: Path, data: Path) -> Iterator[tuple[str, Path]]:
    """Yield prose, and the Python library, which is mostly code."""
    yield "books", data / BOOKS
    path = folder / "library.jsonl.gz"
    with path.open("wb") as file:
        subprocess.run(["gzip", "-c"], input=library_lines(), stdout=file, check=True)
    yield "Python library", path


def library_lines() -> bytes:
    documents = open_share(LibraryCorpus("python_library"), Path()).documents()
    return b"".join(json.dumps({"text": document.text}).encode() + b"\n" for document in documents)


def measure(case: str, path: Path, folder: Path, data: Path) -> dict[str, Any]:
    project = Project(folder)
    neox = {"kind": "tokenizer", "source": "file", "file": str(data / NEOX), "vocab_size": VOCAB_SIZE}
    project.run("tokenizer", neox)
    runs = [partial(make_shard, project, path), *(partial(run_peer, path, data, *setting) for setting in PEERS)]
    times = pd.DataFrame([timed(number, run) for _ in range(REPEATS) for number, run in enumerate(runs)])
    if times["tokens"].nunique() > 1:
        sys.exit(f"{case}: the numbers of tokens differ")
    tokens, ours_s = times["tokens"][0], times["wall_s"][times["run"] == 0]
    peers_s = times[times["run"] > 0].groupby("run")["wall_s"].median()
    best = peers_s.idxmin()
    rates = spread(list(tokens / ours_s / 1e6), "ours") | {"peer": tokens / peers_s[best] / 1e6}
    return {
        "corpus": case,
        "tokens": int(tokens),
        **{name: round(float(rate), 3) for name, rate in rates.items()},
        "ratio": round(peers_s[best] / ours_s.median(), 2),
        "peer_num_proc": PEERS[best - 1][0],
        "peer_batch_size": PEERS[best - 1][1],
    }


def make_shard(project: Project, path: Path) -> int:
    """Return the number of tokens without the ends of texts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # which `datasets.map` with several processes switches off for good
    config = shard_config({"source": "files", "files": [str(path)]}, 0, 1)
    config |= {"vocab_size": VOCAB_SIZE, "test_fraction": 0.001}
    summary = token_shard.run(project.context("shard", config, {"tokenizer": "tokenizer"})).summary
    return sum(summary[f"{split}_tokens"] - summary[f"{split}_documents"] for split in ("train", "test"))


def run_peer(path: Path, data: Path, processes: int | None, batch_size: int) -> int:
    """Return the number of tokens."""
    fast = PreTrainedTokenizerFast(tokenizer_file=str(data / NEOX))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], return_attention_mask=False)["input_ids"]}

    with tempfile.TemporaryDirectory() as cache:
        loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
        mapped = loaded.map(
            encode, batched=True, batch_size=batch_size, num_proc=processes, remove_columns=loaded.column_names
        )
        tokens = sum(len(chunk.flatten()) for chunk in mapped.data.column("input_ids").chunks)
        del loaded, mapped
    return tokens


def timed(number: int, run: Callable[[], int]) -> dict[str, float]:
    gc.collect()
    start_s = time.perf_counter()
    return {"run": number, "tokens": run(), "wall_s": time.perf_counter() - start_s}


def processor() -> str:
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return next(iter(names), platform.machine())


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
