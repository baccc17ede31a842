"""Evaluations that fail, peers, and the report of what is left, through Snakemake."""

from dataclasses import replace

from tests.workflow.test_excerpts import EXCERPTS
from tests.workflow.tiny_project import Project

FAILING = "implicit-s0/free/word-problem"
REPORT = ("implicit-llm", "report", "--config", "tiny.yaml")
PEER = """
peers:
  other:
    data: s3
    checkpoint: {path: models/other}
"""


def test_a_failing_evaluation_leaves_the_others_and_a_report_with_missing_results(project: Project) -> None:
    failing = replace(project, variables={"TINY_FAIL": FAILING})
    failing.edit(failing.config, "eval_block_len: 4", "eval_block_len: 2")
    failing.snakemake("--keep-going", code=1)
    fresh = failing.manifest("evaluate/explicit-s0/explicit/word-problem")
    assert fresh["identity"]["config"]["modes"][0]["eval_block_len"] == 2

    said = failing.command(*REPORT, code=2)
    for part in (f"evaluate/{FAILING}", "RuntimeError: made to fail", "results/tiny/report/manifest.json"):
        assert part in said
    assert "explicit-s0" not in said

    failing.command(*REPORT, "--missing")
    failing.append(failing.config, EXCERPTS)
    failing.command(*REPORT, "--only", "figure_3", "--missing")
    shown = failing.manifest("excerpt/figure_3-with-missing")["summary"]["missing"]
    assert [item["job"] for item in shown] == [f"evaluate/{FAILING}"]
    made = failing.manifest("report-with-missing")["summary"]
    (lacking,) = made["missing"]
    assert (lacking["job"], lacking["state"]) == (f"evaluate/{FAILING}", "failed")
    assert lacking["config"]["kind"] == "word_problem"
    assert lacking["data"]["s3-test-L16-h0.5"]["length"] == 16
    assert made["num_inputs"] == 4  # three phases and the evaluation that went well

    project.snakemake()
    assert "the report is there" in project.command(*REPORT)


def test_a_peer_is_imported_and_evaluated_and_other_content_is_another_peer(project: Project) -> None:
    folder = project.dir / "models" / "other"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    project.append(project.config, PEER)
    mine = {"checkpoint/other", "evaluate/other/checkpoint/word-problem", "report"}
    assert project.planned() == mine
    project.snakemake()
    imported = project.manifest("checkpoint/other")["identity"]["config"]
    assert (imported["path"], set(imported["sha256"])) == ("models/other", {"config.json", "model.safetensors"})
    (folder / "model.safetensors").write_bytes(b"two")
    assert project.planned() == mine
