"""Format the table of verdicts from the entries of claims.json, with the paper's numbers, ours and the limitations.

The report, the pages of results and the README all use these rows, so that they cannot disagree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from implicit_llm_report.claims.claims import BY_SEED, FAILS, HOLDS, MISSING, NOT_RUN, UNDECIDED
from implicit_llm_report.inputs.frame import count_words, short_count

Entry = Mapping[str, Any]
FROM_NOTE = "†"
MARKS = f"{FROM_NOTE} from a reading note, not read in the paper itself."
RUN_OF_RELEASED = ", our one run of the released code"
IN_WORDS = {True: {HOLDS: "new", BY_SEED: "new, depends on the seed", FAILS: "new, does not hold"}}
LACKING = "not finished"  # the text for a claim that lacks a planned number
ORDER = (HOLDS, BY_SEED, UNDECIDED, FAILS, MISSING)
SEVERITY = (HOLDS, UNDECIDED, BY_SEED, MISSING, FAILS)  # from the best verdict to the worst
FEW_SAMPLES = 256  # below this number of test sequences, the short table shows the 95 % interval
PROJECT, OWN = "project", "this project"  # `origin` of new claims, and `where` of unpublished claims


@dataclass(frozen=True)
class Row:
    """A row of the table.

    claim: the short statement. where: the place in the paper. here: the mean, then the worst to the best seed. state:
    the verdict in claims.json. few: the 95 % interval, if there are few test sequences. bound: the bound of the claim.
    limits: limitations, which are the number of models, missing seeds, unequal test sets of a pair, how much smaller
    model and data are than the paper's, and the controls. tested: the runs. elsewhere: the numbers and verdicts of the
    other experiments that tested the claim. is_asked: whether the experiment can test the claim.
    """

    id: str
    claim: str
    where: str
    paper: str
    here: str
    interval: str
    verdict: str
    state: str
    tested: tuple[str, ...]
    few: tuple[str, ...]
    bound: tuple[str, ...]
    limits: tuple[str, ...]
    elsewhere: tuple[str, ...]
    is_new: bool
    is_headline: bool
    is_asked: bool

    @property
    def is_run(self) -> bool:
        return self.state != NOT_RUN

    @property
    def is_short(self) -> bool:
        """Whether the short tables have this row; they always have a claim that is not reproduced."""
        return self.is_headline or self.state == FAILS

    @property
    def essential(self) -> tuple[str, ...]:
        """The limitations for a short table, which include the bound if a seed missed it."""
        return (*(self.bound if self.state in (BY_SEED, FAILS) else ()), *self.limits)

    @property
    def evidence(self) -> tuple[str, ...]:
        """The tested runs, the bound and the limitations."""
        return (*self.tested, *self.bound, *self.limits)


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """Return a row for each claim: first those of the paper, then the new ones, each in the order of claims.yaml."""
    return sorted(map(_row, entries), key=lambda row: row.is_new)


def merged(experiments: Mapping[str, Iterable[Entry]]) -> list[Entry]:
    """Return one entry for each claim: that of the experiment with the worst verdict, and of equal verdicts the first.

    If the best model decides a claim, the entry with the best verdict counts instead. experiments: the entries of each
    experiment, by a name for its models. If several experiments ran a claim, the returned entry has two more keys:
    `models` is the name of its experiment, and `elsewhere` has the entries of the other experiments by name.
    """
    found: dict[str, dict[str, Entry]] = {}
    for name, entries in experiments.items():
        for entry in entries:
            found.setdefault(entry["id"], {})[name] = entry
    return [_decided(of_claim) for of_claim in found.values()]


def _decided(entries: dict[str, Entry]) -> Entry:
    run = {name: entry for name, entry in entries.items() if entry["verdict"] != NOT_RUN}
    if len(run) < 2:
        return next(iter((run or entries).values()))
    is_possibility = next(iter(run.values()))["is_best_of_them"]
    name = (min if is_possibility else max)(run, key=lambda name: SEVERITY.index(run[name]["verdict"]))
    return {**run.pop(name), "models": name, "elsewhere": run}


def counted(rows: Sequence[Row]) -> str:
    """Return a sentence with the number of tested claims of the paper and their verdicts."""
    mine = [row for row in rows if not row.is_new]
    tested = [row for row in mine if row.is_run]
    head = f"{len(tested)} of {len(mine)} claims of the paper were tested"
    return f"{head}: {_by_state(tested, {MISSING: LACKING})}." if tested else f"{head}."


def counted_new(rows: Iterable[Row]) -> str:
    """Return a text with the number of each verdict on the claims of this project."""
    words = {HOLDS: "confirmed", FAILS: "not confirmed", UNDECIDED: "undecided", MISSING: LACKING}
    return _by_state([row for row in rows if row.is_new], words)


def _by_state(rows: Sequence[Row], words: Mapping[str, str]) -> str:
    numbers = {state: sum(row.state == state for row in rows) for state in ORDER}
    plural = {BY_SEED: BY_SEED.replace("depends", "depend")}
    shown = {state: words.get(state, plural.get(state, state) if numbers[state] > 1 else state) for state in ORDER}
    return ", ".join(f"{number} {shown[state]}" for state, number in numbers.items() if number)


def markdown(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the full table for a page, with the limitations beside the verdict."""
    lines = (
        (row.claim, row.paper, row.here, row.interval, _verdict(row, (*row.bound, *row.limits, *row.elsewhere)))
        for row in rows
    )
    return table("claim | paper | here: mean (worst to best seed or pair) | 95 %, worst to best | verdict", lines)


def table(heads: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {heads} |", "|---" * len(heads.split(" | ")) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _verdict(row: Row, cut: Iterable[str]) -> str:
    return "; ".join((f"**{row.verdict}**", *cut))


def evidence(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table of the runs, seeds and sequences behind each verdict."""
    return table(
        "claim | evidence", ((row.claim, "; ".join((*row.tested, *row.limits, *row.elsewhere))) for row in rows)
    )


def outcomes(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table of the paper's claims, sorted by place, each with its number and verdict."""
    mine = sorted((row for row in rows if not row.is_new), key=lambda row: row.where)
    ends = (f"{row.here}, **{row.verdict}**" if row.is_run else row.here for row in mine)
    lines = ((row.where, row.claim, end) for row, end in zip(mine, ends, strict=True))
    return table("in the paper | claim | outcome", lines)


def short_markdown(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table of headline claims and claims that are not reproduced, with their limitations."""
    short = (row for row in rows if row.is_short)
    lines = ((row.claim, row.paper, row.here, _verdict(row, (*row.few, *row.essential))) for row in short)
    return table("claim | paper | here: mean (worst to best seed or pair) | verdict", lines)


def _row(entry: Entry) -> Row:
    state, is_new = entry["verdict"], entry["origin"] == PROJECT
    is_run = state != NOT_RUN
    lost = entry["num_missing"]
    lacking = (f"{lost} of {count_words(lost + entry['num_seeds'], 'seed')} missing",) if lost else ()
    limits = (*_of_several(entry), *lacking, *_unequal(entry), *_training(entry), *_controls(entry))
    return Row(
        id=entry["id"],
        claim=entry["short"] or entry["statement"].rstrip("."),
        where=entry["where"],
        paper=_paper(entry),
        here=_here(entry) if is_run else "not run",
        interval=_interval(entry),
        verdict=IN_WORDS.get(is_new, {}).get(state, LACKING if state == MISSING else state),
        state=state,
        tested=_tested(entry) if is_run else (),
        few=_few(entry) if is_run else (),
        bound=_bound(entry) if is_run else (),
        limits=limits if is_run else (),
        elsewhere=tuple(_elsewhere(name, other) for name, other in entry.get("elsewhere", {}).items()),
        is_new=is_new,
        is_headline=entry["is_headline"],
        is_asked=entry["is_asked"],
    )


def _paper(entry: Entry) -> str:
    mark = {"secondary": f" {FROM_NOTE}", "reference_run": RUN_OF_RELEASED}.get(entry["mark"] or "", "")
    stated, where = entry["published"], entry["where"]
    if entry["origin"] == PROJECT:
        return f"{stated}{mark}" if stated else "–" if where == OWN else where
    return f"{stated} ({where}){mark}" if stated else where


def _elsewhere(models: str, entry: Entry) -> str:
    new = {HOLDS: "holds", FAILS: "does not hold"} if entry["origin"] == PROJECT else {}
    verdict = ({MISSING: LACKING} | new).get(entry["verdict"], entry["verdict"])
    limits = (count_words(entry["num_seeds"], "seed"), *_training(entry), *_controls(entry))
    return f"{models}: {_here(entry)}, {verdict} ({', '.join(limits)})"


def _here(entry: Entry) -> str:
    measured, form = entry["measured"], entry["form"]
    if measured["mean"] is None:
        return LACKING
    ends = "" if entry["num_seeds"] < 2 else f" ({shown(entry['worst'], form)} to {shown(entry['best'], form)})"
    unit = f"{UNITS[form]} above chance" if entry["metric"] == "above_chance" else UNITS[form]
    models = f"{entry['models']}: " if "models" in entry else ""
    return f"{models}{shown(measured['mean'], form)}{unit}{ends}"


UNITS = {"percent": " %", "points": " points", "ratio": " times", "number": ""}


def shown(value: float, form: str) -> str:
    """Return a number in the format of the pages: one decimal for percent and points, else three significant digits."""
    text = f"{100 * value:.1f}" if form in ("percent", "points") else f"{value:#.3g}".removesuffix(".")
    return text.removeprefix("-") if text == "-0.0" else text.replace("-", "−")


def _interval(entry: Entry) -> str:
    return " to ".join(shown(end, "percent") for end in entry["bounds"] or ())


def _tested(entry: Entry) -> tuple[str, ...]:
    """Return the run, its seeds and test sequences, the range of the other runs, and the runs without a number."""
    number, samples = entry["num_seeds"], entry["num_samples"]
    others = [value for value in entry["others"].values() if value is not None]
    lacking = [name for name, value in entry["others"].items() if value is None]
    words = (
        f"{entry['run']}",
        count_words(number, "seed"),
        count_words(samples, "sequence") if samples else "",
        f"the others {_range(min(others), max(others), entry['form'])}" if others else "",
        f"not finished: {' and '.join(lacking)}" if lacking else "",
    )
    return tuple(filter(None, words))


def _of_several(entry: Entry) -> tuple[str, ...]:
    """Return how many recipes were measured, and whether the entry's is the best or the worst; empty for one recipe."""
    number = sum(value is not None for value in (entry["measured"]["mean"], *entry["others"].values()))
    is_one_of_several = number > 1 and entry["measured"]["mean"] is not None
    return (f"{'best' if entry['is_best_of_them'] else 'worst'} of {number} recipes",) if is_one_of_several else ()


def _range(low: float, high: float, form: str) -> str:
    return " to ".join(dict.fromkeys((shown(low, form), shown(high, form)))) + UNITS[form]


def _bound(entry: Entry) -> tuple[str, ...]:
    sign, bound = entry["condition"].split()
    return (f"needs {sign} {shown(float(bound), entry['form'])}{UNITS[entry['form']]}",)


def _few(entry: Entry) -> tuple[str, ...]:
    """Return the number of test sequences with the 95 % interval if there are fewer than FEW_SAMPLES sequences."""
    samples = entry["num_samples"]
    return (
        (f"{count_words(samples, 'sequence')} (95 %: {_interval(entry)})",) if samples and samples < FEW_SAMPLES else ()
    )


def _unequal(entry: Entry) -> tuple[str, ...]:
    """Return the numbers of test sequences of the two models of a pair if they differ."""
    sizes = entry["of_pair"]
    return (f"on {' and '.join(f'{size:,}' for size in sizes)} sequences",) if len({*sizes}) > 1 else ()


def _training(entry: Entry) -> tuple[str, ...]:
    """Return model size and training tokens if they are more than 10 % below the paper's; empty for our own claims."""
    found = []
    for key, (mine, full) in sorted(entry["full"].items()):
        if entry["origin"] == "paper" and mine and mine < 0.9 * full:
            size = f"{short_count(float(f'{mine:.3g}'))} of {short_count(full)} parameters"
            found.append({"num_parameters": size, "train_tokens": f"{100 * mine / full:.2g} % of planned tokens"}[key])
    return (", ".join(found),) if found else ()


def _controls(entry: Entry) -> tuple[str, ...]:
    """Return the range of each control and whether it also meets the bound, then the controls that were not run."""
    lacking = [control["name"] for control in entry["controls"] if control["mean"] is None]
    too = {True: " (holds too)", False: ""}
    words = [
        f"{one['name']} {_range(one['low'], one['high'], entry['form'])}"
        + too[one["verdict"] == entry["verdict"] == HOLDS]
        for one in entry["controls"]
        if one["mean"] is not None
    ]
    heads = (f"control{'s' * (len(words) > 1)}: ", f"control{'s' * (len(lacking) > 1)} not run: ")
    return tuple(head + ", ".join(names) for head, names in zip(heads, (words, lacking), strict=True) if names)
