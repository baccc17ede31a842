"""Pages of the project: their Python runs, experiments take their YAML, programs their commands, messages exist.

Numbers are those of the files they come from, and kept tables and weights are what they say.

tests/workflow/test_experiments.py runs the YAML of experiments.md.
"""

import ast
import hashlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from textwrap import dedent
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
import yaml
from rich.console import Console
from snakemake.cli import get_argument_parser
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2ForCausalLM

from implicit_llm_data.groups import load_group
from implicit_llm_report.figures.first_look import Trial
from implicit_llm_report.kept import make_again
from implicit_llm_workflow.commands.experiments import write_project
from implicit_llm_workflow.commands.try_it import accuracy_table
from implicit_llm_workflow.console import app
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import (
    DEFAULT_EXPERIMENT,
    experiment_names,
    experiment_path,
    read_yaml,
)
from implicit_llm_workflow.results.listing import models
from tests.benchmarks.hard_tokens import fits
from tests.pages import PAGES, ROOT, commands_of
from tests.unit.checkpoint.foreign import mamba2_config, write_original_mamba2

NOTEBOOK = "results/reference/state-tracking/NOTES.md"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def run_blocks(document: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python blocks of a document one after another as one script, in `folder`; return its names."""
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    exec(compile("\n".join(blocks_of(document, "python")), document, "exec"), names)
    return names


def test_the_model_of_the_readme_multiplies_longer_words_than_it_was_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = run_blocks("README.md", ROOT, monkeypatch)
    table = load_group("S5").table
    products = [list(accumulate(word, lambda a, b: int(table[a, b]))) for word in names["tokens"].tolist()]
    assert names["tokens"].shape == (8, 512)
    assert torch.stack(names["products"], dim=1).tolist() == products  # as the page makes them
    assert (names["predictions"] == torch.tensor(products)).float().mean() > 0.99


def test_the_blocks_of_the_library_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_blocks("docs/library.md", tmp_path, monkeypatch)
    assert names["rest"].past_key_values.get_seq_length() == 12
    assert names["tokens"].shape == (2, 17)
    assert names["converted"].solver.mode == "unrolled"
    assert names["jacobian"].off_diagonal_share() > 0


@pytest.mark.parametrize("document", PAGES)
def test_links_of_a_document_lead_to_files_of_the_project(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", read(document))
    folder = (ROOT / document).parent
    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []


def test_messages_that_the_page_of_troubles_quotes_are_in_the_code() -> None:
    quoted = re.findall(r"^`([^`]+)`$", read("docs/troubleshooting.md"), re.MULTILINE)
    sources = [path for folder in ("implicit_llm", "workflow/lib") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    # Of formatted strings the parts between the values.
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [message for message in quoted if not any(message in text for text in texts)] == []
    assert len(quoted) > 12


# Their blocks are experiments, models and sites of their own, which other tests read.
OWN = ("experiments", "extending", "your-text", "your-checkpoint", "your-cluster", "authors-code")
YAML = [
    (page, block)
    for page in PAGES
    if page not in {f"docs/{name}.md" for name in OWN} and not page.startswith("workflow/plugins")
    for block in blocks_of(page, "yaml")
]
PLACEHOLDERS = {"COMMIT": "a" * 40, "DIGEST": "a" * 64, ", ...}": "}"}


@pytest.mark.parametrize(("page", "block"), YAML)
def test_a_block_of_a_page_fits_into_the_experiment_of_the_paper(page: str, block: str, tmp_path: Path) -> None:
    for placeholder, value in PLACEHOLDERS.items():
        block = block.replace(placeholder, value)
    given = yaml.safe_load(dedent(block))
    experiment = read_yaml(ROOT / "workflow/config/paper.yaml")
    del experiment["excerpts"]
    if "phases" in given:
        (tmp_path / "curricula").mkdir()
        (tmp_path / "curricula" / "own.yaml").write_text(yaml.safe_dump(given))
        experiment["runs"] = {"own": {**experiment["runs"]["mamba2-130m-implicit"], "curriculum": "own"}}
        given = {"evaluations": {}}
    elif not set(given) & set(experiment):
        given = {"evaluations": given}
    if "evaluations" in given:
        experiment |= {"evaluations": {}, "peers": {}}
    experiment |= {name: {**experiment[name], **section} for name, section in given.items()}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(experiment))
    assert load_experiment(tmp_path / "own.yaml").name == "paper"


COMMANDS = [(page, shlex.join(words)) for page in PAGES for words in commands_of(page)]
OWN_FILE = re.compile(r"^# workflow/config/([a-z0-9-]+)\.yaml$", re.MULTILINE)  # that a page has its reader write


def check(words: list[str], own_configs: Iterable[str] = ()) -> None:
    """Have the real parsers read the words, and look up what they name; an error of any kind refuses them.

    `own_configs`: names of experiments besides those of the project.
    """
    program, *arguments = words
    if program == "make":
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, check=True)
        return
    if program == "implicit-llm":
        console = typer.main.get_command(app)
        do_nothing(console)
        console.main(list(arguments), program, standalone_mode=False)
        configs = [value for option, value in pairwise(arguments) if option == "--config"]
    else:
        options = get_argument_parser().parse_args(arguments)
        assert {Path(name).name for name in options.profile or []} <= {it.name for it in (ROOT / "profiles").iterdir()}
        configs = [str(path) for path in options.configfile or []]
        if options.targets:
            values = read_yaml(ROOT / (configs or [experiment_path(DEFAULT_EXPERIMENT)])[-1])
            assert {*options.targets} <= {values["name"], *values["excerpts"]}
    names = {Path(config).stem for config in configs if not (ROOT / config).is_file()}
    assert names <= {*experiment_names(), *own_configs}


def do_nothing(command: Any) -> None:
    """Have the command read its words and end."""
    command.callback = None
    for below in getattr(command, "commands", {}).values():
        do_nothing(below)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_on_a_page_is_taken(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(shlex.split(command), OWN_FILE.findall((ROOT / page).read_text(encoding="utf-8")))


def test_the_commands_in_a_folder_of_ones_own_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = commands_of(str(tmp_path / "README.md"))
    assert {words[0] for words in commands} == {"implicit-llm"}
    for words in commands:
        check(words)


def test_the_demo_ends_with_the_page_the_activation_and_a_command_that_is_taken() -> None:
    make = ["make", "--dry-run", "--no-print-directory", "demo", "VENV=.venv"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    page, shell, following = (shlex.split(line)[1].split(":", 1)[1].strip() for line in done.stdout.splitlines()[-3:])
    assert page == (ROOT / "results" / "demo" / "report" / "index.html").as_uri()
    assert shell == "source .venv/bin/activate"
    check(shlex.split(following))


@pytest.mark.parametrize(
    "command",
    [
        "implicit-llm estimat --config paper",
        "implicit-llm estimate --confg paper",
        "implicit-llm estimate --config papr",
        "implicit-llm evaluate word-problem --model a --data b --max-itr 3",
        "implicit-llm mlflow rebild",
        "snakemake --profle cluster paper",
        "snakemake --profile clster paper",
        "snakemake --profile cluster figure_9",
        "snakemake --profile cluster demo",
        "snakemake --profile cluster --configfile workflow/config/papr.yaml",
        "snakemake --executor submitit --submitit-clster local",
        "make dmo",
    ],
)
def test_a_misspelt_command_is_noticed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises((Exception, SystemExit)):
        check(shlex.split(command))


def test_the_lists_of_commands_and_keys_are_those_of_the_program() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generated_pages.py"))["generated_pages"]()
    assert len(pages) == 3
    for path, content in pages.items():
        assert path.read_text(encoding="utf-8") == content, f"type `python docs/generated_pages.py`: {path}"


@pytest.mark.parametrize(("page", "name"), [("docs/your-text.md", "mytext"), ("docs/authors-code.md", "their-words")])
def test_the_experiment_of_a_page_is_read(page: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_text("".join(blocks_of(page, "yaml")))
    experiment = load_experiment(path)
    assert experiment.name == name
    assert all(experiment.evaluations_of(run) for run in experiment.models)


def test_the_lines_for_a_checkpoint_of_ones_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, intermediate_size=16)).save_pretrained(
        tmp_path / "models/my-llama"
    )
    folder = tmp_path / "models/mamba2-130m"
    folder.mkdir()
    theirs = Mamba2ForCausalLM(mamba2_config(vocab_size=24))
    write_original_mamba2(theirs, folder, is_pickle=True, vocab_size=24)
    digest = hashlib.sha256((folder / "pytorch_model.bin").read_bytes()).hexdigest()
    code = "\n".join(blocks_of("docs/your-checkpoint.md", "python"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace("DIGEST", digest), names)
    assert (names["model"].solver.max_iter, names["model"].solver.phantom_steps) == (4, 1)
    assert (tmp_path / "models/mamba2-130m-here/model.safetensors").is_file()
    model, rest = blocks_of("docs/your-checkpoint.md", "yaml")
    (tmp_path / "models/my-llama.yaml").write_text(model)
    evaluations = "evaluations:\n  perplexity: {kind: perplexity, modes: [{name: blockwise, eval_mode: blockwise}]}\n"
    (tmp_path / "own.yaml").write_text(f"name: own\n{rest}{evaluations}")
    runs = load_experiment(tmp_path / "own.yaml").runs
    assert {name: run.is_implicit for name, run in runs.items()} == {"implicit": True, "control": False}


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


BENCHMARKS = ROOT / "results" / "benchmarks"
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
MODELS = {"mamba2": "Mamba2 130M", "llama3": "Llama 130M"}


def benchmark(name: str, card: str = "h200") -> dict:
    return json.loads((BENCHMARKS / f"{name}-{card}.json").read_text(encoding="utf-8"))


def cells(text: str, *start: str) -> list[str]:
    """The cells of the one row that starts with these."""
    (row,) = re.findall("^" + re.escape("| " + " | ".join(start) + " | ") + r"(.*) \|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def digits(value: float) -> float:
    """Three significant digits, as the pages have them."""
    return float(f"{value:.3g}")


def rounded(ms: float) -> float:
    return digits(ms) if ms < 1000 else round(ms)


@pytest.mark.parametrize("row", [row for row in TRAINING if row.startswith(("mamba2", "llama3-130m"))])
def test_the_parts_of_a_training_step_are_the_profiled_ones(row: str) -> None:
    table = read("docs/performance.md").partition("Where the milliseconds")[2].partition("two kernels")[0]
    (parts,) = (found["kernels_ms"] for found in benchmark("training-profile")["rows"] if found["row"] == row)
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
    found = cells(read("docs/performance.md").partition("Where the milliseconds")[0], TRAINING[row])
    assert [float(cell) for cell in [found.pop(1)] if cell] == [rounded(ms) for ms in by_mamba_ssm]
    theirs, here, ratio, floor = map(float, found)
    assert (theirs, floor) == (published["ms"], published["floor_ms"])
    assert here == rounded(ms)
    assert ratio == pytest.approx(theirs / ms, rel=0.03)
    if "before_ms" in ours:
        table = read("docs/performance.md").partition("two kernels")[2]
        assert [*map(float, cells(table, TRAINING[row]))] == [rounded(ours["before_ms"]), rounded(ms)]


def test_the_memory_of_the_series_is_the_measured_one() -> None:
    page = " ".join(read("docs/performance.md").split())
    phantom, series, of_llama, series_of_llama = benchmark("series-gradient", "h100")["rows"]
    for before, after in ((phantom, series), (of_llama, series_of_llama)):
        assert (before["solver"]["gradient"], after["solver"]["gradient"]) == ("phantom", "series")
        assert before["losses"][0] == after["losses"][0]
        ms, gib = ([digits(row[key]) for row in (before, after)] for key in ("ms", "peak_gib"))
        assert f"from {ms[0]:g} to {ms[1]:g} ms and from {gib[0]:g} to {gib[1]:g} GiB" in page


def test_the_moves_by_later_tokens_are_the_measured_ones() -> None:
    page, (*rows, s5) = read("docs/library.md"), benchmark("causality", "cpu")["rows"]
    for row in rows:
        method = {"plain": "plain", "anderson": "Anderson"}[row["method"]]
        moved = [f"{row[key]:.2f}" if key in row else "" for key in rows[0] if key not in ("method", "stop")]
        assert cells(page, f'{method}, `"{row["stop"]}"`') == moved
    assert f"moves by {s5['moved']:.3f}, and no prediction changes" in page
    assert s5["changed_predictions"] == 0


def block_row(row: dict) -> str:
    """A row of the table of blocks, as docs/evaluation.md has it."""
    names = {
        "a5-monoid-published-s0": "A5 × monoid",
        "a5-monoid-released-s0": "A5 × monoid, a third of the steps",
        "s5-state-passing-s0": "S5",
        "catbabi-implicit-s0": "CatbAbI",
    }
    block = f"{row['block_len']}{', the whole' if row['block_len'] == row['length'] else ''}"
    block = f"**{block}**" if row["block_len"] == 8 else block
    block = block if row["stop"] == "token" else f"{block}, mean residual"
    work = f"{row['f_evaluations_per_token']:.1f} | {row['serial_steps_per_token']:.2f}"
    cells = f"{100 * row['accuracy']:.1f} % | {work} | {100 * row['share_at_cap']:.2f} % | {row['seconds']:.0f}"
    return f"| {names[row['model']]} | {block} | {cells} |"


def test_the_table_of_blocks_is_the_measured_one() -> None:
    found = re.findall(r"^\| (?:A5 × monoid.*|S5|CatbAbI) \|.*$", read("docs/evaluation.md"), re.MULTILINE)
    assert found == [block_row(row) for row in benchmark("evaluation-blocks", "cpu")["rows"]]


def test_the_iterations_of_hard_tokens_are_the_measured_ones() -> None:
    page, kept = " ".join(read("docs/state-tracking.md").split()), benchmark("hard-tokens", "cpu")
    published, third, s5 = (
        next(fit for fit in kept["fits"] if fit["model"] == model)
        for model in ("a5-monoid-published-s0", "a5-monoid-released-s0", "s5-state-passing-s0")
    )
    assert [*fits(kept["rows"])] == kept["fits"]
    for fit, words in (
        (published, "adds {:.2f} iterations (95 %: {:.2f} to {:.2f})"),
        (s5, "{:.2f} ({:.2f} to {:.2f})"),
    ):
        assert words.format(fit["per_hard_token"], *fit["interval_95"]) in page
    assert f"to {published['at_none']:.1f} without any; on S5" in page
    left_out = [fit["sequences"] - fit["converged"] for fit in (published, s5, third)]
    assert f"left out: {left_out[1]} of {s5['sequences']} on S5, {left_out[2]} of {third['sequences']} on A5" in page
    assert (left_out[0], f"({third['per_hard_token']:.2f} per hard token;" in page) == (0, True)


def test_the_positions_of_an_iteration_are_the_measured_ones() -> None:
    page, rows = " ".join(read("docs/state-tracking.md").split()), benchmark("hard-tokens", "cpu")["rows"]

    def positions(model: str, length: int, hard: float) -> str:
        (row,) = (row for row in rows if (row["model"], row["length"], row["hard_fraction"]) == (model, length, hard))
        pairs = zip(row["iterations"], row["is_converged"], strict=True)
        return f"{length / fmean(count for count, is_converged in pairs if is_converged):.{1 + (hard == 1)}f}"

    at = [positions("a5-monoid-published-s0", *place) for place in ((256, 0.1), (64, 0.1), (256, 0.5))]
    assert "we find {} at the trained length and share, {} at 64 tokens, {} with 50 % hard".format(*at) in page
    assert f"we find {positions('s5-state-passing-s0', 128, 1.0)}." in page


def test_the_serial_steps_of_the_protocol_are_the_measured_ones() -> None:
    rows = [
        row for row in benchmark("evaluation-blocks", "cpu")["rows"] if (row["stop"], row["block_len"]) == ("token", 8)
    ]
    steps = {row["model"]: f"{row['serial_steps_per_token']:.2f}" for row in rows}
    words = f"take {steps['a5-monoid-published-s0']} and {steps['s5-state-passing-s0']} serial steps per token"
    assert words in " ".join(read("docs/state-tracking.md").split())


@pytest.mark.parametrize("name", ["a5-monoid-published-s0", "a5-monoid-released-s0", "catbabi-implicit-s0"])
def test_the_card_of_a_packaged_model_has_its_numbers_by_the_protocol_and_by_the_criterion_before(name: str) -> None:
    card = " ".join((TRAINED / name / "README.md").read_text().split())
    rows = [row for row in benchmark("evaluation-blocks", "cpu")["rows"] if row["model"] == name]
    (by_token,) = (row for row in rows if (row["stop"], row["block_len"]) == ("token", 8))
    (by_mean,) = (row for row in rows if row["stop"] == "sequence")
    for row in (by_token, by_mean):
        cells = f"{100 * row['accuracy']:.1f} % | {row['f_evaluations_per_token']:.1f}"
        assert f"| {cells} | {100 * row['share_at_cap']:.2f} % | {row['seconds']:.0f} |" in card


def test_the_table_of_the_demo_is_the_measured_one() -> None:
    frame = pd.read_csv(ROOT / "results/reference/demo/accuracy.csv")
    frame = frame[frame["mode"].isin(["blockwise-8-token", "parallel"])].sort_values("length")
    for (name, hard), of in frame.groupby(["name", "hard_fraction"]):
        group, kind = name.split("-")
        cells = " | ".join(f"{100 * accuracy:.1f} %" for accuracy in of.accuracy_last10)
        assert f"| {group.upper()} | {hard} | {kind}, 1 layer | {cells} |" in read("docs/demo.md")
    assert len(frame) == 18
    last = frame.query("group == 'A5' and hard_fraction == 0.5 and length == 64").set_index("name").accuracy_last10
    numbers = re.search(r"^best_accuracy_last10 a5-test-L64-h0.5 +(\S+) +(\S+)$", read("docs/inspect.md"), re.M)
    assert numbers.groups() == tuple(f"{last[name]:.4g}" for name in ("a5-implicit", "a5-explicit"))


def test_state_tracking_in_short_blocks_is_the_measured_one() -> None:
    page, measured = read("docs/performance.md"), benchmark("state-tracking", "h100")["rows"]
    for shown, row, key, precision in (
        ("training step, ms", "training", "ms", None),
        ("evaluation in fp32, ms a block", "evaluation", "ms_a_block", "fp32"),
        ("evaluation in bf16, ms a block", "evaluation", "ms_a_block", "bf16"),
    ):
        found = [line[key] for line in measured if (line["row"], line.get("precision")) == (row, precision)]
        assert [float(cell) for cell in cells(page, shown) if cell] == [digits(value) for value in found]
        if row == "evaluation":
            assert f"{found[-1] * 8192 / 1000:.0f} s in {precision}" in page


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


def test_the_list_of_trained_models_has_the_measured_accuracies() -> None:
    rows = [
        row for row in benchmark("evaluation-blocks", "cpu")["rows"] if (row["stop"], row["block_len"]) == ("token", 8)
    ]
    for row in rows:
        listed = next(model for model in models() if model.name == row["model"])
        about = f"of the answers in {row['sequences']} sequences of {row['length']} tokens"
        assert listed.accuracy == f"{100 * row['accuracy']:.1f} % {about}"
    assert {row["model"] for row in rows} == {model.name for model in models()}


WRITTEN = runpy.run_path(str(ROOT / "docs/written.py"))


@pytest.mark.parametrize("page", WRITTEN["PAGES"])
def test_the_generated_parts_of_a_page_are_those_of_the_kept_results(page: str) -> None:
    assert read(page) == WRITTEN["written"](read(page))
    assert page == "README.md" or "<!-- begin " in read(page)


def test_the_readme_shows_the_table_that_the_command_prints() -> None:
    kept = json.loads((TRAINED / "s5-state-passing-s0/accuracy_by_position.json").read_text(encoding="utf-8"))
    nothing = np.zeros((0, 0))
    trial = Trial(np.ones((16, 512), bool), 1.0, kept, 32, nothing, nothing, 0.05)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(accuracy_table(trial))
    printed = [line.rstrip() for line in capture.get().splitlines()]
    (shown,) = blocks_of("README.md", "text")
    assert len(shown.splitlines()) > 2
    assert set(shown.splitlines()) <= set(printed)


def test_the_readme_has_at_most_850_words() -> None:
    assert len(read("README.md").split()) <= 850


def test_the_figure_of_the_readme_is_drawn_from_the_kept_numbers() -> None:
    assert read("docs/images/hero.svg") == runpy.run_path(str(ROOT / "docs/images/hero.py"))["draw"]()


def test_the_bar_chart_of_training_steps_is_drawn_from_the_measured_ones() -> None:
    assert read("docs/images/performance.svg") == runpy.run_path(str(ROOT / "docs/images/performance.py"))["draw"]()


def test_the_gpu_hours_of_the_readme_are_those_of_the_reports_and_of_the_page_of_the_paper() -> None:
    reports = [read(f"results/reference/{name}/index.html") for name in WRITTEN["EXPERIMENTS"]]
    hours = sum(float(re.search(r"training jobs, ([\d.]+) hours", report)[1]) for report in reports)
    whole = re.search(r"([\d,]+) GPU-hours in all", read("docs/paper.md"))[1]
    stated = f"took {hours:.1f} GPU-hours of training; the whole paper takes {whole} by estimate"
    assert stated in " ".join(read("README.md").split())


def test_the_step_times_of_the_readme_are_the_measured_ones() -> None:
    ours = {row["row"]: row["ms"] for row in benchmark("training-step")["rows"]}
    theirs = {row["row"]: row["ms"] for row in benchmark("published-code")["training"]}
    rows = "llama3-130m-explicit", "llama3-130m-implicit"
    explicit, implicit = (f"{rounded(ours[row]):.0f}" for row in rows)
    published = " and ".join(f"{theirs[row]:g}" for row in rows)
    page = " ".join(read("README.md").split())
    assert f"takes {explicit} ms explicit and {implicit} ms implicit. The authors' code takes {published} ms" in page


STATE_FIGURES = runpy.run_path(str(ROOT / "docs/images/state_tracking.py"))["FIGURES"]


@pytest.mark.parametrize("name", STATE_FIGURES)
def test_a_figure_of_state_tracking_is_drawn_from_the_kept_results(name: str) -> None:
    assert read(f"docs/images/{name}.svg") == STATE_FIGURES[name]()


@pytest.mark.parametrize(
    ("file", "by", "page"),
    [("seeds", "dropout", "docs/demo.md"), ("tolerance", "tol", NOTEBOOK)],
)
def test_the_seeds_of_the_demo_are_the_kept_ones(file: str, by: str, page: str) -> None:
    frame = pd.read_csv(ROOT / f"results/reference/demo/{file}.csv").query("unrolled_steps == 1000")
    for (value, hard, length), rows in frame.groupby([by, "hard_fraction", "length"]):
        found = rows.sort_values("seed").accuracy_last10
        shown = cells(read(page), f"{value:g}", f"{hard:g}", str(length))
        assert shown == [f"{100 * accuracy:.1f}" for accuracy in (*found, found.mean())]


LANGUAGE_MODELS = ROOT / "results/reference/language-models"
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


STATE_TRACKING = ROOT / "results/reference/state-tracking"
TRAINED = ROOT / "implicit_llm/trained"
SEEDS = {"s5-implicit": 5, "s5-single-words": 5, "s5-state-passing": 5, "a5m-published-stop": 1}  # others: 3
GROUP = ["run", "phase", "mode", "hard_fraction", "length"]


def test_the_page_of_complete_tables_has_every_row_of_the_kept_results() -> None:
    (page, text), *others = WRITTEN["WHOLE"].items()
    assert (read(page), others) == (text(), [])
    tables = WRITTEN["TRACKING"]["TABLES"]
    rows = [len([*rows()]) for title, _, rows in tables.values() if title]
    assert rows == [6, 18, 9, 3, 9, 8, 4, 6, 5, 8, 9, 5]
    assert read(page).count("\n|") == sum(rows) + 2 * len(rows)


def test_the_page_of_state_tracking_has_at_most_1500_words_and_six_figures() -> None:
    page = re.sub(r"<!--.*?-->", "", read("docs/state-tracking.md"))
    assert len([word for word in page.split() if re.search(r"\w", word)]) <= 1500
    assert page.count("<img ") <= 6


@pytest.mark.parametrize(
    ("folder", "script", "files", "number"),
    [
        (LANGUAGE_MODELS, "tables.py", "*.csv", 3),
        (STATE_TRACKING, "tables.py", "*.csv", 4),
        (STATE_TRACKING, "page.py", "claims.json", 1),
    ],
)
def test_tables_and_verdicts_are_made_from_the_kept_inputs(
    folder: Path, script: str, files: str, number: int, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, folder / script, tmp_path], cwd=ROOT, check=True)
    made = {path.name: path.read_bytes() for path in tmp_path.glob(f"{'declared/' * (script == 'page.py')}{files}")}
    assert made == {path.name: path.read_bytes() for path in folder.glob(files)}
    assert len(made) == number


def test_the_verdicts_on_language_models_are_made_from_the_kept_inputs(tmp_path: Path) -> None:
    shutil.unpack_archive(LANGUAGE_MODELS / "inputs.tar.xz", tmp_path)
    experiment = ROOT / "workflow/config/language-models.yaml"
    make_again(tmp_path / "results/language-models", tmp_path / "page", experiment)
    kept = (LANGUAGE_MODELS / "claims.json").read_bytes()
    assert (tmp_path / "page/declared/claims.json").read_bytes() == kept


def test_only_rows_with_every_planned_seed_are_complete() -> None:
    for name, is_complete in {"accuracy.csv": True, "incomplete.csv": False}.items():
        for run, found in pd.read_csv(STATE_TRACKING / name).groupby(GROUP).seed.nunique().groupby("run"):
            wanted = SEEDS.get(str(run), 3)
            assert ((found == wanted) == is_complete).all(), run


def test_trained_models_have_the_digests_of_their_cards_and_stay_small() -> None:
    cards = sorted(TRAINED.glob("*/README.md"))
    assert len(cards) == 4
    for card in cards:
        digest = hashlib.sha256((card.parent / "model.safetensors").read_bytes()).hexdigest()
        assert digest in card.read_text(encoding="utf-8"), card.parent.name
    assert sum(path.stat().st_size for path in TRAINED.rglob("*") if path.is_file()) < 24 * 2**20


def test_a_misread_answer_is_no_slip_of_the_state() -> None:
    found = runpy.run_path(str(STATE_TRACKING / "slips.py"))["slips"](np.array([[0, 0, 5, 0, 0, 3, 3, 0, 0, 9]]))
    assert found.tolist() == [[0, 0, 0, 0, 0, 3, 0, 4, 0, 0]]  # 4 takes the 3 back


def test_the_slips_of_the_page_are_the_counted_ones() -> None:
    page = " ".join(read(NOTEBOOK).partition("### How earlier models slipped")[2].split())
    for found in json.loads(read("results/reference/state-tracking/slips.json")).values():
        assert f"{found['words']} words of {found['length']:,} tokens it slips {found['slips']['number']} times" in page


def test_the_lost_words_of_the_page_are_the_kept_ones() -> None:
    page = " ".join(read(NOTEBOOK).partition("### How words are lost")[2].split())
    kept = json.loads(read("results/reference/state-tracking/rereads.json"))
    at_005, at_001 = (
        [kept[f"s5-state-passing-s{seed}{at}"]["lost"] for seed in (0, 3)] for at in ("", ", tolerance 0.01")
    )
    assert f"lose {len(at_005[0])} and {len(at_005[1])} of 256 words" in page
    assert f"At 0.01 they lose {len(at_001[0])} and {len(at_001[1])} " in page
    margins = pd.DataFrame([word["least_margins"] for word in [*at_005[0], *at_005[1]]])
    right = [int((margins[f"tolerance {tol}"] > 0).sum()) for tol in ("0.06", "0.04", "0.01")]
    assert "At {} no answer there is wrong in {} words, at 0.04 in {}, and at 0.01 in {}.".format(0.06, *right) in page


def test_the_words_read_by_two_stopping_rules_are_the_kept_ones() -> None:
    page = " ".join(read(NOTEBOOK).split())
    kept = json.loads(read("results/reference/state-tracking/stopping_rules.json"))
    few, many = (
        [f"{100 * one[rule]['accuracy_last10']:.1f}" for rule in ("sequence", "token")]
        for one in kept["a5-monoid-released-s0"]
    )
    assert f"With 50 % hard tokens it has {many[0]} % by this rule, and {many[1]} % if" in page
    findings = " ".join(read("docs/state-tracking.md").split())
    assert f"has {many[0]} % with 50 % hard tokens by the mean residual" in findings
    assert f"and {many[1]} % if each token must converge" in findings
    assert few[0] == few[1]
    assert f"With 10 % it has {few[0]} % both ways" in page
    *right, last = [one["token"]["right_throughout"] for one in kept["s5-state-passing"]]
    assert f"{', '.join(map(str, right))} and {last} of 128 words of 512 tokens are right throughout" in page


def test_the_pilots_of_state_passing_are_the_kept_ones() -> None:
    table = read(NOTEBOOK).partition("### What was changed")[2].partition("\n- ")[0]
    kept = json.loads(read("results/reference/state-tracking/state-passing.json"))["pilots"]["runs"]
    found = [one for run in kept for one in run["accuracy"] if one["length"] > 32]
    shown = [f"{100 * one['accuracy_last10']:.1f} / {100 * one['accuracy_sequence']:.1f}" for one in found]
    assert [cell for cell in shown if f" {cell} |" not in table] == []
    assert len(shown) == 10
