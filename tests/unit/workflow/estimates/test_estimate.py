"""Prices against the measured steps they come from, arithmetic by hand, and what is said of what is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.config import flops
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_workflow.estimates.data_estimate import TokenisationRate, data_estimates, tokenisation_rate
from implicit_llm_workflow.estimates.estimate import Choice, TrainingEstimate, TrainingEstimator
from implicit_llm_workflow.estimates.evaluation_estimate import evaluation_estimates
from implicit_llm_workflow.estimates.hardware import HARDWARE_FILE, Hardware, read_hardware
from implicit_llm_workflow.estimates.throughput import Throughput, TrainingWork
from implicit_llm_workflow.estimates.training_memory import TrainedModel, fitting_step, step_gib
from implicit_llm_workflow.experiment_files.library_configs import model_fields
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import PROJECT_DIR
from tests.unit.workflow.experiments import ExperimentFile

BENCHMARK = json.loads((PROJECT_DIR / "results/benchmarks/language-model-steps-h200.json").read_text())["rows"]
BOUNDED = {"mode": "fixed_point", "max_iter": 4, "tol": 0.05, "phantom_steps": 1, "tau": 0.8}
FREE = {"mode": "fixed_point", "max_iter": 24, "tol": 0.05, "phantom_steps": 4, "tau": 0.8}
STEPS, BATCH, LENGTH = 1000, 512, 2048


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return read_hardware()


def solver_of(config: str) -> dict[str, Any] | None:
    file = PROJECT_DIR / "implicit_llm" / "configs" / config / "config.json"
    return json.loads(file.read_text()).get("solver")


def train_node(name: str, model: dict[str, Any], solver: dict[str, Any] | None, **phase: Any) -> Node:
    run, seed = name.partition("/")[0].rsplit("-s", 1)
    config = {
        "task": "language_model",
        "model": model,
        "phase": {"name": "p", "index": 0, "start_step": 0, "end_step": STEPS, "solver": solver, **phase},
        "total_steps": STEPS,
        "batch_size": BATCH,
        "precision": "bf16",
        "seed": int(seed),
    }
    return Node("train", name, config, {"data": "data/pile-train"}, run, int(seed))


def language_plan(tiny: ExperimentFile, *nodes: Node) -> Plan:
    """A plan of these training jobs on a corpus in two shards."""
    corpus = {"source": "hub", "dataset": "EleutherAI/the_pile_deduplicated"}
    shard = {"kind": "token_shard", "corpus": corpus, "num_shards": 2, "test_fraction": 0.001}
    shards = [Node("data", f"pile-shard-0000{k}", shard) for k in (0, 1)]
    stream = Node("data", "pile-train", {"kind": "token_stream", "split": "train", "length": LENGTH})
    plan = tiny.plan()
    plan.nodes = {node.key: node for node in (*shards, stream, *nodes)}
    return plan


def estimates(plan: Plan, hardware: Hardware, choice: Choice | None = None) -> dict[str, TrainingEstimate]:
    return {job.key: job for job in TrainingEstimator(plan, hardware, choice).all()}


@pytest.mark.parametrize("row", BENCHMARK, ids=lambda row: row["config"])
def test_a_measured_step_is_priced_at_what_it_took(row: dict[str, Any], hardware: Hardware) -> None:
    model, solver = model_fields(row["config"], "test"), solver_of(row["config"])
    evaluations, again = None, 1.0
    if solver is not None:
        evaluations = row["solver_iterations"] + solver["phantom_steps"]
        if row["config"].endswith("1.3b-implicit"):  # with gradient checkpointing
            again = 1 + solver["phantom_steps"] / (evaluations + 2 * solver["phantom_steps"])
    work = flops.training_flops(model, 2048, solver, evaluations) * row["micro_batch"] * 2048
    variant = {"explicit": "explicit", "pretrain": "bounded", "implicit": "free"}[row["config"].split("-")[-1]]
    job = TrainingWork(model["model_type"], variant, flops.num_parameters(model), "bf16", work, work * again)
    price = Throughput(hardware).price(job, "h200")
    assert price is not None
    assert price.gpu_hours * 3600e3 == pytest.approx(row["step_ms"], rel=1e-6)
    assert price.basis == "measured"
    assert 0.1 < price.utilisation < 0.45


@pytest.mark.parametrize("row", BENCHMARK, ids=lambda row: row["config"])
def test_the_memory_of_a_measured_step_is_told_within_five_per_cent(row: dict[str, Any]) -> None:
    trained = TrainedModel(model_fields(row["config"], "test"), solver_of(row["config"]), 2048, "bf16")
    is_recomputed = row["config"].endswith("1.3b-implicit")
    gib = step_gib(trained, row["micro_batch"], accumulates=False, is_recomputed=is_recomputed)
    assert gib == pytest.approx(row["peak_gib"], rel=0.05)


def test_a_size_between_two_measured_ones_is_interpolated(hardware: Hardware) -> None:
    throughput = Throughput(hardware)
    sizes = ["mamba2-130m-explicit", "mamba2-370m-explicit", "mamba2-1.3b-explicit"]
    parameters = [flops.num_parameters(model_fields(size, "test")) for size in sizes]
    works = [TrainingWork("implicit_mamba2", "explicit", number, "bf16", 1e20, 1e20) for number in parameters]
    small, middle, large = (price for work in works if (price := throughput.price(work, "h200")) is not None)
    assert large.gpu_hours < middle.gpu_hours < small.gpu_hours
    assert middle.basis == "interpolated"


def test_another_card_is_marked_as_assumed_and_lacks_what_it_cannot_compute(hardware: Hardware) -> None:
    work = TrainingWork("implicit_llama3", "free", 125_000_000, "bf16", 1e20, 1e20)
    throughput = Throughput(hardware)
    assert throughput.price(work, "v100") is None
    h100, h200 = throughput.price(work, "h100"), throughput.price(work, "h200")
    assert h100 is not None
    assert h200 is not None
    assert (h100.basis, h200.basis) == ("assumed", "measured")
    assert h100.gpu_hours > h200.gpu_hours  # the same products, less bandwidth


def test_a_tiny_model_has_no_price(hardware: Hardware) -> None:
    work = TrainingWork("implicit_mamba2", "free", 20_000, "bf16", 1e15, 1e15)
    assert Throughput(hardware).price(work, "h200") is None


def test_tokens_flops_and_disk_of_a_phase_are_those_of_hand_arithmetic(
    tiny: ExperimentFile, hardware: Hardware
) -> None:
    model = model_fields("mamba2-130m-implicit", "test")
    trunk = train_node("m-s0/bounded", model, BOUNDED, keep=[700, 800])
    branch = train_node("m-s0/free-80", model, FREE, start_step=800)
    found = estimates(language_plan(tiny, trunk, branch), hardware)
    tokens = 200 * BATCH * LENGTH
    free = found["train/m-s0/free-80"]
    assert free.tokens == tokens
    assert free.flops == pytest.approx(flops.training_flops(model, LENGTH, FREE, 28) * tokens)
    assert (free.f_evaluations.value, free.f_evaluations.source) == (28, "upper bound")
    parameters = flops.num_parameters(model)
    assert found["train/m-s0/bounded"].disk_bytes == parameters * (3 * 12 + 4)
    assert (free.card, free.gpus) == ("mi300x", 8)


def test_finished_phases_replace_the_upper_bound(tiny: ExperimentFile, hardware: Hardware) -> None:
    model = model_fields("mamba2-130m-implicit", "test")
    nodes = [train_node(f"m-s{seed}/free", model, FREE) for seed in (0, 1)]
    other_solver = train_node("n-s0/free", model, {**FREE, "tol": 0.01})
    plan = language_plan(tiny, *nodes, other_solver, train_node("o-s0/free", model, FREE))
    manifest = plan.run_dir(nodes[0]) / "manifest.json"
    manifest.parent.mkdir(parents=True)
    identity = Identity("train", nodes[0].name, nodes[0].config, "", {})
    manifest.write_bytes(Manifest.of(identity, (), {"metrics": {"f_evaluations": 12.5}}).to_bytes())
    sources = {key: job.f_evaluations for key, job in estimates(plan, hardware).items()}
    assert (sources["train/m-s0/free"].value, sources["train/m-s0/free"].source) == (12.5, "measured")
    assert (sources["train/m-s1/free"].value, sources["train/m-s1/free"].source) == (12.5, "measured with another seed")
    assert sources["train/o-s0/free"].source == "measured with the same solver"
    assert (sources["train/n-s0/free"].value, sources["train/n-s0/free"].source) == (28, "upper bound")


def test_the_micro_batch_is_the_largest_divisor_that_fits() -> None:
    trained = TrainedModel(model_fields("llama3-1.3b-implicit", "test"), FREE, 2048, "bf16")
    step = fitting_step(trained, 0.92 * 192, 16)
    assert step is not None
    assert 16 % step.micro_batch == 0
    assert step.gib <= 0.92 * 192
    assert step_gib(trained, 2 * step.micro_batch, accumulates=True, is_recomputed=False) > 0.92 * 192
    assert not step.is_recomputed
    assert fitting_step(trained, 10, 16) is None


def test_a_model_that_fits_only_with_checkpointing_is_told_so(tiny: ExperimentFile, hardware: Hardware) -> None:
    unrolled = {"mode": "unrolled", "num_unroll": 64}
    node = train_node("m-s0/unrolled", model_fields("mamba2-1.3b-implicit", "test"), unrolled)
    job = estimates(language_plan(tiny, node), hardware, Choice("h100", 8))[node.key]
    assert job.step is not None
    assert job.step.is_recomputed
    assert job.gpus == 8


def test_a_pretrained_model_has_tokens_but_no_price(tiny: ExperimentFile, hardware: Hardware) -> None:
    node = train_node("g-s0/explicit", {"pretrained": "gpt2"}, None)
    job = estimates(language_plan(tiny, node), hardware)[node.key]
    assert job.tokens == STEPS * BATCH * LENGTH
    assert (job.flops, job.disk_bytes, job.gpu_hours) == (None, None, None)


def test_the_corpus_is_split_among_its_shards_and_downloaded_once(tiny: ExperimentFile, hardware: Hardware) -> None:
    pile = data_estimates(language_plan(tiny), hardware, TokenisationRate(1e6, "assumed"))[0]
    assert (pile.jobs, pile.tokens, pile.disk_bytes) == (2, 207e9, 414e9)
    assert pile.core_hours == pytest.approx(207e9 / 1e6 / 3600)
    assert pile.download_bytes == 451.1e9


def test_the_measured_rate_of_tokenisation_is_taken_if_there_is_one(tmp_path: Path, hardware: Hardware) -> None:
    assert tokenisation_rate(hardware, tmp_path).source == "assumed"
    file = tmp_path / "results" / "benchmarks" / "tokenisation-cpu.json"
    file.parent.mkdir(parents=True)
    rows = [{"corpus": "books", "ours": 0.9, "peer": 0.5}, {"corpus": "library", "ours": 0.8, "peer": 0.6}]
    file.write_text(json.dumps({"machine": {"cores": 2}, "rows": rows}))
    rate = tokenisation_rate(hardware, tmp_path)
    assert (rate.tokens_per_s, rate.source) == (4e5, "measured, results/benchmarks/tokenisation-cpu.json")
    file.write_text(json.dumps({"rows": []}))
    assert tokenisation_rate(hardware, tmp_path).source.startswith("assumed: results/benchmarks/tokenisation-cpu.json")


@pytest.mark.parametrize(("solver", "iterations"), [(FREE, 24), ({"mode": "unrolled", "num_unroll": 4}, 32)])
def test_evaluations_take_a_pass_for_each_mode_and_test_set(
    tiny: ExperimentFile, hardware: Hardware, solver: dict[str, Any], iterations: int
) -> None:
    model = model_fields("mamba2-130m-implicit", "test")
    explicit = model_fields("mamba2-130m-explicit", "test")
    modes = [{"name": name, "eval_mode": name} for name in ("simultaneous", "blockwise", "sequential")]
    config = {"kind": "perplexity", "lengths": [2048, 4096], "max_tokens": 1000, "modes": modes, "precision": "bf16"}
    trained = {"m": train_node("m-s0/free", model, solver), "e": train_node("e-s0/explicit", explicit, None)}
    evaluations = [
        Node("evaluate", f"{node.name}/perplexity", config, {"model": node.key, "pile-test": "data/pile-test"})
        for node in trained.values()
    ]
    plan = language_plan(tiny, *trained.values(), *evaluations)
    plan.nodes["data/pile-test"] = Node(
        "data", "pile-test", {"kind": "token_stream", "split": "test"}, {"shard-00000": "data/pile-shard-00000"}
    )
    of_implicit, of_explicit = evaluation_estimates(plan, hardware)
    assert (of_implicit.tokens, of_explicit.tokens) == (2 * 2 * 1000, 2 * 1000)
    assert (of_implicit.has_sequential, of_explicit.has_sequential) == (True, False)
    passes = [flops.forward_flops(model, length) for length in (2048, 4096)]
    assert of_implicit.flops == pytest.approx(2 * 1000 * sum(iterations * one.stack + one.outside for one in passes))
    assert of_implicit.prices["v100"] is None
    assert of_implicit.prices["h200"] is not None


def test_word_problems_are_read_at_the_lengths_of_the_evaluation_and_as_many_as_a_mode_takes(
    tiny: ExperimentFile, hardware: Hardware
) -> None:
    trained = [
        train_node("m-s0/free", model_fields("mamba2-state-tracking-implicit", "test"), FREE),
        train_node("e-s0/explicit", model_fields("mamba2-state-tracking-explicit", "test"), None),
    ]
    tests = [
        Node("data", f"test-{length}", {"kind": "word_problem", "length": length, "num_samples": 100}, {})
        for length in (16, 64)
    ]
    modes: list[dict[str, Any]] = [
        {"name": "whole", "eval_mode": "simultaneous", "max_samples": 25},
        {"name": "blocks", "eval_mode": "blockwise", "max_samples": 400},
    ]
    config = {"kind": "word_problem", "lengths": [64], "modes": modes}
    upstream = {node.name: node.key for node in tests}
    nodes = [Node("evaluate", f"{node.name}/one", config, upstream | {"model": node.key}) for node in trained]
    of_implicit, of_explicit = evaluation_estimates(language_plan(tiny, *trained, *tests, *nodes), hardware)
    assert of_implicit.tokens == (25 + 100) * 64
    assert of_explicit.tokens == 100 * 64


def test_downstream_tasks_take_their_requests_once_for_each_mode_and_swept_value(
    tiny: ExperimentFile, hardware: Hardware
) -> None:
    trained = train_node("m-s0/free", model_fields("mamba2-130m-implicit", "test"), FREE)
    mode = {"name": "blockwise", "eval_mode": "blockwise"}
    config: dict[str, Any] = {"kind": "lm_eval", "modes": [mode], "tasks": ["piqa"], "precision": "bf16"}
    upstream = {"model": trained.key, "tokenizer": "data/pile-tokenizer"}
    changes: list[dict[str, Any]] = [{}, {"limit": 10, "sweep": {"eval_max_iter": [1, 2, 4]}}, {"tasks": ["mine"]}]
    nodes = [Node("evaluate", f"{trained.name}/{i}", config | change, upstream) for i, change in enumerate(changes)]
    whole, swept, unknown = evaluation_estimates(language_plan(tiny, trained, *nodes), hardware)
    assert whole.tokens == 1838 * 2 * 40
    assert swept.tokens == 3 * 10 * 2 * 40
    assert whole.prices["h100"] is not None
    assert (unknown.tokens, set(unknown.prices.values())) == (None, {None})


def test_the_peaks_are_those_of_the_utilisation_that_training_reports(hardware: Hardware) -> None:
    from implicit_llm.training.operations.speed import peak_flops

    for card in hardware.cards.values():
        for precision in ("fp32", "fp16", "bf16"):
            expected = card.peak_tflops.get(precision)
            found = peak_flops(card.name, precision, tf32=False)
            assert found == (None if expected is None else pytest.approx(expected * 1e12)), card.name


def test_an_unreadable_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"language-model-steps-h200\.json: is no table.*restore the file"):
        read_hardware(project=tmp_path)


def test_a_misspelt_fact_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(HARDWARE_FILE.read_text().replace("memory_gib: 32", "memory_gb: 32", 1))
    with pytest.raises(ConfigError, match=r"cards\.v100: unknown key 'memory_gb'; did you mean 'memory_gib'"):
        read_hardware(file)
