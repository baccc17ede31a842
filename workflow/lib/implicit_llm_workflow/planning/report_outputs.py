"""What the report of an experiment consists of: its figures and its tables."""

from __future__ import annotations

from collections.abc import Iterator

from implicit_llm_workflow.experiment_files.data_sets import CATBABI, LANGUAGE_MODEL, WORD_PROBLEM, WordProblem
from implicit_llm_workflow.experiment_files.evaluations import DUALITY, JACOBIAN, LM_EVAL, PERPLEXITY
from implicit_llm_workflow.experiment_files.experiment import Experiment
from implicit_llm_workflow.experiment_files.runs import Run


def report_figures(experiment: Experiment) -> list[str]:
    """Names of the figures that the report of an experiment has."""
    return [name for name, is_there in figures_of_reports(experiment).items() if is_there]


def report_tables(experiment: Experiment) -> list[str]:
    """Names of the tables, each of which is written as .csv and .tex."""
    return [name for name, is_there in tables_of_reports(experiment).items() if is_there]


def figures_of_reports(experiment: Experiment) -> dict[str, bool]:
    """Every figure that a report can have, and whether the one of this experiment has it."""
    runs = experiment.runs.values()
    has_implicit = any(run.is_implicit for run in runs)
    has_words = WORD_PROBLEM in _evaluated(experiment)
    has_language = any(experiment.data[run.data].kind == LANGUAGE_MODEL for run in runs)
    return {
        "accuracy-by-length": has_words,
        "accuracy-by-position": has_words,
        "accuracy-by-mode": has_words and WORD_PROBLEM in _evaluated(experiment, implicit_only=True),
        "accuracy-by-hard-fraction": _has_shares_of_hard_tokens(experiment),
        "perplexity-by-length": PERPLEXITY in _evaluated(experiment),
        "perplexity-by-position": PERPLEXITY in _evaluated(experiment),
        "perplexity-by-parameters": _has_sizes(experiment),
        "curriculum": _has_branches(experiment),
        "downstream-by-iterations": "eval_max_iter" in _swept(experiment, LM_EVAL),
        "loss-by-tokens": has_language,
        "loss-by-flops": has_language,
        "accuracy-by-babi-task": CATBABI in _evaluated(experiment),
        "minimum-layers": "minimum_layers" in experiment.report,
        "test-time-iterations": "eval_max_iter" in _swept(experiment),
        "test-time-tolerance": "eval_tol" in _swept(experiment),
        "convergence-by-iteration": _has_convergence(experiment),
        "jacobian": JACOBIAN in _evaluated(experiment),
        "training-curves": True,
        "solver-health": has_implicit,
        "spectral-radius": has_implicit,
    }


def tables_of_reports(experiment: Experiment) -> dict[str, bool]:
    """Likewise every table."""
    evaluated = _evaluated(experiment)
    return {
        "accuracy": WORD_PROBLEM in evaluated,
        "perplexity": PERPLEXITY in evaluated,
        "downstream": LM_EVAL in evaluated,
        "babi": CATBABI in evaluated,
        "minimum-layers": "minimum_layers" in experiment.report,
        "test-time": bool(_swept(experiment)),
        "duality": DUALITY in evaluated,
        "jacobian": JACOBIAN in evaluated,
        "peers": _has_peer_table(experiment),
        "published": True,
    }


def _has_shares_of_hard_tokens(experiment: Experiment) -> bool:
    """Whether models of one kind, task and training length differ in the share of hard tokens in training."""
    shares: dict[tuple, set[tuple[float, ...]]] = {}
    for run in _runs_in(experiment, WORD_PROBLEM):
        data = experiment.data[run.data]
        if isinstance(data, WordProblem):
            key = (data.group, data.monoid, data.train.length, data.test, run.is_implicit)
            shares.setdefault(key, set()).add(data.train.hard_fractions)
    return any(len(found) > 1 for found in shares.values())


def _has_sizes(experiment: Experiment) -> bool:
    """Whether language models of one family and kind differ in size on one data set."""
    sizes: dict[tuple, set[tuple]] = {}
    for run in _runs_in(experiment, PERPLEXITY):
        size = tuple(run.model.get(key) for key in ("hidden_size", "num_hidden_layers"))
        sizes.setdefault((run.data, run.model.get("model_type"), run.is_implicit), set()).add(size)
    return any(len(found) > 1 for found in sizes.values())


def _has_branches(experiment: Experiment) -> bool:
    """Whether several free phases of one curriculum, which leave its trunk at different steps, are evaluated."""
    return any(
        len({phase.start_step for phase in run.final_phases if phase.after is not None}) > 1
        for run in _runs_in(experiment, PERPLEXITY)
    )


def _runs_in(experiment: Experiment, kind: str) -> Iterator[Run]:
    """The runs that are evaluated in this kind, without sweeps."""
    for run in experiment.runs.values():
        if any(evaluation.kind == kind and not evaluation.sweep for evaluation in experiment.evaluations_of(run)):
            yield run


def _has_peer_table(experiment: Experiment) -> bool:
    """Whether a peer is evaluated in a kind whose numbers stand in the table of peers; others have their own place."""
    return any(
        evaluation.kind in (WORD_PROBLEM, CATBABI, PERPLEXITY) and not evaluation.sweep
        for peer in experiment.peers.values()
        for evaluation in experiment.evaluations_of_peer(peer)
    )


def _evaluated(experiment: Experiment, *, implicit_only: bool = False, is_swept: bool = False) -> set[str]:
    """Kinds of the evaluations that are done: those of the modes as they are, or those of a sweep."""
    return {
        evaluation.kind
        for run in experiment.runs.values()
        if run.is_implicit or not implicit_only
        for evaluation in experiment.evaluations_of(run)
        if bool(evaluation.sweep) == is_swept
    }


def _has_convergence(experiment: Experiment) -> bool:
    """Whether the simultaneous iteration of an implicit model is followed."""
    return any(
        evaluation.kind == DUALITY
        and not evaluation.sweep
        and any(mode["eval_mode"] == "simultaneous" for mode in evaluation.modes)
        for run in experiment.runs.values()
        if run.is_implicit
        for evaluation in experiment.evaluations_of(run)
    )


def _swept(experiment: Experiment, *kinds: str) -> set[str]:
    """Settings that are swept for an implicit model, in evaluations of `kinds` or of those that one figure draws."""
    return {
        key
        for run in experiment.runs.values()
        if run.is_implicit
        for evaluation in experiment.evaluations_of(run)
        if evaluation.kind in (kinds or (WORD_PROBLEM, PERPLEXITY))
        for key in evaluation.sweep
    }
