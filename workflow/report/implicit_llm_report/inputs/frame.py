"""Build the frame: one table of everything that was measured or is missing, with one row per number.

The columns are the `kind` of evaluation, `metric` and `value`; the conditions of the number (run, seed, phase and its
solver, model, data, length, mode, ...); the `role` of the input from which it comes; and the `reason` why a result is
missing. A missing number has a row of its own with the value None or NaN, never zero. A missing number of EXTRAS has a
row only if the record's `lacks` names it. A column that does not apply to a kind is None. Curves and other details are
in `detail`, a mapping by name. All columns have the type object: pandas then stores them as one array, and filters and
slices this array much faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from implicit_llm_contracts.config.evaluation import COSTS
from implicit_llm_contracts.config.flops import FAMILY_NAMES
from implicit_llm_contracts.hints import natural
from implicit_llm_contracts.plugins import BUILTIN, Kinds
from implicit_llm_report.config import VALIDATION_KINDS, ReportError
from implicit_llm_report.inputs.suites import AVERAGE
from implicit_llm_report.inputs.training_runs import TrainingRun, end_loss_of, share_bounded

Metrics = Mapping[str, Sequence[str]]  # by kind: the metrics of every record; an absent number counts as missing
# Further metrics, which only some records of a kind have. An absent number counts as missing only if `lacks` names it.
EXTRAS = (
    "logit_std", "against_f_evaluations_per_token", "iterations_per_token", "residual", "token_match_sequential",
)  # fmt: skip
ABOUT = (
    "role", "run", "seed", "phase", "solver", "is_implicit", "model_type", "num_layers", "num_parameters", "source",
    "train_length", "train_tokens", "train_flops", "setting", "task", "data", "data_set", "split", "protocol",
    "measure", "mode", "against", "eval_mode", "length", "group", "monoid", "hard_fraction", "train_hard_fraction",
    "sweep", "num_samples", "num_tokens", "eval_tol", "eval_max_iter", "eval_block_len", "eval_stop", "layer",
    "state_size",
    "is_hard", "is_checked", "num_documents", "num_fewshot", "task_version", "task_hash", "harness_version",
    "num_questions",
)  # fmt: skip
# The columns that `frame_of` and `_Derived` compute from a record and from other records.
DERIVED = (
    "record", "name", "label", "family", "phase_label", "is_headline", "swept", "base", "at", "extent", "length_factor",
    "is_harder", "iterations", "budget", "share_bounded", "models", "choice",
    "validation_loss",
)  # fmt: skip
COLUMNS = ("kind", *ABOUT, *DERIVED, "suite", "column", "reason", "metric", "value", "detail")

# Rows that agree in these columns belong to one sweep. In its rows with the smallest and the largest swept value, the
# column `extent` is "least" and "most".
SWEEP = ("kind", "run", "phase", "base", "data", "length", "swept")

# The evaluations of an explicit model that agree in these columns have the same numbers.
TEST = ("run", "phase", "seed", "data", "length", "task", "protocol", "measure", "against")

# The order of `eval_mode` in tables and legends: explicit models (None), the mode of the protocol (blockwise), others.
MODE_ORDER = (None, "blockwise", "sequential", "simultaneous", "as_trained")
LAST_TEN, COST, PERPLEXITY = "accuracy_last10", "f_evaluations_per_token", "perplexity"
FAMILIES = {**FAMILY_NAMES, "mamba2": "Mamba2", "llama": "Llama"}
LANGUAGE_KINDS = ("perplexity", "lm_eval")
RECURRENT = ("lstm",)  # families that process a sequence token by token, without a solver
# Models within this factor count as equally large, because implicit models have slightly more parameters.
SAME_SIZE = 1.3
METRIC_WORDS = {
    LAST_TEN: "accuracy on the last ten tokens",
    "accuracy_sequence": "share of sequences with every answer right",
    "accuracy_token": "accuracy over all tokens",
    COST: "f-evaluations per token",
    "serial_steps": "evaluations of the layer stack that wait for one another, for each token",
    "unconverged_share": "share of unconverged tokens",
    "token_match_sequential": "share of tokens predicted as in sequential mode",
    "above_chance": "last-ten accuracy above the best constant answer",
    "layers": "fewest layers that solve a length",
    "accuracy": "accuracy at all questions",
    PERPLEXITY: "perplexity",
    "loss": "loss in nats per token",
    "acc": "accuracy",
    "acc_norm": "accuracy, normalised by length",
    AVERAGE: "average accuracy",
    "token_agreement": "share of tokens with the same most likely next token in both modes",
    "settled_early": "share of the predictions that are final after a quarter of the iterations",
    "off_diagonal_share": "share of the Jacobian off its diagonal, of the Frobenius norm",
    "relative_difference": "relative difference of the paper's formula and autograd",
    "f_radius": "spectral radius of ∂f/∂z at the fixed point",
}

# The metrics that are shares, which pages show in percent.
SHARES = frozenset({
    LAST_TEN, "accuracy_sequence", "accuracy_token", "unconverged_share", "token_match_sequential", "above_chance",
    "chance_last10", "accuracy", "acc", "acc_norm", AVERAGE, "token_agreement", "settled_early", "off_diagonal_share",
})  # fmt: skip


def metrics_of(kinds: Kinds) -> Metrics:
    """Return the metrics by kind of evaluation; evaluations on validation sets are kinds of their own."""
    kind_of = {name: name for name in kinds.evaluations} | {split: kind for kind, split in VALIDATION_KINDS.items()}
    return {name: kinds.evaluations[kind].metrics for name, kind in kind_of.items()}


def family_of(model_type: str | None) -> str:
    """Return the name of a model's family: an unknown type unchanged, and "model" for None."""
    return FAMILIES.get(model_type or "", model_type or "model")


def kind_of(model: Any) -> str:
    """Return "implicit" or "explicit" for a group of rows, a training run or a published number."""
    return "implicit" if model.is_implicit else "explicit"


def shares_of(hard: float | tuple[float, ...]) -> tuple[float, ...]:
    """Return the shares of hard tokens as a tuple; a data set with several shares mixes them in equal parts."""
    return hard if isinstance(hard, tuple) else (hard,)


def is_close(first: float | None, second: float | None, tolerance: float) -> bool:
    """Return whether two positive numbers differ by at most `tolerance` times the larger one; False for None or 0."""
    return bool(first and second and abs(first - second) <= tolerance * max(first, second))


def short_count(count: float) -> str:
    """Return a short text of a count, such as "131.6M", "1.32B" or "41.9k"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:g}"


def count_words(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 seed" or "2,048 sequences"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Spread:
    """The measured values of a number over seeds, records or pairs of seeds; `num_missing` of these have no value."""

    values: tuple[float, ...] = ()
    num_missing: int = 0

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def low(self) -> float | None:
        return min(self.values, default=None)

    @property
    def high(self) -> float | None:
        return max(self.values, default=None)

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        found = list(values)
        return cls(tuple(value for value in found if value is not None), found.count(None))


def seeds_words(spread: Spread) -> str:
    """Return the number of seeds as text, such as "3 seeds", and how many of them have no number."""
    words = count_words(len(spread.values) + spread.num_missing, "seed")
    return words + (f", {spread.num_missing} missing" if spread.num_missing else "")


def mode_rank(record: Mapping[str, Any]) -> tuple[bool, int, bool, str]:
    """Return a sorting key of a record's mode.

    Modes with the stopping criterion of the released code ("batch") come after all others. Both groups are sorted by
    MODE_ORDER. Within one `eval_mode`, modes with the stopping criterion "token" come first; then names decide.
    """
    stop = record.get("eval_stop")
    return (stop == "batch", MODE_ORDER.index(record.get("eval_mode")), stop != "token", record.get("mode") or "")


def frame_of(
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    reasons: Mapping[str, str],
    training: Sequence[TrainingRun] = (),
    names: Mapping[str, str] | None = None,
    kinds: Kinds = BUILTIN,
) -> pd.DataFrame:
    """Return the frame of all records, sorted by kind, test and model.

    Implicit models come before explicit ones, phases with fewer training FLOPs before others, and headline modes
    (`is_headline` in `_Derived`) before other modes. `records`: the records by kind. `reasons`: by role, why a result
    is missing. `training`: the runs from which some columns are computed. `names`: by run, the name that readers see.
    """
    language = [record for kind in LANGUAGE_KINDS for record in records.get(kind, ())]
    models = {str(r["run"]): (family_of(r.get("model_type")), r.get("num_parameters")) for r in language}
    titles, rows, metrics = model_titles(models), [], metrics_of(kinds)
    validated = _validation_losses(records.get(VALIDATION_KINDS[PERPLEXITY], ()))
    for kind, found in records.items():
        mine = _without_repeats(found)
        derived = _Derived(kind, [record for record in mine if not record.get("sweep")], training, names or {})
        for number, record in enumerate(mine):
            about = {
                **dict.fromkeys(COLUMNS),
                **{key: _hashable(record.get(key)) for key in ABOUT},
                "kind": kind,
                "record": number,
                **derived.of(record),
                "models": titles.get(str(record.get("run"))),
                "validation_loss": validated.get(_of_training(record)),
                "reason": reasons.get(str(record.get("role"))),
                "detail": {key: value for key, value in record.items() if isinstance(value, list | dict)},
            }
            for task, metric, value in _numbers(record, kind, metrics.get(kind, ())):
                rows.append(about | {"metric": metric, "value": value} | ({} if task is None else {"task": task}))
    frame = pd.DataFrame(sorted(rows, key=_order), columns=pd.Index(COLUMNS, dtype=object), dtype=object)
    swept = frame[frame["swept"].notna()].astype({"at": float})
    for extent, end in (("least", "min"), ("most", "max")):
        ends = swept.groupby(list(SWEEP), dropna=False)["at"].transform(end)
        frame.loc[swept.index[swept["at"] == ends], "extent"] = extent
    return frame


def _without_repeats(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out the record of an explicit model in a sweep if another record has the same test.

    Nothing is swept in an explicit model, so both records have the same numbers.
    """
    found, tests = [], set()
    for record in sorted(records, key=lambda record: bool(record.get("sweep"))):
        sweep, test = record.get("sweep"), tuple(record.get(key) for key in TEST)
        if not sweep or sweep["key"] is not None or test not in tests:
            found.append(record)
            tests.add(test)
    return found


def model_titles(models: Mapping[str, tuple[str, int | None]]) -> dict[str, str]:
    """Return a title for each run, such as "Mamba2, 214k–226k": its family, and the range of sizes close to its own.

    `models`: by run, the family and the number of parameters.
    """
    found: list[list[str]] = []
    for run in sorted(models, key=lambda run: (models[run][0], models[run][1] or 0, run)):
        (family, size), first = models[run], models[found[-1][0]] if found else ("", None)
        if first[0] != family or (size or 0) > SAME_SIZE * (first[1] or 0):
            found.append([])
        found[-1].append(run)
    titles: dict[str, str] = {}
    for runs in found:
        ends = [size for run in (runs[0], runs[-1]) if (size := models[run][1])]
        words = dict.fromkeys(short_count(float(f"{size:.3g}")) for size in ends)
        titles |= dict.fromkeys(runs, ", ".join(filter(None, (models[runs[0]][0], "–".join(words)))))
    return titles


def _numbers(
    record: Mapping[str, Any], kind: str, metrics: Sequence[str]
) -> Iterator[tuple[str | None, str, float | None]]:
    """Yield task, metric and value of each number of a record; the task is None for a number of the whole record."""
    numbers = {
        **{name: record.get(name) for name in metrics},
        **(record.get("metrics") or {}),  # an lm_eval record: the numbers of its task
        **{name: record.get(name) for name in COSTS},
        **dict.fromkeys(record.get("lacks", ())),
        **{name: record[name] for name in EXTRAS if record.get(name) is not None},
    }
    if kind == "word_problem":
        last_ten, chance = record.get(LAST_TEN), record.get("chance_last10")
        numbers["above_chance"] = None if last_ten is None or chance is None else last_ten - chance
        numbers["serial_steps"] = serial_steps(record)
    if record.get("measure") == "convergence":
        curve = record.get("convergence") or {"f_evaluations": [0], "agreement_with_last": [None]}
        early = [count <= curve["f_evaluations"][-1] / 4 for count in curve["f_evaluations"]]
        numbers["settled_early"] = curve["agreement_with_last"][sum(early) - 1] if any(early) else None
    yield from ((None, metric, value) for metric, value in numbers.items())
    for metric in metrics:
        yield from ((task, metric, value) for task, value in (record.get(f"{metric}_by_task") or {}).items())


def serial_steps(record: Mapping[str, Any]) -> float | None:
    """Return the number of f-evaluations per token that must run one after another; None if the cost is unknown.

    For a recurrent network and in sequential mode, these are all f-evaluations.
    """
    work, length, mode = record.get(COST), record["length"], record.get("eval_mode")
    if work is None or family_of(record.get("model_type")) in RECURRENT or mode == "sequential":
        return work
    blocks = -(-length // (record.get("eval_block_len") or length)) if mode == "blockwise" else 1
    return work * blocks / length


class _Derived:
    """A calculator of the columns that depend on several records; `records`: all of one kind, except those of sweeps.

    `name`: the name of the run that readers see, and its phase if several phases of the run have results of this kind.
    `label`: equal to `name` if `names` has the run. The label of another run is "explicit", or "implicit" with the
    phase that `name` has. `is_headline`: whether the mode represents the model in figures and claims. Of the modes with
    the most test sets, it is the first by `mode_rank`, and never a swept one. `budget`: "bounded" for those phases of
    a run that allow the fewest iterations, "free" for its other phases; None if all allow equally many. `choice`: a
    score of the run; of several competing runs, the one with the lowest score is chosen. The score is the training loss
    at the end for language models, and the error on the validation set for CatbAbI; other kinds have none. If all
    competing runs have a `validation_loss`, this loss decides instead. `swept`, `at`, `base`: the setting that a record
    sweeps, its value, and the mode without the sweep.
    """

    def __init__(
        self,
        kind: str,
        records: Sequence[Mapping[str, Any]],
        training: Sequence[TrainingRun],
        names: Mapping[str, str],
    ) -> None:
        self.kind, self.training, self.names = kind, training, names
        self.tests: defaultdict[tuple, defaultdict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
        self.ranks: dict[tuple, tuple] = {}
        self.phases: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        self.errors: dict[tuple, float] = {}
        for record in records:
            reading, mode = _reading(record), record.get("mode") or ""
            self.tests[reading][mode].add((record.get("data"), record.get("length")))
            self.ranks[reading, mode] = mode_rank(record)
            self.phases[str(record.get("run"))][record.get("phase")] = record.get("solver")
            if record.get("split") == "valid" and record.get("accuracy") is not None:
                self.errors[_validated(record)] = 1 - record["accuracy"]

    def of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        sweep, run = record.get("sweep"), str(record.get("run"))
        solver: Any = record.get("solver")
        length, trained, phase = record.get("length"), record.get("train_length"), record.get("phase")
        name, label = self._named(run, phase, solver)
        bounds = {one.iterations for one in self.phases[run].values() if one is not None}
        reading = _reading(record)
        tests = self.tests[reading]
        headline = min(tests, key=lambda mode: (-len(tests[mode]), self.ranks[reading, mode]), default=None)
        return {
            "name": name,
            "label": label if record.get("is_implicit") or run in self.names else "explicit",
            "family": family_of(record.get("model_type")),
            "phase_label": solver and solver.label,
            "is_headline": not sweep and record.get("mode") == headline,
            **({"swept": sweep["key"], "base": sweep["base"], "at": _number(sweep["value"])} if sweep else {}),
            "length_factor": length / trained if length and trained else None,
            "is_harder": _is_harder(record),
            "iterations": solver and solver.iterations,
            "budget": None if len(bounds) < 2 else "bounded" if solver.iterations == min(bounds) else "free",
            "share_bounded": share_bounded(run, phase, self.training),
            "choice": end_loss_of(run, phase, self.training) if self.kind in LANGUAGE_KINDS
            else self.errors.get(_validated(record)),
        }  # fmt: skip

    def _named(self, run: str, phase: Any, solver: Any) -> list[str]:
        labels = [one and one.label for one in self.phases[run].values()]
        is_unique = solver is not None and labels.count(solver.label) == 1
        words = (solver.label if is_unique else phase) if len(labels) > 1 else None
        return [" ".join(filter(None, (self.names.get(run, name), words))) for name in (run, "implicit")]


def _number(value: Any) -> float | None:
    """Return the value of a swept setting; None in the record of an explicit model, for which nothing is swept."""
    return None if value is None else float(value)


def _is_harder(record: Mapping[str, Any]) -> bool | None:
    """Return whether the test's largest share of hard tokens exceeds that of training; None if either is unknown."""
    hard, trained = (_hashable(record.get(key)) for key in ("hard_fraction", "train_hard_fraction"))
    return None if hard is None or trained is None else max(shares_of(hard)) > max(shares_of(trained))


def _validation_losses(records: Sequence[Mapping[str, Any]]) -> dict[tuple, float | None]:
    """Return the loss of each trained model on validation text, in its first mode at the shortest length."""
    plain = [record for record in records if not record.get("sweep")]
    first = sorted(plain, key=lambda record: (mode_rank(record), record.get("length") or 0))
    return {_of_training(record): record.get("loss") for record in reversed(first)}


def _of_training(record: Mapping[str, Any]) -> tuple:
    return record.get("run"), record.get("phase"), record.get("seed")


def _validated(record: Mapping[str, Any]) -> tuple:
    return tuple(record.get(key) for key in ("run", "phase", "seed", "data_set", "protocol", "mode"))


def _order(row: Mapping[str, Any]) -> tuple:
    test = (row["group"] or "", row["monoid"] or "", shares_of(row["hard_fraction"] or 0.0), natural(row["data"] or ""))
    model = (not row["is_implicit"], natural(row["run"] or ""), row["train_flops"] or 0.0, row["phase"] or "")
    reading = (not row["is_headline"], mode_rank(row), row["against"] != "sequential", row["length"] or 0)
    return (row["kind"], *test[:3], *model, *reading, test[3], row["seed"] or 0)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _reading(record: Mapping[str, Any]) -> tuple:
    """Return the key of the records that share one headline mode: their run, phase, and for CatbAbI the protocol."""
    return record.get("run"), record.get("phase"), record.get("protocol")


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that belong together, such as those of all seeds.

    Each column of the frame is an attribute, whose value is that of the first row.
    """

    rows: pd.DataFrame

    @cached_property
    def _first(self) -> dict[str, Any]:
        return dict(zip(self.rows.columns, self.rows.iloc[0], strict=True))

    def __getattr__(self, column: str) -> Any:
        if column not in COLUMNS:
            raise AttributeError(column)
        return self._first[column]

    @cached_property
    def _by_seed(self) -> pd.DataFrame:
        return self.rows.sort_values("seed", kind="stable") if self.rows["seed"].nunique() > 1 else self.rows

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._by_seed["role"].drop_duplicates())

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(self.rows["metric"]))

    def spread(self, metric: str, over: str = "seed") -> Spread:
        """Return the values of a metric over the seeds, or over another column.

        A seed whose row has no number counts as missing. Raises: ReportError if a seed has several rows of the metric,
        because their mean has no meaning.
        """
        found = self._numbers(metric, over)
        if len({key for key, _ in found}) < len(found):
            raise ReportError(f"{self.role}: {metric} is in several records of one {over}, which have no mean")
        return Spread.of(value for _, value in found)

    def mean(self, column: str) -> float | None:
        """Return the mean of a column, such as training FLOPs, over the seeds; None if a seed has no value."""
        values = self.rows.drop_duplicates("seed")[column].tolist()
        return None if None in values else sum(values) / len(values)

    def by_seed(self, metric: str) -> dict[int | None, float | None]:
        """Return a value for each seed: the mean over its records that have a number, or None if none of them has."""
        values: defaultdict[int | None, list[float | None]] = defaultdict(list)
        for seed, value in self._numbers(metric, "seed"):
            values[seed].append(value)
        return {seed: Spread.of(mine).mean for seed, mine in values.items()}

    def cells(self, column: str) -> dict[Any, Group]:
        """Return a group for each value of a column, in the order of `in_order`; rows without a value are left out."""
        cells = {cell._first[column]: cell for cell in groups(self.rows[self.rows[column].notna()], (column,))}
        return {value: cells[value] for value in in_order(cells)}

    def details(self, name: str) -> list[Any]:
        """Return a detail, such as a curve, of each record that has it, in the order of the seeds."""
        return [detail[name] for detail in self._by_seed.drop_duplicates("record")["detail"] if detail.get(name)]

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        """The columns that `_numbers` uses, in the order of the seeds; lists are much faster to read than Series."""
        return {name: self._by_seed[name].tolist() for name in ("metric", "value", "seed", "record", "role")}

    def _numbers(self, metric: str, over: str) -> list[tuple[Any, float | None]]:
        """Return the value of `over` and the number for each row of the metric; NaN becomes None."""
        rows = zip(*(self._columns[column] for column in ("metric", over, "value")), strict=True)
        return [(key, None if value != value else value) for name, key, value in rows if name == metric]


def plain(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the rows of a kind of evaluation for models that were trained here, without sweeps."""
    return frame[(frame["kind"] == kind) & frame["sweep"].isna() & frame["source"].isna()]


def headlines(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in the mode that represents their model."""
    return rows[rows["is_headline"].astype(bool)]


def roles_of(found: Iterable[Group]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(role for group in found for role in group.roles))


def groups(rows: pd.DataFrame, by: Sequence[str]) -> list[Group]:
    """Return groups of the rows that agree in the columns `by`, in the order of their first rows; NaN equals None."""
    places: defaultdict[tuple, list[int]] = defaultdict(list)  # pandas' groupby takes ten times as long for few rows
    for place, key in enumerate(zip(*(rows[column] for column in by), strict=True)):
        places[tuple(None if part != part else part for part in key)].append(place)  # only NaN differs from itself
    return [Group(rows.iloc[mine]) for mine in places.values()]


def in_order(values: Iterable[Any]) -> list[Any]:
    """Return the values without duplicates: numbers by size, then texts in the order of `values`."""
    found = list(dict.fromkeys(values))
    numbers = sorted(value for value in found if not isinstance(value, str))
    return [*numbers, *(value for value in found if isinstance(value, str))]
