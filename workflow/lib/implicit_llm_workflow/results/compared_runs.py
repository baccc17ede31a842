"""What `compare` compares: results by name or folder, with their identities, journals and evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS, WORK, work_directory
from implicit_llm_workflow.results.job_look import LOG
from implicit_llm_workflow.results.journals import JOURNAL, Point, read_points
from implicit_llm_workflow.results.lineage import Ancestor, NoLineage, Shelf, read_run, root_of
from implicit_llm_workflow.results.run_names import NotComparable, find_model

if TYPE_CHECKING:
    from implicit_llm_workflow.planning.plan import Plan

START = "start"


class Results:
    """All results of one experiment, below `root`, by fingerprint, also those that were only asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._shelf = Shelf(root)

    def identity(self, fingerprint: str, near: Path) -> Identity | None:
        """None where nothing tells what it was. Of equal results of several runs that of the run of `near`."""
        try:
            found = self._beside(fingerprint, near) or self._shelf.find(fingerprint)
        except NoLineage:
            found = None
        if found is not None:
            stage, _, name = found.key.partition("/")
            return Identity(stage, name or stage, found.config, found.code, found.upstream)
        path = self._asked.get(fingerprint[:FINGERPRINT_DIGITS])
        return None if path is None else read_identity(path)

    @staticmethod
    def _beside(fingerprint: str, run_dir: Path) -> Ancestor | None:
        for path in run_dir.parent.glob(f"*/{WORK}/{fingerprint[:FINGERPRINT_DIGITS]}/{MANIFEST}"):
            found = read_run(path.parents[2], path)
            if found.fingerprint == fingerprint:
                return found
        return None

    @cached_property
    def _asked(self) -> dict[str, Path]:
        return {path.stem: path for path in (self.root / ".identities").rglob("*.json")}


@dataclass(frozen=True)
class Subject:
    """One result: a phase of a run, or an imported checkpoint. `recorded`: None while it is not finished."""

    run_dir: Path
    identity: Identity
    recorded: Manifest | None
    results: Results

    @property
    def key(self) -> str:
        return f"{self.identity.stage}/{self.identity.name}"

    @property
    def seed(self) -> Any:
        return self.identity.config.get("seed")

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

    def chain(self) -> list[Identity]:
        """The phases that it goes on from and itself, the first one first, as far as they are known."""
        chain = [self.identity]
        while (start := chain[0].upstream.get(START)) is not None:
            before = self.results.identity(start, self.run_dir)
            if before is None:
                break
            chain.insert(0, before)
        return chain

    def curve(self) -> list[Point]:
        """The points of the whole chain."""
        found: list[Point] = []
        for identity in self.chain()[:-1]:
            run_dir = self.results.root / identity.stage / identity.name
            found += read_points(work_directory(run_dir, identity.fingerprint) / JOURNAL)
        return [*found, *self.points]

    def evaluations(self) -> Iterator[tuple[str, Manifest]]:
        """Finished evaluations of this very result, by name."""
        _, _, name = self.key.partition("/")
        name = f"{name}/checkpoint" if self.identity.stage == "checkpoint" else name
        for path in sorted((self.results.root / "evaluate" / name).glob(f"*/{MANIFEST}")):
            try:
                recorded = Manifest.of_run(path.parent)
            except ManifestError:
                continue
            if recorded is not None and recorded.upstream.get("model") == self.identity.fingerprint:
                yield path.parent.name, recorded


@dataclass(frozen=True)
class Compared:
    """One column: a result, or those of all seeds of a run."""

    label: str
    members: tuple[Subject, ...]

    @property
    def first(self) -> Subject:
        return self.members[0]

    @property
    def seeds(self) -> list[Any]:
        return [member.seed for member in self.members]


def find_compared(names: Sequence[str], plan: Plan | None) -> list[Compared]:
    """A column for each name; without a plan all have to be folders. Raises: NotComparable."""
    shelves: dict[Path, Results] = {}
    found = [_find(name, plan, shelves) for name in names]
    for name, item in zip(names, found, strict=True):
        if not any(member.has_begun for member in item.members):
            command = f"; type: {plan.command_for([plan.nodes[item.first.key]])}" if plan is not None else ""
            raise NotComparable(f"{name}: has not begun yet{command}")
    labels = [item.label for item in found]
    return [
        Compared(item.first.run_dir.as_posix(), item.members) if labels.count(item.label) > 1 else item
        for item in found
    ]


def is_folder(name: str) -> bool:
    """Whether it names a run directory, or something in it, rather than a run of the experiment."""
    return ("/" in name or name in (".", "..")) and Path(name).exists()


def read_identity(path: Path) -> Identity | None:
    """What a job was asked for, from the file that it was given it in."""
    try:
        values = json.loads(path.read_bytes())
        return Identity(values["stage"], values["name"], values["config"], values["code"], values["upstream"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find(name: str, plan: Plan | None, shelves: dict[Path, Results]) -> Compared:
    if is_folder(name) or plan is None:
        subject = _from_folder(Path(name), shelves)
        return Compared(subject.key.partition("/")[2], (subject,))
    label, keys = find_model(name, plan)
    results = shelves.setdefault(plan.root.absolute(), Results(plan.root.absolute()))
    return Compared(label, tuple(_of_plan(plan, key, results) for key in keys))


def _of_plan(plan: Plan, key: str, results: Results) -> Subject:
    """What is there; what is wanted where that has begun, or nothing is there."""
    run_dir, wanted = results.root / key, plan.identities[key]
    try:
        recorded = Manifest.of_run(run_dir)
    except ManifestError:
        recorded = None
    if recorded is None:
        return Subject(run_dir, wanted, None, results)
    identity = Identity(wanted.stage, wanted.name, recorded.config, recorded.code, recorded.upstream)
    return Subject(run_dir, identity, recorded, results)


def _from_folder(path: Path, shelves: dict[Path, Results]) -> Subject:
    """The run whose folder it is, or lies in. Raises: NotComparable."""
    for folder in [path.absolute(), *path.absolute().parents]:
        if not (folder / MANIFEST).is_file() and not (folder / WORK).is_dir():
            continue
        identity, recorded = _identity_in(folder)
        if identity is None:
            break
        root = root_of(folder, f"{identity.stage}/{identity.name}")
        return Subject(folder, identity, recorded, shelves.setdefault(root, Results(root)))
    raise NotComparable(f"{path}: is no run directory; give one, such as results/demo/train/a5-implicit-s1/free")


def _identity_in(folder: Path) -> tuple[Identity | None, Manifest | None]:
    """Of the result that is there, or else of the one that was begun last."""
    try:
        recorded = Manifest.of_run(folder)
        if recorded is not None:
            identity = Identity(recorded.stage, recorded.name, recorded.config, recorded.code, recorded.upstream)
            return identity, recorded
    except ManifestError as error:
        raise NotComparable(f"{folder / MANIFEST}: cannot be read ({error}); run the workflow to rebuild it") from error
    journals = sorted(folder.glob(f"{WORK}/*/{JOURNAL}"), key=lambda journal: journal.stat().st_mtime)
    for journal in reversed(journals):
        for base in folder.parents:
            path = base / ".identities" / folder.relative_to(base) / f"{journal.parent.name}.json"
            if path.is_file():
                return read_identity(path), None
    return None, None
