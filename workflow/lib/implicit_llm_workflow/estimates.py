"""Estimate the cost of a job from its earlier runs, or else from its FLOPs and a measured or assumed throughput.

The throughputs come from workflow/config/estimate/hardware.yaml, which describes GPUs and measured training steps. The
estimates of an experiment's training jobs are a table for people and JSON for programs.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from rich.table import Table

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.flops import UncountedModel, max_evaluations, num_parameters, training_flops
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.identity import canonical_json
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import FREED, PROVENANCE, is_done, work_directory
from implicit_llm_workflow.experiment_files.models import model_fields
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import CONFIG_DIR, PROJECT_DIR
from implicit_llm_workflow.site import CLUSTER_PROFILE, Site, read_site
from implicit_llm_workflow.text import MISSING, number_text, plain_table, time_text

HARDWARE_FILE = CONFIG_DIR / "estimate/hardware.yaml"
FEW_EVALUATIONS = 8  # a solver with at most this many f-evaluations per token counts as bounded, others as free
STATE_BYTES = 12  # per parameter of a checkpoint: the weights and AdamW's two moments in fp32
SAME_SIZE = 0.1  # models of a family have the same throughput if their parameter counts differ by a smaller share
Unit = Literal["gpu", "cpu"]
CPU: Literal["cpu"] = "cpu"
MODEL_BYTES = 4  # per parameter of the final model, which is saved in fp32 beside the checkpoint
UNNAMED_HOURS = 24  # an experiment with more hours of training runs on this machine only if the user named it


@dataclass(frozen=True)
class Card:
    """A GPU model. `peak_tflops`: by precision. `utilisation`: the share of the peak to assume without measurements."""

    name: str
    peak_tflops: Mapping[str, float]
    utilisation: float


@dataclass(frozen=True)
class MeasuredStep:
    """A timed training step of the library's configuration `model`.

    `solver`: None for an explicit model. `f_evaluations`: per token, including those with gradient.
    """

    model: str
    solver: Mapping[str, Any] | None
    card: str
    precision: str
    length: int
    tokens_per_s: float
    f_evaluations: float
    commit: str
    date: str

    @cached_property
    def fields(self) -> dict[str, Any]:
        return model_fields(self.model, str(HARDWARE_FILE))

    def is_like(self, model: Mapping[str, Any], solver: Mapping[str, Any] | None) -> bool:
        """Return whether a job with this model and solver has the model family, size and kind of phase of this step."""
        ratio = num_parameters(model) / num_parameters(self.fields)
        is_same_family = model.get("model_type") == self.fields["model_type"]
        return is_same_family and abs(ratio - 1) < SAME_SIZE and _phase(solver) == _phase(self.solver)


@dataclass(frozen=True)
class Hardware:
    """The content of workflow/config/estimate/hardware.yaml."""

    cards: Mapping[str, Card]
    scaling_efficiency: float
    smallest_parameters: float
    steps: tuple[MeasuredStep, ...]

    def card(self, name: str) -> Card:
        """Return the GPU of this name. Raises: ConfigError, which names the nearest GPU."""
        if name not in self.cards:
            raise ConfigError(f"{HARDWARE_FILE}: cards: there is no {name!r}; {nearest(name, self.cards)}")
        return self.cards[name]

    def speed(
        self, model: Mapping[str, Any], solver: Mapping[str, Any] | None, precision: str, card: str
    ) -> tuple[float, str] | None:
        """Return the model FLOPs per second of one GPU and their source.

        The source is the measured step of a similar job on this GPU, or else the assumed share of the GPU's peak. The
        result is None for an unknown GPU, for a precision without a peak, and for models so small that their FLOPs do
        not determine their time.
        """
        facts = self.cards.get(card)
        peak_tflops = None if facts is None else facts.peak_tflops.get(precision)
        if facts is None or peak_tflops is None or num_parameters(model) < self.smallest_parameters:
            return None
        for step in self.steps:
            if (step.card, step.precision) == (card, precision) and step.is_like(model, solver):
                per_token = training_flops(step.fields, step.length, step.solver, step.f_evaluations)
                return per_token * step.tokens_per_s, f"measured on {card}, commit {step.commit}"
        share = facts.utilisation
        return share * peak_tflops * 1e12, f"{share:.0%} of the peak of {card}, assumed"


def read_hardware(path: Path = HARDWARE_FILE) -> Hardware:
    """Read the throughputs of the hardware. Raises: ConfigError."""
    return fill(Hardware, read_yaml(path), str(path))


def _phase(solver: Mapping[str, Any] | None) -> str:
    """Return "explicit", "bounded" for few iterations, such as (4+1) or 4 unrolled, or "free" for many."""
    if solver is None:
        return "explicit"
    return "bounded" if max_evaluations(solver) <= FEW_EVALUATIONS else "free"


@dataclass(frozen=True)
class Work:
    """The computation and disk space of a training job.

    `tokens`, `flops` and `disk_bytes` are None if the data set has no length. `flops` and `disk_bytes` are also None if
    the model's configuration does not determine them. `f_evaluations`: per token of a training step, including those
    with gradient. `unique_tokens`: the size of the data set if its key `tokens` limits it; training repeats these
    tokens.
    """

    tokens: int | None
    f_evaluations: float
    flops: float | None = None
    disk_bytes: float | None = None
    unique_tokens: int | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of a job.

    `hours`: the sum over the GPUs of the job, or wall time if it runs on a CPU; None if unknown. `device`: the GPU or
    CPU for these hours. `basis`: the source of the number.
    """

    unit: Unit | None
    hours: float | None
    device: str | None
    basis: str

    @property
    def is_assumed(self) -> bool:
        return self.basis.endswith("assumed")

    @property
    def text(self) -> str:
        """The hours as text, such as "12 s wall time" or "120 GPU-hours"; "-" if they are unknown."""
        if self.unit is None or self.hours is None:
            return MISSING
        if self.unit == CPU or self.hours < 0.1:
            return f"{time_text(3600 * self.hours)} {'wall time' if self.unit == CPU else 'GPU'}"
        return f"{number_text(self.hours, 3)} GPU-hours"


UNKNOWN = Cost(None, None, None, "not known")
DONE_BEFORE = Cost(CPU, 0.0, CPU, "done before, is taken up again")


class CostModel:
    """The costs of a plan's jobs. `card`, `gpus`: GPU model and number of GPUs that replace those of the profile."""

    def __init__(self, plan: Plan, card: str | None = None, gpus: int | None = None) -> None:
        """Raise ConfigError if the hardware file lacks `card`."""
        self._plan, self._card, self._gpus = plan, card, gpus
        self._name = None if card is None else self.hardware.card(card).name

    @cached_property
    def hardware(self) -> Hardware:
        return read_hardware()

    @cached_property
    def site(self) -> Site:
        """The hardware classes and rules of the last driver's profile if it has any, else of the cluster profile."""
        return read_site(self._plan.profile, PROJECT_DIR)

    def of(self, node: Node) -> Cost:
        """Return the cost of the whole job, or DONE_BEFORE (0 hours) if the wanted result exists with all its files."""
        work = work_directory(self._plan.run_dir(node), self._plan.identities[node.key].fingerprint)
        if is_done(work) and not (work / FREED).exists():
            return DONE_BEFORE
        return self.whole(node)

    def whole(self, node: Node) -> Cost:
        """Return the cost of the whole job from its earlier run or another seed, else (for training) from its FLOPs.

        If the user chose a GPU, only earlier runs on this GPU count. Return UNKNOWN if there is no basis.
        """
        for words, manifest, cost in self._earlier(node):
            is_wanted = self._name is None or self._name.startswith(cost.device or "-")
            if is_wanted and cost.hours is not None:
                return _scaled(cost, manifest.config, node.config, words)
        return self._modelled(node) if node.stage == "train" else UNKNOWN

    @property
    def training_hours(self) -> float:
        """The sum of the known hours of all training jobs, finished or not: GPU-hours, or wall time on CPUs."""
        return sum(self.whole(node).hours or 0 for node in self._plan.nodes.values() if node.stage == "train")

    def recorded(self, node: Node) -> Cost:
        """Return the recorded cost of the node's result, even of a stale one; UNKNOWN without a result or a record."""
        return self._recorded[node.key][1] if node.key in self._recorded else UNKNOWN

    def work(self, node: Node) -> Work:
        """Return the computation and disk space of a training job."""
        model, phase = node.config["model"], node.config["phase"]
        data = self._plan.nodes[node.upstream["data"]].config
        length, unique, f_evaluations = data.get("length"), data.get("tokens"), self._f_evaluations(node)
        if length is None:  # a data set of a plugin
            return Work(None, f_evaluations)
        tokens = _sequences(node.config) * int(length)
        try:
            flops = tokens * training_flops(model, length, phase["solver"], f_evaluations)
            # The last training state, the states from which branches start, and the model remain on disk.
            per_parameter = STATE_BYTES * (1 + len(phase.get("keep", []))) + MODEL_BYTES
            return Work(tokens, f_evaluations, flops, per_parameter * num_parameters(model), unique)
        except UncountedModel:
            return Work(tokens, f_evaluations, unique_tokens=unique)

    def place(self, node: Node) -> tuple[str, int]:
        """Return the name and number of the GPUs of a training job; ("cpu", 1) if its rule has no GPUs.

        The user's choice of GPU and number has precedence. The number is reduced until it divides the batch size.
        """
        run, _, phase = node.name.partition("/")
        card, gpus = self.site.place(node.config["task"], run, phase)
        sizes = range(1, (self._gpus or gpus) + 1)
        return self._card or card, max(size for size in sizes if node.config["batch_size"] % size == 0)

    def _modelled(self, node: Node) -> Cost:
        config, flops, (card, gpus) = node.config, self.work(node).flops, self.place(node)
        solver, precision = config["phase"]["solver"], config["precision"]
        if card in self.hardware.cards and precision not in self.hardware.cards[card].peak_tflops:
            reason = f"{card} does not run {precision}; for another GPU, add --hardware NAME to `implicit-llm estimate`"
            return replace(UNKNOWN, basis=reason)
        speed = None if flops is None else self.hardware.speed(config["model"], solver, precision, card)
        if flops is None or speed is None:
            return UNKNOWN
        flops_per_s, basis = speed
        share = self.hardware.scaling_efficiency if gpus > 1 else 1.0
        return Cost("gpu", flops / flops_per_s / share / 3600, card, basis)

    def _f_evaluations(self, node: Node) -> float:
        """Return the f-evaluations per token in an earlier run with the same solver, or else their upper bound."""
        phase = node.config["phase"]
        for _, manifest, _ in self._earlier(node):
            value = manifest.summary.get("metrics", {}).get("f_evaluations")
            if value is not None and manifest.config["phase"]["solver"] == phase["solver"]:
                return float(value)
        return _max_evaluations(phase)

    def _earlier(self, node: Node) -> Iterator[tuple[str, Manifest, Cost]]:
        """Yield basis, manifest and cost of the job's own result, then of the first seed of its run with a result."""
        for key, words in ((node.key, "as last time"), (node.seedless_key, "as another seed")):
            if key in self._recorded:
                yield words, *self._recorded[key]

    @cached_property
    def _recorded(self) -> dict[str, tuple[Manifest, Cost]]:
        """The manifest and cost of finished jobs, also of stale ones, by key and by key without the seed."""
        found: dict[str, tuple[Manifest, Cost]] = {}
        for key, node in self._plan.nodes.items():
            manifest = self._plan.statuses[key].recorded
            if manifest is not None:
                found[key] = manifest, recorded_cost(self._plan.run_dir(node), manifest.fingerprint)
                found.setdefault(node.seedless_key, found[key])
        return found


def total_text(costs: Iterable[Cost]) -> str:
    """Return a text with the total for GPUs, the total for CPUs, and the number of jobs whose cost is unknown."""
    costs = list(costs)
    sums = {unit: _total(cost.hours for cost in costs if cost.unit == unit) for unit in get_args(Unit)}
    parts = [Cost(unit, hours, None, "").text for unit, hours in sums.items() if hours is not None]
    unknown = sum(cost.hours is None for cost in costs)
    return " and ".join([*parts, *([f"{unknown:,} of unknown cost"] if unknown else [])]) or "nothing"


def recorded_cost(run_dir: Path, fingerprint: str) -> Cost:
    """Return the recorded cost of all attempts of a finished job together, or UNKNOWN without a record."""
    values = read_object(work_directory(run_dir, fingerprint) / PROVENANCE)
    try:
        hours, device = sum(attempt["busy_s"] for attempt in values["attempts"]) / 3600, values["device"]
        if device == CPU:
            return Cost(CPU, hours, CPU, "recorded")
        return Cost("gpu", hours * values["processes"], device, "recorded")
    except (ValueError, KeyError, TypeError):
        return UNKNOWN


def _max_evaluations(phase: Mapping[str, Any]) -> int:
    return max_evaluations(phase["solver"], passes_states=phase.get("state_passing") is not None)


def _scaled(cost: Cost, old: Mapping[str, Any], new: Mapping[str, Any], words: str) -> Cost:
    """Return the cost scaled to the new number of training sequences; its basis mentions whether settings changed."""
    if canonical_json({**old, "seed": 0}) == canonical_json({**new, "seed": 0}):
        return replace(cost, basis=words)
    factor = _sequences(new) / _sequences(old) if "phase" in new and "phase" in old else 1.0
    scaled = f" x {factor:.3g}" if factor != 1 else ""
    return replace(cost, hours=(cost.hours or 0.0) * factor, basis=f"{words}{scaled}, with other settings")


def _sequences(config: Mapping[str, Any]) -> int:
    """Return the number of sequences in all batches of a training job."""
    return int((config["phase"]["end_step"] - config["phase"]["start_step"]) * config["batch_size"])


NUMBERS = ("seeds", "tokens", "f-evals", "FLOPs", "hours", "on", "disk GB")


@dataclass(frozen=True)
class JobEstimate:
    """The estimate of a training job.

    `name`: the same for all seeds. `is_bound`: whether the f-evaluations are the solver's maximum, so that the job
    can take fewer.
    """

    key: str
    name: str
    work: Work
    cost: Cost
    gpus: int
    card: str
    is_bound: bool


def training_estimates(plan: Plan, costs: CostModel, keys: Collection[str] | None = None) -> list[JobEstimate]:
    """Return the estimates of the training jobs among `keys`, or of all training jobs, in the order of the plan."""
    found = []
    for node in plan.nodes.values():
        if node.stage == "train" and (keys is None or node.key in keys):
            work, phase, (card, gpus) = costs.work(node), node.config["phase"], costs.place(node)
            is_fixed = phase["solver"] is None or phase["solver"].get("mode") == "unrolled"
            is_bound = not is_fixed and work.f_evaluations == _max_evaluations(phase)
            name = node.seedless_key.removeprefix("train/")
            found.append(JobEstimate(node.key, name, work, costs.whole(node), gpus, card, is_bound))
    return found


def training_table(jobs: list[JobEstimate]) -> Table:
    """Return a table with one row for each phase of a run, in which all seeds are summed, and a row of totals."""
    rows = [
        [name, *_cells([job for job in jobs if job.name == name])] for name in dict.fromkeys(job.name for job in jobs)
    ]
    table = plain_table("run", *NUMBERS, rows=rows, whole=("run", *NUMBERS), right=NUMBERS)
    sums = _sums(jobs)
    table.add_row("all runs", "", sums["tokens"], "", sums["flops"], sums["hours"], "", sums["disk"], style="bold")
    return table


def notes(jobs: list[JobEstimate], costs: CostModel) -> Iterator[str]:
    """Yield lines that explain the columns, the sources and the assumptions of the numbers."""
    yield "hours: GPU-hours, or hours of wall time of a job that ran on a CPU. -: not known before the job's first run."
    for basis in sorted({job.cost.basis for job in jobs} - {UNKNOWN.basis}):
        yield f"       {basis}"
    for card in sorted({job.card for job in jobs} - {"cpu", *costs.hardware.cards}):
        yield f"       {card} is not in {HARDWARE_FILE}; add it there, or set `card` of the class in {CLUSTER_PROFILE}."
    if any(job.cost.is_assumed for job in jobs):
        yield f"       ?: assumed in {HARDWARE_FILE.name}. Run one seed first: its time then counts for the others."
    yield "f-evals: evaluations of the layer stack for a token, those with gradient included."
    if any(job.is_bound for job in jobs):
        yield "       ≤: the most that the solver may take; finished phases replace it by what they took."
    if any(job.gpus > 1 for job in jobs):
        yield f"several GPUs: {costs.hardware.scaling_efficiency:.0%} of the throughput each, assumed."


def as_json(jobs: list[JobEstimate], costs: CostModel) -> dict[str, Any]:
    """Return the estimate of each job, the totals, and the notes."""
    return {
        "training": jobs,
        "totals": {
            "flops": _total(job.work.flops for job in jobs),
            "gpu_hours": _total(job.cost.hours for job in jobs if job.cost.unit == "gpu"),
            "disk_bytes": _total(job.work.disk_bytes for job in jobs),
        },
        "notes": list(notes(jobs, costs)),
    }


def _cells(jobs: list[JobEstimate]) -> list[str]:
    """Return the cells of a row for jobs that differ only in their seed; tokens, FLOPs, hours and disk are sums."""
    job, sums = jobs[0], _sums(jobs)
    unique = job.work.unique_tokens
    passes = f" (each {job.work.tokens / unique:.3g} x {_short(unique)})" if unique and job.work.tokens else ""
    place = f"{job.gpus} x {job.card}" if job.cost.device in (None, job.card) else str(job.cost.device)
    return [
        str(len(jobs)),
        sums["tokens"] + passes,
        f"{'≤' if any(job.is_bound for job in jobs) else ''}{max(job.work.f_evaluations for job in jobs):.1f}",
        sums["flops"],
        sums["hours"] + ("?" if any(job.cost.is_assumed for job in jobs) else ""),
        MISSING if job.cost.hours is None else place,
        sums["disk"],
    ]


def _sums(jobs: list[JobEstimate]) -> dict[str, str]:
    disk, tokens = _total(job.work.disk_bytes for job in jobs), _total(job.work.tokens for job in jobs)
    return {
        "tokens": MISSING if tokens is None else _short(tokens),
        "flops": number_text(_total(job.work.flops for job in jobs), 3),
        "hours": number_text(_total(job.cost.hours for job in jobs), 3),
        "disk": number_text(None if disk is None else disk / 1e9, 2),
    }


def _short(count: float) -> str:
    """Return a short text of a count, such as 207B for 207e9."""
    unit, size = next(((unit, size) for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if count >= size), ("", 1))
    return f"{count / size:.3g}{unit}"


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known numbers, or None if all are unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
