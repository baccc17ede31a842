"""Results that a report has to do without: what they are, and the numbers that they would have given, as missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from implicit_llm.report.config import Hole, ReportConfig

PARALLEL, CHECKPOINT = "parallel", "checkpoint"
# What is known of a run, and of a data set, from the records of others.
OF_RUN = ("num_layers", "num_parameters", "model_type", "train_length", "train_hard_fraction")
OF_PHASE = ("train_tokens", "train_flops")
OF_DATA = ("chance_last10", "chance_per_position")

Record = dict[str, Any]
Records = Mapping[str, Sequence[Mapping[str, Any]]]


def missing_records(config: ReportConfig, known: Records) -> Iterator[tuple[str, Record]]:
    """(kind, record) for each number of accuracy or perplexity that the holes would have given: without the number.

    Sweeps are left out, as they are from the tables and figures that these go to. `known`: the records that are there.
    """
    for hole in config.holes:
        job, kind = config.jobs[hole.role], str(hole.config.get("kind"))
        if job.evaluation is None or kind not in _RECORDS_OF or hole.config.get("sweep"):
            continue
        about: Record = {"role": hole.role, "run": job.run, "phase": job.phase, "kind": kind, "seed": job.seed}
        about |= {"source": {} if job.phase == CHECKPOINT else None, "is_implicit": bool(hole.is_implicit)}
        about |= _shared(known, OF_RUN, {"run": job.run})
        about |= _shared(known, OF_PHASE, {"run": job.run, "phase": job.phase})
        for role, data in hole.data.items():
            for record in _RECORDS_OF[kind](hole.config, data):
                of_data = _shared(known, OF_DATA, {"data": role, "length": record["length"]})
                for mode in _modes(hole):
                    yield kind, {**about, **of_data, "data": role, "mode": mode, **record}


def _modes(hole: Hole) -> list[str]:
    return [mode["name"] for mode in hole.config.get("modes", ())] if hole.is_implicit else [PARALLEL]


def _word_problem(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[Record]:
    return [{key: data.get(key) for key in ("group", "monoid", "length", "hard_fraction")}]


def _perplexity(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[Record]:
    return [{"length": length} for length in config.get("lengths", ())]


def _catbabi(config: Mapping[str, Any], data: Mapping[str, Any]) -> list[Record]:
    protocols = config.get("protocols", ("windowed",))
    return [{"length": data.get("length"), "protocol": protocol} for protocol in protocols]


_RECORDS_OF = {"word_problem": _word_problem, "perplexity": _perplexity, "catbabi": _catbabi}


def _shared(known: Records, keys: Sequence[str], wanted: Mapping[str, Any]) -> Record:
    """These fields of the first record that agrees with `wanted` and has them."""
    for records in known.values():
        for record in records:
            if all(record.get(key) == value for key, value in wanted.items()):
                found = {key: record[key] for key in keys if record.get(key) is not None}
                if found:
                    return found
    return {}
