"""The frame: the same numbers as the files, each in a row, the missing ones too."""

import json
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_report.config import ReportError
from implicit_llm_report.inputs.frame import frame_of, groups
from implicit_llm_report.inputs.training_runs import Solver
from tests.unit.report.sample_language_runs import family, make_babi_runs, make_language_runs
from tests.unit.report.sample_runs import SampleRun, inputs_of, make_context, make_runs

WORDS = (SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=20, seeds=(0, 1), lengths=(16, 64)),)
LOST = "evaluate:a5-implicit-s1/free/word-problem"
WHAT = ("run", "seed", "phase", "data", "mode", "length")


def records_of(folder: Path) -> list[dict]:
    (path,) = (folder / file.path for file in Manifest.read(folder / "manifest.json").files)
    return json.loads(path.read_text())["records"]


def test_every_number_of_every_file_is_a_row_with_what_it_is_of(tmp_path: Path) -> None:
    roles = (
        make_runs(tmp_path / "words", WORDS)
        | make_babi_runs(tmp_path / "babi", seeds=(0,))
        | make_language_runs(tmp_path / "text", family("mamba2", "implicit_mamba2", seeds=(0,))[:2])
    )
    frame = inputs_of(make_context(tmp_path / "report", roles)).measured
    frame = frame[frame["task"].isna()]  # without the parts of CatbAbI
    found = {(row.kind, row.metric, *(getattr(row, key) for key in WHAT)): row for row in frame.itertuples()}
    metrics = {"word_problem": "accuracy_last10", "perplexity": "perplexity", "catbabi": "accuracy"}
    wanted = 0
    for role, folder in roles.items():
        for record in records_of(folder) if role.startswith("evaluate:") else ():
            kind = record.get("kind", "word_problem")
            row = found[kind, metrics[kind], *(record[key] for key in WHAT)]
            assert (row.value, row.role) == (record[metrics[kind]], role)
            wanted += 1
    assert wanted == (frame["metric"].isin(metrics.values())).sum()


def test_the_mode_in_which_each_token_converges_stands_for_a_model_whatever_modes_are_called() -> None:
    ways = {"a": ("simultaneous", "batch"), "b": ("blockwise", "sequence"), "z": ("blockwise", "token")}
    model = {"role": "evaluate:x", "run": "x", "seed": 0, "length": 4, "accuracy_last10": 0.5}
    records = [
        model | {"mode": name, "eval_mode": mode, "eval_stop": stop} for name, (mode, stop) in sorted(ways.items())
    ]
    frame = frame_of({"word_problem": records}, {})
    assert list(dict.fromkeys(frame["mode"])) == ["z", "b", "a"]
    assert set(frame[frame["is_headline"].astype(bool)]["mode"]) == {"z"}


@pytest.mark.parametrize("step", [1, -1])
def test_the_loss_on_validation_text_is_that_of_the_first_mode_at_the_shortest_length(step: int) -> None:
    model = {"role": "evaluate:x", "run": "x", "seed": 0, "phase": "free"}
    modes = {"blockwise": 2.0, "simultaneous": 3.0}
    records = [
        model | {"mode": mode, "eval_mode": mode, "length": length, "loss": loss + length / 100}
        for mode, loss in modes.items()
        for length in (4, 8)
    ]
    records.append(
        model | {"mode": "blockwise", "length": 2, "loss": 9.0, "sweep": {"key": "tol", "base": "", "value": 1}}
    )
    frame = frame_of({"validation_perplexity": records[::step], "perplexity": [model | {"length": 4, "loss": 1.0}]}, {})
    assert set(frame["validation_loss"]) == {2.04}


def test_rows_that_are_not_one_thing_have_no_mean() -> None:
    records = [{"role": "evaluate:x", "run": "x", "seed": 0, "length": length, "perplexity": 3.0} for length in (1, 2)]
    frame = frame_of({"perplexity": records}, {})
    (both,) = groups(frame, ("run",))
    with pytest.raises(ReportError, match="perplexity is in several records of one seed"):
        both.spread("perplexity")
    assert [group.spread("perplexity").values for group in groups(frame, ("run", "length"))] == [(3.0,), (3.0,)]


def test_a_number_that_is_no_number_is_missing_and_seeds_come_in_order() -> None:
    found = {1: 2.0, 0: None}
    records = [{"role": str(seed), "run": "x", "seed": seed, "perplexity": value} for seed, value in found.items()]
    (group,) = groups(frame_of({"perplexity": records}, {}), ("run",))
    assert (group.spread("perplexity").values, group.spread("perplexity").num_missing) == ((2.0,), 1)
    assert group.roles == ("0", "1")
    assert group.rows[group.rows["metric"] == "perplexity"]["value"].isna().sum() == 1


def test_a_model_is_called_by_its_phase_only_where_several_of_its_phases_are_there() -> None:
    free, bounded, unrolled = (
        Solver("fixed_point", 24, 4),
        Solver("fixed_point", 4, 4),
        Solver("unrolled", num_unroll=4),
    )
    models = [("a", "f", free), ("b", "f", free), ("b", "u", unrolled), ("c", "one", bounded), ("c", "two", bounded)]
    records = [{"run": run, "phase": phase, "solver": solver} for run, phase, solver in models]
    names = frame_of({"perplexity": records}, {})["name"].unique()
    assert list(names) == ["a", "b (24+4)", "b (unrolled 4)", "c one", "c two"]
