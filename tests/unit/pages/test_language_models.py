"""docs/language-models.md and its complete tables: their numbers are those of the kept results."""

import math
import re
import runpy

import pandas as pd
import pytest

from tests.unit.pages.page_texts import LANGUAGE_MODELS, benchmark, read

PAGE = read("docs/language-models.md")
FINDINGS = " ".join(PAGE.split())
ROWS = runpy.run_path(str(LANGUAGE_MODELS / "rows.py"))
FRESH, REPEATED, MAMBA2, LARGE = ROWS["TEXTS"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, pd.DataFrame]:
    """The tables of fresh text alone, to which a test adds rows; rows.py reads these instead of the files."""
    names = ("test_loss", "validation_loss", "agreement")
    tables = {
        name: pd.read_csv(LANGUAGE_MODELS / f"{name}.csv").query("experiment == 'language-models'") for name in names
    }
    monkeypatch.setitem(ROWS["tested"].__globals__, "table_of", lambda name: tables[name].copy())
    return tables


def add(tables: dict[str, pd.DataFrame], run: str, phase: str, losses: list[float], name: str = "test_loss") -> None:
    """Losses by seed of a run on repeated text."""
    rows = [
        {"experiment": "language-models-repeated", "run": run, "phase": phase, "seed": seed, "mode": "as_trained"}
        | {"length": 2048, "loss": loss, "train_flops": 1.6e16}
        for seed, loss in enumerate(losses)
    ]
    tables[name] = pd.concat([tables[name], pd.DataFrame(rows)], ignore_index=True)


def repeated(tables: dict[str, pd.DataFrame], free: list[float]) -> str:
    """What the page says of the gain on repeated text, of which the chosen single pass has a loss of 2.5 and more."""
    for run, loss in (("single-pass-wd0.1", 2.9), ("single-pass-wd1.0", 2.4)):
        add(tables, run, "single", [loss], "validation_loss")
    add(tables, "single-pass-wd0.1", "single", [2.0])
    add(tables, "single-pass-wd1.0", "single", [2.5, 2.6, 2.7])
    add(tables, "implicit", "free-80", free)
    return "\n".join(ROWS["regulariser"]())


@pytest.mark.parametrize(
    ("free", "answer"),
    [
        ([2.400, 2.501, 2.602], "**Yes: free iterations gain more on repeated than on fresh text**."),
        ([2.499, 2.600, 2.699], "**No: free iterations gain less on repeated than on fresh text**."),
        ([2.3, 2.6, 2.8], "**Undecided: whether free iterations gain more on repeated than on fresh text**."),
        (
            [2.4],
            "Whether free iterations gain more on repeated than on fresh text is open: one seed was run.",
        ),
    ],
)
def test_the_interval_of_the_difference_decides_whether_iteration_gains_more_on_repeated_text(
    made_up, free: list[float], answer: str
) -> None:
    assert repeated(made_up, free).splitlines()[0] == answer


def test_a_gain_is_shown_of_the_run_that_validation_text_chose_with_the_seeds_that_both_models_have(made_up) -> None:
    repeated(made_up, [2.4])
    (line,) = (line for line in ROWS["ingredients"]() if line.startswith("| free iterations, at equal tokens"))
    fresh, on_repeated, *others = line.strip("| ").split(" | ")[1:]
    assert on_repeated == "-0.100 (one seed)"
    assert (fresh, others) == ("-0.019 (-0.022 to -0.016)", ["not run", "not run", "–"])
    assert ROWS["final_cell"](REPEATED, "single").endswith("), 16.0")


def test_what_was_not_run_says_so_in_every_table() -> None:
    mamba2 = [line.split(" | ")[3] for line in list(ROWS["ingredients"]())[2:]]
    kept = set(pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").experiment)
    assert (set(mamba2) == {"not run"}) == ("language-models-mamba2" not in kept)
    four_at_equal_flops = next(
        line for line in ROWS["ingredients"]() if line.startswith("| four iterations, at equal FLO")
    )
    assert four_at_equal_flops.count("not run") == len(ROWS["TEXTS"])


def test_the_interval_of_the_mean_is_by_students_t_and_a_single_seed_has_none() -> None:
    low, high = ROWS["interval"](pd.Series([1.0, 2.0, 3.0]))
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert ROWS["interval"](pd.Series([1.0])) is None


def test_the_dot_plot_has_a_panel_for_each_text_and_a_dot_for_each_model_that_was_run() -> None:
    drawn = read("docs/images/language-model-losses.svg")
    kept = set(pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").experiment)
    assert re.findall(r'class="title"[^>]*>([^<]+)<', drawn) == [
        text for text, (experiment, _) in ROWS["TEXTS"].items() if experiment in kept
    ]
    assert drawn.count('r="4.6"') == sum(
        not ROWS["losses"](text, model).empty for text in ROWS["TEXTS"] for model in ROWS["LABELS"]
    )


def test_the_page_has_no_column_of_another_experiment() -> None:
    assert not re.search(r"^\|.*25M", PAGE, re.MULTILINE)


def test_loops_gain_as_much_on_fresh_as_on_repeated_text_at_equal_tokens() -> None:
    fresh, repeated = (ROWS["at_equal_tokens"](name, 4) for name in ROWS["REGIMES"].values())
    readme = " ".join(read("results/reference/language-models/README.md").split())
    spans = [f"{-max(gains):.3f} to {-min(gains):.3f}" for gains in (fresh, repeated)]
    assert f"four loops gain {spans[0]} on fresh text and {spans[1]} on repeated text." in readme
    large = [
        own
        for loops in (2, 4)
        for own, (flops, _) in zip(
            ROWS["at_equal_flops"]("repeated_100m_tokens_10_times", loops, "repeated_100m_tokens_10_times"),
            ROWS["of_loops"]("repeated_100m_tokens_10_times", loops).values(),
            strict=True,
        )
        if flops >= 3e18
    ]
    assert (round(max(large), 2), round(min(large), 2)) == (-0.04, -0.12)


@pytest.fixture(scope="module")
def losses() -> dict[str, pd.DataFrame]:
    """By experiment: mean loss over the last tenth of the steps, by run and phase, a column for each seed.

    A kept loss is the mean since the one before.
    """
    frame = pd.read_csv(LANGUAGE_MODELS / "training_loss.csv")
    job = ["experiment", "run", "phase", "seed"]
    frame["weight"] = frame.groupby(job).step.diff().fillna(1)
    last = frame[frame.step > 0.9 * frame.groupby(job).step.transform("max")]
    sums = last.assign(loss=last.loss * last.weight).groupby(job)[["loss", "weight"]].sum()
    mean = sums.loss / sums.weight
    return {name: of.droplevel("experiment").unstack() for name, of in mean.groupby("experiment")}


def test_the_losses_in_training_are_the_kept_ones(losses) -> None:
    kept = losses["language-models"]
    away = kept.loc["implicit", "bounded"] - losses["language-models-first"].loc["implicit", "bounded"]
    about = " ".join((LANGUAGE_MODELS / "README.md").read_text(encoding="utf-8").split())
    assert f"of the second three are {away.min():.3f} to {away.max():.3f} nats per token away" in about


def test_normalised_weights_give_a_fifth_of_the_gain_of_a_single_pass_and_about_a_quarter_for_mamba2() -> None:
    shares = {
        text: ROWS["gain"](text, "normed", "explicit").mean() / ROWS["gain"](text, "single", "explicit").mean()
        for text in (FRESH, MAMBA2)
    }
    assert 0.17 < shares[FRESH] < 0.23
    assert 0.23 < shares[MAMBA2] < 0.29
    assert "Normalised weights give a fifth of that gain for Llama and about a quarter for Mamba2" in FINDINGS


def test_the_share_of_the_advantage_that_a_single_pass_has_is_the_measured_one() -> None:
    shares, by_seed, normed = [], [], []
    for text in (FRESH, MAMBA2, LARGE):
        single, free = (ROWS["gain"](text, of, "explicit") for of in ("single", "free"))
        shares.append(f"{100 * single.mean() / free.mean():.0f} %")
        by_seed.append(
            "{:.0f} to {:.0f}".format(*(100 * end for end in ((single / free).min(), (single / free).max())))
        )
        normed.append(ROWS["gain"](text, "single", "normed").mean() / ROWS["gain"](text, "free", "normed").mean())
    assert f"already has {shares[0]} ({by_seed[0]} by seed) of the advantage of the implicit Llama" in FINDINGS
    assert f"It has {shares[1]} ({by_seed[1]}) of that of Mamba2" in FINDINGS
    assert f"; {100 * normed[0]:.0f} and {100 * normed[1]:.0f} % if explicit weights are normalised." in FINDINGS
    four, free = (-ROWS["gain"](LARGE, of, "single").mean() for of in ("bounded", "free"))
    gains = f"four iterations lower the loss by {four:.3f} and free ones by {free:.3f}. It had 200M tokens."
    assert f"a single pass has {shares[2]} of Llama's advantage, {gains}" in FINDINGS


def test_free_iterations_are_worse_than_the_explicit_model_at_more_flops() -> None:
    llama, mamba2 = (ROWS["gain"](text, "free", "long") for text in (FRESH, MAMBA2))
    stated = f"even free iterations, at 1.3 times its FLOPs, are {llama.mean():.3f} nats per token worse (Mamba2: "
    assert f"{stated}{mamba2.mean():.3f})." in FINDINGS
    for text in (FRESH, MAMBA2):
        free, long = (ROWS["tested"](text, of).train_flops.mean() for of in ("free", "long"))
        assert f"{free / long:.1f}" == "1.3"


def test_what_is_unequal_has_the_measured_sizes() -> None:
    test, valid = (pd.read_csv(LANGUAGE_MODELS / f"{split}_loss.csv") for split in ("test", "validation"))
    solo = test.query("experiment == 'language-models-repeated' and seed == 0 and length == 2048").set_index("run").loss
    equal, chosen = solo["explicit"] - solo["single-pass-wd0.3"], solo["explicit"] - solo["single-pass-wd1.0"]
    assert f"the single pass is {equal:.3f} better than the explicit model, not {chosen:.3f} (seed 0)" in FINDINGS
    loss = valid.query("experiment == 'language-models-mamba2' and seed == 0").set_index("run").loss
    steps = [loss[f"mamba2-{of}-lr0.001"] - loss[f"mamba2-{of}-lr0.003"] for of in ("explicit", "single-pass")]
    assert "gained {:.3f} for the explicit model and {:.3f} for the single pass".format(*steps) in FINDINGS
    slow = loss["llama3-single-pass-lr0.001"]
    better, adds = loss["llama3-explicit-lr0.001"] - slow, slow - loss["llama3-single-pass-lr0.003"]
    assert f"is {better:.3f} better than the explicit model; its higher rate adds {adds:.3f}" in FINDINGS


def test_what_iterating_gains_by_seed_is_as_the_page_says() -> None:
    four, free = ([ROWS["gain"](text, of, "single") for text in ROWS["TEXTS"]] for of in ("bounded", "free"))
    assert [int((gain > 0).sum()) for gain in four] == [3, 3, 1, 0]
    assert all((gain < 0).all() for gain in free)
    assert [len(gain) for gain in free] == [3, 3, 3, 1]
    assert {f"{-gain.mean():.2f}" for gain in free[:3]} == {"0.02", "0.03"}
    flops = {
        of: [ROWS["tested"](text, of).train_flops.mean() for text in ROWS["TEXTS"]]
        for of in ("bounded", "free", "single")
    }
    assert all(1.9 < a / b < 2.2 for a, b in zip(flops["bounded"], flops["single"], strict=True))
    assert "**Four iterations did not help with 21M parameters**, at twice the FLOPs" in FINDINGS
    times = [a / b for a, b in zip(flops["free"], flops["single"], strict=True)]
    assert (
        f"at {min(times):.1f} to {max(times):.1f} times the FLOPs, with each of the nine seeds and with 130M"
        in FINDINGS
    )


def test_the_distances_to_the_fixed_point_are_the_measured_ones() -> None:
    kept = (benchmark("language-blocks", "h100"), benchmark("language-blocks-130m", "h200"))
    rows = [row for one in kept for row in one["rows"] if row["table"] == "distance"]
    *at, bounded = [row for row in rows if row["tol"] == 0.05]
    solved = [row for row in rows if row["tol"] == 0.0001]
    assert bounded["model"] == "language-models-130m/implicit-s0/bounded"
    assert [f"{100 * row['distance']:.0f}" for row in at] == ["4", "3", "2"]
    (four,) = (row for row in rows if row["tol"] is None and row["model"] == bounded["model"])
    assert f"Its four iterations leave it {100 * four['distance']:.0f} % away" in FINDINGS
    most = max(abs(a["loss"] - b["loss"]) for a, b in zip(at, solved[:3], strict=True))
    assert f"The loss differs by at most {most:.3f} nats per token" in FINDINGS
    frame = pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").query("phase == 'bounded' and length == 2048")
    by_mode = frame.pivot_table(index=["experiment", "seed"], columns="mode", values="loss")
    higher = (by_mode["blockwise-256-token"] - by_mode.as_trained).dropna()
    mamba2, llama, large = (higher.loc[f"language-models-{name}"] for name in ("mamba2", "repeated", "130m"))
    assert f"their loss is {mamba2.min():.3f} to {mamba2.max():.3f} nats higher for Mamba2" in FINDINGS
    assert f"{llama.min():.3f} to {llama.max():.3f} for Llama on repeated text" in FINDINGS
    assert f"and {large.item():.3f} for Llama 130M" in FINDINGS


def test_the_share_of_equal_tokens_is_the_kept_one() -> None:
    frame = pd.read_csv(LANGUAGE_MODELS / "agreement.csv").query("experiment != 'language-models-25m'")
    means = 100 * frame.groupby(["experiment", "mode", "against", "phase"]).token_agreement.mean()
    assert f"agree on {means.min():.0f} to {means.max():.0f} % of the tokens" in FINDINGS


def test_four_iterations_of_mamba2_as_trained_are_compared_with_explicit_models_of_normalised_weights() -> None:
    frame = pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").query(
        "length == 2048 and mode in ['as_trained', 'parallel']"
    )
    loss = frame.groupby(["run", "phase"]).loss.mean()
    ratio = math.exp(loss["mamba2-implicit", "bounded"] - loss["mamba2-explicit-normed", "explicit"])
    assert f"(4+1) Mamba2 has {ratio:.3f} times explicit's perplexity" in FINDINGS


def test_about_a_fifth_of_the_tokens_had_not_converged_where_modes_were_compared() -> None:
    frame = pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").query("length == 2048 and run == 'implicit'")
    solved = frame[frame["mode"].isin(["simultaneous", "blockwise"]) & (frame.experiment == "language-models")]
    assert set(solved.eval_stop) == {"sequence"}
    assert solved.unconverged_share.between(0.17, 0.24).all()
    assert "so about a fifth of their tokens had not converged" in FINDINGS


def test_a_run_that_was_cut_short_had_losses_as_near_as_the_page_says() -> None:
    first = pd.read_json(LANGUAGE_MODELS / "cut-short.json").pivot(index="step", columns="phase", values="loss")
    frame = pd.read_csv(LANGUAGE_MODELS / "training_loss.csv").query("experiment == 'language-models-130m'")
    away = (frame.pivot(index="step", columns="phase", values="loss") - first).rolling(10).mean()
    assert f"had training losses at most {away.loc[400:].abs().max().max():.3f} away" in FINDINGS
    about = " ".join(read("results/reference/language-models/README.md").split())
    ends = [first[phase].last_valid_index() for phase in ("explicit", "single", "bounded", "free-80")]
    assert ends[2:] == [1526, 1526]
    assert f"the explicit model reached step {ends[0]} and the single pass {ends[1]}" in about


def test_iterated_llamas_of_130m_parameters_are_the_worst_at_eight_times_their_length() -> None:
    by_length = [
        {model: ROWS["losses"](LARGE, model, length).item() for model in ("explicit", "single", "bounded", "free")}
        for length in (8192, 16384)
    ]
    four, eight = (sorted(losses, key=lambda model: losses[model]) for losses in by_length)
    assert four[-1] == "explicit"
    assert set(eight[2:]) == {"bounded", "free"}
