"""Claims: what they measure, of which models, and the verdict that follows."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.journal import Point
from implicit_llm_report.claims import claims
from implicit_llm_report.claims.claims import Claim, Judgement
from implicit_llm_report.claims.measure import Measure
from implicit_llm_report.config import MinimumLayersConfig, MissingResult, ReportConfig, ReportError, ReportJob
from implicit_llm_report.inputs.missing import missing_records
from implicit_llm_report.inputs.published import load_published
from implicit_llm_report.inputs.suites import load_suites
from implicit_llm_report.inputs.training_runs import Phase, Solver, TrainingRun
from tests.refusals import refused
from tests.unit.report.sample_runs import Record, given_of

WORD: Record = (
    {"run": "a", "seed": 0, "is_implicit": True, "num_layers": 1, "group": "A5", "monoid": "none", "length": 16}
    | {"hard_fraction": 0.2, "train_length": 16, "train_hard_fraction": 0.2, "data": "L16", "mode": "blockwise"}
    | {"num_samples": 10_000, "chance_last10": 0.1, "accuracy_last10": 1.0, "f_evaluations_per_token": 9.0}
)
EXPLICIT: Record = (
    {"run": "m-explicit", "phase": "explicit", "seed": 0, "is_implicit": False, "model_type": "implicit_mamba2"}
    | {"num_parameters": 1000, "data": "text-test", "length": 128, "mode": "parallel", "perplexity": 20.0}
    | {"train_length": 128, "train_tokens": 1e6, "train_flops": 1e12}
)
IMPLICIT = EXPLICIT | {
    "run": "m-implicit", "phase": "free", "solver": Solver("fixed_point", 24, 4), "is_implicit": True,
    "mode": "blockwise", "perplexity": 18.0, "num_parameters": 1050, "train_flops": 4e12,
}  # fmt: skip
SETTLED = {"measure": "convergence", "convergence": {"f_evaluations": [1, 8], "agreement_with_last": [1.0, 1.0]}}
BOUNDED = IMPLICIT | {"phase": "bounded", "solver": Solver("fixed_point", 4, 1), "perplexity": 19.0}
CLAIMS = {claim.id: claim for claim in claims.load_claims()}
AT_LEAST, AT_MOST = ">= 0.9", "<= 0.5"


def judge(
    measure: Record,
    bound: str,
    records: Sequence[Record],
    *,
    training: Sequence[TrainingRun] = (),
    scale: str = "demo",
    **config: Any,
) -> Judgement:
    chosen = Measure(**({"metric": "accuracy_last10"} | measure))
    claim = Claim("id", "statement", "paper", "Fig. 3", None, None, ("demo",), chosen, bound)
    given = given_of({chosen.kind: list(records)}, training, **config)
    return claims.judge(claim, given.frame, scale)


def of_claim(name: str, records: Sequence[Record], kind: str, training: Sequence[TrainingRun] = ()) -> Judgement:
    """The verdict on a claim of claims.yaml."""
    claim = CLAIMS[name]
    frame = given_of({kind: list(records)}, training, minimum_layers=MinimumLayersConfig("S5")).frame
    return claims.judge(claim, frame, claim.scales[-1])


def runs(**values: float | None) -> list[Record]:
    """One record a run, with this last-ten accuracy."""
    return [WORD | {"run": run, "accuracy_last10": value} for run, value in values.items()]


def seeds(record: Record, *values: float | None, metric: str = "perplexity") -> list[Record]:
    return [record | {"seed": seed, metric: value} for seed, value in enumerate(values)]


HARDER = WORD | {"data": "L16-harder", "hard_fraction": 0.3, "accuracy_last10": 0.2}
GOOD_AND_BAD, FEW = runs(good=0.99, bad=0.1), WORD | {"accuracy_last10": 0.93, "num_samples": 128}
# By the sentence: the measure, the bound, the records, the verdict, and the mean that is shown.
JUDGED: dict[str, tuple[Record, str, Sequence[Record], str, float | None]] = {
    "of what can be done the best run decides": ({}, AT_LEAST, GOOD_AND_BAD, "reproduced", 0.99),
    "of what cannot be done all runs decide": ({}, AT_MOST, runs(low=0.1, high=0.6), "not reproduced", 0.6),
    "a missing number never helps": ({}, AT_MOST, runs(low=0.1, lost=None), "missing", None),
    "a missing number does not hide a failure": ({}, AT_MOST, runs(high=0.6, lost=None), "not reproduced", 0.6),
    "an unfinished run may still be the best": ({}, AT_LEAST, runs(bad=0.1, lost=None), "missing", None),
    "one complete run is enough where the best decides": (
        {}, AT_LEAST, [*runs(good=0.95, better=1.0), WORD | {"run": "better", "seed": 1, "accuracy_last10": None}],
        "reproduced", 0.95,
    ),
    "a run is complete if each of its numbers is": (
        {}, AT_LEAST, [*runs(a=0.95), *seeds(WORD | {"data": "L32"}, 1.0, None, metric="accuracy_last10")],
        "missing", 1.0,
    ),
    "a missing number alone is missing": ({}, AT_LEAST, runs(lost=None), "missing", None),
    "a claim must hold on every test set of the run that decides": (
        {}, AT_LEAST, [WORD, HARDER], "not reproduced", 0.2,
    ),
    "a claim about all runs is decided by the worst": (
        {"speaks": "all"}, AT_LEAST, GOOD_AND_BAD, "not reproduced", 0.1,
    ),
    "a claim whose seeds disagree depends on the seed": (
        {}, AT_LEAST, seeds(WORD, 1.0, 0.9, 0.83, metric="accuracy_last10"), "depends on the seed", 0.91,
    ),
    "a claim that lacks a seed is missing": (
        {}, AT_LEAST, seeds(WORD, 1.0, None, metric="accuracy_last10"), "missing", 1.0,
    ),
    "the share of one seed is judged by its interval over the test sequences": (
        {}, AT_LEAST, [FEW], "undecided", 0.93,
    ),
    "the interval of many test sequences is narrow": (
        {}, AT_LEAST, [FEW | {"num_samples": 4096}], "reproduced", 0.93,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("measure", "bound", "records", "verdict", "shown"), JUDGED.values(), ids=JUDGED)
def test_a_verdict(measure: Record, bound: str, records: Sequence[Record], verdict: str, shown: float | None) -> None:
    judgement = judge(measure, bound, records)
    assert (judgement.verdict, judgement.spread.mean) == (verdict, pytest.approx(shown))
    assert judgement.num_competing == len({record["run"] for record in records})
    assert judgement.to_dict()["measured"]["mean"] == judgement.spread.mean


def test_a_verdict_has_the_range_of_the_seeds_and_the_interval_of_one() -> None:
    spread = judge({}, AT_LEAST, seeds(WORD, 1.0, 0.9, 0.83, metric="accuracy_last10")).spread
    assert (spread.low, spread.high) == (0.83, 1.0)
    assert judge({}, AT_LEAST, [FEW]).to_dict()["interval"] == pytest.approx([0.872, 0.963], abs=1e-3)


@pytest.mark.parametrize(("scale", "of"), [("state-tracking", {"group": "A5"}), ("demo", {"group": "S5"})])
def test_claim_without_runs_or_at_another_scale_was_not_run(scale: str, of: Record) -> None:
    assert judge({"of": of}, AT_LEAST, (WORD,), scale=scale).verdict == "not run"


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ({"length_factor": 4}, 0.5),
        ({"is_harder": True}, 0.4),
        ({"length_factor": 1, "is_harder": False}, 1.0),
        ({"family": "Llama"}, 0.3),
        ({"iterations": {"at_most": 8}}, 0.2),
        ({"is_headline": True, "data": "L16"}, 1.0),
        ({"is_headline": True, "run": "far"}, 0.7),  # read on more test sets sequentially than in blocks
    ],
)
def test_columns_of_the_frame_say_which_numbers_a_claim_means(of: Record, expected: float) -> None:
    records = [
        WORD,
        WORD | {"data": "L64", "length": 64, "accuracy_last10": 0.5},
        WORD | {"data": "h0.5", "hard_fraction": 0.5, "accuracy_last10": 0.4},
        WORD | {"data": "llama", "model_type": "llama", "length": 18, "accuracy_last10": 0.3},
        WORD | {"data": "few", "solver": Solver("fixed_point", 8, 4), "length": 18, "accuracy_last10": 0.2},
        WORD | {"mode": "sequential", "length": 18, "accuracy_last10": 0.1},
        *[
            WORD
            | {
                "run": "far",
                "data": data,
                "accuracy_last10": 0.7,
                "mode": "sequential",
                "length": 99,
                "hard_fraction": None,
            }
            for data in ("far-1", "far-2")
        ],
        WORD | {"run": "far", "data": "far-1", "accuracy_last10": 0.6, "length": 99, "hard_fraction": None},
    ]
    assert judge({"of": of}, AT_LEAST, records).spread.mean == expected


@pytest.mark.parametrize(
    ("by", "metric", "expected"),
    [("difference", "accuracy_last10", -0.3), ("ratio", "f_evaluations_per_token", 4.0)],
)
def test_two_modes_of_one_run_are_compared_seed_by_seed(by: str, metric: str, expected: float) -> None:
    published = WORD | {"mode": "released-criterion", "accuracy_last10": 0.7, "f_evaluations_per_token": 36.0}
    records = [WORD, published, WORD | {"seed": 1}, published | {"seed": 1}]
    records.append(published | {"run": "b", "accuracy_last10": 0.0})
    measure = {
        "metric": metric,
        "of": {"mode": "released-criterion"},
        "against": {"mode": "blockwise"},
        "same": ("name", "data"),
    }
    judgement = judge(measure | {"by": by}, AT_MOST, records)
    assert judgement.spread.values == pytest.approx((expected, expected))


def test_derived_numbers_are_rows_of_the_frame() -> None:
    above_chance = judge({"metric": "above_chance"}, AT_LEAST, (WORD,))
    assert above_chance.spread.mean == pytest.approx(0.9)
    assert above_chance.to_dict()["form"] == "points"
    curve = {"f_evaluations": [1, 2, 4, 8, 16], "agreement_with_last": [0.1, 0.5, 0.95, 1.0, 1.0]}
    record = {"role": "r", "run": "m", "measure": "convergence", "convergence": curve}
    assert of_claim("few-tokens-need-all-iterations", [record], "duality").spread.values == (0.95,)
    late = {"f_evaluations": [8, 16], "agreement_with_last": [0.9, 1.0]}  # nothing after a quarter of the iterations
    missing = of_claim("few-tokens-need-all-iterations", [record | {"convergence": late}], "duality")
    assert (missing.spread.values, missing.spread.num_missing) == ((), 1)


def lost_records(config: Record, known: Sequence[Record] = ()) -> list[Record]:
    """Those of a missing evaluation."""
    item = MissingResult("j", "lost", "failed", "", "", config, {"text-test": {}}, is_implicit=True)
    report = ReportConfig("demo", jobs={"lost": ReportJob("n", 0, "free", "x")}, missing=(item,))
    return [found for _, found in missing_records(report, known)]


SIMULTANEOUS = [{"name": mode, "eval_mode": mode} for mode in ("simultaneous", "sequential")]
MAMBA2 = {"model_type": "implicit_mamba2"}
PAIR = {"measure": "pair", "eval_mode": "simultaneous", "against": "sequential", "token_agreement": 1.0} | MAMBA2


@pytest.mark.parametrize(
    ("claim", "config", "there"),
    [
        ("duality-of-language-models", {"kind": "duality", "modes": SIMULTANEOUS, "lengths": [8]}, PAIR),
        ("few-tokens-need-all-iterations", {"kind": "duality", "modes": SIMULTANEOUS, "lengths": [8]}, SETTLED),
        ("iteration-contracts", {"kind": "jacobian"}, {"setting": "trained", "f_radius": 0.5}),
        ("jacobian-formula", {"kind": "jacobian"}, {"is_checked": True, "relative_difference": 1e-9}),
    ],
)
def test_a_claim_about_all_runs_is_missing_while_a_run_has_no_result(claim: str, config: Record, there: Record) -> None:
    record = {"role": "evaluate:m", "run": "m", "is_implicit": True} | there
    assert of_claim(claim, [record], config["kind"]).verdict == "reproduced"
    lost = lost_records(config, [{"run": "n"} | MAMBA2])
    assert of_claim(claim, [record, *lost], config["kind"]).verdict == "missing"


def test_what_is_known_of_a_run_is_taken_from_all_its_records() -> None:
    known = [{"run": "n", "train_length": 8}, {"run": "n", "train_length": 9, "train_hard_fraction": 0.1}]
    (lost,) = lost_records({"kind": "jacobian"}, known)
    assert (lost["train_length"], lost["train_hard_fraction"]) == (8, 0.1)


def test_a_missing_downstream_result_is_missing_in_its_columns_and_their_average() -> None:
    tasks = ["local_last_word", "local_continuation", "local_cloze"]
    lost = lost_records({"kind": "lm_eval", "modes": SIMULTANEOUS[:1], "tasks": tasks})
    frame = given_of({"lm_eval": lost}).frame
    assert {"last word", "cloze", "average"} <= set(frame["column"].dropna())
    assert frame["value"].isna().all()


@pytest.mark.parametrize(
    ("values", "by_seed", "is_missing"),
    [
        ([(0, 0.8), (0, 1.0), (1, 1.0)], [0.9, 1.0], False),
        ([(0, 0.8), (0, None), (1, 1.0)], [0.8, 1.0], False),
        ([(0, 0.8), (1, None)], [0.8], True),
    ],
)
def test_records_of_a_seed_are_averaged_and_a_seed_is_missing_only_if_none_has_a_number(
    values: list[tuple[int, float | None]], by_seed: list[float], is_missing: bool
) -> None:
    pair = {"run": "m", "is_implicit": True} | PAIR
    records = [pair | {"seed": seed, "token_agreement": value} for seed, value in values]
    other = [pair | {"measure": "convergence", "token_agreement": 0.0}, pair | {"source": {}, "token_agreement": 0.0}]
    judgement = of_claim("duality-of-language-models", [*records, *other], "duality")
    assert (judgement.verdict == "missing", sorted(judgement.spread.values)) == (is_missing, pytest.approx(by_seed))


def test_whether_modes_agree_is_asked_of_models_after_their_free_phase() -> None:
    phases = (("bounded", 4, 0.9), ("free-80", 24, 0.98))
    records = [
        {"run": "m", "is_implicit": True, "phase": phase, "solver": Solver("fixed_point", most, 1)}
        | PAIR
        | {"token_agreement": share}
        for phase, most, share in phases
    ]
    judgement = of_claim("duality-of-language-models", records, "duality")
    assert (judgement.verdict, judgement.spread.values) == ("reproduced", (0.98,))


def test_layers_grow_with_the_length_also_where_no_depth_solves_it() -> None:
    def depth(num_layers: int, length: int, accuracy: float, *, is_implicit: bool = False) -> Record:
        record = (
            WORD
            | {"run": f"n{num_layers}-{length}-{is_implicit}", "is_implicit": is_implicit, "group": "S5"}
            | {"num_layers": num_layers, "length": length, "train_length": length, "data": f"L{length}"}
        )
        return record | {"mode": "blockwise" if is_implicit else "parallel", "accuracy_last10": accuracy}

    explicit = [depth(1, 4, 1.0), depth(2, 4, 1.0), depth(1, 8, 0.2), depth(2, 8, 0.4)]
    implicit = [depth(1, length, 1.0, is_implicit=True) for length in (4, 8)]
    grown = of_claim("explicit-layers-grow", [*explicit, *implicit], "word_problem")
    assert (grown.verdict, grown.spread.mean) == ("reproduced", 2.0)
    assert (
        of_claim("one-implicit-layer-at-every-length", [*explicit, *implicit], "word_problem").verdict == "reproduced"
    )


def test_iterations_at_test_time_are_compared_seed_by_seed_and_with_every_explicit_model() -> None:
    base = IMPLICIT | {"task": "piqa"}
    swept = [
        base | {"seed": seed, "mode": f"blockwise-{n}", "metrics": {"acc": value}}
        | {"sweep": {"key": "eval_max_iter", "value": n, "base": "blockwise"}}
        for seed, n, value in ((0, 2, 0.1), (0, 4, 0.3), (0, 16, 0.9), (1, 2, 0.5), (1, 4, 0.6), (1, 16, 1.0))
    ]  # fmt: skip
    records = [*swept, EXPLICIT | {"task": "piqa", "metrics": {"acc": 0.2}}]
    of = {"swept": "eval_max_iter", "extent": "most"}
    common = {"metric": "acc", "kind": "lm_eval", "of": of}
    gain = {"against": of | {"extent": "least"}, "same": ("name", "base", "column")}
    assert sorted(judge(common | gain, AT_MOST, records).spread.values) == pytest.approx([0.5, 0.8])
    above = {"against": {"is_implicit": False}, "same": ("models", "column")}
    assert sorted(judge(common | above, AT_MOST, records).spread.values) == pytest.approx([0.7, 0.8])


def compare(name: str, *records: Record, training: Sequence[TrainingRun] = ()) -> Judgement:
    return of_claim(name, records, "perplexity", training)


FREE, FREE_BOUNDED = "free-below-explicit-mamba2", "free-below-bounded-mamba2"


@pytest.mark.parametrize(
    ("implicit", "verdict", "ends"),
    [
        ((18.0, 18.6), "reproduced", (18.0 / 20.0, 18.6 / 19.0)),
        ((17.0, 19.5), "depends on the seed", (17.0 / 20.0, 19.5 / 19.0)),
        ((18.0, None), "missing", (18.0 / 20.0, 18.0 / 19.0)),
    ],
)
def test_a_pair_holds_when_every_seed_of_one_is_below_every_seed_of_the_other(
    implicit: tuple[float | None, ...], verdict: str, ends: tuple[float, float]
) -> None:
    judgement = compare(FREE, BOUNDED, *seeds(IMPLICIT, *implicit), *seeds(EXPLICIT, 20.0, 19.0))
    assert (judgement.verdict, judgement.spread.low, judgement.spread.high) == (verdict, *ends)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"num_parameters": 1110}, "reproduced"),
        ({"num_parameters": 1120}, "not run"),
        ({"train_tokens": 1.009e6}, "reproduced"),
        ({"train_tokens": 1.02e6}, "not run"),
        ({"train_tokens": None}, "not run"),
        ({"model_type": "implicit_llama3"}, "not run"),
    ],
)
def test_only_models_of_one_family_and_of_equal_parameters_and_tokens_are_compared(
    changes: Record, verdict: str
) -> None:
    assert compare(FREE, IMPLICIT | changes, BOUNDED | changes, EXPLICIT).verdict == verdict


LARGE = {"num_parameters": 5000, "run": "l"}
LONG = EXPLICIT | {"run": "m-explicit-long", "perplexity": 17.0, "train_tokens": 4e6, "train_flops": 3.8e12}
LLAMA = {"model_type": "implicit_llama3"}
LARGER = EXPLICIT | LLAMA | {"run": "large", "num_parameters": 2100}
EXTRAPOLATES = "implicit-extrapolates-mamba2"
# By the sentence: the claim, the records, the verdict, and the values behind it where they are told.
COMPARED: dict[str, tuple[str, list[Record], str, tuple[float, ...] | None]] = {
    "phases of one run are compared seed by seed": (  # 18.9 is above 18.5, but of another seed
        FREE_BOUNDED, [*seeds(IMPLICIT, 18.0, 18.9), *seeds(BOUNDED, 18.5, 19.5)], "reproduced",
        (18.0 / 18.5, 18.9 / 19.5),
    ),
    "phases are told by their iterations": (
        "bounded-below-explicit-mamba2", [IMPLICIT, BOUNDED, EXPLICIT], "reproduced", (19 / 20,),
    ),
    "without a bounded phase there is no free one": (FREE, [IMPLICIT, EXPLICIT], "not run", None),
    "at equal FLOPs the run that was trained for longer stands against it": (
        "free-below-explicit-at-equal-flops-mamba2", [IMPLICIT, BOUNDED, EXPLICIT, LONG], "not reproduced", (18 / 17,),
    ),
    "the worst size decides": (
        FREE,
        [IMPLICIT, BOUNDED, EXPLICIT, IMPLICIT | LARGE | {"perplexity": 21.0}, BOUNDED | LARGE,
         EXPLICIT | LARGE | {"run": "l-e"}],
        "not reproduced", None,
    ),
    "a length factor takes the longer rows of both": (
        EXTRAPOLATES,
        [IMPLICIT, BOUNDED, EXPLICIT, IMPLICIT | {"length": 512, "perplexity": 30.0}, EXPLICIT | {"length": 512}],
        "not reproduced", None,
    ),
    "without longer rows a length factor takes none": (EXTRAPOLATES, [IMPLICIT, BOUNDED, EXPLICIT], "not run", None),
    "a model is compared with itself on longer rows": (
        "explicit-fails-at-eight-times", [EXPLICIT, EXPLICIT | {"length": 1024, "perplexity": 45.0}], "reproduced",
        (2.25,),
    ),
    "a smaller implicit model is set against larger explicit ones of as many tokens": (
        "parameter-optimal",
        [IMPLICIT | LLAMA, LARGER, EXPLICIT | LLAMA | {"perplexity": 1.0},
         EXPLICIT | LLAMA | {"run": "huge", "num_parameters": 9000},
         LARGER | {"run": "longer", "train_tokens": 9e6, "perplexity": 1.0}],
        "reproduced", (0.9,),
    ),
    "without larger models nothing is set against it": ("parameter-optimal", [IMPLICIT | LLAMA], "not run", None),
}  # fmt: skip


@pytest.mark.parametrize(("claim", "records", "verdict", "values"), COMPARED.values(), ids=COMPARED)
def test_models_are_compared(claim: str, records: list[Record], verdict: str, values: tuple[float, ...] | None) -> None:
    judgement = compare(claim, *records)
    assert judgement.verdict == verdict
    assert values is None or judgement.spread.values == pytest.approx(values)


def trained(record: Record, last_loss: float) -> TrainingRun:
    points = tuple(Point(step=step, values={"loss": loss}, time="") for step, loss in ((50, 1.0), (100, last_loss)))
    phase = Phase("train", record["phase"], 0, 100, None, points)
    return TrainingRun(record["run"], 0, (phase,), "language_model")


def test_language_models_that_compete_are_chosen_by_the_training_loss_at_the_end() -> None:
    lucky = EXPLICIT | {"run": "m-explicit-lucky", "perplexity": 15.0}
    training = (trained(EXPLICIT, 2.0), trained(lucky, 2.5), trained(IMPLICIT, 2.2))
    judgement = compare(FREE, IMPLICIT, BOUNDED, EXPLICIT, lucky, training=training)
    assert judgement.spread.mean == pytest.approx(18 / 20)
    assert "m-explicit (parallel) [chosen of 2 by training loss at the end]" in judgement.evidence.text
    assert compare(FREE, IMPLICIT, BOUNDED, EXPLICIT, lucky).verdict == "missing"  # the test set must not choose


def test_language_models_that_all_have_validation_text_are_chosen_by_it_over_the_seeds_that_they_share() -> None:
    single = IMPLICIT | {"mode": "as_trained", "phase": "single", "solver": Solver("unrolled", num_unroll=1)}
    kept, overfitted = ({"run": run, "model_type": "implicit_llama3"} for run in ("wd1.0", "wd0.1"))
    text = [*seeds(single | kept, 19.0, 20.0), *seeds(single | overfitted, 15.0), EXPLICIT | kept | {"run": "e"}]
    losses = {"wd1.0": [2.0, 9.0], "wd0.1": [2.5]}
    chosen = [
        single | {"run": run, "seed": seed, "loss": loss}
        for run, of_run in losses.items()
        for seed, loss in enumerate(of_run)
    ]
    training = (trained(single | kept, 2.0), trained(single | overfitted, 0.5))
    claim = CLAIMS["single-pass-beats-explicit-repeated"]
    frame = given_of({"perplexity": text, "validation_perplexity": chosen}, training).frame
    judgement = claims.judge(claim, frame, "language-models-repeated")
    assert "wd1.0 (as_trained) [chosen of 2 by loss on validation text]" in judgement.evidence.text
    assert judgement.spread.values == pytest.approx((19 / 20,))
    partly = given_of({"perplexity": text, "validation_perplexity": chosen[:2]}, training).frame
    assert "wd0.1" in claims.judge(claim, partly, "language-models-repeated").evidence.text


def repeated(*values: float | None, **changes: Any) -> list[Record]:
    """A phase on repeated text, by seed, with its loss and perplexity."""
    record = IMPLICIT | {"mode": "as_trained", "model_type": "implicit_llama3"} | changes
    losses = [None if value is None else math.log(value) for value in values]
    return [one | {"loss": loss} for one, loss in zip(seeds(record, *values), losses, strict=True)]


@pytest.mark.parametrize(
    ("free", "verdict", "difference"),
    [
        ((19.2, 24.0, 28.8), "reproduced", math.log(0.96)),
        ((19.2, 24.0, 29.7), "depends on the seed", None),
        ((19.8, 24.75, 29.7), "not reproduced", math.log(0.99)),
        ((19.2, 24.0, None), "missing", None),
    ],
)
def test_each_seed_must_gain_as_much_on_repeated_text_as_loops_do(
    free: tuple[float | None, ...], verdict: str, difference: float | None
) -> None:
    single = repeated(20.0, 25.0, 30.0, run="single", phase="single", solver=Solver("unrolled", num_unroll=1))
    judgement = of_claim(
        "iteration-gains-as-loops-do", [*repeated(*free, solver=Solver("f", 32, 4)), *single], "perplexity"
    )
    assert judgement.verdict == verdict
    assert judgement.evidence.num_seeds == sum(value is not None for value in free)
    if difference is not None:
        assert judgement.spread.values == pytest.approx((difference,) * 3)


def test_mamba2_and_llama_have_the_same_controls_by_the_same_bounds() -> None:
    names = [name.removesuffix("-mamba2") for name in CLAIMS if name.endswith("-mamba2") and "single-pass" in name]
    assert len(names) == 3
    for name in (*names, "iteration-pays-at-equal-flops"):
        llama, mamba2 = CLAIMS[name], CLAIMS[f"{name}-mamba2"]
        assert (mamba2.holds_if, mamba2.measure.by) == (llama.holds_if, llama.measure.by)
        assert mamba2.scales == ("language-models-mamba2",)


def test_branches_of_a_curriculum_are_told_by_the_share_of_their_bounded_phase() -> None:
    phases = [Phase("train:b", "bounded", 0, 100, Solver(max_iter=4), (), "trunk")]
    phases += [
        Phase(f"train:{n}", f"free-{n}", n, 100, Solver(max_iter=24), (), f"f{n}", "trunk") for n in (70, 80, 90)
    ]
    run = TrainingRun("m-implicit", 0, tuple(phases), "language_model")
    branches = [IMPLICIT | {"phase": f"free-{n}", "perplexity": p} for n, p in ((70, 20.0), (80, 18.0), (90, 19.0))]
    judgement = compare("eighty-percent-bounded", *branches, BOUNDED | {"perplexity": 1.0}, training=[run])
    assert (judgement.verdict, judgement.spread.mean) == ("reproduced", pytest.approx(18 / 19))


BABI = "implicit-better-on-most-babi-tasks"


def babi(is_implicit: bool, *accuracies: float, **changes: Any) -> Record:
    record = (
        {"run": f"babi-{is_implicit}", "phase": "p", "seed": 0, "is_implicit": is_implicit, "data": "babi-test"}
        | {"data_set": "babi", "split": "test", "protocol": "windowed", "accuracy": 0.5}
        | {"model_type": "implicit_mamba2", "num_layers": 1, "num_parameters": 100, "train_tokens": 5.0}
        | {"mode": "blockwise" if is_implicit else "parallel"}
    )
    by_task = {str(task): value for task, value in enumerate(accuracies, start=1)}
    return record | {"accuracy_by_task": by_task} | changes


def validated(run: str, *, is_implicit: bool, valid: float, test: float, **changes: Any) -> list[Record]:
    """A run of a grid: its accuracy on the validation set, and on the only task of the test set."""
    changes |= {"run": run}
    return [
        babi(is_implicit, valid, data="babi-valid", split="valid", accuracy=valid, **changes),
        babi(is_implicit, test, accuracy=test, **changes),
    ]


@pytest.mark.parametrize(
    ("records", "verdict", "shares"),
    [
        ([babi(True, 0.6, 0.6, 0.6, 1.0), babi(False, 0.5, 0.5, 0.5, 1.0)], "reproduced", (0.75,)),
        ([babi(True, 0.6, 0.6, 0.4, 1.0), babi(False, 0.5, 0.5, 0.5, 1.0)], "not reproduced", (0.5,)),
        ([babi(True, 0.6, num_layers=2), babi(False, 0.5)], "not run", ()),
        (
            [babi(True, 0.6, 0.6), babi(False, 0.5, 0.5), babi(False, 0.7, 0.7, seed=1)],
            "depends on the seed",
            (1.0, 0.0),
        ),
        ([babi(True, 0.6), babi(True, seed=1), babi(False, 0.5)], "missing", (1.0,)),
    ],
)
def test_most_tasks_are_more_than_half_of_them_and_ties_do_not_count(
    records: list[Record], verdict: str, shares: tuple[float, ...]
) -> None:
    judgement = of_claim(BABI, records, "catbabi")
    assert (judgement.verdict, judgement.spread.values) == (verdict, shares)


def test_a_grid_is_judged_by_the_runs_that_validation_chose_and_not_by_the_best_on_the_test_set() -> None:
    grid = [
        *validated("i-lucky", is_implicit=True, valid=0.4, test=0.8),
        *validated("i-chosen", is_implicit=True, valid=0.6, test=0.3),
        babi(True, 0.9, run="i-unvalidated"),
        *validated("e", is_implicit=False, valid=0.2, test=0.5),
    ]
    judgement = of_claim(BABI, grid, "catbabi")
    assert (judgement.verdict, judgement.evidence.run) == ("not reproduced", "i-chosen")
    words = "[chosen of 3 by accuracy on the validation set, 1 of them without a number there] against e"
    assert words in judgement.evidence.text
    unknown = [babi(True, 0.6, run="i-a"), babi(True, 0.7, run="i-b"), babi(False, 0.5)]
    assert of_claim(BABI, unknown, "catbabi").verdict == "missing"


def test_runs_of_other_training_tokens_do_not_compete_and_the_worse_pair_decides() -> None:
    small = [
        *validated("i-128", is_implicit=True, valid=0.5, test=0.4),
        *validated("e", is_implicit=False, valid=0.5, test=0.5),
    ]
    large = [record | {"train_tokens": 10.0, "run": f"{record['run']}-256"} for record in small]
    large = [r | {"accuracy_by_task": {"1": 0.9}} if r["is_implicit"] else r for r in large]
    assert of_claim(BABI, large, "catbabi").verdict == "reproduced"
    assert of_claim(BABI, [*small, *large], "catbabi").verdict == "not reproduced"


@pytest.mark.parametrize(
    ("name", "task", "metric"),
    [("hellaswag", "hellaswag", "acc_norm"), ("lambada-ppl", "lambada_openai", "perplexity")],
)
def test_downstream_columns_are_compared_for_every_pair_of_seeds(name: str, task: str, metric: str) -> None:
    records = []
    for record, values in ((IMPLICIT, (0.7, 0.6)), (BOUNDED, (0.1, 0.1)), (EXPLICIT, (0.5, 0.65))):
        records += [record | {"seed": s, "task": task, "metrics": {metric: value}} for s, value in enumerate(values)]
    judgement = of_claim(f"free-better-{name}-mamba2", records, "lm_eval")
    ratios = (0.7 / 0.5, 0.7 / 0.65, 0.6 / 0.5, 0.6 / 0.65)
    expected = ratios if metric == "perplexity" else (0.2, 0.05, 0.1, -0.05)
    assert judgement.spread.values == pytest.approx(expected)
    assert judgement.verdict == "depends on the seed"


def test_the_projects_claims_can_be_read_and_name_a_mark_for_what_is_published() -> None:
    assert {claim.origin for claim in CLAIMS.values()} == {"paper", "project"}
    assert all(claim.mark for claim in CLAIMS.values() if claim.published)
    assert len(CLAIMS) == len(claims.load_claims())  # by id
    of_large_models = [claim for claim in CLAIMS.values() if re.search("760M|1.3B", claim.published or "")]
    compared = [claim for claim in of_large_models if claim.origin == "paper" and claim.id != "modes-agree"]
    assert len(compared) > 20
    assert [claim.id for claim in compared if claim.full.keys() != {"num_parameters", "train_tokens"}] == []


FACTS = "marks: {{paper: x, not_known: y}}\nfacts: [{{id: a, part: model, what: b, source: d, {}}}]\n"
NUMBERS = "marks: {{paper: from it}}\n{}: [{{id: x, source: s, mark: paper, {}}}]\n"
SUITE = (
    "suites: [{name: s, title: t, columns: [{label: a, task: b, metric: acc}], averages: [{label: m, columns: [c]}]}]"
)


@pytest.mark.parametrize(
    ("load", "text", "named"),
    [
        (claims.load_claims, "claims: [{id: a, metrics: b}]", "unknown key 'metrics'"),
        (claims.load_claims, "nothing: 1", "unknown key 'nothing'"),
        (claims.load_claims, "claims: [", "not valid YAML"),
        (load_published, FACTS.format("value: null, mark: paper"), "not_known goes with the value null"),
        (load_published, FACTS.format("value: c, mark: not_known"), "not_known goes with the value null"),
        (load_published, FACTS.format("value: c, mark: rumour"), "mark"),
        (load_published, FACTS.format("value: c, mark: paper, sauce: x"), "unknown key 'sauce'"),
        (
            load_published,
            NUMBERS.format("downstream", "values: {PIQA: 0.7, HellaSwg: 0.5}"),
            "x: suite paper has no column 'HellaSwg'; did you mean",
        ),
        (
            load_published,
            NUMBERS.format("downstream", "suite: mine, values: {PIQA: 0.7}"),
            "x: suite mine has no column 'PIQA'; there is no such suite",
        ),
        (
            load_published,
            NUMBERS.format("numbers", "metric: accuracy_last, value: 0.5"),
            "x: there is no metric 'accuracy_last'; did you mean",
        ),
        (
            load_published,
            NUMBERS.format("perplexities", "solver: {max_iter: 4}, value: 9.5"),
            "x: solver: give max_iter and phantom_steps",
        ),
        (load_suites, SUITE, "an average is of 'c', which is no column of the suite; its columns are a"),
    ],
)
def test_a_damaged_file_of_the_report_is_a_one_line_error_with_file_and_key(
    tmp_path: Path, load: Callable[[Path], object], text: str, named: str
) -> None:
    path = tmp_path / "damaged.yaml"
    path.write_text(text)
    with refused(f"{path}.*{re.escape(named)}", (ReportError, ConfigError)):
        load(path)


@pytest.mark.parametrize(
    "wrong", [{"metric": "acuracy"}, {"of": {"lenght": 3}}, {"same": ("nmae",)}, {"equal": ("length",)}]
)
def test_an_unknown_metric_or_column_is_refused_with_the_valid_ones(wrong: Record) -> None:
    with pytest.raises(ValueError, match=r"accuracy_last10|length.*\?|name|use one of num_parameters, train_tok"):
        Measure(**({"metric": "accuracy_last10"} | wrong))
