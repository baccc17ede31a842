"""Small experiment files, TINY with two runs on one data set, run directories as their jobs
leave them, and calls of `implicit-llm`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS
from implicit_llm_workflow import console
from implicit_llm_workflow.experiment_files.experiment import Experiment, load_experiment
from implicit_llm_workflow.planning.code_digest import STAGES
from implicit_llm_workflow.planning.plan import Plan

TINY = """\
name: tiny

data:
  s3:
    kind: word_problem
    group: S3
    train: {length: 8, hard_fraction: [0.5, 1], num_samples: 64}
    test: {lengths: [8, 16], hard_fractions: [0.5], num_samples: 32}

override:
  task: {total_steps: 10, batch_size: 8}
  curriculum:
    unrolled: {steps: 4}

runs:
  implicit:
    data: s3
    model: mamba2-implicit
    task: word-problem
    curriculum: unrolled-then-free
    seeds: [0, 1]
    override:
      model: {hidden_size: 16}
      curriculum:
        free: {solver: {tol: 0.1}}
  explicit:
    data: s3
    model: mamba2-explicit
    task: word-problem
    curriculum: explicit

evaluations:
  word-problem:
    kind: word_problem
    modes:
      - {name: blockwise, eval_mode: blockwise, eval_block_len: 4}
"""
# CatbAbI and a language model: a trunk with two branches, and its explicit baseline.
LANGUAGE = """\
name: language

data:
  babi:
    kind: catbabi
    text:
      source: simulated
      families: [2, 1]
      stories: {train: 8, valid: 4, test: 4}
    length: 200
    vocab_size: 192
  text:
    kind: language_model
    corpus: {source: python_library}
    num_shards: 3
    tokenizer: {source: trained}
    vocab_size: 512
    test_fraction: 0.1
    train: {length: 32}
    test: {lengths: [64, 32]}

runs:
  babi:
    data: babi
    model: mamba2-babi-explicit
    task: catbabi
    curriculum: explicit
  trunk:
    data: text
    model: mamba2-130m-implicit
    task: language-model
    curriculum: bounded-then-free-branches
    seeds: [0, 1]
    override:
      model: {hidden_size: 64}
      task: {total_steps: 1000}
      curriculum:
        free-70: {solver: {tol: 0.04}}
  flat:
    data: text
    model: llama3-130m-explicit
    task: language-model
    curriculum: explicit
    override:
      task: {total_steps: 1000}

evaluations:
  questions:
    kind: catbabi
    protocols: [windowed, carried]
    modes:
      - {name: blockwise, eval_mode: blockwise}
  agreement:
    kind: duality
    runs: ["flat*"]
    trace_tokens: 64
    modes:
      - {name: simultaneous, eval_mode: simultaneous}
      - {name: sequential, eval_mode: sequential}
  perplexity:
    kind: perplexity
    max_tokens: 4096
    modes:
      - {name: blockwise, eval_mode: blockwise}
"""
# For TINY.
EXCERPTS = """
excerpts:
  figure_3:
    title: "Figure 3"
    figures: [accuracy-by-length]
    tables: [accuracy]
    from: [{runs: [implicit], evaluations: ["word-*"]}]
  figure_training:
    title: "Training"
    figures: [training-curves]
    from: [{runs: [explicit], evaluations: []}]
"""
# For LANGUAGE, and for one of its runs.
PEER = "\npeers:\n  other: {data: text, checkpoint: {hub: owner/other, revision: null}}\n"
GRID = """\
    grid:
      lr: {key: override.task.schedule.peak_learning_rate, values: [1e-4, 5.0e-4]}
      batch: {key: override.task.batch_size, values: [128, 256]}
"""

# The jobs of TINY.
FREE = {
    f"{stage}/implicit-s{seed}/{name}"
    for seed in (0, 1)
    for stage, name in (("train", "free"), ("evaluate", "free/word-problem"))
}
UNROLLED = {"train/implicit-s0/unrolled", "train/implicit-s1/unrolled"}
EXPLICIT = {"train/explicit-s0/explicit", "evaluate/explicit-s0/explicit/word-problem"}
EVALUATIONS = {
    f"evaluate/{run}/word-problem" for run in ("implicit-s0/free", "implicit-s1/free", "explicit-s0/explicit")
}
TEST_SETS = {"data/s3-test-L8-h0.5", "data/s3-test-L16-h0.5"}
ALL = {"data/s3-train", *TEST_SETS, *UNROLLED, *FREE, *EXPLICIT, "report"}


@dataclass(frozen=True)
class ExperimentFile:
    path: Path

    def edit(self, old: str, new: str) -> ExperimentFile:
        """Replace text that must be there."""
        text = self.path.read_text()
        assert old in text, old
        self.path.write_text(text.replace(old, new, 1))
        return self

    def add(self, text: str) -> ExperimentFile:
        with open(self.path, "a") as file:
            file.write(text)
        return self

    def beside(self, name: str, text: str) -> Path:
        """Write another file of the experiment's folder."""
        path = self.path.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self) -> Experiment:
        return load_experiment(self.path)

    def plan(self, codes: dict[str, str] | None = None) -> Plan:
        """The plan with a made-up code digest for each stage and results beside the file."""
        known = {STAGES[stage]: code for stage, code in (codes or {}).items()}
        return Plan(
            self.load(),
            self.path.parent / "results",
            lambda code: known.get(code.module.rpartition(".")[0], code.module),
        )


def finish(plan: Plan) -> None:
    """Write the manifest of every job as if it had run."""
    for key in plan.nodes:
        finish_with(plan, key, {})


def keys(plan: Plan, state: str) -> set[str]:
    return {key for key, status in plan.statuses.items() if status.state == state}


START_S = 1_700_000_000.0  # seconds since 1970, in November 2023


def real_plan(experiment: ExperimentFile) -> Plan:
    """The plan with the code digests of now, as the commands make it."""
    return Plan(experiment.load(), experiment.path.parent / "results")


def work_of(plan: Plan, key: str) -> Path:
    """The work directory of the wanted result, made if it is not there."""
    fingerprint = plan.identities[key].fingerprint
    work = plan.run_dir(plan.nodes[key]) / "work" / fingerprint[:FINGERPRINT_DIGITS]
    work.mkdir(parents=True, exist_ok=True)
    return work


def at(seconds: float) -> str:
    """A time of the journal, so many seconds after the first."""
    return datetime.fromtimestamp(START_S + seconds, UTC).isoformat(timespec="milliseconds")


def event(name: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "name": name, "time": at(seconds), **fields}


def metrics(step: int, seconds: float, **values: float | None) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "time": at(seconds), "values": values}


def write_journal(plan: Plan, key: str, *records: Mapping[str, Any], torn: str = "") -> Path:
    """Append the records, and the beginning of another one."""
    path = work_of(plan, key) / "journal.jsonl"
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(record)}\n" for record in records) + torn)
    return path


def finish_with(plan: Plan, key: str, summary: Mapping[str, Any]) -> None:
    """A finished job: its commit, and the two copies of it."""
    manifest, work = Manifest.of(plan.identities[key], (), summary), work_of(plan, key)
    for path in (work / "commit.json", work / "manifest.json", plan.run_dir(plan.nodes[key]) / "manifest.json"):
        path.write_bytes(manifest.to_bytes())


def log(plan: Plan, key: str, *lines: str) -> Path:
    path = work_of(plan, key) / "job.log"
    path.write_text("".join(f"2026-01-01T00:00:00Z {line}\n" for line in lines))
    return path


_HOLD = """
import fcntl, os, socket, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(f"process {os.getpid()} on {socket.gethostname()}{sys.argv[2]}\\n")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path, further: str = "") -> Iterator[int]:
    """Another process holds the lock file meanwhile, with `further` words beside its name; gives its pid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", _HOLD, os.fspath(path), further]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.kill()


HEAVY = ("torch", "transformers", "mlflow", "snakemake", "numpy", "implicit_llm")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as stopped:
        console.main(list(arguments))
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints that ends with this exit code."""
    ended, out, err = run(capsys, *arguments)
    assert ended == code, err
    return out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that is refused."""
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def loaded_after(*statements: str) -> list[str]:
    """Which of the heavy packages a fresh interpreter has loaded after the statements."""
    code = "; ".join([*statements, "import sys", f"print(*[name for name in {HEAVY!r} if name in sys.modules])"])
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).splitlines()[-1].split()


def loaded_by(*calls: tuple[str, ...]) -> list[str]:
    """Which of the heavy packages these commands load, one after the other."""
    call = f"for words in {calls!r}:\n    try:\n        main([*words])\n    except SystemExit:\n        pass"
    return loaded_after("from implicit_llm_workflow.console import main", f"exec({call!r})")


def where(experiment: ExperimentFile) -> tuple[str, ...]:
    """The options that name the experiment and its results."""
    return ("--config", str(experiment.path), "--results", str(experiment.path.parent / "results"))
