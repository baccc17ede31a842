"""Prices against the measured steps they come from, arithmetic by hand, and what is said of what is unknown."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from implicit_llm.training.operations.status import peak_flops
from implicit_llm_contracts.config import flops
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.run_directory import PROVENANCE
from implicit_llm_workflow.commands.options import make_plan
from implicit_llm_workflow.estimates import (
    HARDWARE_FILE,
    CostModel,
    MeasuredStep,
    read_hardware,
    training_estimates,
    training_table,
)
from implicit_llm_workflow.experiment_files.models import model_fields
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import Status
from implicit_llm_workflow.project_dirs import PROJECT_DIR
from implicit_llm_workflow.rules.snakemake_driver import check_disk
from implicit_llm_workflow.site import RuleResources
from implicit_llm_workflow.text import number_text
from tests.pages import ROOT
from tests.unit.workflow.experiments import EXCERPTS, ExperimentFile, finish_with, output, where, work_of

BENCHMARKS = PROJECT_DIR / "results" / "benchmarks"
BOUNDED = {"mode": "fixed_point", "max_iter": 4, "tol": 0.05, "phantom_steps": 1, "tau": 0.8}
FREE = {"mode": "fixed_point", "max_iter": 24, "tol": 0.05, "phantom_steps": 4, "tau": 0.8}
STEPS, BATCH, LENGTH = 1000, 512, 2048
HARDWARE = read_hardware()
STATE_TRACKING = "mamba2-state-tracking-implicit"
CONFIGS = {  # rows of the benchmark that are not named after their configuration
    "state-tracking-explicit": "mamba2-state-tracking-explicit",
    "state-tracking-unrolled": STATE_TRACKING,
    "state-tracking-free": STATE_TRACKING,
}


def timed_rows() -> list[dict[str, Any]]:
    """Rows of the benchmark with their configuration and commit."""
    values = json.loads((BENCHMARKS / "training-step-h200.json").read_text())
    return [{"commit": values["commit"], "config": CONFIGS.get(row["row"], row["row"])} | row for row in values["rows"]]


def sequences_in(config: str) -> int:
    """Of a step of the benchmark."""
    return 512 if "state-tracking" in config else 4 if "1.3b" in config else 8


def train_node(name: str, model: dict[str, Any], solver: dict[str, Any] | None, **phase: Any) -> Node:
    run, seed = name.partition("/")[0].rsplit("-s", 1)
    phase = {"name": "p", "index": 0, "start_step": 0, "end_step": STEPS, "solver": solver, **phase}
    config = {"task": "language_model", "model": model, "phase": phase, "total_steps": STEPS, "seed": int(seed)}
    config |= {"batch_size": BATCH, "precision": "bf16"}
    return Node("train", name, config, {"data": "data/pile-train"}, run, int(seed))


def language_plan(tiny: ExperimentFile, *nodes: Node) -> Plan:
    """A plan of these training jobs on a stream of tokens."""
    stream = Node("data", "pile-train", {"kind": "token_stream", "split": "train", "length": LENGTH})
    plan = tiny.plan()
    plan.nodes = {node.key: node for node in (stream, *nodes)}
    return plan


def test_the_prices_are_the_newest_measured_steps() -> None:
    newest: dict[tuple[str, float], dict[str, Any]] = {}
    for row in timed_rows():
        newest[row["config"], row["f_evaluations"] or 1] = row
    assert newest.keys() == {(step.model, step.f_evaluations) for step in HARDWARE.steps}
    for step in HARDWARE.steps:
        row = newest[step.model, step.f_evaluations]
        tokens_per_s = sequences_in(step.model) * step.length / row["ms"] * 1e3
        assert (step.tokens_per_s, step.commit) == (pytest.approx(tokens_per_s, rel=1e-4), row["commit"]), step


@pytest.mark.parametrize("step", HARDWARE.steps, ids=lambda step: f"{step.model}-{step.f_evaluations}")
def test_a_measured_step_is_priced_at_what_it_took(step: MeasuredStep) -> None:
    model = model_fields(step.model, "test")
    flops_per_s, basis = HARDWARE.speed(model, step.solver, step.precision, step.card)
    work = flops.training_flops(model, step.length, step.solver, step.f_evaluations)
    assert flops_per_s == pytest.approx(work * step.tokens_per_s)
    assert step.commit in basis
    assert 0.1 < flops_per_s / 1e12 / HARDWARE.cards["h200"].peak_tflops["bf16"] < 0.55


@pytest.mark.parametrize(
    ("config", "solver", "precision", "card"),
    [
        ("mamba2-370m-explicit", None, "bf16", "h200"),  # another size
        ("mamba2-130m-explicit", None, "bf16", "h100"),  # another card
        ("mamba2-130m-explicit", None, "fp32", "h200"),  # another precision
    ],
)
def test_what_was_not_measured_takes_the_assumed_share_of_the_peak(
    config: str, solver: Any, precision: str, card: str
) -> None:
    facts = HARDWARE.cards[card]
    flops_per_s, basis = HARDWARE.speed(model_fields(config, "test"), solver, precision, card)
    assert flops_per_s == facts.utilisation * facts.peak_tflops[precision] * 1e12
    assert basis.endswith("assumed")


@pytest.mark.parametrize(
    ("changes", "card"),
    [({}, "v100"), ({}, "abacus"), ({"hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 1}, "h200")],
)
def test_an_unknown_card_one_without_the_precision_and_a_tiny_model_have_no_price(
    changes: dict[str, int], card: str
) -> None:
    assert HARDWARE.speed(model_fields("mamba2-130m-explicit", "test") | changes, None, "bf16", card) is None


def test_tokens_flops_and_disk_of_a_phase_are_those_of_hand_arithmetic(tiny: ExperimentFile) -> None:
    model = model_fields("mamba2-130m-implicit", "test")
    trunk = train_node("m-s0/bounded", model, BOUNDED, keep=[700, 800])
    branch = train_node("m-s0/free-80", model, FREE, start_step=800)
    passing = train_node("m-s0/passing", model, FREE, start_step=800, state_passing=64)
    plan = language_plan(tiny, trunk, branch, passing)
    bounded, free, passing = training_estimates(plan, CostModel(plan))
    tokens = 200 * BATCH * LENGTH
    assert free.work.flops == pytest.approx(flops.training_flops(model, LENGTH, FREE, 28) * tokens)
    assert (free.work.tokens, free.work.f_evaluations, free.is_bound) == (tokens, 28, True)
    assert (passing.work.f_evaluations, passing.is_bound) == (29, True)  # one more returns the state
    assert bounded.work.disk_bytes == flops.num_parameters(model) * (3 * 12 + 4)
    assert (free.card, free.gpus) == ("mi300x", 8)


def test_passes_over_limited_tokens_are_told_with_the_tokens(
    language: ExperimentFile, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = language.edit("train: {length: 32}", "train: {length: 32, tokens: 16384}").plan()
    (job, *_) = [job for job in training_estimates(plan, CostModel(plan)) if job.name.startswith("flat")]
    assert (job.work.tokens, job.work.unique_tokens) == (1000 * 512 * 32, 16384)
    shown = output(capsys, "estimate", str(language.path))
    assert "16.4M (each 1e+03 x 16.4k)" in shown


def test_a_target_takes_what_its_training_jobs_take(tiny: ExperimentFile, capsys: pytest.CaptureFixture[str]) -> None:
    def estimated(*targets: str) -> dict[str, float]:
        values = json.loads(output(capsys, "estimate", str(tiny.path), *targets, *where(tiny)[2:], "--json"))
        assert values["totals"]["flops"] == pytest.approx(sum(job["work"]["flops"] for job in values["training"]))
        return {job["key"]: job["work"]["flops"] for job in values["training"]}

    tiny.add(EXCERPTS)
    whole, free = estimated(), {"train/implicit-s0/unrolled", "train/implicit-s0/free"}
    assert estimated("train/implicit-s0/free").keys() == free < whole.keys()
    assert estimated("figure_training").items() == {(key, whole[key]) for key in ("train/explicit-s0/explicit",)}


def test_an_earlier_run_counts_before_the_table_on_its_own_card(tiny: ExperimentFile) -> None:
    model = model_fields("mamba2-130m-implicit", "test")
    nodes = [train_node(f"m-s{seed}/free", model, FREE) for seed in (0, 1)]
    other_solver = train_node("n-s0/free", model, {**FREE, "tol": 0.01})
    plan = language_plan(tiny, *nodes, other_solver)
    finish_with(plan, nodes[0].key, {"metrics": {"f_evaluations": 12.5}})
    took = {"attempts": [{"busy_s": 7200}], "device": "NVIDIA H200", "processes": 1}
    (work_of(plan, nodes[0].key) / PROVENANCE).write_text(json.dumps(took))
    for card in (None, "h200"):
        costs = CostModel(plan, card)
        first, second, other = (costs.whole(node) for node in (*nodes, other_solver))
        assert (first.hours, first.device, first.basis) == (2, "NVIDIA H200", "as last time")
        assert (second.hours, second.basis) == (2, "as another seed")
        assert other.basis not in ("as last time", "as another seed")
        assert [costs.work(node).f_evaluations for node in (*nodes, other_solver)] == [12.5, 12.5, 28]
    assert (
        CostModel(plan, "h100").whole(nodes[0]).basis
        == f"{HARDWARE.cards['h100'].utilisation:.0%} of the peak of h100, assumed"
    )


def test_a_pretrained_model_has_tokens_but_no_price(tiny: ExperimentFile) -> None:
    plan = language_plan(tiny, train_node("g-s0/explicit", {"pretrained": "gpt2"}, None))
    (job,) = training_estimates(plan, CostModel(plan))
    assert job.work.tokens == STEPS * BATCH * LENGTH
    assert (job.work.flops, job.work.disk_bytes, job.cost.hours) == (None, None, None)


def test_a_data_set_of_a_plugin_without_a_length_leaves_its_tokens_unknown(tiny: ExperimentFile) -> None:
    plan = language_plan(tiny, train_node("a-s0/explicit", model_fields("mamba2-130m-explicit", ""), None))
    del plan.nodes["data/pile-train"].config["length"]
    plan.nodes["data/pile-train"].config["num_samples"] = 2**60
    jobs = training_estimates(plan, CostModel(plan))
    assert (jobs[0].work.tokens, jobs[0].work.flops, jobs[0].cost.hours) == (None, None, None)
    column = training_table(jobs).columns[2]
    assert [*map(str, column.cells)] == ["-", "-"]
    plan.statuses["data/pile-train"] = Status("missing", "", None)
    plan.root.mkdir(parents=True)
    check_disk(plan)  # nothing is known of the disk space either


def test_the_peaks_are_those_of_the_utilisation_that_training_reports() -> None:
    for card in HARDWARE.cards.values():
        known = {precision: peak_flops(card.name, precision) for precision in ("fp32", "fp16", "bf16")}
        assert {name: peak / 1e12 for name, peak in known.items() if peak} == pytest.approx(card.peak_tflops), card.name


def test_a_misspelt_fact_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(HARDWARE_FILE.read_text().replace("utilisation: 0.17", "utilization: 0.17", 1))
    with pytest.raises(ConfigError, match=r"cards\.v100: unknown key 'utilization'; did you mean 'utilisation'"):
        read_hardware(file)


def test_the_command_prints_a_table_and_the_same_as_json(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    assert re.search("≤36.0.*GPU-hours", output(capsys, "estimate", *where(tiny)), re.DOTALL)
    values = json.loads(output(capsys, "estimate", *where(tiny), "--json", "--hardware", "h200"))
    jobs = {job["key"]: job for job in values["training"]}
    assert list(jobs) == [key for key, node in tiny.plan().nodes.items() if node.stage == "train"]
    assert {job["card"] for job in jobs.values()} == {"h200"}
    assert values["totals"]["flops"] == pytest.approx(sum(job["work"]["flops"] for job in jobs.values()))


@pytest.mark.parametrize("config", ["paper", "pretrain-130m", "state-tracking", "miniature", "demo"])
def test_every_job_of_the_shipped_experiments_is_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str
) -> None:
    values = json.loads(output(capsys, "estimate", "--config", config, "--results", str(tmp_path), "--json"))
    assert values["training"]
    for job in values["training"]:
        is_of_others = "lstm" in job["key"] or "delta-" in job["key"]  # whose FLOPs nobody counts
        assert job["work"]["flops"] is None if is_of_others else job["work"]["flops"] > 0, job["key"]
        assert job["cost"]["hours"] is not None or config != "paper"


SITE = """\
__variables__:
  classes:
    fast: {partition: gpu, constraint: "", venv: "", gpus: 4, cpus: 64, mem_gb: 500, setup: "", card: a100}
  other_jobs: {partition: cpu}
  rules:
    train_word_problem: {class: fast, gpus: 1}
    train_language_model: {class: fast, gpus: 4, nodes: "2 if 'mamba2' in wildcards.run else 1"}
"""


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The profile of a cluster, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for folder in ("profiles/cluster", "results"):
        Path(folder).mkdir(parents=True)
    path = tmp_path / "profiles" / "cluster" / "config.yaml"
    path.write_text(SITE)
    return path


def listed_hours(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """GPU-hours by experiment, as `list` shows them."""
    rows = [line.split() for line in output(capsys, "list").splitlines()]
    return {row[0]: row[3] for row in rows if len(row) > 4}


@pytest.mark.usefixtures("profile")
def test_the_classes_of_the_profile_say_which_cards_train_and_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(output(capsys, "estimate", "--config", "language-models", "--json"))
    assert {(job["card"], job["gpus"]) for job in values["training"]} == {("a100", 4)}
    jobs = json.loads(output(capsys, "estimate", "--config", "pretrain-130m", "--json"))["training"]
    assert {job["gpus"] for job in jobs if "mamba2" in job["key"]} == {8}
    listed = {one["name"]: one for one in json.loads(output(capsys, "list", "--json"))["experiments"]}
    hours = [job["cost"]["hours"] for job in values["training"]]
    assert listed["language-models"]["gpu_hours"] == pytest.approx(sum(hours))
    shown = listed_hours(capsys)
    assert (shown["language-models"], shown["demo"]) == (number_text(sum(hours), 3), "-")


def test_training_on_a_cpu_takes_no_gpu_hours_of_the_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = make_plan("miniature", tmp_path)
    for key, node in plan.nodes.items():
        if node.stage == "train":
            finish_with(plan, key, {})
            took = {"attempts": [{"busy_s": 7200}], "device": "cpu", "processes": 1}
            (work_of(plan, key) / PROVENANCE).write_text(json.dumps(took))
    listed = json.loads(output(capsys, "list", "--json", "--results", str(tmp_path)))["experiments"]
    (found,) = (one for one in listed if one["name"] == "miniature")
    assert (found["gpu_hours"], found["has_unknown"]) == (0, False)


def test_a_class_whose_card_has_no_facts_is_named_with_the_two_ways_to_give_them(
    capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    profile.write_text(SITE.replace("card: a100", "card: l40s"))
    said = "estimate/hardware.yaml; add it there, or set `card` of the class in profiles/cluster."
    shown = output(capsys, "estimate", "language-models")
    assert "l40s is not in" in shown
    assert said in shown
    profile.write_text(SITE)
    assert "is not in" not in output(capsys, "estimate", "language-models")


def test_a_gpu_that_does_not_run_the_precision_of_a_job_is_named_as_the_reason_for_unknown_hours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "v100 does not run bf16; for another GPU, add --hardware NAME to `implicit-llm estimate`"
    assert said in output(capsys, "estimate", "state-tracking", "train/a5m-explicit-s0/explicit")
    assert said not in output(
        capsys, "estimate", "state-tracking", "train/a5m-explicit-s0/explicit", "--hardware", "h200"
    )


def test_the_hours_of_the_worked_site_are_those_that_list_shows_there(
    capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    page = (ROOT / "docs" / "your-cluster.md").read_text(encoding="utf-8")
    profile.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    shown = listed_hours(capsys)
    on_page = dict(re.findall(r"^\| `([\w-]+)` \| ([\d.,]+) \|$", page, re.MULTILINE))
    assert len(on_page) == 4
    assert on_page == {name: shown[name] for name in on_page}


def test_a_card_that_no_one_has_timed_has_hours_of_its_peak() -> None:
    flops_per_s, _ = HARDWARE.speed(model_fields("llama3-130m-implicit", "test"), {"max_iter": 32}, "bf16", "a100")
    assert flops_per_s == pytest.approx(0.35 * 312e12)


PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \|.*\| ([^|]*\d[^|]*) \|$", re.MULTILINE)  # those that name hours
HOURS = re.compile(r"([\d,]+) (V100|MI300X)")


def hours_in(text: str) -> dict[str, int]:
    return {card.lower(): int(number.replace(",", "")) for number, card in HOURS.findall(text)}


def test_hours_of_training_are_those_of_the_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = json.loads(output(capsys, "estimate", "--config", "paper", "--results", str(tmp_path), "--json"))
    jobs = {job["key"]: job for job in values["training"]}
    plan = make_plan("paper", tmp_path)

    def hours_of(keys: set[str]) -> dict[str, float]:
        hours: Counter[str] = Counter()
        for key in keys & jobs.keys():
            hours[jobs[key]["card"]] += jobs[key]["cost"]["hours"]
        return hours

    named = {name: hours_in(hours) for name, hours in ROW.findall(PAGE) if hours_in(hours)}
    assert len(named) > 10
    for name, hours in named.items():
        assert hours == pytest.approx(hours_of(plan.with_inputs([f"excerpt/{name}"])), rel=0.02), name
    (whole,) = re.findall(r"everything together\s+takes ([^;]*?) of training", PAGE)
    assert hours_in(whole.replace("-hours", "")) == pytest.approx(hours_of(set(jobs)), rel=0.02)


def test_an_expression_for_the_nodes_is_evaluated_and_a_wrong_one_is_a_line_that_names_it() -> None:
    assert RuleResources("h100", nodes="2 if wildcards.phase == 'free' else 1").num_nodes("a", "free") == 2
    for wrong, why in (("wildcards.size", "AttributeError"), ("'two'", "ValueError"), ("2 if", "SyntaxError")):
        with pytest.raises(ConfigError, match=rf"nodes: .* gives {why} for run 'a'.*wildcards\.run"):
            RuleResources("h100", nodes=wrong).num_nodes("a", "free")
