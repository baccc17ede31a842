"""Make the records that missing results would have given, without numbers, so that tables and claims show the gap."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from implicit_llm_contracts.config.evaluation import PARALLEL, pairs_of, swept_modes
from implicit_llm_contracts.config.evaluation_kinds import DUALITY, EVALUATION_KINDS, JACOBIAN, LM_EVAL, PERPLEXITY
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.tasks import CATBABI, WORD_PROBLEM
from implicit_llm_report.config import MissingResult, ReportConfig
from implicit_llm_report.inputs.frame import shares_of
from implicit_llm_report.inputs.suites import load_suites

CHECKPOINT_PHASE = "checkpoint"
KINDS = (WORD_PROBLEM, PERPLEXITY, CATBABI, LM_EVAL, DUALITY, JACOBIAN)
# Fields of a run and of a data set that can be copied from the records of other results.
OF_RUN = ("num_layers", "num_parameters", "model_type", "train_length", "train_hard_fraction")
OF_PHASE = ("train_tokens", "train_flops")
OF_DATA = ("chance_last10", "chance_per_position")
OF_TEST = ("group", "monoid", "hard_fraction")

Record = dict[str, Any]
Records = Mapping[str, Sequence[Mapping[str, Any]]]


def missing_records(config: ReportConfig, known: Records) -> Iterator[tuple[str, Record]]:
    """Yield (kind, record) for each missing evaluation; `known` contains the existing records."""
    for item in config.missing:
        job, kind = config.jobs[item.role], str(item.config.get("kind"))
        if job.evaluation is None or kind not in KINDS:
            continue
        about: Record = {"role": item.role, "run": job.run, "phase": job.phase, "kind": kind, "seed": job.seed}
        about |= {"source": {} if job.phase == CHECKPOINT_PHASE else None, "is_implicit": bool(item.is_implicit)}
        about |= _shared(known, OF_RUN, {"run": job.run})
        about |= _shared(known, OF_PHASE, {"run": job.run, "phase": job.phase})
        settings: Any = fill(EVALUATION_KINDS[kind].config, item.config, item.job)
        for test in _tests(item, settings):
            of_data = _shared(known, OF_DATA, {key: test.get(key) for key in ("data", "length")})
            for mode in _modes(settings, is_implicit=bool(item.is_implicit)):
                yield kind, {**about, **of_data, **test, **mode}


def _shared(known: Records, keys: Sequence[str], wanted: Mapping[str, Any]) -> Record:
    """Return the fields `keys`, each from the first record that agrees with `wanted` and has it."""
    found: Record = {}
    for record in chain.from_iterable(known.values()):
        if all(record.get(key) == value for key, value in wanted.items()):
            found = {key: record[key] for key in keys if record.get(key) is not None} | found
    return found


def _tests(item: MissingResult, settings: Any) -> list[Record]:
    """Return the tests of an evaluation: tasks, or data sets with lengths and protocols."""
    if settings.kind == LM_EVAL:
        columns = [column for suite in load_suites() for column in suite.columns]
        metrics = {task: [column.metric for column in columns if column.task == task] for task in settings.tasks}
        return [
            {"task": task, "data": task, "metrics": dict.fromkeys(names or ["acc"])} for task, names in metrics.items()
        ]
    data, asked = item.data, getattr(settings, "lengths", None)
    if settings.kind == JACOBIAN:  # it uses the shortest sequences, and among these the most hard tokens
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
    """Return the names that distinguish the records of a test: modes, swept modes, or pairs of modes."""
    if settings.kind == JACOBIAN:
        return [{"setting": "trained", "is_checked": True}]
    if not is_implicit and settings.kind != DUALITY:
        return [{"mode": PARALLEL}]
    modes = swept_modes(settings.modes, settings.sweep) if is_implicit else ()
    found = {
        mode.name: {
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
    records = [found.get(mode, {"mode": mode}) | {"measure": "pair", "against": against} for mode, against in pairs]
    traced = [mode.name for mode in modes if mode.eval_mode == "simultaneous" and mode.sweep is None]
    return records + [found[mode] | {"measure": "convergence"} for mode in traced[:1]]
