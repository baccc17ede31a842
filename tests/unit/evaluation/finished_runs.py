"""For tests of the evaluation: finished runs, small real models, models made up, and rows of tokens."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import implicit_llm
from implicit_llm.solver.stats import SolverStats
from implicit_llm_contracts.config.solver import SolverConfig
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
    return StageRequest(run_dir, identity, inputs, {"device": "cpu"})


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
        small_model(kind, vocab_size, sharpness=1).save_pretrained(work / "model")
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


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> list[Any]:
    """Let the `number`-th call of the function raise KeyboardInterrupt; the list gets the arguments of every call."""
    function, calls = getattr(owner, name), []

    def stopped(*given: Any, **options: Any) -> Any:
        calls.append((*given, *options.values()))
        if len(calls) == number:
            raise KeyboardInterrupt
        return function(*given, **options)

    monkeypatch.setattr(owner, name, stopped)
    return calls


def summary(run_dir: Path) -> dict[str, Any]:
    return Manifest.read(run_dir / "manifest.json").summary


def records(run_dir: Path) -> list[dict[str, Any]]:
    manifest = Manifest.read(run_dir / "manifest.json")
    return json.loads((run_dir / manifest.files[0].path).read_text())["records"]


ANSWERS = 6  # the vocabulary of a stand-in


class Rows:
    """Rows of random tokens, with further columns on request; `fetched` holds the sizes of batches read."""

    def __init__(self, num_rows: int = 7, length: int = 12, vocab_size: int = VOCAB, **columns: np.ndarray) -> None:
        rows = np.random.default_rng(0).integers(0, vocab_size, (num_rows, length))
        self.length, self.vocab_size = length, vocab_size
        self.columns: dict[str, np.ndarray] = {"input_ids": rows, "labels": rows} | columns
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.fetched.append(len(indices))
        return {name: column[indices] for name, column in self.columns.items()}


def problems(num_rows: int = 10, length: int = 12) -> Rows:
    """Rows whose label at each position is the input plus one, as a stand-in answers."""
    none = np.zeros((num_rows, length), dtype=np.int64)
    rows = Rows(num_rows, length, ANSWERS, task=none, is_document_start=none == 1)
    rows.columns["labels"] = (rows.columns["input_ids"] + 1) % ANSWERS
    return rows


MAMBA2 = {"hidden_size": 16, "expand": 2, "head_dim": 8, "state_size": 8}
LLAMA3 = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def small_model(kind: str, vocab_size: int = VOCAB, sharpness: float = 30, family: str = "mamba2") -> Any:
    """An untrained model, implicit, explicit or gpt_neox, with sharpened outputs, so that losses differ by token."""
    torch.manual_seed(0)
    config: Any
    if kind == "gpt_neox":
        config = GPTNeoXConfig(vocab_size=vocab_size, max_position_embeddings=64, **LLAMA3)
    elif family == "mamba2":
        config = implicit_llm.load_config(f"mamba2-state-tracking-{kind}", vocab_size=vocab_size, **MAMBA2)
    else:
        config = implicit_llm.load_config(f"llama3-130m-{kind}", vocab_size=vocab_size, **LLAMA3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(sharpness)
    return model


def contracting_model() -> Any:
    """An implicit model with weak feedback, so that the iteration converges in a few steps."""
    model = small_model("implicit")
    with torch.no_grad():
        model.backbone.layers[0].mixer.in_proj.g.mul_(0.2)
    return model


OUT_OF_MEMORY = torch.OutOfMemoryError("tried to allocate")


class StandIn(torch.nn.Module):
    """Answers as told, and reports iterations.

    It is right up to `right_until`, and not finite at `nan_at`; its memory takes batches up to `fits`.
    """

    def __init__(
        self,
        right_until: int = 10**6,
        fits: int = 10**6,
        nan_at: int | None = None,
        is_implicit: bool = True,
        raises_non_finite: bool = False,
        out_of_memory: RuntimeError = OUT_OF_MEMORY,
    ) -> None:
        super().__init__()
        self.right_until, self.fits, self.nan_at = right_until, fits, nan_at
        self.raises_non_finite, self.out_of_memory = raises_non_finite, out_of_memory
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.solver = SolverConfig() if is_implicit else None

    def forward(self, input_ids: Tensor) -> Any:
        batch, length = input_ids.shape
        if batch > self.fits:
            raise self.out_of_memory
        if self.raises_non_finite:
            raise FloatingPointError("the fixed-point iteration became NaN")
        answers = torch.where(torch.arange(length) < self.right_until, input_ids + 1, input_ids) % ANSWERS
        logits = torch.nn.functional.one_hot(answers, ANSWERS).float()
        if self.nan_at is not None:
            logits[0, self.nan_at, 0] = torch.nan
        first = torch.arange(batch) == 0
        stats = SolverStats(
            num_iter=torch.full((batch,), 7.0),
            residual=torch.where(first, 0.2, 0.01),
            is_converged=~first,
            unconverged_tokens=torch.where(first, 3, 0),
            num_closing=1,
        )
        return SimpleNamespace(logits=logits, solver_stats=stats if self.solver else None)
