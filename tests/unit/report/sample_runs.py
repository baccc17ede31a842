"""Finished runs made up for tests of the report: manifests, metrics and journals, with plausible numbers."""

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from implicit_llm.evaluation.kinds.word_problem import chance_per_position
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.runs.identity import compute_fingerprint
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import FileRecord, Manifest
from implicit_llm_contracts.runs.run_directory import work_directory
from implicit_llm_contracts.runs.stage_context import StageContext
from implicit_llm_report import stage
from implicit_llm_report.config import ReportConfig
from implicit_llm_report.inputs.frame import frame_of
from implicit_llm_report.inputs.published import Published
from implicit_llm_report.inputs.sources import Given, load_inputs
from implicit_llm_report.inputs.training_runs import TrainingRun
from implicit_llm_report.kept import context_of

Record = dict[str, Any]
Change = Callable[[Record], Record]
Phase = tuple[str, int, int, Mapping[str, Any] | None]  # name, first and last step, solver

UNROLLED = {"mode": "unrolled", "num_unroll": 4, "tau": 0.8}
FREE = {"mode": "fixed_point", "max_iter": 16, "tol": 0.05, "phantom_steps": 4, "tau": 0.8}
# Mode -> f-evaluations a token at the training length, growth of them with length, position where it begins to fail.
MODES = {
    "blockwise": (9.2, 0.0, math.inf),
    "sequential": (7.1, 0.0, math.inf),
    "simultaneous": (17.0, 0.7, 40.0),
    "released-criterion": (14.0, 0.6, 22.0),
}


def solved_by(mode: str) -> Record:
    """What a record says of a mode of this name."""
    if mode == "parallel":
        return {"mode": mode, "eval_mode": None, "eval_stop": None}
    is_released = mode == "released-criterion"
    return {
        "mode": mode,
        "eval_mode": "simultaneous" if is_released else mode,
        "eval_stop": "batch" if is_released else "token",
        "eval_block_len": 8,
        "eval_tol": 0.05,
        "eval_max_iter": 64,
    }


@dataclass(frozen=True)
class SampleRun:
    """A run of the sample: its task and how well it learned."""

    name: str
    group: str
    is_implicit: bool
    train_hard_fraction: float
    test_hard_fractions: Sequence[float]
    steps: int = 2400
    quality: float = 0.995
    seeds: Sequence[int] = (0,)
    monoid: str = "none"
    train_length: int = 16
    lengths: Sequence[int] = (16, 32, 64)


def make_runs(
    results: Path,
    runs: Sequence[Any],
    change: Change = lambda record: record,
    make_one: Callable[..., Any] | None = None,
) -> dict[str, Path]:
    """Write training phases and evaluations of `runs`; returns run directories by role. `change` edits a record."""
    made = [(make_one or _make_one)(results, run, seed, change) for run in runs for seed in run.seeds]
    return {role: folder for roles in made for role, folder in roles.items()}


def make_context(folder: Path, roles: Mapping[str, Path], config: Mapping[str, Any] | None = None) -> StageContext:
    """The context in which the report's body runs."""
    config = dict(config or {"experiment": "demo"})
    known = jobs_of(roles, [item["role"] for item in config.get("missing", ())])
    return context_of(roles, folder, known | config, "0" * 64)


def make_report(folder: Path, roles: Mapping[str, Path], **config: Any) -> Path:
    """The files of a report; of a few figures and tables it takes a fraction of the time."""
    context = make_context(folder / "report", roles, {"experiment": "miniature"} | config)
    written = {Path(file) for file in stage.run(context).files}
    assert written == {path for path in (context.work / "declared").rglob("*") if path.is_file()}
    return context.work / "declared"


def rows_of(made: Path, table: str) -> list[dict[str, str]]:
    """The rows of a table's CSV file."""
    return list(csv.DictReader((made / "tables" / f"{table}.csv").read_text().splitlines()))


def claims_of(made: Path) -> dict[str, Record]:
    """The claims of a report by their names."""
    return {claim["id"]: claim for claim in json.loads((made / "claims.json").read_text())["claims"]}


def names_in(made: Path, folder: str) -> set[str]:
    """The figures or tables of a report."""
    return {path.stem for path in (made / folder).glob("*")}


def page_of(made: Path) -> str:
    """The page with all numbers; that of an excerpt is its only one."""
    numbers = made / "numbers.html"
    return (numbers if numbers.exists() else made / "index.html").read_text()


def figure_of(made: Path, name: str) -> str:
    """A figure on the page."""
    return page_of(made).split(f'id="figure-{name}"')[1].split("</figure>")[0]


def legend_of(figure: str) -> Sequence[str]:
    return re.findall(r"</svg>\s*(.*?)</li>", figure.split('<div class="panels')[0], re.DOTALL)


def inputs_of(context: StageContext) -> Given:
    """What the report reads."""
    return load_inputs(context.inputs, fill(ReportConfig, context.config, "report"))


def given_of(records: Mapping[str, Sequence[Record]], training: Sequence[TrainingRun] = (), **config: Any) -> Given:
    """What sections and claims are made from, of records as the report reads them."""
    config = {"experiment": "demo"} | config
    known = {
        kind: [{"role": f"evaluate:{record['run']}"} | record for record in mine] for kind, mine in records.items()
    }
    frame = frame_of(known, {}, training)
    return Given(ReportConfig(**config), Published({}), frame, tuple(training), {})


def jobs_of(roles: Mapping[str, Path], missing: Sequence[str] = ()) -> Record:
    """What the workflow says of the inputs and of the missing results: their names are those that the samples give."""
    solvers = {
        role.removeprefix("train:"): Manifest.read(folder / "manifest.json").config["phase"].get("solver")
        for role, folder in roles.items()
        if role.startswith("train:")
    }
    jobs = {}
    for role in [*roles, *missing]:
        stage, _, name = role.partition(":")
        model, _, rest = name.partition("/")
        phase, _, evaluation = rest.rpartition("/") if stage == "evaluate" else (rest, "", None)
        run, seed = re.fullmatch(r"(.+?)(?:-s(\d+))?", model).groups()  # type: ignore[union-attr]
        jobs[role] = {
            "run": run, "seed": None if seed is None else int(seed), "phase": phase or "checkpoint",
            "evaluation": evaluation, "solver": solvers.get(f"{model}/{phase}"),
        }  # fmt: skip
    parts = [("babi", "valid"), ("babi", "test"), ("text", "test")]
    return {"jobs": jobs, "data": {f"{data}-{split}": {"data": data, "split": split} for data, split in parts}}


def _make_one(results: Path, run: SampleRun, seed: int, change: Change) -> dict[str, Path]:
    name, config = f"{run.name}-s{seed}", {"task": "word_problem", "seed": seed, "run": run.name}
    phases = two_phases(run.steps // 2, run.steps) if run.is_implicit else [("explicit", 0, run.steps, None)]
    roles, model = trained(results, name, config, phases, partial(_training_values, run))
    records = [
        change(_record(run, seed, length, fraction, mode))
        for length in run.lengths
        for fraction in run.test_hard_fractions
        for mode in (MODES if run.is_implicit else ("parallel",))
    ]
    evaluation = f"{name}/{phases[-1][0]}/word-problem"
    return roles | evaluated(results, evaluation, "word_problem", records, {"model": model})


def two_phases(middle: int, end: int) -> list[Phase]:
    return [("unrolled", 0, middle, UNROLLED), ("free", middle, end, FREE)]


def trained(
    results: Path,
    name: str,
    config: Record,
    phases: Sequence[Phase],
    values: Callable[[int, Any], Mapping[str, float]],
    summary: Record | None = None,
    start: str = "",
) -> tuple[dict[str, Path], str]:
    """Write training phases, each from the one before it, the first from `start`; folders by role, and the last one's
    fingerprint. `values`: the journal at a step of a solver.
    """
    roles: dict[str, Path] = {}
    for index, (phase, first, end, solver) in enumerate(phases):
        settings = {"name": phase, "index": index, "start_step": first, "end_step": end, "solver": solver}
        about = {"model": {"model_type": "implicit_mamba2"}, "total_steps": end} | config | {"phase": settings}
        points = [(step, values(step, solver)) for step in range(first + 10, end + 1, 10)]
        roles[f"train:{name}/{phase}"] = folder = results / "train" / name / phase
        upstream = {"data": "d" * 64} | ({"start": start} if start else {})
        start = finish(folder, "train", f"{name}/{phase}", about, upstream, {}, points, summary)
    return roles, start


def evaluated(
    results: Path, name: str, kind: str, records: Sequence[Record], upstream: Mapping[str, str] | None = None
) -> dict[str, Path]:
    """Write a finished evaluation; its folder by its role."""
    folder = results / "evaluate" / name
    finish(folder, "evaluate", name, {"kind": kind}, dict(upstream or {}), {"metrics.json": {"records": records}})
    return {f"evaluate:{name}": folder}


def _record(run: SampleRun, seed: int, length: int, hard_fraction: float, mode: str) -> Record:
    chance = chance_per_position(run.group, run.monoid, hard_fraction, length).tolist()
    quality = run.quality - 0.004 * seed - (0.03 if hard_fraction > run.train_hard_fraction else 0.0)
    curve = _curve(run, chance, hard_fraction, mode, quality)
    cost, growth, _ = MODES.get(mode, (1.0, 0.0, 0.0))
    last = curve[-10:]
    return {
        "run": run.name, "seed": seed, "phase": "free", "is_implicit": run.is_implicit,
        "model_type": "implicit_mamba2", "num_layers": 1, "num_parameters": 41_856,
        "data": f"{run.name.split('-')[0]}-test-L{length}-h{hard_fraction:g}", "group": run.group, "monoid": run.monoid,
        "length": length, "hard_fraction": hard_fraction, "train_length": run.train_length,
        "train_hard_fraction": run.train_hard_fraction, **solved_by(mode), "num_samples": 512,
        "chance_last10": sum(chance[-10:]) / len(chance[-10:]), "chance_per_position": chance,
        "accuracy_last10": sum(last) / len(last), "accuracy_sequence": min(curve) ** 2,
        "accuracy_token": sum(curve) / len(curve),
        "accuracy_per_position": curve, "f_evaluations_per_token": cost * (length / run.train_length) ** growth,
        "residual": 0.049 if run.is_implicit else None, "unconverged_share": 0.0 if run.is_implicit else None,
        "iterations_per_token": cost - 1.0 if run.is_implicit else None,
        "token_match_sequential": 0.98 if run.is_implicit and mode != "sequential" else None, "nonfinite_share": 0.0,
    }  # fmt: skip


def _curve(run: SampleRun, chance: Sequence[float], hard_fraction: float, mode: str, quality: float) -> list[float]:
    if not run.is_implicit:
        return [max(base, math.exp(-0.55 * hard_fraction * position)) for position, base in enumerate(chance)]
    lost = [1 / (1 + math.exp((MODES[mode][2] - position) / 4)) for position in range(len(chance))]
    known = [quality ** (position / 16) for position in range(len(chance))]
    return [best * (1 - gone) + base * gone for best, gone, base in zip(known, lost, chance, strict=True)]


def _training_values(run: SampleRun, step: int, solver: Mapping[str, Any] | None) -> dict[str, float]:
    wiggle = 0.02 * math.sin(step * 0.7)
    solved = 1 / (1 + math.exp(-(step / run.steps - 0.62) * 30)) if run.is_implicit else 0.12
    values = {
        "loss": 2.4 * (1 - solved) + 0.02 + wiggle * (1 - solved),
        "accuracy_last10": min(1.0, 0.1 + 0.89 * solved + wiggle * (1 - solved)),
        "learning_rate": 3e-3 * (1 - step / run.steps),
    }
    if solver is not None and solver["mode"] == "fixed_point":
        left = 1 - step / run.steps
        values |= {
            "num_iter": 9 + 7 * left + wiggle * 10,
            "residual": 0.05 + 0.2 * left,
            "unconverged_share": 0.1 * left,
        }
        values |= {"spectral_radius": 0.75 + 0.2 * left} if step % 100 == 0 else {}
    return values


def finish(
    run_dir: Path,
    stage: str,
    name: str,
    config: dict[str, Any],
    upstream: dict[str, str],
    files: Mapping[str, Any],
    points: Sequence[tuple[int, Mapping[str, float]]] = (),
    summary: Mapping[str, Any] | None = None,
) -> str:
    """Write a finished run directory; returns its fingerprint."""
    fingerprint = compute_fingerprint(stage, config | {"name": name}, "c0de", upstream)
    work = work_directory(run_dir, fingerprint)
    work.mkdir(parents=True, exist_ok=True)
    journal = Journal(work / "journal.jsonl")
    for step, values in points:
        journal.metrics(step, values)
    journal.close()
    for file, content in files.items():
        (work / file).write_text(json.dumps(content))
    records = tuple(FileRecord.of(work / file, run_dir) for file in files)
    manifest = Manifest(stage, name, fingerprint, dict(config), "c0de", upstream, records, dict(summary or {}))
    manifest.write(run_dir / "manifest.json")
    provenance = {
        "fingerprint": fingerprint,
        "attempts": [{"started": "2025-01-01T00:00:00+00:00", "host": "host", "busy_s": 30.6}],
        "device": "cpu",
        "processes": 2,
        "cpus": 2,
        "git": {"commit": "5b0a7c1d" * 5, "is_dirty": stage == "train"},
        "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
        "argv": ["/usr/bin/implicit-llm", stage, "--run-dir", f"results/demo/{stage}/{name}", "--identity", "{...}"],
        "mlflow_run_id": fingerprint[::2],
    }
    (work / "provenance.json").write_text(json.dumps(provenance))
    return fingerprint
