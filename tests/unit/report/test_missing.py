"""Reports that lack results, and reports with models that were trained elsewhere."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_report.tables import source_words
from tests.unit.report.sample_language_runs import family, make_babi_runs, make_language_runs
from tests.unit.report.sample_runs import MODES, SampleRun, claims_of, evaluated, finish, make_runs, page_of, rows_of
from tests.unit.report.sample_runs import make_report as make_any_report
from tests.unit.report.test_report_stage import see_that_the_page_is_whole

WORDS = (
    SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=200, seeds=(0, 1), lengths=(16, 64)),
    SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=200, lengths=(16, 64)),
)
LANGUAGE = family("mamba2", "implicit_mamba2")[:2]
DATA = {
    f"a5-test-L{length}-h0.2": {"group": "A5", "monoid": "none", "length": length, "hard_fraction": 0.2}
    for length in (16, 64)
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on word problems, one of them with two seeds."""
    return make_runs(tmp_path_factory.mktemp("words"), WORDS)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    results = tmp_path_factory.mktemp("language")
    return make_language_runs(results, LANGUAGE) | make_babi_runs(results)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One implicit run of one seed."""
    return make_language_runs(tmp_path_factory.mktemp("text"), family("mamba2", "implicit_mamba2", seeds=(0,))[:1])


def make_report(folder: Path, roles: dict[str, Path], missing: Sequence[dict[str, Any]] = (), **shown: Any) -> Path:
    """Without the missing ones of these results."""
    shown = {"figures": ("perplexity-by-length",), "tables": ("accuracy", "perplexity", "babi")} | shown
    there = {role: path for role, path in roles.items() if role not in [item["role"] for item in missing]}
    return make_any_report(folder, there, missing=list(missing), **shown)


def missing_result(role: str, **about: Any) -> dict[str, Any]:
    command = f"snakemake results/{role.replace(':', '/')}/manifest.json"
    why = "EvaluationOutOfMemory: no <room>"
    return {"job": role.replace(":", "/", 1), "role": role, "state": "failed", "why": why, "command": command, **about}


def missing_evaluation(role: str, *, is_implicit: bool) -> dict[str, Any]:
    config = {"kind": "word_problem", "modes": [{"name": mode, "eval_mode": "simultaneous"} for mode in MODES]}
    return missing_result(role, config=config, data=DATA, is_implicit=is_implicit)


def test_a_missing_seed_is_counted_as_missing_and_the_other_stays(tmp_path: Path, words: dict[str, Path]) -> None:
    lacking = "evaluate:a5-implicit-s1/free/word-problem"
    declared = make_report(tmp_path, words, [missing_evaluation(lacking, is_implicit=True)])
    mine = [row for row in rows_of(declared, "accuracy") if row["run"] == "a5-implicit"]
    assert {(row["mode"], row["length"]) for row in mine} == {
        (mode, length) for mode in MODES for length in ("16", "64")
    }
    assert {row["num_seeds"] for row in mine} == {"1"}
    see_that_the_page_is_whole(declared)
    page = page_of(declared)
    assert "2 seeds, 1 missing" in page
    assert "Missing from this report" in page
    assert "EvaluationOutOfMemory: no &lt;room&gt;" in page
    assert "snakemake results/evaluate/a5-implicit-s1/free/word-problem/manifest.json" in page


def test_an_evaluation_that_is_missing_for_all_seeds_keeps_its_rows(tmp_path: Path, words: dict[str, Path]) -> None:
    lacking = "evaluate:a5-explicit-s0/explicit/word-problem"
    declared = make_report(tmp_path, words, [missing_evaluation(lacking, is_implicit=False)])
    mine = [row for row in rows_of(declared, "accuracy") if row["run"] == "a5-explicit"]
    shown = [[row[key] for key in ("mode", "length", "accuracy_last10_mean", "reason")] for row in mine]
    assert shown == [["parallel", length, "", "EvaluationOutOfMemory: no <room>"] for length in ("16", "64")]
    assert "missing" in (declared / "tables" / "accuracy.tex").read_text()
    (row,) = rows_of(declared, "missing")
    assert (row["result"], row["state"]) == ("evaluate/a5-explicit-s0/explicit/word-problem", "failed")


def test_two_missing_evaluations_of_other_lengths_are_missing_at_their_own(
    tmp_path: Path, words: dict[str, Path]
) -> None:
    lacking = [f"evaluate:a5-implicit-s0/free/{name}" for name in ("word-problem", "word-problem-long")]
    missing = [missing_evaluation(role, is_implicit=True) for role in lacking]
    missing = [item | {"config": item["config"] | {"lengths": [n]}} for item, n in zip(missing, (16, 64), strict=True)]
    rows = rows_of(make_report(tmp_path, words, missing), "accuracy")
    assert {(row["length"], row["num_seeds"]) for row in rows if row["run"] == "a5-implicit"} == {
        ("16", "1"),
        ("64", "1"),
    }


def test_missing_perplexities_and_answers_are_shown_as_missing(tmp_path: Path, language: dict[str, Path]) -> None:
    evaluations = [role for role in language if role.startswith("evaluate:")]
    texts = [role for role in evaluations if role.endswith("/perplexity")]
    babi = [role for role in evaluations if "babi" in role]
    modes = [{"name": "blockwise", "eval_mode": "blockwise"}]
    missing = [
        missing_result(
            texts[0],
            config={"kind": "perplexity", "modes": modes, "lengths": [128, 512]},
            data={"text-test": {"kind": "token_stream"}},
            is_implicit="explicit" not in texts[0],
        ),
        missing_result(
            babi[0],
            config={"kind": "catbabi", "modes": modes},
            data={"babi-test": {"kind": "catbabi", "length": 200}},
            is_implicit="explicit" not in babi[0],
        ),
    ]
    declared = make_report(tmp_path, language, missing)
    assert page_of(declared).count("1 missing") >= 2
    assert claims_of(declared)


TRAINED = {"model_type": "implicit_mamba2", "num_layers": 1, "train_length": 16, "train_hard_fraction": 0.2}


@pytest.mark.parametrize(
    ("training", "state", "verdict"), [(TRAINED, "missing", "not finished"), ({}, "not run", "not run")]
)
def test_a_claim_whose_models_are_still_training_is_not_finished(
    tmp_path: Path, words: dict[str, Path], training: dict[str, Any], state: str, verdict: str
) -> None:
    there = {role: path for role, path in words.items() if "explicit-s0" in role}
    modes = [{"name": mode, "eval_mode": mode, "eval_stop": "token"} for mode in ("simultaneous", "sequential")]
    config = {"kind": "word_problem", "modes": modes}
    missing = [
        {**missing_evaluation(role, is_implicit=True), "training": training, "config": config}
        for role in (f"evaluate:a5-implicit-s{seed}/free/word-problem" for seed in (0, 1))
    ]
    made = make_report(tmp_path, there, missing, experiment="demo", figures=None, tables=None)
    for name in ("implicit-solves-a5", "modes-agree"):
        claim = claims_of(made)[name]
        assert (claim["verdict"], claim["is_asked"]) == (state, True), name
        for page in (page_of(made), (made / "index.html").read_text()):
            assert f"</span> {verdict}</span>" in page.split(f"claim-{name}")[1]
            assert "</span> missing</span>" not in page


def test_a_report_without_any_result_says_so(tmp_path: Path, words: dict[str, Path]) -> None:
    one = {role: path for role, path in words.items() if role == "train:a5-explicit-s0/explicit"}
    missing = [missing_evaluation("evaluate:a5-explicit-s0/explicit/word-problem", is_implicit=False)]
    assert "lacks" in page_of(make_report(tmp_path, one, missing))


SOURCE = {
    "hub": "owner/big",
    "revision": None,
    "commit": "c" * 40,
    "sha256": {"config.json": "a", "model.safetensors": "d" * 64},
}


def peer(results: Path, kind: str, records: list[dict[str, Any]]) -> dict[str, Path]:
    """An imported checkpoint with one evaluation."""
    about = {
        "run": "big",
        "phase": "checkpoint",
        "seed": None,
        "source": SOURCE,
        "is_implicit": False,
        "mode": "parallel",
    }
    imported, found = results / "checkpoint" / "big", [about | record for record in records]
    fingerprint = finish(imported, "checkpoint", "big", {"hub": "owner/big"}, {}, {}, summary={"source": SOURCE})
    return {"checkpoint:big": imported} | evaluated(
        results, f"big/checkpoint/{kind}", kind, found, {"model": fingerprint}
    )


def test_peers_stand_beside_our_models_and_touch_no_claim_and_no_figure(tmp_path: Path, text: dict[str, Path]) -> None:
    records = [
        {"kind": "perplexity", "data": "text-test", "length": length, "perplexity": 3.25, "num_parameters": 10**9,
         "model_type": "implicit_mamba2", "loss": math.log(3.25), "num_tokens": 65_024}
        for length in (128, 512)
    ]  # fmt: skip
    alone = make_report(tmp_path / "alone", text)
    declared = make_report(tmp_path / "with", text | peer(tmp_path / "results", "perplexity", records))
    for name in ("claims.json", "figures/perplexity-by-length.svg"):
        assert (declared / name).read_bytes() == (alone / name).read_bytes()
    rows = rows_of(declared, "perplexity")
    mine = [row for row in rows if row["name"] == "big"]
    assert {(row["length"], row["perplexity_mean"]) for row in mine} == {("128", "3.25"), ("512", "3.25")}
    assert any(row["phase"] == "free-80" and float(row["perplexity_mean"]) > 3.25 for row in rows)
    see_that_the_page_is_whole(declared)
    assert "owner/big at cccccccccccc, not pinned" in page_of(declared)


@pytest.mark.parametrize("lacking", [(), ("swept",), ("perplexity",), ("swept", "perplexity")])
def test_an_explicit_peer_has_one_row_for_a_test_though_a_sweep_evaluates_it_too(
    tmp_path: Path, text: dict[str, Path], lacking: tuple[str, ...]
) -> None:
    record = {"data": "text-test", "length": 128, "perplexity": 3.25, "model_type": "implicit_mamba2"}
    roles = text | peer(tmp_path / "results", "perplexity", [record])
    about = {"run": "big", "phase": "checkpoint", "seed": None, "source": SOURCE, "is_implicit": False}
    swept = {**about, **record, "mode": "parallel", "sweep": {"base": "parallel", "key": None, "value": None}}
    for name in ("swept", "swept-more"):
        roles |= evaluated(tmp_path / "results", f"big/checkpoint/{name}", "perplexity", [swept])
    settings = {"kind": "perplexity", "modes": [{"name": "blockwise", "eval_mode": "blockwise"}], "lengths": [128]}
    missing = [
        missing_result(
            f"evaluate:big/checkpoint/{name}",
            config=settings | ({} if name == "perplexity" else {"sweep": {"eval_tol": [0.5]}}),
            data={"text-test": {"length": 128}},
            is_implicit=None,
        )
        for name in lacking
    ]
    rows = [row for row in rows_of(make_report(tmp_path / "report", roles, missing), "perplexity")
            if row["name"] == "big"]  # fmt: skip
    assert [row["perplexity_mean"] for row in rows] == ["" if "perplexity" in lacking else "3.25"]


def test_protocols_of_catbabi_are_not_taken_for_seeds_of_a_peer(tmp_path: Path, text: dict[str, Path]) -> None:
    records = [
        {"kind": "catbabi", "data": "babi-test", "length": 200, "protocol": protocol, "accuracy": accuracy}
        for protocol, accuracy in (("windowed", 0.25), ("carried", 0.75))
    ]
    rows = rows_of(make_report(tmp_path / "report", text | peer(tmp_path / "results", "catbabi", records)), "babi")
    assert [(row["protocol"], row["accuracy_mean"]) for row in rows] == [("windowed", "0.25"), ("carried", "0.75")]


def test_where_a_peer_comes_from_is_said_in_words() -> None:
    assert source_words({"path": "models/x"}) == "models/x"
    assert source_words(SOURCE | {"revision": "c" * 40}) == "owner/big at cccccccccccc"
    assert source_words(SOURCE | {"revision": "main"}) == "owner/big at cccccccccccc, not pinned"
    assert source_words({}) == "trained elsewhere"
