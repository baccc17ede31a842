"""The facts that estimates rest on: cards, measured steps, corpora; from workflow/config/estimate/hardware.yaml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.validation import validate
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.project_dirs import CONFIG_DIR, PROJECT_DIR

HARDWARE_FILE = CONFIG_DIR / "estimate" / "hardware.yaml"


@dataclass(frozen=True)
class Card:
    """A GPU. `peak_tflops` by precision; `is_measured` is False where efficiency and overhead are assumptions."""

    name: str
    memory_gib: float
    bandwidth_tb_s: float
    peak_tflops: Mapping[str, float]
    matmul_efficiency: float
    overhead_factor: float
    is_measured: bool


@dataclass(frozen=True)
class MeasuredStep:
    """A training step that was timed. `solver_iterations` are those without gradient, None for "as configured"."""

    config: str
    card: str
    precision: str
    length: int
    micro_batch: int
    step_ms: float
    solver: Mapping[str, Any] | None
    solver_iterations: float | None
    is_recomputed: bool
    source: str


@dataclass(frozen=True)
class Corpus:
    """A published text collection; gb are 10^9 bytes."""

    tokens: float
    text_gb: float
    download_gb: float
    files: int


@dataclass(frozen=True)
class Hardware:
    """`assignments`: task -> card and GPUs by parameters, as in the file."""

    cards: Mapping[str, Card]
    usable_memory: float
    scaling_efficiency: float
    assignments: Mapping[str, Any]
    steps: tuple[MeasuredStep, ...]
    corpora: Mapping[str, Corpus]
    tokens_per_s_per_core: float

    def assigned(self, task: str, parameters: int) -> tuple[str, int]:
        """Card and number of GPUs for the training jobs of a task; of an unknown task as for language models."""
        assignment = self.assignments.get(task, self.assignments["language_model"])
        gpus = [line["gpus"] for line in assignment["gpus"] if parameters <= line["up_to_parameters"]]
        return assignment["card"], gpus[0] if gpus else assignment["gpus"][-1]["gpus"]

    def card(self, name: str) -> Card:
        """Raises: ConfigError that names the nearest card."""
        if name not in self.cards:
            raise ConfigError(f"{HARDWARE_FILE}: cards: there is no {name!r}; {nearest(name, self.cards)}")
        return self.cards[name]


def read_hardware(path: Path = HARDWARE_FILE, project: Path = PROJECT_DIR) -> Hardware:
    """The facts, with the rows of the benchmark files that they name. Raises: ConfigError."""
    values = read_yaml(path)
    validate(values, "hardware", str(path))
    steps = [
        MeasuredStep(**{**item, "solver_iterations": None, "is_recomputed": False}) for item in values.pop("steps")
    ]
    for calibration in values.pop("calibrations"):
        steps += _benchmark_steps(calibration, project)
    cards = {name: Card(**item) for name, item in values.pop("cards").items()}
    corpora = {name: Corpus(**item) for name, item in values.pop("corpora").items()}
    hardware = Hardware(cards=cards, corpora=corpora, steps=tuple(steps), **values)
    for step in hardware.steps:
        hardware.card(step.card)
    for assignment in hardware.assignments.values():
        hardware.card(assignment["card"])
    return hardware


def _benchmark_steps(calibration: Mapping[str, Any], project: Path) -> list[MeasuredStep]:
    """The rows of a benchmark file; their solver is that of the library's configuration (None here)."""
    path = project / calibration["file"]
    try:
        rows = json.loads(path.read_bytes())["rows"]
        return [
            MeasuredStep(
                config=row["config"],
                card=calibration["card"],
                precision=calibration["precision"],
                length=calibration["length"],
                micro_batch=row["micro_batch"],
                step_ms=row["step_ms"],
                solver=None,
                solver_iterations=row.get("solver_iterations"),
                is_recomputed=row["config"] in calibration.get("recomputed", []),
                source=calibration["file"],
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is no table of measured steps ({type(error).__name__}: {error}); restore the file, or remove it "
            f"from calibrations in {HARDWARE_FILE}"
        ) from error
