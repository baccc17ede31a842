"""The jobs of an experiment and what each of them is."""

from dataclasses import replace

from implicit_llm_contracts.config.evaluation import EvaluateConfig
from implicit_llm_contracts.config.training import TrainConfig
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_data.stages.word_problem import WordProblemConfig
from implicit_llm_report.config import ReportConfig
from implicit_llm_workflow.planning.graph import build_graph, report_figures, report_tables
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


def test_every_phase_of_every_seed_is_a_job_whose_inputs_have_roles(
    tiny: ExperimentFile,
) -> None:
    nodes = build_graph(tiny.load())
    assert list(nodes) == KEYS
    assert nodes["train/implicit-s1/unrolled"].upstream == {"data": "data/s3-train"}
    assert nodes["train/implicit-s1/free"].upstream == {"data": "data/s3-train", "start": "train/implicit-s1/unrolled"}
    assert nodes["evaluate/implicit-s1/free/word-problem"].upstream == {
        "model": "train/implicit-s1/free",
        "s3-test-L8-h0.5": "data/s3-test-L8-h0.5",
        "s3-test-L16-h0.5": "data/s3-test-L16-h0.5",
    }
    below = [key for key in KEYS if key.startswith(("train", "evaluate"))]
    assert nodes["report"].upstream == {key.replace("/", ":", 1): key for key in below}


def test_the_report_knows_of_each_data_set_whose_split_it_is(language: ExperimentFile) -> None:
    splits = {name: about["split"] for name, about in build_graph(language.load())["report"].config["data"].items()}
    assert {"text-tokenizer": "tokenizer", "text-train": "train", "text-test": "test"}.items() <= splits.items()


def test_sums_in_another_precision_than_the_usual_one_are_another_training(tiny: ExperimentFile) -> None:
    usual = build_graph(tiny.load())["train/implicit-s0/free"].config
    tiny.edit("batch_size: 8}", "batch_size: 8, reduction: bf16}")
    other = build_graph(tiny.load())["train/implicit-s0/free"].config
    assert usual["reduction"] == "fp32"
    assert other == usual | {"reduction": "bf16"}


def test_every_job_is_described_as_its_stage_reads_it(tiny: ExperimentFile) -> None:
    classes = {"data": WordProblemConfig, "train": TrainConfig, "evaluate": EvaluateConfig, "report": ReportConfig}
    plan, seen = tiny.plan(), set[str]()
    for key, node in plan.nodes.items():
        assert seen.issuperset(node.upstream.values())  # a job comes after those that it reads from
        seen.add(key)
        wanted = plan.identities[key]
        parsed = Identity.parse(wanted.to_json())
        assert (parsed.fingerprint, parsed.name) == (wanted.fingerprint, wanted.name)
        assert replace(wanted, name="other").fingerprint == wanted.fingerprint
        kind = {"kind"} if node.stage == "data" else set()
        fill(classes[node.stage], {name: it for name, it in parsed.config.items() if name not in kind}, key)
    phase = plan.nodes["train/implicit-s1/free"].config["phase"]
    assert (phase["start_step"], phase["end_step"], phase["solver"]["tol"]) == (4, 10, 0.1)
    assert plan.nodes["train/explicit-s0/explicit"].config["phase"]["solver"] is None


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
