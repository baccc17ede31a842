"""Which figures and tables the report of an experiment has: those whose needs in its registry are planned."""

from collections.abc import Iterator, Mapping
from typing import Any

from implicit_llm_report.registry import Entry, registry
from implicit_llm_workflow.experiment_files.data_sets import WordProblem
from implicit_llm_workflow.experiment_files.evaluations import Evaluation
from implicit_llm_workflow.experiment_files.experiment import Experiment
from implicit_llm_workflow.experiment_files.runs import Run


def report_figures(experiment: Experiment) -> list[str]:
    """Names of the figures that the report of an experiment has."""
    own = {name: it for plugin in experiment.plugins.values() for name, it in plugin.figures.items()}
    return _met({**registry().figures} | {name: Entry(it.needs, it.caption) for name, it in own.items()}, experiment)


def report_tables(experiment: Experiment) -> list[str]:
    """Names of the tables, each of which is written as .csv and .tex."""
    return _met(registry().tables, experiment)


def _met(entries: Mapping[str, Entry], experiment: Experiment) -> list[str]:
    planned = list(_planned_results(experiment))
    return [name for name, entry in entries.items() if entry.is_met(planned)]


def _planned_results(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """One for each run, evaluation of a run or peer, and the report, with the fields that registry.yaml names."""
    yield {"kind": "report", "settings": tuple(experiment.report), "is_peer": False}
    for run in experiment.runs.values():
        about = _about(run, experiment)
        yield {"kind": "train", **about}
        yield from ({**about, **_about_evaluation(item)} for item in experiment.evaluations_of(run))
    for peer in experiment.peers.values():
        yield from ({"is_peer": True, **_about_evaluation(item)} for item in experiment.evaluations_of_peer(peer))


def _about(run: Run, experiment: Experiment) -> dict[str, Any]:
    data = experiment.data[run.data]
    about = {
        "is_peer": False,
        "is_implicit": run.is_implicit,
        "data": data.kind,
        "data_set": run.data,
        "model_type": run.model.get("model_type"),
        "size": tuple(run.model.get(key) for key in ("hidden_size", "num_hidden_layers")),
        "has_branches": len({phase.start_step for phase in run.final_phases if phase.after is not None}) > 1,
    }
    if isinstance(data, WordProblem):
        about["test"] = (data.group, data.monoid, data.train.length, data.test)
        about["hard_fractions"] = data.train.hard_fractions
    return about


def _about_evaluation(item: Evaluation) -> dict[str, Any]:
    modes = tuple(mode["eval_mode"] for mode in item.modes)
    return {"kind": item.kind, "swept": tuple(item.sweep), "eval_mode": modes}
