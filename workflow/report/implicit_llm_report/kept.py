"""Keep what a report was made from, small enough for git, and make the report from it again with the code of today.

    python -m implicit_llm_report.kept results/h200 results/reference/h200          # keep
    python -m implicit_llm_report.kept results/reference/h200 page --again          # make the report from it, in page/

Kept are the report, and of its inputs and their data sets manifests, metrics, provenance and thinned journals.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import typer

from implicit_llm_contracts.runs.journal import Journal, Point, read
from implicit_llm_contracts.runs.manifest import FILE_NAME, Manifest
from implicit_llm_contracts.runs.stage_context import Input, StageContext
from implicit_llm_report import stage

FILES = ("metrics.json", "provenance.json")
MOST_POINTS = 300  # of each key of a journal


def inputs_of(results: Path) -> dict[str, Input]:
    """By role, the inputs of the report that lies in `results/report`. Raises: ManifestError."""
    roles = Manifest.read(results / "report" / FILE_NAME).identity["upstream"]
    folders = {role: results / role.replace(":", "/", 1) for role in roles}
    return {role: Input(folder.absolute(), Manifest.read(folder / FILE_NAME)) for role, folder in folders.items()}


def keep(results: Path, target: Path) -> None:
    """Copy what a finished report shows and reads. Raises: ManifestError."""
    results = results.absolute()
    shutil.copytree(results / "report", target / "report", ignore=shutil.ignore_patterns("work", "job.log", "*.tsv"))
    manifests = [given.dir / FILE_NAME for given in inputs_of(results).values()]
    manifests += results.glob(f"data/*/{FILE_NAME}")
    for path in manifests:
        given = Input(path.parent, Manifest.read(path))
        for file in (path, *(given.work / name for name in FILES)):
            if file.exists():
                (target / file.relative_to(results)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target / file.relative_to(results))
        if given.manifest.stage == "train":
            journal = Journal(target / given.journal.relative_to(results))
            for point in thinned(read(given.journal)):
                journal.metrics(point.step, point.values)
            journal.close()


def thinned(points: list[Point]) -> Iterator[Point]:
    """Of each key at most MOST_POINTS values, and the last: one that is measured rarely stays whole."""
    kept = {len(points) - 1}
    for key in {key for point in points for key in point.values}:
        places = [place for place, point in enumerate(points) if key in point.values]
        kept.update(places[:: math.ceil(len(places) / MOST_POINTS)])
    return (points[place] for place in sorted(kept) if place >= 0)


def make_again(kept: Path, target: Path) -> None:
    """The report of kept results, in `target/declared`. Raises: UserError."""
    manifest = Manifest.read(kept / "report" / FILE_NAME)
    context = StageContext(
        stage="report",
        name="report",
        fingerprint=manifest.fingerprint,
        config=dict(manifest.identity["config"]),
        inputs=inputs_of(kept),
        run_dir=target,
        work=target,
        journal=Journal(None),
        log=logging.getLogger(__name__),
        runtime={},
        is_main=True,
    )
    stage.run(context)


def main(results: Path, target: Path, again: bool = False) -> None:
    """Keep RESULTS in TARGET, or with --again make the report of kept RESULTS in TARGET."""
    (make_again if again else keep)(results, target)


if __name__ == "__main__":
    typer.run(main)
