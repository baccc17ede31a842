"""docs/language-models.md: its losses and differences are those of the kept results."""

import re

import pandas as pd
import pytest

from tests.unit.pages.page_texts import LANGUAGE_MODELS, read

FINDINGS = " ".join(read("docs/language-models.md").split())
ROWS = {  # run and phase; the tables of differences leave "implicit, " out
    "explicit": ("explicit", "explicit"),
    "explicit, weights normalised": ("explicit-normed", "explicit"),
    "implicit, a single pass": ("single-pass", "single"),
    "implicit, (4+1)": ("implicit", "bounded"),
    "implicit, free from 80 %": ("implicit", "free-80"),
    "explicit, twice the tokens": ("explicit-long", "explicit"),
}


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


def difference(of: pd.Series, other: pd.Series) -> str:
    """Mean over seeds with its 95 % interval, by Student's t with two degrees of freedom."""
    found = of - other
    mean, half = found.mean(), 4.303 * found.std() / 3**0.5
    return f"{mean:+.3f} ({mean - half:.3f} to {mean + half:.3f})"


def test_the_losses_of_language_models_are_the_kept_ones(losses) -> None:
    kept, small = losses["language-models"], losses["language-models-25m"]
    frame = pd.read_csv(LANGUAGE_MODELS / "training_loss.csv").query("experiment == 'language-models'")
    flops = frame.groupby(["run", "phase", "seed"]).flops.max().groupby(["run", "phase"]).mean() / 1e15
    for label, key in ROWS.items():
        shown = " | ".join(f"{loss:.3f}" for loss in (*kept.loc[key], kept.loc[key].mean()))
        assert f"| {label} | {flops.loc[key]:.1f} | {shown} |" in FINDINGS
    slow, first = (small.loc[f"small-explicit-lr{rate}", "explicit"][0] for rate in ("0.0003", "0.001"))
    assert f"({slow:.2f} against {first:.2f})" in FINDINGS


def test_the_differences_between_language_models_are_the_kept_ones(losses) -> None:
    kept, keys = losses["language-models"], {label.removeprefix("implicit, "): key for label, key in ROWS.items()}
    shown = re.findall(r"^\| (.+) \| (.+) \| ([+-][^|]+) \|$", read("docs/language-models.md"), re.MULTILINE)
    assert len(shown) == 7
    for of, other, nats in shown:
        assert nats == difference(kept.loc[keys[of]], kept.loc[keys[other]]), (of, other)
    first = losses["language-models-first"].loc["implicit", "bounded"]
    assert f"is {difference(first, kept.loc['single-pass', 'single'])}." in FINDINGS
    away = kept.loc["implicit", "bounded"] - first
    assert f"ended {away.min():.3f} to {away.max():.3f} nats away" in FINDINGS


def test_the_share_of_equal_tokens_is_the_kept_one() -> None:
    frame = pd.read_csv(LANGUAGE_MODELS / "agreement.csv")
    names = {"simultaneous": "at once", "blockwise": "blocks of 256", "sequential": "token by token"}
    for (mode, against), of in frame.groupby(["mode", "against"]):
        percent = [100 * one for _, one in of.groupby("phase").token_agreement]
        text = [f"{one.mean():.1f} % ({one.min():.1f} to {one.max():.1f})" for one in percent]
        assert f"| {names[mode]}, and {names[against]} | {' | '.join(text)} |" in FINDINGS


def test_the_losses_on_held_out_text_are_the_kept_ones() -> None:
    frame = pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").query("experiment == 'language-models'")
    trained = frame[frame["mode"].isin(["parallel", "as_trained"])].groupby(["run", "phase", "length"]).loss
    cells = {at: f"{of.mean():.2f} ({of.min():.2f} to {of.max():.2f})" for at, of in trained}
    for label, key in ROWS.items():
        assert f"| {label} | {' | '.join(cells[(*key, length)] for length in (2048, 4096, 8192))} |" in FINDINGS
    by_mode = frame.pivot_table(index=["run", "phase", "length", "seed"], columns="mode", values="loss")
    assert f"has a loss of {by_mode.simultaneous.loc['implicit', 'bounded', 2048].mean():.2f} at" in FINDINGS
    assert f"by at most {(by_mode.blockwise - by_mode.simultaneous).abs().max():.2f}." in FINDINGS


def test_four_iterations_are_worse_on_held_out_text_with_each_of_three_equal_seeds() -> None:
    frame = pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").query("length == 2048 and mode == 'as_trained'")
    loss = frame[frame.experiment == "language-models"].set_index(["run", "phase", "seed"]).loss
    differences = loss["implicit", "bounded"] - loss["single-pass", "single"]
    assert (len(differences), (differences > 0).all()) == (3, True)
    assert "On held-out text it is worse with each of three equal seeds" in FINDINGS


def test_about_a_fifth_of_the_tokens_had_not_converged_where_modes_were_compared() -> None:
    frame = pd.read_csv(LANGUAGE_MODELS / "test_loss.csv").query("length == 2048 and run == 'implicit'")
    solved = frame[frame["mode"].isin(["simultaneous", "blockwise"]) & (frame.experiment == "language-models")]
    assert set(solved.eval_stop) == {"sequence"}
    assert solved.unconverged_share.between(0.17, 0.24).all()
    assert "About a fifth of their tokens had not converged" in FINDINGS
