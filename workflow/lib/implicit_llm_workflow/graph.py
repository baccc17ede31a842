"""From an experiment to the jobs that it takes: nodes with their identity and the nodes they read from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from implicit_llm_workflow.experiment import DataSet, Evaluation, Experiment, Run
from implicit_llm_workflow.recipes import Phase

REPORT_DIR = Path(__file__).resolve().parents[2] / "report"
REPORT_SUFFIXES = {".css", ".html", ".j2", ".rst", ".yaml"}


@dataclass(frozen=True)
class Node:
    """One job. `upstream` maps the role an input has for this job to the key of the node it comes from."""

    stage: str
    name: str
    config: Mapping[str, Any]
    upstream: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Path of its run directory below results/<config>: "train/a5-implicit-s0/free"; the one report is "report"."""
        return self.stage if self.stage == self.name else f"{self.stage}/{self.name}"


def build_graph(experiment: Experiment) -> dict[str, Node]:
    """All nodes by key, every node after those it reads from."""
    nodes: dict[str, Node] = {}
    for node in _all_nodes(experiment):
        nodes[node.key] = node
    return nodes


def _all_nodes(experiment: Experiment) -> Iterator[Node]:
    for data in experiment.data.values():
        yield train_data_node(data)
        yield from nodes_of_test_data(data)
    report_inputs: dict[str, str] = {}
    for run in experiment.runs.values():
        for seed in run.seeds:
            for node in _run_nodes(experiment, run, seed):
                if node.stage in ("train", "evaluate"):
                    report_inputs[f"{node.stage}:{node.name}"] = node.key
                yield node
    config = {"experiment": experiment.name, **experiment.report, "assets": report_assets()}
    yield Node("report", "report", config, report_inputs)


def _run_nodes(experiment: Experiment, run: Run, seed: int) -> Iterator[Node]:
    data = experiment.data[run.data]
    previous: Node | None = None
    for phase in run.phases:
        previous = _train_node(run, seed, phase, previous, data)
        yield previous
    assert previous is not None  # a curriculum has at least one phase
    for evaluation in experiment.evaluations.values():
        yield _evaluate_node(run, seed, evaluation, previous, data)


def train_data_node(data: DataSet) -> Node:
    """The training set of a data set."""
    train = data.train
    return Node(
        "data", f"{data.name}-train", _data_config(data, "train", train.length, train.hard_fractions, train.num_samples)
    )


def nodes_of_test_data(data: DataSet) -> Iterator[Node]:
    """The test sets of a data set: one for every length and hard fraction."""
    for length in data.test.lengths:
        for hard_fraction in data.test.hard_fractions:
            name = f"{data.name}-test-L{length}-h{hard_fraction:g}"
            yield Node("data", name, _data_config(data, "test", length, (hard_fraction,), data.test.num_samples))


def _data_config(
    data: DataSet, split: str, length: int, hard_fractions: tuple[float, ...], num_samples: int
) -> dict[str, Any]:
    return {
        "kind": data.kind,
        "group": data.group,
        "monoid": data.monoid,
        "hard_fraction": hard_fractions[0] if len(hard_fractions) == 1 else list(hard_fractions),
        "length": length,
        "num_samples": num_samples,
        "split": split,
        "seed": data.seed,
        "shard_samples": data.shard_samples,
    }


def _train_node(run: Run, seed: int, phase: Phase, previous: Node | None, data: DataSet) -> Node:
    task = run.task
    schedule = {key: value for key, value in asdict(task.schedule).items() if value is not None}
    config = {
        "task": task.kind,
        "labels": task.labels,
        "model": dict(run.model),
        "phase": asdict(phase),
        "total_steps": task.total_steps,
        "schedule": schedule,
        "optimizer": asdict(task.optimizer),
        "batch_size": task.batch_size,
        "precision": task.precision,
        "seed": seed,
    }
    upstream = {"data": train_data_node(data).key}
    if previous is not None:
        upstream["start"] = previous.key
    return Node("train", f"{run.name}-s{seed}/{phase.name}", config, upstream)


def _evaluate_node(run: Run, seed: int, evaluation: Evaluation, trained: Node, data: DataSet) -> Node:
    config = {"kind": evaluation.kind, "modes": [dict(mode) for mode in evaluation.modes]}
    upstream = {"model": trained.key, **{node.name: node.key for node in nodes_of_test_data(data)}}
    return Node("evaluate", f"{run.name}-s{seed}/{evaluation.name}", config, upstream)


def report_assets() -> dict[str, str]:
    """sha256 of the files that say what the report claims and compares with, by their path below workflow/report."""
    files = sorted(path for path in REPORT_DIR.rglob("*") if path.suffix in REPORT_SUFFIXES)
    return {path.relative_to(REPORT_DIR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def report_figures(experiment: Experiment) -> list[str]:
    """Names of the figures that the report of an experiment has."""
    has_implicit = any(run.is_implicit for run in experiment.runs.values())
    names = {
        "accuracy-by-length": bool(experiment.evaluations),
        "accuracy-by-position": bool(experiment.evaluations),
        "accuracy-by-mode": bool(experiment.evaluations) and has_implicit,
        "training-curves": True,
        "solver-health": has_implicit,
    }
    return [name for name, is_there in names.items() if is_there]
