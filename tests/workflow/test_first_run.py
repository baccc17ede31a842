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


def test_every_job_leaves_a_manifest_and_a_log_and_a_second_run_does_nothing(built: Project) -> None:
    for key in ALL:
        assert (built.results / key / "manifest.json").is_file(), key
        assert "done" in (built.results / key / "job.log").read_text(), key
    assert (built.results / "report" / "index.html").is_file()
    first, second = (
        json.loads((built.results / "train/implicit-s0" / phase / "manifest.json").read_text())
        for phase in ("unrolled", "free")
    )
    assert second["identity"]["upstream"]["start"] == first["fingerprint"]
    assert NOTHING in built.snakemake()
