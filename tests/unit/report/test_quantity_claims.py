"""Claims about numbers that are derived from several tests, and about downstream tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from implicit_llm_report.claims import Claim, Condition, Judgement
from implicit_llm_report.claims import judge as judge_found
from implicit_llm_report.config import MinimumLayersConfig
from implicit_llm_report.findings import find
from implicit_llm_report.measures import PairMeasure, Quantity
from implicit_llm_report.section import SectionInputs
from implicit_llm_report.training_runs import Phase, Solver, TrainingRun
from tests.unit.report.sample_runs import Record, given_of

FREE = Solver("fixed_point", 24, 4)
PAIR: Record = {
    "role": "evaluate:m-s0/free/duality", "run": "m", "phase": "free", "seed": 0, "measure": "pair", "data": "text",
    "mode": "simultaneous", "against": "sequential", "is_implicit": True,
}  # fmt: skip
AGREE = {"name": "record", "kind": "duality", "key": "token_agreement", "where": {"measure": "pair"}}


def inputs(
    records: Mapping[str, Sequence[Record]] | None = None, training: Sequence[TrainingRun] = ()
) -> SectionInputs:
    return given_of(records or {}, training, minimum_layers=MinimumLayersConfig("S5", threshold=0.98))


def claim(quantity: Record, **condition: float) -> Claim:
    chosen, holds_if = Quantity(**quantity), Condition(**condition)
    return Claim("id", "s", "paper", "w", None, None, ("demo",), holds_if, quantity=chosen)


def judge(given: SectionInputs, quantity: Record, **condition: float) -> Judgement:
    asked = claim(quantity, **condition)
    return judge_found(asked, find(asked, given), "demo")


def agreements(*values: float | None) -> dict[str, list[Record]]:
    """One record a model."""
    return {"duality": [PAIR | {"run": f"m{i}", "token_agreement": value} for i, value in enumerate(values)]}


@pytest.mark.parametrize(
    ("values", "speaks", "verdict", "shown"),
    [
        ((0.98, 0.99), "all", "holds", 0.98),
        ((0.9, 0.99), "all", "fails", 0.9),
        ((0.9, 0.99), "best", "holds", 0.99),
        ((0.99, None), "all", "missing", None),
        ((0.9, None), "all", "fails", 0.9),
        ((None,), "best", "missing", None),
    ],
)
def test_the_worst_or_the_best_model_decides_and_a_missing_number_never_helps(
    values: tuple[float | None, ...], speaks: str, verdict: str, shown: float | None
) -> None:
    judgement = judge(inputs(agreements(*values)), AGREE | {"speaks": speaks}, at_least=0.976)
    assert (judgement.verdict, judgement.spread.mean) == (verdict, shown)


def test_records_of_a_model_are_averaged_by_seed_and_others_are_left_out() -> None:
    values = {(0, 0.8), (0, 1.0), (1, 1.0)}
    records = [PAIR | {"seed": seed, "token_agreement": value} for seed, value in values]
    other = [PAIR | {"measure": "convergence", "token_agreement": 0.0}, PAIR | {"source": {}, "token_agreement": 0.0}]
    judgement = judge(inputs({"duality": [*records, *other]}), AGREE, at_least=0.9)
    assert sorted(judgement.spread.values) == pytest.approx([0.9, 1.0])
    assert judgement.verdict == "holds"
    assert judgement.evidence is not None
    assert judgement.evidence.roles == (PAIR["role"],)


def test_a_seed_is_missing_only_if_none_of_its_records_has_a_number() -> None:
    values = [(0, 0.8), (0, None), (1, 1.0)]
    records = [PAIR | {"seed": seed, "token_agreement": value} for seed, value in values]
    judgement = judge(inputs({"duality": records}), AGREE, at_least=0.9)
    assert (judgement.verdict, judgement.spread.values) == ("borderline", (0.8, 1.0))
    records.append(PAIR | {"seed": 2, "token_agreement": None})
    assert judge(inputs({"duality": records}), AGREE, at_least=0.9).verdict == "missing"


def test_without_records_it_was_not_run_at_this_scale() -> None:
    assert judge(inputs(), AGREE, at_least=0.9).verdict == "not run at this scale"


def depth(num_layers: int, length: int, accuracy: float, *, is_implicit: bool = False) -> Record:
    about = {"run": f"n{num_layers}-{length}-{is_implicit}", "seed": 0, "is_implicit": is_implicit, "group": "S5"}
    about |= {"monoid": "none", "num_layers": num_layers, "length": length, "hard_fraction": 1.0, "data": f"L{length}"}
    about |= {"train_length": length, "train_hard_fraction": 1.0, "mode": "blockwise" if is_implicit else "parallel"}
    return about | {"role": f"evaluate:{num_layers}", "accuracy_last10": accuracy, "chance_last10": 0.01}


def test_layers_grow_with_the_length_also_where_no_depth_solves_it() -> None:
    points = [depth(1, 4, 1.0), depth(2, 4, 1.0), depth(1, 8, 0.2), depth(2, 8, 0.4)]
    grow = {"name": "growth_of_layers", "kind": "word_problem", "model": "explicit"}
    judgement = judge(inputs({"word_problem": points}), grow, at_least=1)
    assert (judgement.verdict, judgement.spread.mean) == ("holds", 2.0)
    assert judgement.evidence is not None
    assert "1 at 4, > 2 at 8" in judgement.evidence.text
    needed = {"name": "layers_needed", "kind": "word_problem", "model": "implicit"}
    implicit = [depth(1, length, 1.0, is_implicit=True) for length in (4, 8)]
    assert judge(inputs({"word_problem": [*points, *implicit]}), needed, at_most=1).verdict == "holds"


def test_iterations_at_test_time_are_compared_seed_by_seed() -> None:
    base = {"role": "evaluate:w", "run": "w", "phase": "free", "is_implicit": True, "data": "L16", "length": 16}
    base |= {"group": "A5", "monoid": "none", "hard_fraction": 0.2}
    swept = [
        base | {"seed": seed, "mode": f"blockwise-{n}", "accuracy_last10": value, "eval_max_iter": n}
        | {"sweep": {"key": "eval_max_iter", "value": n, "base": "blockwise"}}
        for seed, n, value in ((0, 2, 0.1), (0, 16, 0.9), (1, 2, 0.5), (1, 16, 1.0))
    ]  # fmt: skip
    explicit = base | {"run": "e", "is_implicit": False, "seed": 0, "mode": "parallel", "accuracy_last10": 0.2}
    given = inputs({"word_problem": [*swept, explicit]})
    gain = judge(given, {"name": "gain_by_iterations", "kind": "word_problem"}, at_least=0.05)
    assert sorted(gain.spread.values) == pytest.approx([0.5, 0.8])
    above = judge(given, {"name": "above_explicit", "kind": "word_problem"}, at_least=0)
    assert sorted(above.spread.values) == pytest.approx([0.7, 0.8])


TEXT: Record = (
    {"role": "evaluate:m", "run": "m", "seed": 0, "phase": "free-80", "solver": FREE, "is_implicit": True}
    | {"model_type": "implicit_mamba2", "num_parameters": 1000, "data": "text", "length": 128, "perplexity": 18.0}
    | {"mode": "blockwise", "train_length": 128, "train_tokens": 1e6}
)


def test_perplexity_at_longer_rows_stands_over_that_at_the_training_length() -> None:
    longer = TEXT | {"length": 1024, "perplexity": 45.0}
    growth = {"name": "growth_of_perplexity", "kind": "perplexity", "length_factor": 8}
    judgement = judge(inputs({"perplexity": [TEXT, longer]}), growth, at_least=2)
    assert (judgement.verdict, judgement.spread.mean) == ("holds", 2.5)
    assert judge(inputs({"perplexity": [TEXT]}), growth, at_least=2).verdict == "not run at this scale"


def test_branches_of_a_curriculum_are_told_by_the_share_of_their_bounded_phase() -> None:
    phases = [Phase("train:b", "bounded", 0, 100, {"max_iter": 4}, (), "trunk")]
    phases += [Phase(f"train:{n}", f"free-{n}", n, 100, {"max_iter": 24}, (), f"f{n}", "trunk") for n in (70, 80, 90)]
    run = TrainingRun("m", 0, tuple(phases), "language_model", "implicit_mamba2", 1000)
    points = [TEXT | {"phase": f"free-{n}", "perplexity": value} for n, value in ((70, 20.0), (80, 18.0), (90, 19.0))]
    points.append(TEXT | {"phase": "bounded", "solver": Solver("fixed_point", 4, 1), "perplexity": 1.0})
    share = {"name": "over_other_shares", "kind": "perplexity", "share": 0.8}
    judgement = judge(inputs({"perplexity": points}, training=[run]), share, at_most=1)
    assert judgement.verdict == "holds"
    assert judgement.spread.mean == pytest.approx(18 / 19)


def test_a_smaller_implicit_model_is_set_against_larger_explicit_ones_of_as_many_tokens() -> None:
    explicit = TEXT | {"is_implicit": False, "solver": None, "phase": "explicit", "mode": "parallel"}
    points = [TEXT, explicit | {"run": "large", "num_parameters": 2000, "perplexity": 20.0}]
    points += [explicit | {"run": "equal", "perplexity": 1.0}, explicit | {"run": "huge", "num_parameters": 9000}]
    points += [explicit | {"run": "longer", "num_parameters": 2000, "train_tokens": 9e6, "perplexity": 1.0}]
    larger = {"name": "over_larger", "kind": "perplexity", "family": "Mamba2"}
    judgement = judge(inputs({"perplexity": points}), larger, below=1)
    assert (judgement.verdict, judgement.spread.values) == ("holds", (0.9,))
    assert judge(inputs({"perplexity": points[:1]}), larger, below=1).verdict == "not run at this scale"


def test_predictions_are_looked_at_after_a_quarter_of_the_iterations() -> None:
    curve = {"f_evaluations": [1, 2, 4, 8, 16], "agreement_with_last": [0.1, 0.5, 0.95, 1.0, 1.0]}
    record = PAIR | {"measure": "convergence", "convergence": curve}
    judgement = judge(inputs({"duality": [record]}), {"name": "settled_early", "kind": "duality"}, at_least=0.9)
    assert (judgement.verdict, judgement.spread.values) == ("holds", (0.95,))


def answered(run: str, accuracy: float, task: str = "piqa", **about: Any) -> Record:
    base = {
        "role": f"evaluate:{run}",
        "run": run,
        "phase": "free",
        "solver": FREE,
        "seed": 0,
        "task": task,
    }
    base |= {"is_implicit": True, "mode": "blockwise", "model_type": "implicit_mamba2", "num_parameters": 1000}
    return base | {"train_tokens": 1e6, "metrics": {"acc": accuracy, "perplexity": accuracy}} | about


@pytest.mark.parametrize(("column", "task", "sign"), [("PIQA", "piqa", 1), ("LAMBADA ppl", "lambada_openai", -1)])
def test_downstream_columns_are_compared_for_every_pair_of_seeds(column: str, task: str, sign: int) -> None:
    explicit = {"is_implicit": False, "phase": "explicit", "solver": None, "mode": "parallel"}
    records = [answered("m-implicit", value, task, seed=seed) for seed, value in enumerate((0.7, 0.6))]
    records += [answered("m-explicit", value, task, seed=seed, **explicit) for seed, value in enumerate((0.5, 0.65))]
    records += [answered("m-long", 0.9, task, train_tokens=2e6, **explicit)]
    measure = PairMeasure("downstream", "implicit", family="Mamba2", column=column)
    judged = Claim("id", "s", "paper", "w", None, None, ("demo",), Condition(above=0), compare=measure)
    judgement = judge_found(judged, find(judged, inputs({"lm_eval": records})), "demo")
    assert sorted(judgement.spread.values) == pytest.approx(sorted(sign * v for v in (0.2, 0.05, 0.1, -0.05)))
    assert judgement.verdict == "borderline"


def test_a_quantity_without_words_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="token_agreement"):
        Quantity("record", "duality", key="token_agreemnt")
