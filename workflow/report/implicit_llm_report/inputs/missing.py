"""Make records without numbers for missing results, so that tables and claims show these results as missing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from implicit_llm_contracts.config.evaluation import PARALLEL, UNSWEPT, pairs_of, swept_modes
from implicit_llm_contracts.config.evaluation_kinds import DUALITY, EVALUATION_KINDS, JACOBIAN, LM_EVAL, PERPLEXITY
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_report.config import MissingResult, ReportConfig
from implicit_llm_report.inputs.frame import shares_of
from implicit_llm_report.inputs.suites import load_suites

CHECKPOINT_PHASE = "checkpoint"
KINDS = (WORD_PROBLEM, PERPLEXITY, CATBABI, LM_EVAL, DUALITY, JACOBIAN)
# The fields that a missing record gets from other records of the same run (OF_RUN), phase (OF_PHASE) or data set
# (OF_DATA), or else from `MissingResult.training`. It gets the fields OF_TEST from `MissingResult.data`.
OF_RUN = ("num_layers", "num_parameters", "model_type", "train_length", "train_hard_fraction")
OF_PHASE = ("train_tokens", "train_flops")
OF_DATA = ("chance_last10", "chance_per_position")
OF_TEST = ("group", "monoid", "hard_fraction")

Record = dict[str, Any]


def missing_records(config: ReportConfig, known: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """Yield kind and record for each test and mode of the missing evaluations.

    `known`: the records that exist, and the fields that the training of each run supplies. Missing evaluations of kinds
    outside KINDS, such as those of plugins, yield nothing. Raises: ConfigError for invalid settings.
    """
    for item in config.missing:
        job, kind = config.jobs[item.role], str(item.config.get("kind"))
        if job.evaluation is None or kind not in KINDS:
            continue
        about: Record = {
            **{"role": item.role, "run": job.run, "phase": job.phase, "kind": kind, "seed": job.seed},
            **{"source": {} if job.phase == CHECKPOINT_PHASE else None, "is_implicit": bool(item.is_implicit)},
            **item.training,
            **_shared(known, OF_RUN, run=job.run),
            **_shared(known, OF_PHASE, run=job.run, phase=job.phase),
        }
        settings: Any = fill(EVALUATION_KINDS[kind].config, item.config, item.job)
        for test in _tests(item, settings):
            of_data = _shared(known, OF_DATA, data=test.get("data"), length=test.get("length"))
            for mode in _modes(settings, is_implicit=bool(item.is_implicit)):
                yield kind, {**about, **of_data, **test, **mode}


def _shared(known: Sequence[Record], keys: Sequence[str], **wanted: Any) -> Record:
    """Return the values of `keys`, each from the first record that matches `wanted` and has the key."""
    agreeing = [one for one in known if all(one.get(key) == value for key, value in wanted.items())]
    return {key: one[key] for one in reversed(agreeing) for key in keys if one.get(key) is not None}


def _tests(item: MissingResult, settings: Any) -> list[Record]:
    """Return the fields that describe each test of an evaluation: a task, or a data set, length and protocol."""
    if settings.kind == LM_EVAL:
        columns = [column for suite in load_suites() for column in suite.columns]
        metrics = {task: [column.metric for column in columns if column.task == task] for task in settings.tasks}
        return [
            {"task": task, "data": task, "metrics": dict.fromkeys(names or ["acc"])} for task, names in metrics.items()
        ]
    data, asked = item.data, getattr(settings, "lengths", None)
    if settings.kind == JACOBIAN:  # it uses only the test set with the shortest sequences
        data = dict(sorted(data.items(), key=_shortness)[:1])
    return [
        {"data": name, "length": length, "protocol": protocol, **{key: about.get(key) for key in OF_TEST}}
        for name, about in data.items()
        for length in (asked if asked and "group" not in about else [about.get("length")])
        if not asked or length in asked
        for protocol in getattr(settings, "protocols", (None,))
    ]


def _shortness(named: tuple[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    name, about = named
    return about.get("length") or 0, -max(shares_of(about.get("hard_fraction") or 0.0)), name


def _modes(settings: Any, *, is_implicit: bool) -> list[Record]:
    """Return the fields that describe the mode, swept mode or pair of modes of each record of a test."""
    if settings.kind == JACOBIAN:
        return [{"setting": "trained", "is_checked": True}]
    if not is_implicit and settings.kind != DUALITY:
        return [{"mode": PARALLEL, "sweep": settings.sweep and UNSWEPT}]
    modes = swept_modes(settings.modes, settings.sweep) if is_implicit else ()
    has_sequential = settings.kind == WORD_PROBLEM and any(mode.eval_mode == "sequential" for mode in modes)
    found = {
        mode.name: {
            # The evaluation would compare this mode with the sequential one.
            "lacks": ("token_match_sequential",) if has_sequential and mode.eval_mode != "sequential" else (),
            "mode": mode.name,
            "eval_mode": mode.eval_mode,
            "eval_stop": mode.eval_stop,
            "sweep": mode.sweep and asdict(mode.sweep),
        }
        for mode in modes
    }
    if settings.kind != DUALITY:
        return list(found.values())
    pairs = pairs_of(modes, is_implicit=is_implicit)
    records = [
        found.get(mode, {"mode": mode, "sweep": settings.sweep and UNSWEPT}) | {"measure": "pair", "against": against}
        for mode, against in pairs
    ]
    traced = [mode.name for mode in modes if mode.eval_mode == "simultaneous" and mode.sweep is None]
    return records + [found[mode] | {"measure": "convergence"} for mode in traced[:1]]
