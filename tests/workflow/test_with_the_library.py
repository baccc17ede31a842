"""The rules with the real stages and MLflow: seconds for the data, minutes for the whole."""

import re
import sqlite3
from pathlib import Path

import pytest

from tests.workflow.tiny_project import NOTHING, make_real_project


def test_a_data_set_is_made_and_tracked(tmp_path: Path) -> None:
    project = make_real_project(tmp_path)
    target = "results/tiny/data/s3-train/manifest.json"
    project.snakemake(target)
    assert project.manifest("data/s3-train")["summary"]["num_samples"] == 256
    with sqlite3.connect(project.dir / "results" / "mlflow.db") as store:
        query = "select runs.name, above.name from runs left join tags on tags.run_uuid = runs.run_uuid and key = ?"
        query += " left join runs as above on above.run_uuid = value order by runs.name"
        runs = list(store.execute(query, ["mlflow.parentRunId"]))
    (_, invocation), *_ = runs
    assert runs == [("data/s3-train", invocation), (invocation, None)]
    assert invocation.startswith("snakemake 20")
    assert NOTHING in project.snakemake(target)


@pytest.mark.slow
def test_the_whole_slice_runs_from_the_data_to_the_report(tmp_path: Path) -> None:
    project = make_real_project(tmp_path)
    project.snakemake()
    assert "<svg" in (project.results / "report" / "index.html").read_text()
    assert NOTHING in project.snakemake()
    headline = project.command("implicit-llm", "report", "--numbers", "--config", "tiny.yaml")
    assert re.search(r"implicit/free +blockwise +[0-9.]+ % +[0-9.]+ %", headline)
    with sqlite3.connect(project.dir / "results" / "mlflow.db") as store:
        statuses = [status for (status,) in store.execute("select status from runs")]
    assert statuses == ["FINISHED"] * 10, "nine jobs and their invocation"
