"""List all experiments, each with cost and state or the error in its file, and the trained models of the package."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from implicit_llm_contracts.errors import UserError
from implicit_llm_workflow.estimates import CostModel
from implicit_llm_workflow.experiment_files.experiment import known_experiment
from implicit_llm_workflow.experiment_files.yaml_files import experiment_path
from implicit_llm_workflow.planning.plan import Plan, check_place
from implicit_llm_workflow.project_dirs import trained_models
from implicit_llm_workflow.text import MISSING, number_text, plain_table

ABOUT = "about.json"  # the file that stores a trained model's task, accuracy and training run


@dataclass(frozen=True)
class Listed:
    """An experiment in the list.

    about: the first sentence of the comment at the head of its file. done: the number of its `jobs` that have fresh
    results. gpu_hours: the known GPU-hours of its training; jobs that ran on a CPU have none. has_unknown: whether the
    hours of some training jobs are unknown. error: why it has no plan; the numbers are then zero.
    """

    name: str
    about: str
    jobs: int = 0
    done: int = 0
    gpu_hours: float = 0
    has_unknown: bool = False
    error: str | None = None


@dataclass(frozen=True)
class TrainedModel:
    """A trained model of the package. `kind`: the kind of evaluation that measured its accuracy."""

    name: str
    task: str
    kind: str
    accuracy: str


def experiments(known: Mapping[str, str], results: Path) -> list[Listed]:
    """Return the experiments that `known` maps to their files, or to names that `experiment_path` knows.

    The cheapest are first, and those with errors last.
    """
    found = [_listed(name, known[name], results) for name in sorted(known)]
    return sorted(found, key=lambda one: (one.error is not None, one.gpu_hours, one.jobs))


def _listed(name: str, file: str, results: Path) -> Listed:
    about = ""
    try:
        # `known_experiment` reports a file that is not UTF-8.
        lines = experiment_path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        comment = takewhile(lambda line: line.startswith("#"), lines)
        about = " ".join(line.strip("# ") for line in comment).partition(". ")[0].rstrip(".")
        experiment = known_experiment(name, file)
        check_place(experiment, results)
        plan = Plan(experiment, results)
        states = [plan.statuses[key].state for key in plan.wanted]
        costs = CostModel(plan)
        found = [costs.whole(node) for node in plan.nodes.values() if node.stage == "train"]
    except (UserError, OSError) as error:
        return Listed(name, about, error=str(error))
    known = sum(cost.hours for cost in found if cost.hours is not None and cost.unit == "gpu")
    has_unknown = any(cost.hours is None for cost in found)
    return Listed(name, about, len(states), states.count("fresh"), known, has_unknown)


def models() -> list[TrainedModel]:
    """Return the trained models in the order of their names."""
    folders = sorted(path.parent for path in trained_models().glob(f"*/{ABOUT}"))
    about = ((folder.name, json.loads((folder / ABOUT).read_text(encoding="utf-8"))) for folder in folders)
    return [TrainedModel(name, values["task"], values["kind"], values["accuracy"]) for name, values in about]


def tables(experiments: Sequence[Listed], models: Sequence[TrainedModel]) -> Iterator[RenderableType]:
    """Yield a table of the experiments, how to name others, and a table of the trained models."""
    numbers = ("jobs", "done", "GPU-hours")
    rows = []
    for one in experiments:
        hours = number_text(one.gpu_hours, 3) if one.gpu_hours and not one.has_unknown else MISSING
        rows.append((one.name, str(one.jobs), str(one.done), hours, one.error or one.about))
    yield plain_table("experiment", *numbers, "what it is", rows=rows, right=numbers)
    yield Text("Name an experiment in another folder by its file, such as study/mine.yaml, until it has run here.\n")
    trained = ((model.name, model.task, model.accuracy) for model in models)
    yield plain_table("trained model", "task", "accuracy", rows=trained)
