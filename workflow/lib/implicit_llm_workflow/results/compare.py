"""Results side by side: in what their settings, code and inputs differ, and their numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from implicit_llm_contracts.hints import natural, nearest
from implicit_llm_contracts.runs.atomic import read_object
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.identity import Identity, canonical_json
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS, MLFLOW, PROVENANCE, work_directory
from implicit_llm_workflow.estimates.cost import recorded_cost
from implicit_llm_workflow.planning.code_record import changed_files, read_code_record
from implicit_llm_workflow.results.job_states import LOG, MODEL_STAGES, run_and_phase
from implicit_llm_workflow.results.journals import JOURNAL, Point, read_points
from implicit_llm_workflow.results.lineage import NoLineage, Result, ResultIndex, commit_text
from implicit_llm_workflow.results.text import MISSING, cost_text, number_text, plain_table

if TYPE_CHECKING:
    from implicit_llm_workflow.planning.plan import Plan

CODE = "code"
CODE_DIGITS = 12
SUMMARY, LAST = "at the end (means over the last 50 steps)", "last values in the journal"
FIRST = ("step", "loss", "accuracy_last10", "accuracy", "residual", "num_iter", "f_evaluations", "unconverged_share")
SWEPT = "@"  # in the mode of a number that a sweep gave
_DATA = "data"  # of a summary: settings, not numbers


class NotComparable(UserError):
    """A name means no run or several, or a folder is not one of a run."""


@dataclass(frozen=True)
class Subject:
    """One result: a phase of a run, or an imported checkpoint. `recorded`: None while it is not finished."""

    run_dir: Path
    identity: Identity
    recorded: Manifest | None
    index: ResultIndex

    @property
    def key(self) -> str:
        return f"{self.identity.stage}/{self.identity.name}"

    @property
    def work(self) -> Path:
        return work_directory(self.run_dir, self.identity.fingerprint)

    @cached_property
    def points(self) -> list[Point]:
        """Of its own journal."""
        return read_points(self.work / JOURNAL)

    @property
    def has_begun(self) -> bool:
        return self.recorded is not None or bool(self.points) or (self.run_dir / LOG).exists()

    def input(self, fingerprint: str) -> Identity | None:
        """The identity of an input, also of one that is not finished; None where it is not recorded."""
        with suppress(NoLineage):
            found = self.index.find(fingerprint)
            if found is not None:
                return found.identity
        name = f"{fingerprint[:FINGERPRINT_DIGITS]}.json"
        path = next((self.index.root / ".identities").rglob(name), None)
        return None if path is None else Identity.parse(path.read_text(encoding="utf-8"))

    def evaluations(self) -> Iterator[tuple[str, Manifest]]:
        """Finished evaluations of this very result, by name."""
        is_imported = self.identity.stage == "checkpoint"
        name = f"{self.identity.name}/checkpoint" if is_imported else self.identity.name
        for path in sorted((self.index.root / "evaluate" / name).glob(f"*/{MANIFEST}")):
            recorded = Manifest.find(path)
            if recorded is not None and recorded.upstream.get("model") == self.identity.fingerprint:
                yield path.parent.name, recorded


@dataclass(frozen=True)
class Column:
    """A result, or the results of all seeds of a run."""

    label: str
    members: tuple[Subject, ...]

    @property
    def first(self) -> Subject:
        return self.members[0]


@dataclass(frozen=True)
class DifferentSetting:
    """`where`: in the result itself (""), or in which inputs by role, such as "start.data"; `values`: a text for each
    column, those of several seeds together; `detail`: of code what changed, where that was recorded.
    """

    setting: str
    where: tuple[str, ...]
    values: tuple[str, ...]
    detail: str = ""

    @property
    def shown(self) -> str:
        """ "phase.solver.tol", or "data: group"; a difference that inputs share has one row."""
        first, *others = self.where
        name = f"{first}: {self.setting}" if first else self.setting
        return f"{name} (and of {', '.join(others)})" if others else name


@dataclass(frozen=True)
class NumberRow:
    """`values`: for each column the numbers of its members that have one."""

    section: str
    name: str
    values: tuple[tuple[float, ...], ...]

    def cells(self) -> list[str]:
        """The mean of each column, of several seeds also the lowest and the highest; of two columns also the change."""
        cells = [*map(_spread_text, self.values)]
        if len(cells) != 2 or not all(self.values):
            return [*cells, *([MISSING] if len(cells) == 2 else [])]
        before, after = map(statistics.fmean, self.values)
        return [*cells, "=" if after == before else f"{'+' if after > before else ''}{number_text(after - before, 3)}"]


@dataclass(frozen=True)
class Comparison:
    """What differs, the numbers, and by name the facts about how each column was made."""

    columns: tuple[Column, ...]
    differences: tuple[DifferentSetting, ...]
    num_equal: int
    numbers: tuple[NumberRow, ...]
    facts: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, columns: Sequence[Column]) -> Comparison:
        numbers = tuple(_number_rows(columns))
        return cls(tuple(columns), tuple(_differences(columns)), _num_equal(columns), numbers, _facts(columns))


def find_columns(names: Sequence[str], plan: Plan | None) -> list[Column]:
    """A column for each name; without a plan each must be a folder. Raises: NotComparable."""
    found = [_find(name, plan) for name in names]
    for name, item in zip(names, found, strict=True):
        if not any(member.has_begun for member in item.members):
            command = f"; type: {plan.command_for([plan.nodes[item.first.key]])}" if plan is not None else ""
            raise NotComparable(f"{name}: has not begun yet{command}")
    labels = [item.label for item in found]
    return [
        replace(item, label=item.first.run_dir.as_posix()) if labels.count(item.label) > 1 else item for item in found
    ]


def is_folder(name: str) -> bool:
    """Whether it names a run directory, or something in it, rather than a run of the experiment."""
    return ("/" in name or name in (".", "..")) and Path(name).exists()


def find_model(name: str, plan: Plan) -> tuple[str, list[str]]:
    """What a name means: its full form, and the keys of its jobs, several only if they differ in nothing but the seed.

    A name is a job, a run with its phase, a run (what came out of it), or one of these without the seed (all seeds).
    Raises: NotComparable if the experiment has no such run, or several.
    """
    names: dict[str, dict[str, list[str]]] = {}  # a name -> its full form -> keys
    models = [node for node in plan.nodes.values() if node.stage in MODEL_STAGES]
    for node in models:
        for key in dict.fromkeys((node.key, node.seedless_key)):
            run, phase = run_and_phase(key)
            is_last = (node.config.get("phase") or {}).get("end_step") == node.config.get("total_steps")
            for text in (key, f"{run}/{phase}", *([run] if is_last else [])):
                names.setdefault(text, {}).setdefault(f"{run}/{phase}", []).append(node.key)
    found = names.get(name.strip("/"), {})
    if len(found) == 1:
        return next(iter(found.items()))
    if found:
        raise NotComparable(f"{name}: means several runs; name one of {', '.join(found)}")
    listed = f"`implicit-llm runs --config {plan.experiment.source}` lists them"
    hint = nearest(name, [text for text in names if not text.startswith(MODEL_STAGES)], listed)
    raise NotComparable(f"{name}: experiment {plan.experiment.name} has no such run; {hint}")


def _find(name: str, plan: Plan | None) -> Column:
    if is_folder(name) or plan is None:
        subject = _from_folder(name)
        return Column(subject.key.partition("/")[2], (subject,))
    label, keys = find_model(name, plan)
    index = ResultIndex(plan.root.absolute())
    return Column(label, tuple(_of_plan(plan, key, index) for key in keys))


def _of_plan(plan: Plan, key: str, index: ResultIndex) -> Subject:
    """The result that is there, or else the wanted one."""
    recorded = Manifest.find(index.root / key / MANIFEST)
    wanted = plan.identities[key]
    identity = wanted if recorded is None else Identity(wanted.stage, wanted.name, **recorded.identity)
    return Subject(index.root / key, identity, recorded, index)


def _from_folder(name: str) -> Subject:
    """The finished result of this run directory, or of the one around it. Raises: NotComparable."""
    path = Path(name).absolute()
    manifest = next((folder / MANIFEST for folder in (path, *path.parents) if (folder / MANIFEST).is_file()), None)
    if manifest is None:
        raise NotComparable(
            f"{name}: is no run directory of a finished job; give one, such as results/demo/train/a5-implicit-s1/free"
        )
    try:
        result = Result.read(manifest)
    except NoLineage as error:
        raise NotComparable(f"{manifest}: cannot be read ({error}); run the workflow to rebuild it") from error
    return Subject(result.run_dir, result.identity, result.manifest, ResultIndex(result.root))


def _differences(columns: Sequence[Column]) -> list[DifferentSetting]:
    """What differs, and nothing that is equal; inputs only as far as they differ themselves."""
    members = [member for column in columns for member in column.members]
    found: dict[tuple[str, tuple[str, ...]], DifferentSetting] = {}
    seen: set[tuple[str, ...]] = set()

    def add(where: str, setting: str, texts: list[str], detail: str = "") -> None:
        """A row, if the texts, one for each member, are not all equal."""
        rest, values = iter(texts), []
        for column in columns:
            values.append(", ".join(dict.fromkeys(next(rest) for _ in column.members)))
        if len(set(texts)) == 1 or (setting == "seed" and len(set(values)) == 1):  # the seeds of a column are a fact
            return
        known = found.get((setting, tuple(values)))
        places = (where,) if known is None else (*known.where, where)
        found[setting, tuple(values)] = DifferentSetting(setting, places, tuple(values), detail)

    def walk(where: str, identities: Sequence[Identity]) -> None:
        """From the results to their inputs, those of all members at once."""
        fingerprints = tuple(identity.fingerprint for identity in identities)
        if len(set(fingerprints)) == 1 or fingerprints in seen:
            return
        seen.add(fingerprints)
        tables = [{"stage": identity.stage, **_settings(identity)} for identity in identities]
        for setting in _names(tables):
            add(where, setting, [table.get(setting, MISSING) for table in tables])
        if len({identity.stage for identity in identities}) == 1:
            codes = [identity.code[:CODE_DIGITS] for identity in identities]
            add(where, CODE, codes, _changed_code(members, identities))
        for role in dict.fromkeys(role for identity in identities for role in identity.upstream):
            add_input(where, role, [identity.upstream.get(role) for identity in identities])

    def add_input(where: str, role: str, fingerprints: list[str | None]) -> None:
        if len(set(fingerprints)) == 1:
            return
        pairs = list(zip(members, fingerprints, strict=True))
        inputs = [None if fingerprint is None else member.input(fingerprint) for member, fingerprint in pairs]
        if None not in inputs:
            walk(f"{where}.{role}" if where else role, [item for item in inputs if item is not None])
        else:
            add(where, f"input {role}", [*map(_input_text, inputs, fingerprints)])

    walk("", [member.identity for member in members])
    return list(found.values())


def _input_text(found: Identity | None, fingerprint: str | None) -> str:
    if fingerprint is None:
        return MISSING
    return f"not found ({fingerprint[:FINGERPRINT_DIGITS]})" if found is None else f"{found.stage}/{found.name}"


def _changed_code(members: Sequence[Subject], identities: Sequence[Identity]) -> str:
    """What differs between the code of the first result and the first other one, where both were recorded."""
    codes = list(dict.fromkeys(identity.code for identity in identities))[:2]
    roots = dict.fromkeys(member.index.root for member in members)
    records = [next(filter(None, (read_code_record(root, code) for root in roots)), None) for code in codes]
    known = [record for record in records if record is not None]
    return ", ".join(map(str, changed_files(*known))) if len(known) == 2 else "what changed is not recorded"


def _names(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings of any table; without "phase.solver" (null) if another one has "phase.solver.tol"."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [name for name in names if name not in {name.rpartition(".")[0] for name in names}]


def _num_equal(columns: Sequence[Column]) -> int:
    """How many settings of the results themselves are equal."""
    first, *others = [_settings(member.identity) for column in columns for member in column.members]
    return sum(all(name in other and other[name] == text for other in others) for name, text in first.items())


def _settings(identity: Identity) -> dict[str, str]:
    """The config as texts by dotted key."""

    def leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping):
            for key in sorted(value):
                yield from leaves(value[key], f"{path}.{key}")
        else:
            yield path.removeprefix("."), value if isinstance(value, str) else canonical_json(value)

    return dict(leaves(identity.config, ""))


def _number_rows(columns: Sequence[Column]) -> list[NumberRow]:
    """All numbers that any of the results has, section by section, those to look at first before the others."""
    tables = [[dict(_numbers(member)) for member in column.members] for column in columns]
    names = list(dict.fromkeys(name for column in tables for numbers in column for name in numbers))
    sections = sorted(dict.fromkeys(section for section, _ in names), key=lambda section: section == LAST)

    def order(item: tuple[str, str]) -> tuple[Any, ...]:
        section, name = item
        if section in (SUMMARY, LAST):
            return sections.index(section), FIRST.index(name) if name in FIRST else len(FIRST), name
        return sections.index(section), natural(name)  # L8 before L16

    return [
        NumberRow(*item, tuple(tuple(found[item] for found in column if item in found) for column in tables))
        for item in sorted(names, key=order)
    ]


def _numbers(member: Subject) -> Iterator[tuple[tuple[str, str], float]]:
    """Section, name and value."""

    def flat(section: str, value: Any, name: str = "") -> Iterator[tuple[tuple[str, str], float]]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from flat(section, item, f"{name} {key}".strip())
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (section, name.removeprefix("metrics ")), float(value)

    if member.recorded is not None:
        yield from flat(SUMMARY, {key: item for key, item in member.recorded.summary.items() if key != _DATA})
    for evaluation, recorded in member.evaluations():
        yield from flat(f"evaluation {evaluation}", recorded.summary)
    if member.points:
        yield from flat(LAST, {"step": member.points[-1].step, **member.points[-1].values})


def _facts(columns: Sequence[Column]) -> dict[str, tuple[str, ...]]:
    """When, where and at what cost each result was made: by name a text for each column."""
    found = [[_facts_of(member) for member in column.members] for column in columns]
    return {
        name: tuple("\n".join(dict.fromkeys(item[name] for item in members)) for members in found)
        for name in found[0][0]
    }


def _facts_of(member: Subject) -> dict[str, str]:
    provenance = read_object(member.work / PROVENANCE)
    seed = member.identity.config.get("seed")
    state, time = "finished" if member.recorded is not None else "not finished", ""
    with suppress(TypeError, ValueError):
        time = f"{datetime.fromisoformat(provenance.get('finished', '')):%Y-%m-%d %H:%M} UTC"
    return {
        "seed": str(MISSING if seed is None else seed),
        "fingerprint": member.identity.fingerprint[:FINGERPRINT_DIGITS],
        "state": f"{state} {time}".strip(),
        "took": cost_text(recorded_cost(member.run_dir, member.identity.fingerprint)),
        "device": str(provenance.get("device") or MISSING),
        "commit": commit_text(provenance) or MISSING,
        "MLflow run": str(read_object(member.work / MLFLOW).get("run_id") or MISSING),
    }


def _spread_text(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    spread = f" ({number_text(min(values))} to {number_text(max(values))})" if min(values) < max(values) else ""
    return number_text(statistics.fmean(values)) + spread


def view(comparison: Comparison) -> Iterator[RenderableType]:
    """Tables one after the other."""
    sizes = [len(column.members) for column in comparison.columns]
    pairs = zip(comparison.columns, sizes, strict=True)
    labels = [column.label if size == 1 else f"{column.label} ({size} seeds)" for column, size in pairs]
    yield _table("result", labels, [(name, *values) for name, values in comparison.facts.items()])
    yield Text()
    if comparison.differences:
        yield _table("what differs", labels, [(row.shown, *row.values) for row in comparison.differences])
        for row in comparison.differences:
            if row.detail:
                yield Text(f"  {row.shown}: {row.detail}", style="dim")
        yield Text(f"{comparison.num_equal} settings are equal", style="dim")
    else:
        yield Text("nothing differs: config, code and inputs are equal")
    numbers = [row for row in comparison.numbers if SWEPT not in row.name]
    for section, rows in groupby(numbers, lambda row: row.section):
        change = ["change"] if len(labels) == 2 else []
        yield Text()
        yield _table(section, [*labels, *change], [(row.name, *row.cells()) for row in rows], is_number=True)
    if swept := len(comparison.numbers) - len(numbers):
        yield Text()
        yield Text(f"{swept} numbers of sweeps are in --json", style="dim")


def _table(title: str, labels: Sequence[str], rows: Sequence[tuple[str, ...]], *, is_number: bool = False) -> Table:
    table = plain_table(title, *map(escape, labels), right=[*map(escape, labels)] if is_number else ())
    table.columns[0].min_width = 14
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Each column, what differs, and all numbers of all seeds."""
    return {
        "columns": [
            {
                "label": column.label,
                "members": [
                    {
                        "job": member.key,
                        "run_dir": member.run_dir.as_posix(),
                        "fingerprint": member.identity.fingerprint,
                        "seed": member.identity.config.get("seed"),
                        "is_finished": member.recorded is not None,
                    }
                    for member in column.members
                ],
            }
            for column in comparison.columns
        ],
        "differences": [asdict(row) for row in comparison.differences],
        "equal_settings": comparison.num_equal,
        "numbers": [asdict(row) for row in comparison.numbers],
        "facts": {name: list(values) for name, values in comparison.facts.items()},
    }
