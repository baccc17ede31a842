"""All runs that a results directory holds, as MLflow has to be told of them: from manifests and journals alone."""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.journal import JournalError, read_records
from implicit_llm_contracts.runs.manifest import FILE_NAME, IDENTITY_KEYS, Manifest
from implicit_llm_contracts.runs.run_directory import JOURNAL, WORK, work_directory
from implicit_llm_jobs.tracking.tracked_run import TrackedInput, TrackedRun

# How the stage ended that wrote such an event last; one that was killed has written nothing.
_STATUS = {
    "stage_started": None,
    "stage_finished": None,  # the manifest is still to come
    "stage_failed": "FAILED",
    "stage_stopped": "KILLED",
    "stage_preempted": "SCHEDULED",
}


class KeptRuns:
    """The runs below a directory, those of former settings too."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def in_order(self, works: Iterable[Path] | None = None) -> Iterator[TrackedRun]:
        """The runs in these work directories, by default all, each after those that it reads.

        A directory that does not say whose it is has no run.
        """
        done: set[Path] = set()
        for work in self.works if works is None else works:
            yield from self._with_inputs(work, done)

    def run_in(self, work: Path) -> TrackedRun | None:
        """The run of a work directory; None when neither manifest nor journal names it."""
        manifest = Manifest.find(work / FILE_NAME)
        start = _start_of(work / JOURNAL)
        about = start.get("identity") if manifest is None else {key: getattr(manifest, key) for key in IDENTITY_KEYS}
        if not about:
            return None
        inputs = {role: self._input(given, work) for role, given in about.pop("upstream").items()}
        known = {role: given for role, given in inputs.items() if given is not None}
        return TrackedRun(work.parents[1], work, **about, inputs=known, commit=start.get("commit"))

    def _with_inputs(self, work: Path, done: set[Path]) -> Iterator[TrackedRun]:
        run = None if work in done else self.run_in(work)
        done.add(work)
        if run is not None:
            for given in run.inputs.values():
                yield from self._with_inputs(given.work, done)
            yield run

    def _input(self, fingerprint: str, work: Path) -> TrackedInput | None:
        """Of several runs that are called so, one of the same experiment."""
        found = self._by_name.get(work_directory(Path(), fingerprint).name, [])
        nearest = max(found, key=lambda other: len(os.path.commonpath([other, work])), default=None)
        return None if nearest is None else TrackedInput(nearest.parents[1], fingerprint)

    @cached_property
    def works(self) -> list[Path]:
        """Work directories with a journal."""
        found: list[Path] = []
        for folder, names, _ in os.walk(self._root):
            if WORK in names:
                names.remove(WORK)
                found.extend(path.parent for path in Path(folder, WORK).glob(f"*/{JOURNAL}"))
        return sorted(found)

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for work in self.works:
            found.setdefault(work.name, []).append(work)
        return found


def status_of(run: TrackedRun) -> str | None:
    """How the run ended, as far as its files tell; None for one that may still be going on."""
    if Manifest.find(run.work / FILE_NAME) is not None:
        return "FINISHED"
    names = [record.get("name") for record in read_records(run.journal)]
    return next((_STATUS[name] for name in reversed(names) if name in _STATUS), None)


def _start_of(journal: Path) -> Mapping[str, Any]:
    """The last start that tells who it is; nothing of a damaged journal, which whoever brings it will name."""
    try:
        starts = [record for record in read_records(journal) if record.get("name") == "stage_started"]
    except JournalError:
        return {}
    return next((record for record in reversed(starts) if record.get("identity")), {})
