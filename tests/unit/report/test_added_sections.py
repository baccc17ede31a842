"""Minimum layers, test-time compute and Jacobians in the report, from made-up runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_report.config import MinimumLayersConfig
from implicit_llm_report.inputs.layers import depths, fewest, fewest_layers
from tests.unit.report.sample_runs import (
    Record,
    SampleRun,
    evaluated,
    figure_of,
    finish,
    given_of,
    make_report,
    make_runs,
    names_in,
    page_of,
    rows_of,
)

RUNS = (
    SampleRun("s5-implicit", "S5", True, 0.5, (0.5,), steps=200, seeds=(0, 1), train_length=16, lengths=(16, 64)),
    SampleRun("s5-explicit", "S5", False, 0.5, (0.5,), steps=200, train_length=16, lengths=(16, 64)),
    *(
        SampleRun(f"s5-{kind}-l{n}", "S5", kind == "implicit", 0.5, (0.5,), 200, train_length=n, lengths=(n,))
        for n in (4, 8)
        for kind in ("implicit", "explicit")
    ),
)
MODES = [{"name": "blockwise", "eval_mode": "blockwise"}]
LAYERS_ONLY: dict[str, Any] = {"figures": ("minimum-layers",), "tables": ("minimum-layers",)}
LAYERS = MinimumLayersConfig("S5", threshold=0.9)


def swept_records(results: Path, seed: int) -> list[Record]:
    """The blockwise records of a run once more for each value of two settings, the fewer iterations the worse."""
    (path,) = (results / f"evaluate/s5-implicit-s{seed}/free/word-problem").rglob("metrics.json")
    plain = [record for record in json.loads(path.read_text())["records"] if record["mode"] == "blockwise"]
    sweep = [("eval_max_iter", value, value / 16) for value in (1, 4, 16)]
    sweep += [("eval_tol", value, 1 - value) for value in (0.5, 0.05)]
    return [
        record
        | {
            "mode": f"blockwise@{key}={value}",
            "sweep": {"base": "blockwise", "key": key, "value": value},
            key: value,
            "accuracy_last10": None if (key, value) == ("eval_max_iter", 4) else quality - 0.01 * seed,
        }
        for record in plain
        for key, value, quality in sweep
    ]


def jacobian_records(is_implicit: bool) -> list[Record]:
    about = {"is_implicit": is_implicit, "layer": 0, "state_size": 64, "num_layers": 1}
    share = 0.25 if is_implicit else 0.0
    of_implicit = {"f_radius": 0.8, "relative_difference": 2e-13} if is_implicit else {}
    entries = [[0.9, share], [share * 1e-3, 0.9]]
    measured = {"off_diagonal_share": share, "transition_radius": 0.97, "entries": entries} | of_implicit
    trained = about | {"setting": "trained", "data": "s5-test-L16-h0.5", "position": 8, "seed": 0}
    random = about | {"setting": "random layer", "data": None, "position": 6}
    unreached = dict.fromkeys(("off_diagonal_share", "transition_radius", "f_radius", "relative_difference", "entries"))
    hard = trained | measured | {"position": 9, "is_hard": True, "off_diagonal_share": 2 * share}
    identity = trained | {"is_hard": False} | measured
    harder = hard | {"position": 10, "off_diagonal_share": 3 * share}
    return [identity, hard, harder, random | {"seed": 0} | measured, random | {"seed": 1} | unreached]


def added_runs(results: Path) -> dict[str, Path]:
    """Evaluations beside those of `make_runs`, by role."""
    roles = evaluated(results, "s5-explicit-s0/explicit/jacobian", "jacobian", jacobian_records(False))
    for seed in (0, 1):
        name = f"s5-implicit-s{seed}/free"
        roles |= evaluated(results, f"{name}/jacobian", "jacobian", jacobian_records(True))
        roles |= evaluated(results, f"{name}/test-time", "word_problem", swept_records(results, seed))
    return roles


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("added")
    roles = make_runs(folder / "results", RUNS) | added_runs(folder / "results")
    config = {"experiment": "demo", "note": "Seed 1 > seed 0.", "minimum_layers": {"group": "S5", "threshold": 0.9}}
    return make_report(folder, roles, **config)


def test_the_page_shows_each_section_and_its_figures(made: Path) -> None:
    figures = {"minimum-layers", "test-time-iterations", "test-time-tolerance", "jacobian", "spectral-radius"}
    assert figures <= names_in(made, "figures")
    page = page_of(made)
    assert page.index("Seed 1 &gt; seed 0.") < page.index('<nav aria-label="Contents">')
    assert all(f'id="figure-{name}"' in page for name in figures)
    for words in ("Layers needed by length", "Test-time compute", "Jacobian of the state transition"):
        assert f'<h3 class="topic">{words}</h3>' in page


def test_swept_results_stay_out_of_the_other_tables_and_figures(made: Path) -> None:
    assert {row["mode"] for row in rows_of(made, "accuracy")} == {
        "blockwise", "sequential", "simultaneous", "released-criterion", "parallel",
    }  # fmt: skip


def test_runs_that_tell_of_depth_stay_out_of_the_figures_of_length(made: Path) -> None:
    figure = figure_of(made, "accuracy-by-length")
    assert "s5-implicit-s0" in figure
    assert "s5-implicit-l4" not in figure


SWEPT = {"length": "64", "run": "s5-implicit"}
HARD, RANDOM = {"name": "s5-implicit", "is_hard": "True"}, {"name": "random layer, implicit", "is_hard": ""}
# By the sentence: the table, what its one row has, and what this row says.
CELLS = {
    "test-time compute has mean, spread and seeds": (
        "test-time", SWEPT | {"swept": "eval_max_iter", "at": "16.0"},
        {"accuracy_last10_mean": "0.995", "accuracy_last10_low": "0.99", "accuracy_last10_high": "1.0",
         "by_seed": "0: 1; 1: 0.99", "mode": "blockwise@eval_max_iter=16"},
    ),
    "a missing number of test-time compute is left empty": (
        "test-time", SWEPT | {"swept": "eval_max_iter", "at": "4.0"},
        {"accuracy_last10_mean": "", "num_missing": "2"},
    ),
    "the model without a sweep is as trained": (
        "test-time", SWEPT | {"swept": "eval_tol", "at": "as trained"}, {"mode": "blockwise"},
    ),
    "the explicit model is as trained": (
        "test-time", SWEPT | {"swept": "eval_tol", "at": "as trained", "run": "s5-explicit"}, {"mode": "parallel"},
    ),
    "the fewest layers are of no seed": (
        "minimum-layers", {"name": "implicit: fewest layers", "length": "4"}, {"num_seeds": ""},
    ),
    "a depth has its seeds": ("minimum-layers", {"name": "implicit, 1 layer", "length": "16"}, {"num_seeds": "2"}),
    "tokens without a fixed point are counted": (
        "jacobian", RANDOM,
        {"num_records": "2", "num_reached": "1", "off_diagonal_share_mean": "0.25", "num_seeds": "1",
         "num_missing": "0", "by_seed": ""},
    ),
    "seeds and records of a token are counted": (
        "jacobian", HARD,
        {"num_seeds": "2", "num_records": "4", "by_seed": "0: 0.625; 1: 0.625", "off_diagonal_share_mean": "0.625"},
    ),
    "identity tokens stand alone": ("jacobian", HARD | {"is_hard": "False"}, {"off_diagonal_share_mean": "0.25"}),
    "an explicit model has nothing off the diagonal": (
        "jacobian", HARD | {"name": "s5-explicit"}, {"off_diagonal_share_mean": "0.0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("table", "wanted", "expected"), CELLS.values(), ids=CELLS)
def test_a_row_of_a_table(made: Path, table: str, wanted: dict[str, str], expected: dict[str, str]) -> None:
    (row,) = (row for row in rows_of(made, table) if wanted.items() <= row.items())
    assert {column: row[column] for column in expected} == expected


def test_every_heat_map_has_its_scale_beside_it(made: Path) -> None:
    figure = figure_of(made, "jacobian")
    panels = figure.count('<svg role="img"')
    assert figure.count("image-rendering:pixelated") == panels == 4
    assert figure.count(">0.01</text>") == panels


@pytest.mark.parametrize(
    ("by_depth", "words"),
    [
        ({1: 0.2, 2: 0.95, 4: 1.0}, "2"),
        ({1: 0.25, 2: 0.5, 4: 0.95}, "4"),
        ({1: 0.2, 2: 0.3, 16: 0.4}, "> 16"),
        ({1: None, 2: 0.95}, "missing"),
        ({1: 0.2, 2: None}, "missing"),
        ({1: None}, "missing"),
    ],
)
def test_the_fewest_layers_are_those_that_reach_the_threshold(by_depth: dict[int, float | None], words: str) -> None:
    assert fewest(by_depth, 0.9)[1] == words


def test_only_tests_at_the_training_length_count() -> None:
    about = {"is_implicit": False, "group": "S5", "monoid": "none", "length": 8, "train_length": 8, "mode": "parallel"}
    about |= {"hard_fraction": 1.0, "train_hard_fraction": 1.0, "data": "L8"}
    records = [
        about | {"run": f"{layers}", "num_layers": layers, "seed": seed, "accuracy_last10": accuracy}
        for layers, seed, accuracy in ((1, 0, 0.2), (2, 0, 0.95), (2, 1, 0.93))
    ]
    found = fewest_layers(depths(given_of({"word_problem": records}).measured, LAYERS), LAYERS)
    assert set(found["value"]) == {2.0}
    beyond = given_of({"word_problem": [record | {"length": 32} for record in records]})
    assert depths(beyond.measured, LAYERS).empty


def test_a_section_that_is_asked_for_and_has_no_runs_says_so(tmp_path: Path) -> None:
    roles = make_runs(tmp_path / "results", RUNS[1:2])
    declared = make_report(tmp_path, roles, minimum_layers={"group": "A5"}, **LAYERS_ONLY)
    assert names_in(declared, "figures") == {"minimum-layers"}
    assert len(rows_of(declared, "minimum-layers")) == 0


def test_a_depth_whose_evaluation_is_missing_shows_as_missing(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    config = {"model": {"num_hidden_layers": 2}, "phase": {"name": "explicit", "end_step": 8}, "seed": 0}
    finish(folder, "train", "s5-deep-s0/explicit", config, {}, {}, summary={"data": {"length": 8}})
    data = {"L8": {"group": "S5", "monoid": "none", "length": 8, "hard_fraction": 1.0}}
    lost = {
        "role": "evaluate:s5-deep-s0/explicit/words",
        "job": "x",
        "state": "failed",
        "why": "",
        "command": "",
        "config": {"kind": "word_problem", "modes": []},
        "data": data,
        "is_implicit": False,
    }
    settings = {"missing": [lost], "minimum_layers": {"group": "S5"}} | LAYERS_ONLY
    layers, accuracy = rows_of(
        make_report(tmp_path, {"train:s5-deep-s0/explicit": folder}, **settings), "minimum-layers"
    )
    assert (layers["name"], layers["layers_mean"]) == ("explicit: fewest layers", "")
    assert (accuracy["num_layers"], accuracy["num_missing"]) == ("2", "1")


def test_figures_and_tables_are_there_when_all_their_evaluations_are_missing(tmp_path: Path) -> None:
    roles = make_runs(tmp_path / "results", RUNS[1:2])
    lost = {"state": "failed", "why": "it failed", "command": "snakemake x", "is_implicit": True}
    swept = {"kind": "word_problem", "modes": MODES, "sweep": {"eval_tol": [0.5]}}
    data = {"x": {"group": "S5", "monoid": "none", "length": 16, "hard_fraction": 0.5}}
    missing = [
        lost | {"role": f"evaluate:s5-implicit-s0/free/{name}", "job": name, "config": config, "data": data}
        for name, config in (("jacobian", {"kind": "jacobian"}), ("compute", swept))
    ]
    figures, tables = ("jacobian", "test-time-tolerance", "test-time-iterations"), ("jacobian", "test-time")
    declared = make_report(tmp_path, roles, missing=missing, figures=figures, tables=tables)
    assert names_in(declared, "figures") == {"jacobian", "test-time-tolerance"}
    for name in ("jacobian", "test-time"):
        assert {(row["run"], row["num_missing"]) for row in rows_of(declared, name)} >= {("s5-implicit", "1")}
