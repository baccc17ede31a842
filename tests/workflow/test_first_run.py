"""A first run makes everything; a second one has nothing to do."""

from __future__ import annotations

import json

from tests.workflow.tiny_project import NOTHING, Project

ALL = {
    "data/s3-train",
    "data/s3-test-L8-h0.5",
    "data/s3-test-L16-h0.5",
    "train/implicit-s0/unrolled",
    "train/implicit-s0/free",
    "train/explicit-s0/explicit",
    "evaluate/implicit-s0/free/word-problem",
    "evaluate/explicit-s0/explicit/word-problem",
    "report",
}


def test_every_job_leaves_a_manifest_and_a_log(built: Project) -> None:
    for key in ALL:
        assert (built.results / key / "manifest.json").is_file(), key
        assert "done" in (built.results / key / "job.log").read_text(), key
    assert (built.results / "report" / "index.html").is_file()


def test_the_second_phase_starts_from_the_first(built: Project) -> None:
    first = json.loads((built.results / "train/implicit-s0/unrolled/manifest.json").read_text())
    second = json.loads((built.results / "train/implicit-s0/free/manifest.json").read_text())
    assert second["identity"]["upstream"]["start"] == first["fingerprint"]


def test_a_second_run_does_nothing(built: Project) -> None:
    assert NOTHING in built.snakemake()
