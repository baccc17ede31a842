"""Numbers of a report that are not what their manifests say, or not what the report was planned with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.manifest import FILE_NAME as MANIFEST
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.run_directory import FINGERPRINT_DIGITS
from implicit_llm_report.registry import registry
from implicit_llm_workflow.planning.plan import LOCAL_PROFILE
from implicit_llm_workflow.planning.recorded import METRICS
from implicit_llm_workflow.results.verify import sha256_of

OF_TRAINING = "losses and solver health"


class StaleNumbers(UserError):
    """A report would show numbers that are not those that were asked for."""


@dataclass(frozen=True)
class StaleNumber:
    """`job` makes it, `numbers` says what it is, `why` what is wrong with it."""

    job: str
    manifest: Path
    numbers: str
    why: str

    def __str__(self) -> str:
        return f"{self.numbers} of {self.job}: {self.why}"


def number_words(job: str, kind: str | None) -> str:
    """What numbers of a report come from a job, and where they are shown; `kind` is that of an evaluation."""
    kind = kind if job.startswith("evaluate/") else "train"
    places = {"tables": registry().tables, "figures": registry().figures}
    shown = {place: [name for name, item in entries.items() if kind in item.kinds] for place, entries in places.items()}
    words = "; ".join(f"{place} {', '.join(names)}" for place, names in shown.items() if names)
    evaluated = EVALUATION_KINDS.get(kind or "")
    numbers = OF_TRAINING if kind == "train" else "results" if evaluated is None else evaluated.numbers
    return numbers + (f" ({words})" if words else "")


def stale_numbers(upstream: Mapping[str, str], directories: Mapping[str, Path]) -> list[StaleNumber]:
    """Every input whose manifest has not the wanted fingerprint (by role), or whose numbers are not its manifest's."""
    return [
        StaleNumber(job, directory / MANIFEST, number_words(job, kind), why)
        for role, directory in directories.items()
        for job, kind, why in _checked(role.replace(":", "/", 1), directory, upstream.get(role))
    ]


def changed_result(run_dir: Path) -> str | None:
    """How the metrics of a finished evaluation differ from its manifest; None where they do not, or there are none."""
    manifest = Manifest.find(run_dir / MANIFEST)
    return None if manifest is None else _changed(run_dir, manifest)


def stale_error(found: list[StaleNumber], experiment: str) -> StaleNumbers:
    """One error that names each number, its producer and the command."""
    listed = "; ".join(map(str, found))
    manifests = [item.manifest.as_posix() for item in found]
    remove, config = shlex.join(["rm", "-f", *manifests]), f"workflow/config/{experiment}.yaml"
    make = shlex.join(["snakemake", "--configfile", config, "--profile", LOCAL_PROFILE, *manifests])
    return StaleNumbers(
        f"{len(found)} stale number{'s' if len(found) > 1 else ''}: {listed}. Type `{remove} && {make}`, or "
        f"`implicit-llm report --config {experiment} --missing` for a report without them"
    )


def _checked(job: str, run_dir: Path, wanted: str | None) -> Iterator[tuple[str, str | None, str]]:
    manifest = Manifest.find(run_dir / MANIFEST)
    if manifest is None:
        yield job, None, f"{run_dir / MANIFEST} is not there or cannot be read"
        return
    kind, found = manifest.config.get("kind"), manifest.fingerprint
    if wanted is not None and found != wanted:
        digits = FINGERPRINT_DIGITS
        yield job, kind, f"its manifest carries fingerprint {found[:digits]}, wanted is {wanted[:digits]}"
    elif (changed := _changed(run_dir, manifest)) is not None:
        yield job, kind, changed


def _changed(run_dir: Path, manifest: Manifest) -> str | None:
    for record in manifest.files:
        if record.path.rpartition("/")[2] != METRICS:
            continue
        path = run_dir / record.path
        try:
            found = sha256_of(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if found != record.sha256:
            return f"{path} was changed: expected sha256 {record.sha256[:16]}, found {found[:16]}"
    return None
