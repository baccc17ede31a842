"""The jobs of an experiment and what each of them is."""

from __future__ import annotations

import json

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_workflow.planning.graph import build_graph
from implicit_llm_workflow.planning.report_outputs import report_figures, report_tables
from tests.unit.workflow.experiments import ExperimentFile

KEYS = [
    "data/s3-train",
    "data/s3-test-L8-h0.5",
    "data/s3-test-L16-h0.5",
    "train/implicit-s0/unrolled",
    "train/implicit-s0/free",
    "evaluate/implicit-s0/free/word-problem",
    "train/implicit-s1/unrolled",
    "train/implicit-s1/free",
    "evaluate/implicit-s1/free/word-problem",
    "train/explicit-s0/explicit",
    "evaluate/explicit-s0/explicit/word-problem",
    "report",
]


def test_every_phase_of_every_seed_is_a_job(tiny: ExperimentFile) -> None:
    assert list(build_graph(tiny.load())) == KEYS


def test_a_job_comes_after_those_it_reads_from(tiny: ExperimentFile) -> None:
    nodes = build_graph(tiny.load())
    seen: set[str] = set()
    for key, node in nodes.items():
        assert seen.issuperset(node.upstream.values())
        seen.add(key)


def test_the_roles_of_the_inputs_say_what_they_are_for(tiny: ExperimentFile) -> None:
    nodes = build_graph(tiny.load())
    assert nodes["train/implicit-s1/unrolled"].upstream == {"data": "data/s3-train"}
    assert nodes["train/implicit-s1/free"].upstream == {"data": "data/s3-train", "start": "train/implicit-s1/unrolled"}
    assert nodes["evaluate/implicit-s1/free/word-problem"].upstream == {
        "model": "train/implicit-s1/free",
        "s3-test-L8-h0.5": "data/s3-test-L8-h0.5",
        "s3-test-L16-h0.5": "data/s3-test-L16-h0.5",
    }
    report = nodes["report"].upstream
    assert report["train:implicit-s0/free"] == "train/implicit-s0/free"
    assert report["evaluate:explicit-s0/explicit/word-problem"] == "evaluate/explicit-s0/explicit/word-problem"
    assert len(report) == 8


def test_the_report_knows_of_each_data_set_whose_split_it_is(language: ExperimentFile) -> None:
    splits = {name: about["split"] for name, about in build_graph(language.load())["report"].config["data"].items()}
    assert {"text-tokenizer": "tokenizer", "text-train": "train", "text-test": "test"}.items() <= splits.items()


def test_data_are_described_for_the_library(tiny: ExperimentFile) -> None:
    from implicit_llm_contracts.runs.fill import fill
    from implicit_llm_data.stages.word_problem import WordProblemConfig

    for node in build_graph(tiny.load()).values():
        if node.stage == "data":
            config = dict(node.config)
            assert config.pop("kind") == "word_problem"
            assert fill(WordProblemConfig, config, node.key).group == "S3"


def test_training_is_described_for_the_library(tiny: ExperimentFile) -> None:
    from implicit_llm_contracts.config.solver import SolverConfig
    from implicit_llm_contracts.config.training import TrainConfig
    from implicit_llm_contracts.runs.fill import fill

    nodes = build_graph(tiny.load())
    free = fill(TrainConfig, json.loads(json.dumps(nodes["train/implicit-s1/free"].config)), "free")
    assert (free.seed, free.phase.start_step, free.phase.end_step, free.total_steps) == (1, 4, 10, 10)
    assert SolverConfig.of(free.phase.solver or {}).tol == 0.1
    explicit = fill(TrainConfig, json.loads(json.dumps(nodes["train/explicit-s0/explicit"].config)), "explicit")
    assert explicit.phase.solver is None


def test_evaluation_and_report_are_described_for_the_library(tiny: ExperimentFile) -> None:
    from implicit_llm_contracts.config.evaluation import EvaluateConfig
    from implicit_llm_contracts.runs.fill import fill
    from implicit_llm_report.config import ReportConfig

    nodes = build_graph(tiny.load())
    evaluation = fill(
        EvaluateConfig, json.loads(json.dumps(nodes["evaluate/explicit-s0/explicit/word-problem"].config)), "x"
    )
    assert evaluation.modes[0].eval_block_len == 4
    assert fill(ReportConfig, json.loads(json.dumps(nodes["report"].config)), "x").experiment == "tiny"


def test_the_library_accepts_every_identity(tiny: ExperimentFile) -> None:
    from implicit_llm_contracts.runs import identity as library

    for wanted in tiny.plan().identities.values():
        parsed = library.Identity.parse(wanted.to_json())
        assert (parsed.fingerprint, parsed.name) == (wanted.fingerprint, wanted.name)


def test_the_name_is_no_part_of_the_fingerprint() -> None:
    one = Identity("data", "one", {"a": 1}, "code", {})
    other = Identity("data", "other", {"a": 1}, "code", {})
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != Identity("data", "one", {"a": 1.0}, "code", {}).fingerprint


def test_an_explicit_experiment_has_no_figure_of_solvers(tiny: ExperimentFile) -> None:
    assert "solver-health" in report_figures(tiny.load())
    text = tiny.path.read_text()
    start, end = text.index("  implicit:"), text.index("  explicit:")
    tiny.path.write_text((text[:start] + text[end:]).replace("  curriculum:\n    unrolled: {steps: 4}\n", ""))
    assert report_figures(tiny.load()) == ["accuracy-by-length", "accuracy-by-position", "training-curves"]


def test_the_figures_and_tables_are_those_of_what_is_evaluated(tiny: ExperimentFile, language: ExperimentFile) -> None:
    assert report_tables(tiny.load()) == ["accuracy", "published"]
    assert report_tables(language.load()) == ["perplexity", "babi", "duality", "published"]
    assert report_figures(language.load()) == [
        "perplexity-by-length",
        "perplexity-by-position",
        "curriculum",
        "loss-by-flops",
        "accuracy-by-babi-task",
        "training-curves",
        "solver-health",
        "spectral-radius",
    ]
    text = language.path.read_text()
    language.path.write_text(text.replace('["flat*"]', '["flat*", trunk]'))
    assert "convergence-by-iteration" in report_figures(language.load())  # of the implicit run alone
    language.path.write_text(text[: text.index("evaluations:")])
    assert report_tables(language.load()) == ["published"]
    training = ["training-curves", "solver-health", "spectral-radius"]
    assert report_figures(language.load()) == ["loss-by-flops", *training]
