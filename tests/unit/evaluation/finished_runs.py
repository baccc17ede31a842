"""Finished runs for tests of the evaluation stages: untrained models, small data, and the frame that runs a stage."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import FileRecord, Manifest, sha256_of
from implicit_llm_contracts.runs.stage_context import StageResult
from implicit_llm_data.shard_writer import write_index
from implicit_llm_data.shards import DatasetSpec, Index
from implicit_llm_data.stages import word_problem
from implicit_llm_jobs.stage import StageRequest, run_stage

VOCAB, END_OF_TEXT = 12, 0  # of a stream


def request(run_dir: Path, stage_name: str, name: str, config: dict[str, Any], inputs: dict[str, Path]) -> StageRequest:
    upstream = {role: Manifest.read(path / "manifest.json").fingerprint for role, path in inputs.items()}
    identity = Identity(stage_name, name, config, "c0de", upstream)
    return StageRequest(run_dir, identity.to_json(), inputs, {"device": "cpu"})


def finish(
    run_dir: Path,
    stage_name: str,
    name: str,
    config: dict[str, Any],
    write: Callable[[Path], Sequence[Path | str]],
    summary: dict[str, Any] | None = None,
) -> Path:
    """A run directory whose stage did nothing but `write(work)`, which returns its files."""
    asked = request(run_dir, stage_name, name, config, {})
    run_stage(asked, lambda context: StageResult(write(context.work), summary or {}))
    return run_dir


def train_nothing(folder: Path, kind: str, name: str, vocab_size: int, summary: dict[str, Any]) -> Path:
    """The run directory of a training phase `<name>-<kind>-s7/free` that left an untrained model and a checkpoint."""

    def write(work: Path) -> list[str]:
        torch.manual_seed(0)
        sizes = {"vocab_size": vocab_size, "hidden_size": 16, "expand": 2, "head_dim": 8, "state_size": 8}
        config = implicit_llm.load_config(f"mamba2-state-tracking-{kind}", **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(work / "model")
        (work / "checkpoint").mkdir()
        (work / "checkpoint" / "state.json").write_text("{}")
        return ["model", "checkpoint"]

    return finish(folder / "train" / kind, "train", f"{name}-{kind}-s7/free", {"seed": 7}, write, summary)


def word_problems(run_dir: Path, **changes: Any) -> Path:
    """The run directory of sequences of S3."""
    config = {
        "kind": "word_problem", "group": "S3", "monoid": "none", "hard_fraction": 0.5,
        "length": 12, "num_samples": 9, "split": "test", "seed": 0, "shard_samples": 4, **changes,
    }  # fmt: skip
    run_stage(request(run_dir, "data", run_dir.name, config, {}), word_problem.run)
    return run_dir


def write_stream(folder: Path, tokens: Sequence[int] | np.ndarray, vocab_size: int = VOCAB) -> list[Path]:
    """Write the stream to the existing `folder`; the files it consists of."""
    path = folder / "tokens.bin"
    path.write_bytes(np.asarray(tokens).astype("<u2").tobytes())
    part = FileRecord("tokens.bin", path.stat().st_size, sha256_of(path))
    source = {"kind": "token_stream", "split": "test", "end_of_text": END_OF_TEXT}
    return [path, write_index(folder, Index(DatasetSpec(vocab_size, 16, ("input_ids",), source), parts=(part,)))]


def random_documents(lengths: Sequence[int]) -> list[int]:
    """Documents of so many random tokens, each with end-of-text behind it, one after another."""
    random = np.random.default_rng(0)
    documents = [[*random.integers(1, VOCAB, length).tolist(), END_OF_TEXT] for length in lengths]
    return [token for document in documents for token in document]


def evaluate(stage: ModuleType, folder: Path, name: str, config: dict[str, Any], inputs: dict[str, Path]) -> Path:
    """The run directory of the evaluation."""
    run_stage(request(folder / "evaluate", "evaluate", name, config, inputs), stage.run)
    return folder / "evaluate"


def records(run_dir: Path) -> list[dict[str, Any]]:
    manifest = Manifest.read(run_dir / "manifest.json")
    return json.loads((run_dir / manifest.files[0].path).read_text())["records"]
