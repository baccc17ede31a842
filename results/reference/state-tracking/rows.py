"""Print the tables of docs/state-tracking.md, docs/catbabi.md and their reference page, from the kept results:

    python results/reference/state-tracking/rows.py [TABLE ...]

A cell has the seeds in percent, and says so if they were not run. docs/written.py puts the tables into the pages.
"""

import json
import sys
import tarfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pandas as pd
import yaml

HERE = Path(__file__).parent
PROTOCOL = "blockwise-8-token"
OTHER_MODES = {  # those of the ablation
    "blockwise": "blocks of 32, mean residual",
    "sequential": "sequential",
    "released-criterion": "released code's criterion",
}
A5 = [
    *(f"a5m-released/free-{bound}" for bound in (8, 16, 32)),
    *(f"a5m-{recipe}/free" for recipe in ("published-stop", "no-dropout", "fast")),
]
A5_WHOLE = [f"a5m-published/free-{bound}" for bound in (8, 16, 32)]  # the released recipe to its last step
OTHER_TRAINING = {
    "a5m-state-passing": " (32 tokens, 10 % hard, damped)",
    "a5m-state-passing-mixed": " (32 tokens, 10 and 50 % hard, damped)",
    "a5m-explicit": " (a third of the steps)",
}
A5_PASSING = ["a5m-state-passing/free", "a5m-state-passing-mixed/free"]
NOT_RUN = "not run"


def seeds_of(run: str, mode: str, length: int, hard: float, file: str = "accuracy.csv") -> pd.DataFrame:
    """The rows of a run and phase in one mode, by seed; of incomplete.csv those that lack seeds."""
    frame = pd.read_csv(HERE / file).query("mode == @mode and length == @length and hard_fraction == @hard")
    return frame[frame.run + "/" + frame.phase == run].sort_values("seed")


def percent(values: pd.Series) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in values) or NOT_RUN


def spread(values: pd.Series) -> str:
    """The mean over the seeds, and their range."""
    if values.empty:
        return NOT_RUN
    mean, low, high = (100 * value for value in (values.mean(), values.min(), values.max()))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def names() -> dict[str, str]:
    """Return the names of runs in the report."""
    config = HERE.parents[2] / "workflow/config/state-tracking.yaml"
    return yaml.safe_load(config.read_text(encoding="utf-8"))["report"]["names"]


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def a5() -> Iterator[str]:
    for length, hard in product((256, 1024, 4096), (0.1, 0.5)):
        whole = [percent(seeds_of(run, PROTOCOL, length, hard).accuracy_last10) for run in A5_WHOLE]
        yield row(f"{length:,}, {100 * hard:.0f} %", *whole, *a5_cells(length, hard, PROTOCOL))


def a5_summary() -> Iterator[str]:
    """A row for each recipe that was run, a column for each test."""
    explicit = "a5m-explicit/explicit"
    whole = [run for run in reversed(A5_WHOLE) if not seeds_of(run, PROTOCOL, 256, 0.1).empty]
    for run in [*whole, "a5m-released/free-32", *A5_PASSING, explicit]:
        name, phase = run.split("/")
        about = OTHER_TRAINING.get(name, "")
        bound = f", {phase.removeprefix('free-')} iterations" if phase.startswith("free-") else ""
        mode = "parallel" if run == explicit else PROTOCOL
        tests = ((256, 0.1), (1024, 0.1), (256, 0.5), (1024, 0.5))
        cells = [cell(run, mode, length, hard, "accuracy_last10") for length, hard in tests]
        yield row(f"{names()[name].removeprefix('A5, ')}{bound}{about}", *cells)


def cell(run: str, mode: str, length: int, hard: float, metric: str) -> str:
    """The spread over all seeds, or each seed that is known where others are not."""
    some = seeds_of(run, mode, length, hard, "incomplete.csv")
    if some.empty:
        return spread(seeds_of(run, mode, length, hard)[metric])
    return f"{percent(some[metric])} (only seed{'s' * (len(some) > 1)} {', '.join(map(str, some.seed))})"


def a5_other() -> Iterator[str]:
    for length, hard, mode in product((256, 1024, 4096), (0.1, 0.5), OTHER_MODES):
        whole = [percent(seeds_of(run, mode, length, hard).accuracy_last10) for run in (A5_WHOLE[0], A5_WHOLE[2])]
        yield row(f"{length:,}, {100 * hard:.0f} %", OTHER_MODES[mode], *whole, *a5_cells(length, hard, mode))


def a5_cells(length: int, hard: float, mode: str) -> list[str]:
    return [percent(seeds_of(run, mode, length, hard).accuracy_last10) for run in A5]


def jacobian() -> Iterator[str]:
    """Yield shares off the diagonal and spectral radii, as means over tokens."""
    frame = records("jacobian").query("run == 'a5m-released' and setting == 'trained'")
    frame["bound"] = frame.phase.str.removeprefix("free-").astype(int)
    found = frame.groupby(["bound", "seed", "is_hard"])[["off_diagonal_share", "transition_radius", "f_radius"]].mean()
    for (bound, seed), of_seed in found.groupby(level=[0, 1]):
        share, *radii = (of_seed[column].to_numpy()[::-1] for column in found)  # hard tokens first
        cells = [f"{100 * value:.1f} %" for value in share] + [f"{value:.2f}" for pair in radii for value in pair]
        yield row(f"{bound}", f"{seed}", *cells)


def s5() -> Iterator[str]:
    for length in (32, 128, 512):
        yield row(f"{length:,}, 100 %", *s5_cells(length, PROTOCOL))


def s5_other() -> Iterator[str]:
    for length, mode in product((32, 128, 512), OTHER_MODES):
        yield row(f"{length:,}, 100 %", OTHER_MODES[mode], *s5_cells(length, mode))


def s5_cells(length: int, mode: str) -> list[str]:
    found = seeds_of("s5-implicit/free", mode, length, 1)
    pairs = 100 * found[["accuracy_last10", "accuracy_sequence"]]
    return [f"{last:.1f} / {whole:.1f}" for last, whole in [*pairs.to_numpy(), pairs.mean()]]


def baselines() -> Iterator[str]:
    """The models beside the implicit layer of S5, on the same sequences."""
    frame = pd.read_csv(HERE / "accuracy.csv").sort_values("seed")
    training = pd.read_csv(HERE / "training.csv")
    for run, of_run in frame[frame.run.str.match("s5-(explicit|lstm|llama|delta)")].groupby("run"):
        seconds = training[training.job.str.startswith(f"train/{run}-s")].busy_seconds
        cells = [percent(of_length.accuracy_last10) for _, of_length in of_run.groupby("length")]
        time = f"{seconds.min():.0f} to {seconds.max():.0f}"
        yield row(names()[run].removeprefix("S5, "), f"{of_run.num_parameters.iloc[0]:,}", time, *cells)


def s5_summary() -> Iterator[str]:
    """The implicit layer, the deepest explicit model and the LSTMs."""
    training = pd.read_csv(HERE / "training.csv")
    for run in ("s5-implicit", "s5-explicit-layers16", "s5-lstm-rate0.003", "s5-lstm-rate0.001"):
        phase, mode = ("free", PROTOCOL) if run == "s5-implicit" else ("explicit", "parallel")
        jobs = training[training.job.str.startswith(f"train/{run}-s")]
        size = f"{1e-6 * jobs.parameters.iloc[0]:.1f}M"
        cells = [spread(seeds_of(f"{run}/{phase}", mode, length, 1).accuracy_last10) for length in (32, 128, 512)]
        yield row(names()[run].removeprefix("S5, "), size, *cells)


PASSED = {
    "s5-single-words/free": "implicit, without it",
    "s5-state-passing/free": "implicit, with it",
    "s5-state-passing-damped/free": "implicit, with it, damped training",
    "s5-passing-lstm-rate0.001/explicit": "LSTM, rate 1e-3, with it",
    "s5-passing-lstm-rate0.003/explicit": "LSTM, rate 3e-3, with it",
    "s5-passing-explicit-layers16/explicit": "explicit, 16 layers, with it",
}
CONTROLS = {
    "s5-passing-lstm-rate0.001/explicit": "LSTM, rate 1e-3",
    "s5-passing-lstm-no-restart-rate0.001/explicit": "LSTM, rate 1e-3, no restart",
    "s5-passing-lstm-rate0.003/explicit": "LSTM, rate 3e-3",
    "s5-passing-lstm-no-restart-rate0.003/explicit": "LSTM, rate 3e-3, no restart",
    "s5-passing-explicit-layers1/explicit": "explicit Mamba2, 1 layer",
    "s5-passing-explicit-layers4/explicit": "explicit Mamba2, 4 layers",
    "s5-passing-explicit-layers16/explicit": "explicit Mamba2, 16 layers",
    "s5-passing-explicit-no-restart-layers1/explicit": "explicit Mamba2, 1 layer, no restart",
    "s5-passing-explicit-no-restart-layers4/explicit": "explicit Mamba2, 4 layers, no restart",
    "s5-passing-explicit-no-restart-layers16/explicit": "explicit Mamba2, 16 layers, no restart; 65,536: seeds 0 and 2",
    "s5-passing-no-restart/free": "implicit, no restart, only seed 0 planned",
}


def passing_summary() -> Iterator[str]:
    """Yield exact matches of S5 by length, without and with state passing."""
    for run, name in PASSED.items():
        mode = PROTOCOL if run.endswith("free") else "parallel"
        found = [seeds_of(run, mode, length, 1) for length in (32, 512, 4096, 65536)]
        yield row(name, *(spread(of_length.accuracy_sequence) for of_length in found))


def passing_controls() -> Iterator[str]:
    """Yield exact matches of each seed by length, and the share of training sequences with a carried state."""
    training = pd.read_csv(HERE / "training.csv")
    for run, name in CONTROLS.items():
        jobs = training[training.job.str.startswith(f"train/{run.split('/')[0]}-s")]
        mode = PROTOCOL if run.endswith("free") else "parallel"
        cells = []
        for length in (32, 512, 4096, 65536):
            some = seeds_of(run, mode, length, 1, "incomplete.csv")
            found = some if len(some) else seeds_of(run, mode, length, 1)
            cells.append(percent(found.accuracy_sequence))
        yield row(name, percent(jobs.carried_share), *cells)


def mixed() -> Iterator[str]:
    """Yield exact matches of A5 with state passing in percent of each seed, by length, hard tokens and training."""
    for length in (256, 1024, 4096):
        found = [seeds_of(run, PROTOCOL, length, hard) for run in A5_PASSING for hard in (0.1, 0.5)]
        yield row(f"{length:,}", *(percent(one.accuracy_sequence) for one in found))


def state_passing() -> Iterator[str]:
    """Yield last-ten accuracy and exact matches: without state passing, and with it for half and for all steps."""
    for length in (32, 512, 4096, 65536):
        yield row(f"{length:,}", *state_passing_cells(length, PROTOCOL))


def state_passing_other() -> Iterator[str]:
    for length, mode in product((32, 512, 4096), ("blockwise", "sequential")):
        yield row(f"{length:,}", OTHER_MODES[mode], *state_passing_cells(length, mode))


def state_passing_cells(length: int, mode: str) -> list[str]:
    single, passing = (seeds_of(f"s5-{run}/free", mode, length, 1) for run in ("single-words", "state-passing"))
    earlier = pd.read_csv(HERE / "before/s5-state-passing-4096.csv").sort_values("seed")
    before = earlier.query("mode == @mode and length == @length")
    values = (single.accuracy_last10, before.accuracy_last10, passing.accuracy_last10, passing.accuracy_sequence)
    return [*map(percent, values)]


def lost() -> Iterator[str]:
    """Yield exact matches at 65,536 tokens, then wrong predictions at the end of each eighth of the tokens."""
    frame = records("word-problem-s5-longest")
    frame = frame[frame.run.isin(["s5-state-passing", "s5-state-passing-damped"])].sort_values("seed")
    for one in frame.itertuples():
        at_eighths = one.accuracy_per_position[one.length // 8 - 1 :: one.length // 8]
        wrong = [str(round((1 - share) * one.num_samples)) for share in at_eighths]
        yield row(f"{one.seed}", f"{one.accuracy_sequence * one.num_samples:.0f}", *wrong)


def longer() -> Iterator[str]:
    """The pilots of 8,192 steps: the last ten tokens / whole words; empty where not all words were read."""
    for run in json.loads((HERE / "state-passing.json").read_text())["longer"]["runs"]:
        found = {
            (one["length"], one["mode"]): f"{100 * one['accuracy_last10']:.1f} / {100 * one['accuracy_sequence']:.1f}"
            for one in run["accuracy"]
            if "is_interrupted" not in one
        }
        ways = [(4096, "blockwise-8-token"), (4096, "sequential"), (65536, "blockwise-8-token")]
        recipe = f"{run['peak_learning_rate']:.0e}, {run['dropout']}".replace("e-0", "e-")
        yield row(recipe, f"{run.get('state_passing', 64):,}", f"{run['seed']}", *(found.get(way, "") for way in ways))


def small() -> Iterator[str]:
    """The small A5 models with dropout, by their right answers at the end of training."""
    runs = json.loads((HERE / "state-passing.json").read_text())["small"]["runs"]
    for run in sorted((run for run in runs if run["dropout"]), key=lambda run: -run["train_accuracy_last10"]):
        accuracies = pd.Series([run["train_accuracy_last10"], *(one["accuracy_last10"] for one in run["accuracy"])])
        recipe = f"{run.get('state_passing', 64):,}", "0.1" if "state_noise" in run else "", f"{run['seed']}"
        yield row(*recipe, *percent(accuracies).split(", "))


CARRIED = HERE.parents[1] / "benchmarks/carried-state-cpu.json"


def carried() -> Iterator[str]:
    """Yield exact matches if parts of the carried state are set to zero, by model and data."""
    frame = pd.DataFrame(json.loads(CARRIED.read_text(encoding="utf-8"))["rows"])
    for (model, hard, length), rows in frame.groupby(["model", "hard_fraction", "length"], sort=False):
        cells = [f"{one.exact_matches} of {one.sequences}" for one in rows.itertuples()]
        yield row(f"`{model}`", f"{length}, {100 * hard:.0f} %", *cells)


def coded() -> Iterator[str]:
    """Yield exact matches on S5 with the carried state and with its code, and the distance of the two."""
    frame = pd.DataFrame(json.loads(CARRIED.read_text(encoding="utf-8"))["coded"])
    for length, rows in frame.groupby("length"):
        cells = [f"{one.exact_matches} of {one.sequences}" for one in rows.sort_values("is_coded").itertuples()]
        (scatter,) = rows[~rows.is_coded].scatter
        at = [f"{scatter[place]['median']:.2f}" for place in (0, -1)]
        yield row(f"{length:,}", *cells, *at, f"{100 * scatter[-1]['nearest_is_right']:.0f} %")


def catbabi() -> Iterator[str]:
    """Yield accuracy on all questions and on those of the 19 tasks with a training file."""
    frame = pd.concat([records("catbabi").assign(earlier=""), earlier_modes()])
    frame = frame.query("data == 'babi-test'").sort_values("seed")
    counts = pd.DataFrame([*frame.num_questions_by_task], index=frame.index).drop(columns="3")
    right = counts * pd.DataFrame([*frame.accuracy_by_task], index=frame.index).drop(columns="3")
    frame["trained"] = right.sum(axis=1) / counts.sum(axis=1)
    for (is_implicit, layers, earlier), of_model in frame.groupby(["is_implicit", "num_layers", "earlier"]):
        cells = []
        for protocol in ("windowed", "carried"):
            found = of_model[of_model.protocol == protocol]
            means = (percent([found[column].mean()]) for column in ("accuracy", "trained"))
            cells += [percent(found.accuracy), *means] if len(found) == 3 else ["", "", ""]
        model = f"{'implicit' if is_implicit else 'explicit'}, {layers} layer{'s' * (layers > 1)}"
        yield row(model + earlier, f"{of_model.num_parameters.iloc[0]:,}", *cells)


def earlier_modes() -> pd.DataFrame:
    """The modes in which the implicit models of an earlier training run were evaluated on CatbAbI."""
    parameters = pd.read_csv(HERE / "training.csv").set_index("job").parameters
    found = []
    with tarfile.open(HERE / "inputs.tar.xz") as archive:
        for path in map(Path, archive.getnames()):
            if path.match("catbabi/work/*/partial/*.json"):
                run, (where, mode) = path.parts[3], path.stem.split("--")
                data, _, protocol = where.partition(".")
                mode = mode.replace("published", "released-criterion")  # by its name in the archive
                earlier = f", earlier training, {OTHER_MODES[mode]}"
                names = {"data": data, "protocol": protocol or "windowed", "earlier": earlier, "seed": int(run[-1])}
                model = {"is_implicit": True, "num_layers": 1, "num_parameters": parameters[f"train/{run}/free"]}
                found.append(json.load(archive.extractfile(str(path))) | names | model)
    return pd.DataFrame(found)


def records(kind: str) -> pd.DataFrame:
    """The records of all finished evaluations of this name."""
    with tarfile.open(HERE / "inputs.tar.xz") as archive:
        names = [name for name in archive.getnames() if f"/{kind}/work/" in name and name.endswith("/metrics.json")]
        return pd.DataFrame([one for name in names for one in json.load(archive.extractfile(name))["records"]])


RECIPES = "8 iterations | 16 | 32 | batch criterion, seed 0 | no dropout | fast"
PASSING = "without state passing | with it, 4,096 steps | with it | exact matches, with it"
SEEDS = "seed 0 | seed 1 | seed 2 | seed 3 | seed 4 | mean"
RADII = "transition radius, hard | identity | iteration radius, hard | identity"
EIGHTHS = "8,192 | 16,384 | 24,576 | 32,768 | 40,960 | 49,152 | 57,344 | 65,536"
TABLES = {  # title, head, rows
    "a5": (
        "A5 × monoid, by the protocol",
        f"tokens, hard | all steps: 8 iterations | 16 | 32 | a third: {RECIPES}",
        a5,
    ),
    "a5-other": (
        "A5 × monoid, other modes and criteria",
        f"tokens, hard | mode | all steps: 8 iterations | 32 | a third: {RECIPES}",
        a5_other,
    ),
    "jacobian": (
        "A5 × monoid, a third of the steps: the Jacobian of the state, means over tokens",
        f"iterations | seed | off the diagonal, hard | identity | {RADII}",
        jacobian,
    ),
    "s5": ("S5, by the protocol: last ten tokens / exact matches", f"tokens, hard | {SEEDS}", s5),
    "s5-other": ("S5, other modes and criteria", f"tokens, hard | mode | {SEEDS}", s5_other),
    "baselines": (
        "S5, other models on the same sequences",
        "model | parameters | seconds of training | 32 tokens | 128 | 512",
        baselines,
    ),
    "state-passing": ("S5 with state passing, by the protocol", f"tokens | {PASSING}", state_passing),
    "state-passing-other": (
        "S5 with state passing, other modes and criteria",
        f"tokens | mode | {PASSING}",
        state_passing_other,
    ),
    "lost": (
        "S5 with state passing, damped from seed 5 on: of 256 sequences of 65,536 tokens, exact matches, then wrong "
        "predictions at a position",
        f"seed | exact matches | {EIGHTHS}",
        lost,
    ),
    "longer": (
        "S5 with state passing, preliminary runs of 8,192 steps: last ten tokens / exact matches",
        "learning rate, dropout | chain | seed | 4,096 tokens, protocol | 4,096, sequential | 65,536, protocol",
        longer,
    ),
    "small": (
        "Small A5 models with state passing",
        "sequences in a chain | noise | seed | end of training | 16 tokens | 256 | 2,048",
        small,
    ),
    "catbabi": (
        "CatbAbI: accuracy at the questions of the test set in percent",
        "model | parameters | windowed: seeds | mean | 19 tasks | carried: seeds | mean | 19 tasks",
        catbabi,
    ),
    "a5-summary": (
        "",
        "recipe | 256 tokens, 10 % hard | 1,024, 10 % | 256, 50 % | 1,024, 50 %",
        a5_summary,
    ),
    "s5-summary": ("", "model | parameters | 32 tokens | 128 | 512", s5_summary),
    "passing-controls": (
        "Controls of state passing on S5: sequences right at every token",
        "model | started in a carried state | 32 tokens | 512 | 4,096 | 65,536",
        passing_controls,
    ),
    "mixed": (
        "A5 × monoid with state passing, trained with 10 % hard tokens or mixed (10 and 50 %): exact matches by seed",
        "tokens | 10 % hard | 50 % hard | mixed: 10 % hard | 50 % hard",
        mixed,
    ),
    "carried": (
        "What a block hands to the next: exact matches if a part of it is set to zero",
        "model | tokens, hard | nothing | SSM state | convolution | its first two inputs | all except its last input",
        carried,
    ),
    "coded": (
        "The S5 state as a code: exact matches with the state or its code alone, and their distance",
        "tokens | state as it is | its code | distance after 32 tokens | at the end | nearest is right",
        coded,
    ),
    "passing-summary": ("", "model | 32 tokens | 512 | 4,096 | 65,536", passing_summary),
}


def table(name: str) -> list[str]:
    """A table as Markdown."""
    _, head, rows = TABLES[name]
    return [f"| {head} |", "|" + "---|" * (head.count(" | ") + 1), *rows()]


if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        sys.stdout.write("\n".join([name, *table(name), "", ""]))
