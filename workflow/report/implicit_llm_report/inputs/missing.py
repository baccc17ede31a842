"""The records that missing results would have given: without their numbers, so that tables and claims miss these."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from implicit_llm_report.config import MissingResult, ReportConfig
from implicit_llm_report.inputs.frame import shares_of
from implicit_llm_report.inputs.suites import load_suites

PARALLEL, CHECKPOINT_PHASE = "parallel", "checkpoint"
KINDS = ("word_problem", "perplexity", "catbabi", "lm_eval", "duality", "jacobian")
# To generation; of a pair of modes the nearer is the reference.
NEARNESS = ("sequential", "blockwise", "simultaneous", "as_trained")
# What is known of a run, and of a data set, from the records of others.
OF_RUN = ("num_layers", "num_parameters", "model_type", "train_length", "train_hard_fraction")
OF_PHASE = ("train_tokens", "train_flops")
OF_DATA = ("chance_last10", "chance_per_position")
OF_TEST = ("group", "monoid", "hard_fraction")

Record = dict[str, Any]
Records = Mapping[str, Sequence[Mapping[str, Any]]]


def missing_records(config: ReportConfig, known: Records) -> Iterator[tuple[str, Record]]:
    """(kind, record) of each missing evaluation. `known`: the records that are there."""
    for item in config.missing:
        job, kind = config.jobs[item.role], str(item.config.get("kind"))
        if job.evaluation is None or kind not in KINDS:
            continue
        about: Record = {"role": item.role, "run": job.run, "phase": job.phase, "kind": kind, "seed": job.seed}
        about |= {"source": {} if job.phase == CHECKPOINT_PHASE else None, "is_implicit": bool(item.is_implicit)}
        about |= _shared(known, OF_RUN, {"run": job.run})
        about |= _shared(known, OF_PHASE, {"run": job.run, "phase": job.phase})
        for test in _tests(item, kind):
            of_data = _shared(known, OF_DATA, {key: test.get(key) for key in ("data", "length")})
            for mode in _modes(item, kind):
                yield kind, {**about, **of_data, **test, **mode}


def _shared(known: Records, keys: Sequence[str], wanted: Mapping[str, Any]) -> Record:
    """These fields of the first record that agrees with `wanted` and has them."""
    for records in known.values():
        for record in records:
            if all(record.get(key) == value for key, value in wanted.items()):
                found = {key: record[key] for key in keys if record.get(key) is not None}
                if found:
                    return found
    return {}


def _tests(item: MissingResult, kind: str) -> list[Record]:
    """What an evaluation reads: tasks, or data sets with lengths and protocols."""
    if kind == "lm_eval":
        columns = [column for suite in load_suites() for column in suite.columns]
        metrics = {task: [column.metric for column in columns if column.task == task] for task in item.config["tasks"]}
        return [
            {"task": task, "data": task, "metrics": dict.fromkeys(names or ["acc"])} for task, names in metrics.items()
        ]
    data, asked = item.data, item.config.get("lengths")
    if kind == "jacobian":  # it takes the shortest rows, of these those with the most hard tokens
        data = dict(sorted(data.items(), key=_shortness)[:1])
    protocols = item.config.get("protocols", ("windowed",)) if kind == "catbabi" else (None,)
    return [
        {"data": name, "length": length, "protocol": protocol, **{key: about.get(key) for key in OF_TEST}}
        for name, about in data.items()
        for length in (asked if asked and "group" not in about else [about.get("length")])
        if not asked or length in asked
        for protocol in protocols
    ]


def _shortness(named: tuple[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    name, about = named
    return about.get("length") or 0, -max(shares_of(about.get("hard_fraction") or 0.0)), name


def _modes(item: MissingResult, kind: str) -> list[Record]:
    """What tells the records of a test apart: modes, swept modes, or pairs of modes."""
    if kind == "jacobian":
        return [{"setting": "trained", "is_checked": True}]
    if not item.is_implicit:
        return [{"mode": PARALLEL, **({"measure": "pair", "against": "sequential"} if kind == "duality" else {})}]
    modes: list[Record] = [{"mode": one["name"], "eval_mode": one["eval_mode"]} for one in item.config["modes"]]
    if kind == "duality":
        ordered = sorted(modes, key=lambda mode: NEARNESS.index(mode["eval_mode"]))
        pairs = [mode | {"measure": "pair", "against": other["mode"]} for other, mode in combinations(ordered, 2)]
        traced = [mode | {"measure": "convergence"} for mode in modes if mode["eval_mode"] == "simultaneous"]
        return pairs + traced[:1]
    swept = [
        mode | {"mode": f"{mode['mode']}@{key}={value}", "sweep": {"base": mode["mode"], "key": key, "value": value}}
        for mode in modes
        for key, values in item.config.get("sweep", {}).items()
        for value in values
    ]
    return swept or modes
