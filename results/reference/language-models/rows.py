"""Print the tables of docs/language-models.md and of its complete tables, from the CSV files of this folder:

    python results/reference/language-models/rows.py [TABLE ...]

Losses are those on held-out text at the trained length, each model with the pass of its training. docs/written.py puts
the tables into the pages.
"""

import json
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
NOT_RUN = "not run"
LENGTHS = (2048, 4096, 8192, 16384)
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # by the number of seeds; a single one has no interval
LABELS = {
    "explicit": "explicit",
    "normed": "explicit, weights normalised",
    "single": "implicit, a single pass",
    "bounded": "implicit, (4+1)",
    "free": "implicit, free from 80 %",
    "long": "explicit, twice the tokens",
}
# By text: the experiment, and run and phase of each model. Of runs that a pattern names, validation text chooses one.
TEXTS = {
    "Llama, fresh text": (
        "language-models",
        {
            "explicit": ("explicit", "explicit"),
            "normed": ("explicit-normed", "explicit"),
            "single": ("single-pass", "single"),
            "bounded": ("implicit", "bounded"),
            "free": ("implicit", "free-80"),
            "long": ("explicit-long", "explicit"),
        },
    ),
    "Llama, repeated text": (
        "language-models-repeated",
        {
            "explicit": ("explicit", "explicit"),
            "single": ("single-pass-wd*", "single"),
            "bounded": ("implicit", "bounded"),
            "free": ("implicit", "free-80"),
        },
    ),
    "Mamba2, fresh text": (
        "language-models-mamba2",
        {
            "explicit": ("mamba2-explicit-lr*", "explicit"),
            "normed": ("mamba2-explicit-normed", "explicit"),
            "single": ("mamba2-single-pass-lr*", "single"),
            "bounded": ("mamba2-implicit", "bounded"),
            "free": ("mamba2-implicit", "free-80"),
            "long": ("mamba2-explicit-long", "explicit"),
        },
    ),
    "Llama 130M, fresh text": (
        "language-models-130m",
        {
            "explicit": ("explicit", "explicit"),
            "single": ("single-pass", "single"),
            "bounded": ("implicit", "bounded"),
            "free": ("implicit", "free-80"),
        },
    ),
}
FRESH, REPEATED, MAMBA2, LARGE = TEXTS


def table_of(name: str) -> pd.DataFrame:
    return pd.read_csv(HERE / f"{name}.csv")


def at_choice() -> pd.DataFrame:
    """Return the losses of seed 0 on validation text at the trained length."""
    return table_of("validation_loss").query(f"seed == 0 and length == {LENGTHS[0]}")


def chosen(experiment: str, run: str) -> str | None:
    """The run that a pattern names: the one with the lowest loss of seed 0 on validation text."""
    if "*" not in run:
        return run
    frame = at_choice().query("experiment == @experiment")
    frame = frame[[fnmatch(name, run) for name in frame.run]]
    return None if frame.empty else frame.loc[frame.loss.idxmin(), "run"]


def tested(text: str, model: str) -> pd.DataFrame:
    """The rows of a model on held-out text, by the pass of its training; none where it was not run."""
    frame = of_model(table_of("test_loss"), text, model)
    return frame[frame["mode"].isin(["parallel", "as_trained"])]


def of_model(frame: pd.DataFrame, text: str, model: str) -> pd.DataFrame:
    experiment, models = TEXTS[text]
    run, phase = models.get(model, ("", ""))
    return frame[(frame.experiment == experiment) & (frame.run == chosen(experiment, run)) & (frame.phase == phase)]


def losses(text: str, model: str, length: int = LENGTHS[0]) -> pd.Series:
    """Return the loss by seed."""
    return tested(text, model).query("length == @length").set_index("seed").loss.sort_index()


def interval(values: pd.Series) -> tuple[float, float] | None:
    """The ends of the 95 % interval of the mean, by Student's t; None of a single seed."""
    if len(values) < 2:
        return None
    half = STUDENT_95[len(values)] * values.std() / len(values) ** 0.5
    return values.mean() - half, values.mean() + half


def gain(text: str, of: str, minus: str) -> pd.Series:
    """Return the difference of the losses of equal seeds."""
    return (losses(text, of) - losses(text, minus)).dropna()


def nats(values: pd.Series) -> str:
    if values.empty:
        return NOT_RUN
    ends = interval(values)
    return f"{values.mean():+.3f} ({'one seed' if ends is None else '{:.3f} to {:.3f}'.format(*ends)})"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


INGREDIENTS = {  # model minus model, and what the loops have beside it
    "normalised weights": ("normed", "explicit", None),
    "injection, and the learning rate that is best with it": ("single", "normed", None),
    "both together": ("single", "explicit", "operator"),
    "four iterations, at equal tokens": ("bounded", "single", "equal tokens"),
    "free iterations, at equal tokens": ("free", "single", None),
    "four iterations, at equal FLOPs": (None, None, "equal FLOPs"),
    "(4+1) instead of twice the tokens, at equal FLOPs": ("bounded", "long", None),
}


def ingredients() -> Iterator[str]:
    yield row("what is added", *TEXTS, "loops, arXiv 2609.19107")
    yield "|---|" + "---:|" * (len(TEXTS) + 1)
    for label, (of, minus, loops) in INGREDIENTS.items():
        mine = (NOT_RUN if of is None else nats(gain(text, of, minus)) for text in TEXTS)
        yield row(label, *mine, "–" if loops is None else LOOPS[loops]())


def of_loops(name: str, loops: int) -> dict[int, tuple[float, float]]:
    """Return FLOPs and loss of the study's models by depth."""
    kept = json.loads((HERE / "loops.json").read_text(encoding="utf-8"))[name]
    return {depth: (flops, loss) for depth, number, flops, loss in kept if number == loops}


def at_equal_flops(name: str, loops: int, beside: str) -> list[float]:
    """Return their losses minus those of models without loops, interpolated to equal FLOPs."""
    flops, loss = zip(*of_loops(beside, 1).values(), strict=True)
    inside = [pair for pair in of_loops(name, loops).values() if flops[0] <= pair[0] <= flops[-1]]
    return [own - float(np.interp(np.log(at), np.log(flops), loss)) for at, own in inside]


def at_equal_tokens(name: str, loops: int) -> list[float]:
    once = of_loops(name, 1)
    return [loss - once[depth][1] for depth, (_, loss) in of_loops(name, loops).items()]


def ends(values: list[float]) -> str:
    return f"{min(values):+.3f} to {max(values):+.3f}"


REGIMES = {"fresh": "fresh_1b_tokens", "repeated": "repeated_100m_tokens_10_times"}
LOOPS = {
    "operator": lambda: ends(at_equal_flops("operator_and_a_single_pass", 1, "vanilla")),
    "equal tokens": lambda: ", ".join(f"{word} {ends(at_equal_tokens(name, 4))}" for word, name in REGIMES.items()),
    "equal FLOPs": lambda: ", ".join(f"{word} {ends(at_equal_flops(name, 4, name))}" for word, name in REGIMES.items()),
}


def regulariser() -> Iterator[str]:
    """Yield whether iteration gains more on repeated text, by the 95 % interval of the difference of two means."""
    fresh, repeated = (gain(text, "free", "single") for text in (FRESH, REPEATED))
    question = "free iterations gain more on repeated than on fresh text"
    if len(repeated) < 2:
        yield f"Whether {question} is open: {'one seed was' if len(repeated) else 'repeated text was not'} run."
        return
    seeds = min(len(fresh), len(repeated))
    half = STUDENT_95[seeds] * (fresh.var() / len(fresh) + repeated.var() / len(repeated)) ** 0.5
    more = repeated.mean() - fresh.mean()
    decided = {more + half < 0: f"**Yes: {question}**", more - half > 0: f"**No: {question.replace('more', 'less')}**"}
    yield f"{decided.get(True, f'**Undecided: whether {question}**')}."
    yield f"The difference of the two gains is {more:+.3f} ({more - half:.3f} to {more + half:.3f}) nats per token."


def final() -> Iterator[str]:
    """Yield held-out losses, with the FLOPs of training."""
    yield row("", *TEXTS)
    yield "|---|" + "---:|" * len(TEXTS)
    for model, label in LABELS.items():
        yield row(label, *(final_cell(text, model) for text in TEXTS))


def final_cell(text: str, model: str) -> str:
    values = losses(text, model)
    if values.empty:
        return NOT_RUN
    flops = tested(text, model).train_flops.mean() / 1e15
    bounds = interval(values)
    words = "one seed" if bounds is None else "{:.3f} to {:.3f}".format(*bounds)
    return f"{values.mean():.3f} ({words}), {flops:.1f}"


def lengths() -> Iterator[str]:
    """Yield mean and range over the seeds by length."""
    yield row("", *(f"{length:,} tokens{' (trained)' * (length == LENGTHS[0])}" for length in LENGTHS))
    yield "|---|" + "---:|" * len(LENGTHS)
    for text in TEXTS:
        for model, label in LABELS.items():
            cells = [losses(text, model, length) for length in LENGTHS]
            if not cells[0].empty:
                yield row(f"{text}: {label}", *map(spread, cells))


def spread(values: pd.Series) -> str:
    if values.empty:
        return NOT_RUN
    return f"{values.mean():.2f}" + (f" ({values.min():.2f} to {values.max():.2f})" if len(values) > 1 else "")


MODES = {"simultaneous": "at once", "blockwise": "blocks of 256", "blockwise-256-token": "blocks of 256"} | {
    "sequential": "token by token"
}


def agreement() -> Iterator[str]:
    """Yield the share of equal predictions of the modes, by text and phase."""
    frame = table_of("agreement")
    texts = [text for text in TEXTS if (frame.experiment == TEXTS[text][0]).any()]
    heads = [(text, model) for text in texts for model in ("bounded", "free")]
    yield row(
        "share of equal tokens", *(f"{text}: {LABELS[model].removeprefix('implicit, ')}" for text, model in heads)
    )
    yield "|---|" + "---:|" * len(heads)
    frame["pair"] = frame["mode"].map(MODES) + ", and " + frame.against.map(MODES)
    for pair in ("at once, and token by token", "blocks of 256, and token by token", "at once, and blocks of 256"):
        yield row(pair, *(agreement_cell(frame[frame.pair == pair], *head) for head in heads))


def agreement_cell(frame: pd.DataFrame, text: str, model: str) -> str:
    of = 100 * of_model(frame, text, model).token_agreement
    if of.empty:
        return NOT_RUN
    return f"{of.mean():.1f} %" + (f" ({of.min():.1f} to {of.max():.1f})" if len(of) > 1 else "")


def choices() -> Iterator[str]:
    """Yield the loss of seed 0 on validation text, which chose learning rate and weight decay."""
    yield row("seed 0, loss on validation text", "nats per token")
    yield "|---|---:|"
    frame = at_choice().sort_values(["experiment", "run"])
    for one in frame.itertuples():
        yield row(f"{one.run} (`{one.experiment}.yaml`)", f"{one.loss:.3f}")
    if frame.empty:
        yield row("all", NOT_RUN)


TABLES = {
    f"language-{function.__name__}": function
    for function in (ingredients, regulariser, final, lengths, agreement, choices)
}

if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        sys.stdout.write("\n".join([*TABLES[name](), "", ""]))
