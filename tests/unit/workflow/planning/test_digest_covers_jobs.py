"""The digest of a job holds every module in which one of its functions runs: jobs of every kind are run and traced."""

import ast
import gc
import inspect
import multiprocessing
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from implicit_llm_workflow.commands.jobs import run_job
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import (
    OF_FAMILY,
    OF_IMPLICIT,
    PACKAGES,
    PLUMBING,
    SourceModule,
    job_code,
    job_sources,
    require_submitted_code,
)
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.project_dirs import LIBRARY, package_dir
from tests.unit.data.text_samples import write_corpus

# Explicit models are evaluated in every way: of their jobs most is left out.
EXPERIMENT = """\
name: traced

data:
  s3:
    kind: word_problem
    group: S3
    train: {length: 16, hard_fraction: 0.5, num_samples: 32}
    test: {lengths: [16], hard_fractions: [0.5], num_samples: 4}
  babi:
    kind: catbabi
    text: {source: simulated, families: [1, 2], stories: {train: 8, valid: 4, test: 4}}
    length: 200
    vocab_size: 192
  text:
    kind: language_model
    corpus: {source: files, files: ["part-*.jsonl.gz"]}
    num_shards: 1
    tokenizer: {source: trained}
    vocab_size: 300
    test_fraction: 0.2
    train: {length: 16}
    test: {lengths: [16]}

override:
  task: {total_steps: 5, batch_size: 2, precision: fp32}

runs:
  word-implicit:
    data: s3
    model: mamba2-implicit
    task: word-problem
    curriculum: unrolled-then-free
    override:
      model: &mamba2 {hidden_size: 16, num_hidden_layers: 1, head_dim: 16, state_size: 8}
      curriculum: {unrolled: {steps: 2, solver: {num_unroll: 2}}}
  word-explicit:
    data: s3
    model: mamba2-explicit
    task: word-problem
    curriculum: explicit
    override: {model: *mamba2}
  babi: {data: babi, model: mamba2-babi-explicit, task: catbabi, curriculum: explicit, override: {model: *mamba2}}
  llama3-implicit:
    data: text
    model: llama3-130m-implicit
    task: language-model
    curriculum: bounded-then-free-llama3
    override:
      model: &llama3 {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32}
  llama3-explicit:
    data: text
    model: llama3-130m-explicit
    task: language-model
    curriculum: explicit
    override: {model: *llama3}

evaluations:
  word-problem:
    kind: word_problem
    modes: &modes
      - {name: blockwise, eval_mode: blockwise, eval_block_len: 8}
      - {name: sequential, eval_mode: sequential}
  jacobian: {kind: jacobian, runs: [word-explicit], checked_rows: 1, positions: [2], num_sequences: 1}
  catbabi: {kind: catbabi, protocols: [windowed, carried], carried_max_tokens: 200, modes: *modes}
  perplexity: {kind: perplexity, max_tokens: 32, modes: *modes}
  duality: {kind: duality, runs: [llama3-explicit], max_tokens: 32, trace_tokens: 16, modes: *modes}
  downstream:
    kind: lm_eval
    runs: [llama3-explicit]
    tasks: local
    task_path: local
    bootstrap_draws: 0
    modes: [{name: blockwise, eval_mode: blockwise, max_samples: 2}]

peers:
  untrained:
    {data: s3, checkpoint: {path: workflow/config/checkpoints/untrained}, evaluations: [word-problem]}

# In the place of the report, which draws many figures by the same code.
excerpts:
  figure_1:
    title: One figure
    figures: [accuracy-by-length]
    tables: [accuracy, perplexity]
    from: [{evaluations: ["*"]}]
"""
FOLDERS = {name: package_dir(name) for name in PACKAGES}
MAMBA2, LLAMA3 = OF_FAMILY


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("traced")
    (folder / "traced.yaml").write_text(EXPERIMENT)
    write_corpus(folder / "results" / "downloads")
    return Plan(load_experiment(folder / "traced.yaml"), folder / "results")


def test_every_function_that_a_job_runs_is_in_its_digest(plan: Plan) -> None:
    plan.write_job_files()
    for key, node in plan.nodes.items():  # imports run functions too; so all are done before
        require_submitted_code(plan.code(node).module, plan.identities[key].code, key)
    missing = {}
    for key, node in plan.nodes.items():
        if node.stage == "report":
            continue
        ran = traced(lambda node=node: run(plan, node), plan.code(node).module)
        assert plan.code(node).module in ran, key
        missing[key] = {name for name in ran if not is_below(name, PLUMBING)} - job_sources(plan.code(node)).keys()
    assert {key: names for key, names in missing.items() if names} == {}


def run(plan: Plan, node: Node) -> None:
    machine, downloads = {"device": "cpu", "threads": 1}, {"downloads": plan.root.parent / "downloads"}
    runtime = {"train": machine, "evaluate": machine, "data": downloads, "checkpoint": downloads}.get(node.stage, {})
    run_job(plan.run_dir(node), f"@{plan.identity_file(node)}", None, runtime, is_training=node.stage == "train")


def traced(work: Callable[[], None], module: str) -> set[str]:
    """The modules of the library in which functions run from `module.run` on: in a process of its own, so that nothing
    is cached yet.
    """
    entry, fork = file_of(module), multiprocessing.get_context("fork")
    found = fork.SimpleQueue()
    ran: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED:  # a module, or the body of a class
            return
        if ran or (code.co_name == "run" and Path(code.co_filename) == entry):
            ran.add(code.co_filename)

    def child() -> None:
        threading.settrace(note)
        sys.settrace(note)
        work()
        sys.settrace(None)
        found.put(ran)

    gc.collect()  # what earlier tests left is not to be closed, and so run, in the fork
    process = fork.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    files = [Path(file) for file in found.get()]
    return {
        ".".join([package, *file.relative_to(folder).with_suffix("").parts])
        for package, folder in FOLDERS.items()
        for file in files
        if file.is_relative_to(folder) and file.suffix == ".py" and file.name != "__init__.py"
    }


def file_of(module: str) -> Path:
    package, *rest = module.split(".")
    return FOLDERS[package].joinpath(*rest).with_suffix(".py")


def is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def model(family: str, *, is_implicit: bool) -> dict[str, Any]:
    return {"model_type": family, "is_implicit": is_implicit}


def modules_of(model: dict[str, Any], stage: str = "train", **config: str) -> set[str]:
    return {name.removeprefix(f"{LIBRARY}.") for name in job_sources(job_code(stage, config, model))}


def folder_of(family: str) -> set[str]:
    """The modules in the folder of a family."""
    library, folder = package_dir(), package_dir() / "models" / family.removeprefix("implicit_")
    paths = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(library).with_suffix("").parts) for path in paths}


@pytest.mark.parametrize(("stage", "config"), [("train", {}), ("evaluate", {"kind": "word_problem"})])
def test_a_job_depends_on_its_own_family_alone_and_that_of_an_explicit_model_not_on_the_solver(
    stage: str, config: dict[str, str]
) -> None:
    mamba2, llama3 = (modules_of(model(it, is_implicit=True), stage, **config) for it in (MAMBA2, LLAMA3))
    of_mamba2, of_llama3 = (folder_of(family) for family in (MAMBA2, LLAMA3))
    assert {"models.mamba2.model", "models.mamba2.triton.scan", "models.mamba2.triton.scan_backward"} <= of_mamba2
    assert {"models.llama3.model", "models.llama3.triton.attention"} <= of_llama3
    assert (of_mamba2 & mamba2, of_llama3 & llama3) == (of_mamba2, of_llama3)
    assert (of_mamba2 & llama3, of_llama3 & mamba2) == (set(), set())
    explicit = modules_of(model(MAMBA2, is_implicit=False), stage, **config)
    assert {"solver.fixed_point", "solver.residual", "kernels.triton.convergence"} <= mamba2 - explicit
    assert not [name for name in explicit if name.startswith("solver.")]


@pytest.mark.parametrize("unknown", [{}, {"model_type": "llama"}, {"pretrained": "folder"}])
def test_a_job_with_a_model_that_is_not_known_depends_on_everything(unknown: dict[str, Any]) -> None:
    every = [modules_of(model(family, is_implicit=True)) for family in OF_FAMILY]
    assert modules_of(unknown) == set().union(*every)


@pytest.mark.parametrize("package", PLUMBING)
def test_plumbing_is_left_out_by_whole_packages(package: str) -> None:
    assert (file_of(package).with_suffix("") / "__init__.py").is_file()


def test_what_a_job_takes_from_code_that_it_leaves_out_is_functions_and_classes_which_the_trace_sees() -> None:
    everything = job_sources(job_code("train", {}))
    for family in OF_FAMILY:
        kept = job_sources(job_code("train", {}, model(family, is_implicit=False)))
        for source in kept.values():
            for imported in source.imports:
                if imported.module in everything.keys() - kept.keys():
                    assert defined(everything[imported.module]) >= {*(imported.names or ())}, source.module


def defined(source: SourceModule) -> set[str]:
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in source.tree.body if isinstance(node, kinds)}


def test_the_table_names_modules_that_are_there() -> None:
    reached = job_sources(job_code("train", {}))
    for name in (*OF_IMPLICIT, *OF_FAMILY.values()):
        assert any(is_below(module, (name,)) for module in reached), name
