"""A page with a changed number is not made: the file, its producer and the command are named."""

from pathlib import Path

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import FileRecord, Manifest, ManifestError
from implicit_llm_contracts.runs.run_directory import work_directory
from implicit_llm_workflow.commands.jobs import run_job
from implicit_llm_workflow.planning.code_digest import JobCode, job_digest
from tests.refusals import refused


def test_a_changed_number_stops_the_report(tmp_path: Path) -> None:
    producer = tmp_path / "evaluate/a5-explicit-s0/explicit/word-problem"
    evaluation = Identity("evaluate", "a5-explicit-s0/explicit/word-problem", {"kind": "word_problem"}, "c0de", {})
    metrics = work_directory(producer, evaluation.fingerprint) / "metrics.json"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"records": [{"accuracy": 0.5}]}')
    for folder in (metrics.parent, producer):
        Manifest.of(evaluation, [FileRecord.of(metrics, producer)], {}).write(folder / "manifest.json")
    metrics.write_text(metrics.read_text().replace("0.5", "0.9"))
    code = job_digest(JobCode("implicit_llm_report.stage"))
    role = "evaluate:a5-explicit-s0/explicit/word-problem"
    report = Identity("report", "report", {"experiment": "demo"}, code, {role: evaluation.fingerprint})
    with refused(rf"{metrics}: expected sha256 .*; type `rm -f {producer}/manifest.json` and run", ManifestError):
        run_job(tmp_path / "report", report.to_json({role: str(producer)}), None, {})
    assert not (tmp_path / "report" / "index.html").exists()
