"""What the data sets of an experiment take: tokens, hours of tokenisation, disk, downloads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from implicit_llm_workflow.estimates.hardware import Hardware
from implicit_llm_workflow.experiment_files.data_sets.word_problem import MONOID_ORDER, group_order
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import PROJECT_DIR

TOKENISATION_FILE = Path("results") / "benchmarks" / "tokenisation-cpu.json"
TOKEN_BYTES = 2  # token streams are uint16
_PART = re.compile(r"-(shard-\d+|train|valid|test.*|tokenizer|text)$")


@dataclass(frozen=True)
class DataEstimate:
    """The jobs of one kind of a data set. Numbers that follow from text that is not at hand are None."""

    data: str
    kind: str
    jobs: int
    tokens: float | None = None
    core_hours: float | None = None
    disk_bytes: float | None = None
    download_bytes: float | None = None

    def plus(self, other: DataEstimate) -> DataEstimate:
        """Both together; a download is counted once, since every shard names the whole corpus."""
        return replace(
            self,
            jobs=self.jobs + other.jobs,
            tokens=_sum(self.tokens, other.tokens),
            core_hours=_sum(self.core_hours, other.core_hours),
            disk_bytes=_sum(self.disk_bytes, other.disk_bytes),
        )


@dataclass(frozen=True)
class TokenisationRate:
    """`source` says whether `tokens_per_s` of one core was measured."""

    tokens_per_s: float
    source: str


def data_estimates(plan: Plan, hardware: Hardware, rate: TokenisationRate) -> list[DataEstimate]:
    """One entry for each data set and kind of job, in the order of the plan."""
    found: dict[tuple[str, str], DataEstimate] = {}
    for node in plan.nodes.values():
        if node.stage == "data":
            estimate = data_estimate(_PART.sub("", node.name), node.config, hardware, rate)
            key = (estimate.data, estimate.kind)
            found[key] = found[key].plus(estimate) if key in found else estimate
    return list(found.values())


def tokenisation_rate(hardware: Hardware, project: Path = PROJECT_DIR) -> TokenisationRate:
    """Tokens a second of one core: the slowest text of the benchmark if it has been run, else what the facts assume."""
    try:
        values = json.loads((project / TOKENISATION_FILE).read_bytes())
        slowest = min(float(row["ours"]) for row in values["rows"])  # million tokens a second of all cores
        rate = slowest * 1e6 / int(values["machine"]["cores"])
        return TokenisationRate(rate, f"measured, {TOKENISATION_FILE.as_posix()}")
    except FileNotFoundError:
        return TokenisationRate(hardware.tokens_per_s_per_core, "assumed")
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        why = f"assumed: {TOKENISATION_FILE.as_posix()} cannot be read, {type(error).__name__}"
        return TokenisationRate(hardware.tokens_per_s_per_core, why)


def data_estimate(data: str, config: Mapping[str, Any], hardware: Hardware, rate: TokenisationRate) -> DataEstimate:
    """Of one job. `data`: the data set that it belongs to."""
    kind = config["kind"]
    if kind == "word_problem":
        tokens = config["num_samples"] * config["length"]
        vocabulary = group_order(config["group"], data) * MONOID_ORDER[config["monoid"]]
        return DataEstimate(data, kind, 1, tokens, None, 2 * tokens * (1 if vocabulary <= 256 else 2))
    if kind == "token_shard":
        corpus = hardware.corpora.get(config["corpus"].get("dataset", ""))
        if corpus is None:
            return DataEstimate(data, kind, 1)
        tokens = corpus.tokens / config["num_shards"]
        hours = tokens / rate.tokens_per_s / 3600
        return DataEstimate(data, kind, 1, tokens, hours, tokens * TOKEN_BYTES, corpus.download_gb * 1e9)
    return DataEstimate(data, kind, 1)


def _sum(first: float | None, second: float | None) -> float | None:
    return first if second is None else second if first is None else first + second
