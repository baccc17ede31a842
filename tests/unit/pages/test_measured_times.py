"""Times, memory and rates on the pages: those of results/benchmarks."""

import re
from math import exp, log
from statistics import fmean, median

import pytest

from tests.unit.pages.page_texts import MODELS, benchmark, cells, digits, read, rounded


@pytest.mark.parametrize("family", ["mamba2", "llama3"])
def test_the_cost_of_tuning_a_checkpoint_is_the_measured_one(family: str) -> None:
    ms = {row["row"]: row["ms"] for row in benchmark("training-step")["rows"]}
    explicit, bounded, free = (ms[f"{family}-130m-{phase}"] for phase in ("explicit", "pretrain", "implicit"))
    page = read("docs/your-checkpoint.md")
    found = cells(page, MODELS[family])
    assert [float(cell.split()[0]) for cell in found[:3]] == [*map(digits, (explicit, bounded, free))]
    assert float(found[3]) == round(free / explicit, 1)
    mixed = (0.8 * bounded + 0.2 * free) / explicit
    assert f"{mixed:.1f}" in page.partition("So tuning takes")[2].partition("Memory")[0]


TRAINING = {
    "state-tracking-explicit": "one-layer Mamba2, 512 x 256 tokens, explicit",
    "state-tracking-unrolled": "one-layer Mamba2, unrolled(4)",
    "state-tracking-free": "one-layer Mamba2, free (32+4), all 32 iterations",
    "mamba2-130m-explicit": "Mamba2 130M, 8 x 2048, explicit",
    "mamba2-130m-pretrain": "Mamba2 130M, (4+1)",
    "mamba2-130m-implicit": "Mamba2 130M, (24+4), 15 iterations",
    "llama3-130m-explicit": "Llama 130M, 8 x 2048, explicit",
    "llama3-130m-pretrain": "Llama 130M, (4+1)",
    "llama3-130m-implicit": "Llama 130M, (32+4), 21 iterations",
    "mamba2-1.3b-implicit": "Mamba2 1.3B, 4 x 2048, (24+4), 12 iterations",
    "llama3-1.3b-implicit": "Llama 1.3B, 4 x 2048, (32+4), 19 iterations",
}


@pytest.mark.parametrize("found", benchmark("training-profile")["rows"], ids=lambda found: found["row"])
def test_the_parts_of_a_training_step_are_the_profiled_ones(found: dict) -> None:
    table = read("docs/performance.md").partition("The profiler attributes")[2].partition("before | here")[0]
    row, parts = found["row"], found["kernels_ms"]
    kinds = ["products", "scan, forward", "scan, gradient", "attention", "norms", "additions, casts and sums"]
    rest = sum(ms for kind, ms in parts.items() if kind not in kinds)
    wanted = [digits(parts[kind]) if kind in parts else None for kind in kinds]
    assert [float(cell) if cell else None for cell in cells(table, TRAINING[row])] == [*wanted, digits(rest)]


def test_a_mixer_is_the_measured_one() -> None:
    page = read("docs/performance.md").partition("Between its projections")[2].partition("Waiting limits")[0]
    shown = [
        [float(cell) for cell in re.findall(r"[\d.]+(?= \|)", row)] for row in page.splitlines() if "forward" in row
    ]
    h200, h100 = benchmark("mixer"), benchmark("mixer", "h100")
    by_shape = zip(h200["rows"], h100["rows"], h100["mamba_ssm"], strict=True)
    assert shown == [
        [digits(row[way]["ms"]) for row in rows] for rows in by_shape for way in ("forward", "forward and backward")
    ]


@pytest.mark.parametrize("row", TRAINING)
def test_a_training_step_is_the_measured_one(row: str) -> None:
    (published,) = [found for found in benchmark("published-code")["training"] if found["row"] == row]
    (ours,) = (found for found in benchmark("training-step")["rows"] if found["row"] == row)
    ms = ours["ms"]
    by_mamba_ssm = [found["ms"] for found in benchmark("training-step-mamba-ssm")["rows"] if found["row"] == row]
    found = cells(read("docs/performance.md").partition("The profiler attributes")[0], TRAINING[row])
    assert [float(cell) for cell in [found.pop(1)] if cell] == [rounded(ms) for ms in by_mamba_ssm]
    theirs, here, ratio, floor = map(float, found)
    assert (theirs, floor) == (published["ms"], published["floor_ms"])
    assert here == rounded(ms)
    assert ratio == pytest.approx(theirs / ms, rel=0.03)
    if "before_ms" in ours:
        table = read("docs/performance.md").partition("before | here")[2]
        assert [*map(float, cells(table, TRAINING[row]))] == [rounded(ours["before_ms"]), rounded(ms)]


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_the_time_and_memory_of_the_series_are_the_measured_ones(card: str) -> None:
    page, rows = read("docs/performance.md"), benchmark("series-gradient", card)["rows"]
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        assert [row["solver"].get("gradient", "phantom") for row in (before, after)] == ["phantom", "series"]
        assert before["losses"][0] == pytest.approx(after["losses"][0], abs=1e-4)
        model = {"mamba2": "Mamba2", "llama3": "Llama"}[before["row"].split("-")[0]]
        name = f"{model} {before['row'].split('-')[1].upper()}, {before['solver']['max_iter']} iterations"
        shown = cells(page, name, {"h100": "H100, earlier", "h200": "H200"}[card])
        assert [*map(float, shown)] == [rounded(row[key]) for key in ("ms", "peak_gib") for row in (before, after)]
    others = [row["ms"] for row in benchmark("series-gradient")["other_card"]["rows"] if row["card_number"] == 3]
    assert "took {:,.0f} and {:,.0f} ms".format(*(round(ms, -1) for ms in others)) in " ".join(page.split())


def test_the_changes_of_kernels_save_what_the_page_says() -> None:
    page, kept = " ".join(read("docs/performance.md").split()), benchmark("kernel-changes")
    steps = {(row["changes"].partition(" ")[0], row["row"]): row["ms"] for row in kept["rows"]}
    free, bounded = "mamba2-130m-implicit", "mamba2-130m-pretrain"
    assert f"{rounded(steps['before', free]):g} to {rounded(steps['the', free]):g} ms for Mamba2 130M free" in page
    assert (
        f"{rounded(steps['before', bounded]):g} to {rounded(steps['sweep', bounded]):g} ms for Mamba2 130M (4+1)"
        in page
    )
    streams = {row["changes"]: row["ms"] for row in kept["rows"] if row["row"] == free and row["changes"][:3] == "all"}
    fp32, bf16 = streams.values()
    assert f"saved {100 * (1 - bf16 / fp32):.1f} %" in page
    first, last, rounded_first = (
        row["residual"]
        for iterations, stream in ((16, "fp32"), (32, "fp32"), (16, "bf16"))
        for row in kept["residuals"]
        if (row["model"], row["iterations"], row["stream"]) == (free, iterations, stream)
    )
    assert f"Mamba2 was {100 * (rounded_first / first - 1):.1f} % higher" in page
    rate = log(first / last) / 16
    assert f"reduces it by {100 * (1 - exp(-rate)):.0f} %" in page
    assert f"need {log(rounded_first / first) / rate:.1f} iterations of 16 more" in page
    before, product, sweep, _ = (row for row in kept["mixers"] if row["shape"].startswith("8 x"))
    us = {
        name: {kernel: 1e3 * ms for kernel, ms in row["forward and backward"]["kernels_ms"].items()}
        for name, row in (("before", before), ("sweep", sweep), ("here", benchmark("mixer")["rows"][0]))
    }
    scan = [1e3 * row["forward"]["kernels_ms"]["scan_kernel"] for row in (before, product)]
    assert "slower, {:.0f} to {:.0f} us".format(*scan) in page
    inputs = 1e3 * before["forward"]["kernels_ms"]["inputs_kernel"]
    here = sum(
        1e3 * benchmark("mixer")["rows"][0]["forward"]["kernels_ms"][k] for k in ("convolution_kernel", "decay_kernel")
    )
    assert f"dt has its own kernel: {inputs:.0f} to {here:.0f} us" in page
    head = us["sweep"]["head_kernel"] - us["before"]["head_kernel"]
    sweeps = us["before"]["sweep_kernel"], us["sweep"]["sweep_kernel"]
    assert "{:.0f} to {:.0f} us, while the kernel after it takes {:.0f} us more".format(*sweeps, head) in page


def test_what_a_second_gpu_adds_to_a_step_is_the_measured_time() -> None:
    page, kept = read("docs/pretraining.md"), benchmark("gradient-sums")
    calls: dict[tuple[str, str, int | None], list[dict]] = {}
    for row in kept["rows"]:
        calls.setdefault((row["sums"], row["commit"][:8], row["nccl_max_ctas"]), []).append(row)
    (copied, few, newer, in_place) = calls.values()
    for family, config in (("Llama", "llama3-130m-explicit"), ("Mamba2", "mamba2-130m-explicit")):
        found = [rounded(row["ms"]) for row in copied if row["config"] == config]
        assert [*map(float, cells(page, f"explicit {family}"))] == found
        assert round(100 * found[0] / found[1]) == 95
    text = " ".join(page.split())

    def added(rows: list[dict]) -> list[float]:
        return [row["added_ms"] for row in rows if row["bucket_mib"] == 25]

    assert f"the sums then add {min(added(few)):.1f} to {max(added(few)):.1f} ms" in text
    assert f"add {added(in_place)[1]:.1f} instead of {added(newer)[1]:.1f} ms for Mamba2" in text
    assert added(in_place)[0] > added(newer)[0]
    busy = [row["sums_ms"] for row in copied if row["bucket_mib"] == 25]
    assert f"run for {min(busy):.1f} to {max(busy):.1f} ms per step" in text
    watts, mhz = (sorted(median(row[key]) for row in kept["places"]) for key in ("watts", "sm_mhz"))
    assert f"median power is {watts[0]:.0f} to {watts[-1]:.0f} of 700 W" in text
    assert f"median clock {mhz[0]:,.0f} to {mhz[-1]:,.0f} of 1,980 MHz" in text
    alone, *_ = (row["ms"] for row in kept["places"])
    after = [row["ms"] - alone for row in kept["places"] if row["sums"].startswith("after")]
    assert f"Sums after the graph add {min(after):.1f} to {max(after):.1f} ms" in text


def test_state_tracking_in_short_blocks_is_the_measured_one() -> None:
    page, measured = read("docs/performance.md"), benchmark("state-tracking", "h100")["rows"]
    for shown, row, key, precision in (
        ("training step, ms", "training", "ms", None),
        ("evaluation in fp32, ms per block", "evaluation", "ms_a_block", "fp32"),
        ("evaluation in bf16, ms per block", "evaluation", "ms_a_block", "bf16"),
    ):
        found = [line[key] for line in measured if (line["row"], line.get("precision")) == (row, precision)]
        assert [float(cell) for cell in cells(page, shown) if cell] == [digits(value) for value in found]
        if row == "evaluation":
            assert f"{found[-1] * 8192 / 1000:.0f} s in {precision}" in page


def test_a_step_of_explicit_layers_with_state_passing_is_the_measured_one() -> None:
    before, *here = (row["ms"] for row in benchmark("state-tracking-explicit")["rows"])
    (of_here,) = {round(ms) for ms in here}
    page = " ".join(read("docs/performance.md").split())
    assert f"took {digits(before):g} ms before" in page
    assert f"takes {of_here} ms with them" in page


@pytest.mark.parametrize("family", ["Llama", "Mamba2"])
@pytest.mark.parametrize(("kind", "name"), [("explicit", "explicit"), ("(4+1)", "pretrain"), ("free", "implicit")])
def test_a_rate_on_two_gpus_is_the_measured_one(family: str, kind: str, name: str) -> None:
    config = f"{'llama3' if family == 'Llama' else 'mamba2'}-130m-{name}"
    one, two = (row for row in benchmark("training-scaling", "h100")["rows"] if row["config"] == config)
    rates = f"{one['tokens_per_s']:,}", f"{two['tokens_per_s'] / 2:,.0f}", f"{100 * two['efficiency']:.1f} %"
    rest = f"{two['memory_gib']}", f"{one['loss']:.3f}, {two['loss']:.3f}"
    assert cells(read("docs/pretraining.md"), f"{family} {kind}") == [*rates, *rest]


@pytest.mark.parametrize("found", benchmark("decoding")["rows"], ids=lambda row: f"{row['model']}-{row['batch']}")
def test_a_decoded_token_is_the_measured_one(found: dict) -> None:
    (published,) = [
        row
        for row in benchmark("published-code")["decoding"]
        if (row["model"], row["batch"]) == (found["model"], found["batch"])
    ]
    family, _, kind = found["model"].split("-")
    row = cells(read("docs/performance.md"), f"{MODELS[family]} {kind}", str(found["batch"]))
    measured = [published["ms"], *(digits(found[key]) for key in ("ms", "plain_ms"))]
    assert [float(cell) for cell in row[:3]] == pytest.approx(measured, abs=0.051)
    assert row[3] == "not measured" if found["generate_ms"] is None else float(row[3]) == digits(found["generate_ms"])
    assert row[4] == (str(found["f_evaluations"]) if found["f_evaluations"] else "")


def test_the_moves_by_later_tokens_are_the_measured_ones() -> None:
    page, (*rows, s5) = read("docs/library.md"), benchmark("causality", "cpu")["rows"]
    for row in rows:
        method = {"plain": "plain", "anderson": "Anderson"}[row["method"]]
        moved = [f"{row[key]:.2f}" if key in row else "" for key in rows[0] if key not in ("method", "stop")]
        assert cells(page, f'{method}, `"{row["stop"]}"`') == moved
    assert f"moves by {s5['moved']:.3f}, and no prediction changes" in page
    assert s5["changed_predictions"] == 0


def test_the_angles_between_the_gradients_are_the_measured_ones() -> None:
    rows = benchmark("series-gradient", "cpu")["rows"]
    names = {("a5", 8): "A5, blocks of 8, damped", ("a5", None): "A5, whole sequences, as it was trained"}
    names |= {("s5", 8): "S5, blocks of 8", ("catbabi", None): "CatbAbI"}
    for row in rows:
        shown = cells(read("docs/pretraining.md"), names[row["model"].partition("-")[0], row["solver"]["block_len"]])
        cosines = [f"{row[key]:.3f}" for key in ("cosine", "cosine_of_half_the_steps")]
        assert shown == [f"{100 * row['converged']:.0f} %", *cosines]
    assert len(rows) == len(names)


def test_the_losses_with_either_gradient_are_the_measured_ones() -> None:
    kept = benchmark("series-losses", "h100")
    for row, family in zip(kept["rows"], ("Mamba2", "Llama"), strict=True):
        means = {
            gradient: fmean(
                fmean(run["losses"][-kept["last_steps"] :])
                for run in row["losses"]
                if run["gradient"] == gradient and run["seed"] < 3
            )
            for gradient in ("phantom", "series")
        }
        difference = means["series"] - means["phantom"]
        shown = [*(f"{mean:.3f}" for mean in means.values()), f"{difference:.4f}", f"{row['half_interval']:.4f}"]
        assert cells(read("docs/pretraining.md"), family, shown[0]) == shown[1:]
        assert abs(difference) < min(0.01, row["half_interval"])


def test_the_times_with_few_kernels_for_a_decoded_token_are_the_measured_ones() -> None:
    rows = benchmark("decoding-kernels", "h200")["rows"]
    page = " ".join(read("docs/performance.md").split())

    def times(model: str, batch: int, kernels: str) -> list[float]:
        key = {"table": "token", "model": model, "batch": batch, "kernels": kernels, "checks": "each iteration"}
        return sorted(row["ms"] for row in rows if key.items() <= row.items())

    kinds = ("few", "few, none early", "of the layers")
    for name, model in (("Mamba2", "mamba2-130m-implicit"), ("Llama", "llama3-130m-implicit")):
        shown = (" to ".join(f"{ms:.2f}" for ms in times(model, 1, kernels)) for kernels in kinds)
        assert f"| {name} 130M implicit | {' | '.join(shown)} |" in page
    means = {
        (model, kernels): f"{fmean(times(f'{model}-130m-implicit', 64, kernels)):.1f}"
        for model in ("mamba2", "llama3")
        for kernels in ("few", "of the layers")
    }
    few, layers = means["mamba2", "few"], means["mamba2", "of the layers"]
    assert f"took {few} ms for 64 sequences of Mamba2, where those of the layers took {layers}" in page
    few, layers = means["llama3", "few"], means["llama3", "of the layers"]
    assert f"For Llama it was {few} and {layers}" in page
    tiles = [row["ms"] for row in rows if row["table"] == "tiles" and row["batch"] == 64]
    stack = {
        (row["batch"], row["kernels"]): row["ms"]
        for row in rows
        if (row["table"], row["model"]) == ("stack", "mamba2-130m-implicit")
    }
    few, own = stack[1, "few"], stack[1, "of the layers"]
    assert f"take {few:.2f} ms per evaluation, with their own kernels {own:.2f}." in page
    (evaluations,) = {
        row["f_evaluations"]
        for row in rows
        if row["table"] == "token" and row["model"][:6] == "mamba2" and row["batch"] == 1
    }
    assert f"So {few * evaluations:.1f} ms of a token are layers" in page
    assert f"For Mamba2 none of {len(tiles)} other tile sizes was as fast" in page
    assert min(tiles) > stack[64, "of the layers"]
    (agreement,) = (row for row in rows if row["table"] == "agreement" and row["kernels"] == "few")
    assert f"{100 * agreement['agreement_given_equal_tokens']:.1f} % of Mamba2's predictions" in page
    token = {"table": "token", "model": "mamba2-130m-implicit", "batch": 1, "kernels": "of the layers"}
    each, second = (
        [row["ms"] for row in rows if (token | {"checks": checks}).items() <= row.items()]
        for checks in ("each iteration", "every second")
    )
    assert round(1 - fmean(each) / fmean(second), 2) == 0.07
