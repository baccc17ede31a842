"""Peers of an experiment: their jobs, what makes them another model, and what is refused."""

from pathlib import Path

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.fetched_files import HubFiles
from implicit_llm_workflow.file_digests import FileDigests, safe_digests
from implicit_llm_workflow.planning.graph import report_tables
from implicit_llm_workflow.prefetch import HubCheckpoint, needs_of
from implicit_llm_workflow.results.missing import find_missing
from tests.unit.workflow.experiments import ExperimentFile, finish
from tests.unit.workflow.run_dirs import event, write_journal

PEER = "\npeers:\n  other: {data: text, checkpoint: {hub: owner/other, revision: null}}\n"


def test_a_peer_is_imported_once_and_evaluated_like_a_run(language: ExperimentFile) -> None:
    plan = language.add(PEER).plan()
    assert plan.nodes["checkpoint/other"].config == {"hub": "owner/other", "revision": None, "sha256": {}}
    mine = plan.nodes["evaluate/other/checkpoint/perplexity"]
    assert mine.config == plan.nodes["evaluate/flat-s0/explicit/perplexity"].config
    assert mine.upstream == {"model": "checkpoint/other", "text-test": "data/text-test"}
    assert plan.nodes["report"].upstream["checkpoint:other"] == "checkpoint/other"
    assert "evaluate/other/checkpoint/questions" not in plan.nodes  # of other data
    assert "perplexity" in report_tables(plan.experiment)


def test_other_content_in_the_same_folder_is_another_model(tmp_path: Path) -> None:
    folder, digest = tmp_path / "peer", FileDigests(tmp_path / "cache.json")
    folder.mkdir()
    assert safe_digests(folder / "none", digest) == {}
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    first = safe_digests(folder, digest)
    assert set(first) == {"config.json", "model.safetensors"}
    assert safe_digests(folder, FileDigests(tmp_path / "cache.json")) == first
    (folder / "model.safetensors").write_bytes(b"another")
    assert safe_digests(folder, digest)["model.safetensors"] != first["model.safetensors"]
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    assert set(safe_digests(folder, digest)) == set(first)  # as the import reads it
    (folder / "model.safetensors").unlink()
    assert set(safe_digests(folder, digest)) == {"config.json", "model.safetensors.index.json"}


def test_what_a_peer_of_the_hub_needs_is_prefetched(language: ExperimentFile) -> None:
    needs = needs_of(language.add(PEER).plan())
    assert HubCheckpoint("other", HubFiles("model", "owner/other", None), is_vouched=False) in needs


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{data: text, checkpoint: {}}", "needs either path"),
        ("{data: text, checkpoint: {path: x, hub: y, revision: null}}", "needs either path"),
        ("{data: text, checkpoint: {hub: owner/other}}", "revision: is missing; name the commit, or null"),
        ("{data: text, checkpoint: {path: x, revision: y}}", "unknown key 'revision'"),
        ("{data: txt, checkpoint: {path: x}}", "did you mean 'text'"),
        ("{data: text, checkpoint: {path: x}, evaluations: [perplexty]}", "did you mean 'perplexity'"),
        ("{data: text, checkpoint: {path: x}, evaluations: [questions]}", "none fits its language_model data"),
        ("{data: text, checkpoint: {path: x, sha256: {a.bin: 12}}}", "sha256"),
        ("{data: text, checkpoint: {path: x}}", "is also the name of a trained model"),
    ],
)
def test_a_peer_that_comes_to_nothing_is_refused(language: ExperimentFile, text: str, named: str) -> None:
    name = "flat-s0" if "trained" in named else "other"
    with pytest.raises(ConfigError, match=f"peers.{name}.*{named}"):
        language.add(f"\npeers:\n  {name}: {text}\n").load()


def test_missing_results_say_what_is_in_the_way_and_what_makes_them(language: ExperimentFile) -> None:
    plan = language.add(PEER).plan()
    finish(plan)
    for key in ("checkpoint/other", "evaluate/other/checkpoint/perplexity", "train/flat-s0/explicit"):
        (plan.run_dir(plan.nodes[key]) / "manifest.json").unlink()
    failed = event("stage_failed", error="CheckpointError: no such")
    write_journal(plan, "checkpoint/other", event("stage_started"), failed, torn='{"torn')
    missing = {item.job: item for item in find_missing(plan, plan.nodes["report"])}
    assert set(missing) == {"train/flat-s0/explicit", "checkpoint/other", "evaluate/other/checkpoint/perplexity"}
    imported, evaluated = missing["checkpoint/other"], missing["evaluate/other/checkpoint/perplexity"]
    assert (imported.state, imported.why) == ("failed", "CheckpointError: no such")
    assert (evaluated.state, evaluated.why) == ("missing", "checkpoint/other failed: CheckpointError: no such")
    assert evaluated.is_implicit is None
    assert evaluated.data["text-test"]["kind"] == "token_stream"
    assert missing["train/flat-s0/explicit"].state == "missing"
    assert evaluated.command.endswith(" results/language/evaluate/other/checkpoint/perplexity/manifest.json")
