"""The jobs of an experiment and what each of them is; wanted against recorded results, without Snakemake."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from implicit_llm_contracts.config.evaluation import EvaluateConfig
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.training import TrainConfig
from implicit_llm_contracts.config.word_problem import WordProblemConfig
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import MANIFEST, FileRecord, Manifest, sha256_of
from implicit_llm_data.stages.word_problem import generate
from implicit_llm_report.config import ReportConfig
from implicit_llm_report.registry import registry
from implicit_llm_workflow import file_digests
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import experiment_path
from implicit_llm_workflow.file_digests import FileDigests, Remembered, safe_digests
from implicit_llm_workflow.planning.graph import build_graph, report_figures, report_tables
from implicit_llm_workflow.planning.plan import PLANNED, Plan, UnknownTarget
from implicit_llm_workflow.rules.snakemake_rules import plan_from_snakemake
from tests.limits import file_size_limit
from tests.pages import ROOT
from tests.refusals import refused
from tests.unit.workflow.experiments import (
    ALL,
    EVALUATIONS,
    EXCERPTS,
    EXPLICIT,
    FREE,
    LANGUAGE,
    PEER,
    TEST_SETS,
    TINY,
    UNROLLED,
    ExperimentFile,
    finish,
    keys,
    work_of,
)

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


VALIDATION = "\n    validation: {lengths: [8], hard_fractions: [0.5], num_samples: 16}\n"
CHOICE = (
    "  choice:\n    kind: word_problem\n    split: validation\n    modes: [{name: blockwise, eval_mode: blockwise}]\n"
)


def test_an_evaluation_of_the_validation_split_reads_its_sets_and_no_test_sets(tiny: ExperimentFile) -> None:
    before = tiny.plan().identities
    plan = tiny.edit("num_samples: 32}\n", "num_samples: 32}" + VALIDATION).add(CHOICE).plan()
    evaluation = plan.nodes["evaluate/implicit-s1/free/choice"]
    validation = "s3-validation-L8-h0.5"
    assert evaluation.upstream == {"model": "train/implicit-s1/free", validation: f"data/{validation}"}
    assert "split" not in evaluation.config
    report = plan.nodes["report"].config["data"]
    assert report[validation] == {"data": "s3", "split": "validation"}
    changed = {key for key, identity in before.items() if plan.identities[key] != identity}
    assert changed == {"report"}  # the other jobs and their fingerprints are those without the new keys


TEXT_CHOICE = """\
  text-choice:
    kind: perplexity
    split: validation
    modes: [{name: blockwise, eval_mode: blockwise}]
"""


def test_validation_text_is_a_stream_of_its_own_that_tokenizer_and_shards_leave_out(language: ExperimentFile) -> None:
    before = language.plan().identities
    limited = "test: {lengths: [64, 32]}\n    validation: {lengths: [128, 64], fraction: 0.2}\n"
    plan = language.edit("test: {lengths: [64, 32]}\n", limited).add(TEXT_CHOICE).plan()
    evaluation = plan.nodes["evaluate/flat-s0/explicit/text-choice"]
    assert evaluation.upstream == {"model": "train/flat-s0/explicit", "text-validation": "data/text-validation"}
    assert evaluation.config["lengths"] == [128, 64]
    stream = plan.nodes["data/text-validation"]
    assert (stream.config, stream.upstream) == ({"kind": "token_stream", "split": "validation", "length": 64}, SHARDS)
    assert {plan.nodes[f"data/text-{role}"].config["validation_fraction"] for role in ("tokenizer", *SHARDS)} == {0.2}
    assert plan.nodes["report"].config["data"]["text-validation"] == {"data": "text", "split": "validation"}
    assert "validation-perplexity" in report_tables(language.load())
    kept = {key for key, identity in before.items() if plan.identities[key] == identity}
    assert {key for key in kept if "babi" not in key} == set()


def test_a_limit_of_the_training_tokens_changes_the_training_stream_and_what_reads_it(
    language: ExperimentFile,
) -> None:
    before = language.plan().identities
    plan = language.edit("train: {length: 32}", "train: {length: 32, tokens: 16384}").plan()
    assert plan.nodes["data/text-train"].config == NODES["data/text-train"][0] | {"tokens": 16384}
    kept = {key for key, identity in before.items() if plan.identities[key] == identity}
    assert {key for key in kept if "babi" not in key} == {"data/text-tokenizer", "data/text-test", *SHARDS.values()}


def test_validation_sets_share_no_sequence_with_the_test_sets_of_the_same_length(tiny: ExperimentFile) -> None:
    tiny.edit("[8, 16], hard_fractions: [0.5]", "[16], hard_fractions: [1]")
    sets = "\n    validation: {lengths: [16], hard_fractions: [1], num_samples: 32, seed: 7}\n"
    nodes = tiny.edit("num_samples: 32}\n", "num_samples: 32}" + sets).plan().nodes
    test, validation = (
        {word.tobytes() for word in generate(fill(WordProblemConfig, without_kind(node.config), ""), 0)[0]}
        for node in (nodes["data/s3-test-L16-h1"], nodes["data/s3-validation-L16-h1"])
    )
    assert len(test) == len(validation) == 32
    assert test.isdisjoint(validation)


def without_kind(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "kind"}


def test_every_job_is_described_as_its_stage_reads_it(tiny: ExperimentFile) -> None:
    classes = {"data": WordProblemConfig, "train": TrainConfig, "evaluate": EvaluateConfig, "report": ReportConfig}
    plan, seen = tiny.plan(), set[str]()
    for key, node in plan.nodes.items():
        assert seen.issuperset(node.upstream.values())  # a job comes after those that it reads from
        seen.add(key)
        wanted = plan.identities[key]
        parsed = Identity.read(wanted.to_json())[0]
        assert (parsed.fingerprint, parsed.name) == (wanted.fingerprint, wanted.name)
        assert replace(wanted, name="other").fingerprint == wanted.fingerprint
        kind = {"kind"} if node.stage == "data" else set()
        fill(classes[node.stage], {name: it for name, it in parsed.config.items() if name not in kind}, key)
    phase = plan.nodes["train/implicit-s1/free"].config["phase"]
    assert (phase["start_step"], phase["end_step"], phase["solver"]["tol"]) == (4, 10, 0.1)
    assert plan.nodes["train/explicit-s0/explicit"].config["phase"]["solver"] is None


EXPLICIT_ONLY = (TINY[: TINY.index("  implicit:")] + TINY[TINY.index("  explicit:") :]).replace(
    "  curriculum:\n    unrolled: {steps: 4}\n", ""
)
TRAINING = ["training-curves", "solver-health", "spectral-radius"]
BY_TOKEN = ["accuracy-by-length", "accuracy-by-position"]
OF_LANGUAGE = ["perplexity-by-length", "perplexity-by-position", "curriculum", "loss-by-flops", "accuracy-by-babi-task"]


@pytest.mark.parametrize(
    ("text", "figures", "tables"),
    [
        (
            TINY,
            [*BY_TOKEN, "accuracy-by-mode", *TRAINING],
            ["accuracy", "published"],
        ),
        (EXPLICIT_ONLY, [*BY_TOKEN, "training-curves"], ["accuracy", "published"]),
        (LANGUAGE, [*OF_LANGUAGE, *TRAINING], ["perplexity", "babi", "duality", "published"]),
        (
            LANGUAGE.replace('["flat*"]', '["flat*", trunk]'),  # a figure of the implicit run alone
            [*OF_LANGUAGE, "convergence-by-iteration", *TRAINING],
            ["perplexity", "babi", "duality", "published"],
        ),
        (LANGUAGE[: LANGUAGE.index("evaluations:")], ["loss-by-flops", *TRAINING], ["published"]),
        (
            TINY.replace("word_problem\n    modes", "word_problem\n    sweep: {eval_max_iter: [1, 4]}\n    modes"),
            ["test-time-iterations", *TRAINING],
            ["test-time", "published"],
        ),
    ],
)
def test_the_figures_and_tables_are_those_of_what_is_evaluated(
    tmp_path: Path, text: str, figures: list[str], tables: list[str]
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    experiment = load_experiment(tmp_path / "own.yaml")
    assert (report_figures(experiment), report_tables(experiment)) == (figures, tables)


@pytest.fixture
def shown(tiny: ExperimentFile) -> ExperimentFile:
    return tiny.add(EXCERPTS)


def test_an_excerpt_needs_the_evaluations_that_it_shows_and_their_models(shown: ExperimentFile) -> None:
    plan = shown.plan()
    figure = plan.find("figure_3")
    assert sorted(figure.upstream) == [
        "evaluate:implicit-s0/free/word-problem",
        "evaluate:implicit-s1/free/word-problem",
        *(f"train:implicit-s{seed}/{phase}" for seed in (0, 1) for phase in ("free", "unrolled")),
    ]
    assert not any("explicit" in key.partition("implicit")[0] for key in plan.with_inputs([figure.key]))
    assert list(plan.find("figure_training").upstream) == ["train:explicit-s0/explicit"]


def test_an_excerpt_is_made_by_the_report_s_code_with_its_own_title_and_names(shown: ExperimentFile) -> None:
    plan = shown.plan()
    figure, report = plan.find("figure_3"), plan.find("report")
    assert plan.code(figure) == plan.code(report)
    changed = {key for key in figure.config if figure.config[key] != report.config.get(key)}
    assert changed == {"title", "figures", "tables", "jobs"}
    assert figure.config["jobs"].keys() == figure.upstream.keys()
    assert (figure.config["figures"], figure.config["tables"]) == (["accuracy-by-length"], ["accuracy"])
    assert plan.manifests("report") == [plan.manifest(report)]  # no part of what is made by default


@pytest.mark.parametrize("name", ["paper", "miniature"])
def test_the_paper_and_the_miniature_have_every_figure_and_table(name: str) -> None:
    experiment = load_experiment(experiment_path(name))
    assert report_figures(experiment) == list(registry().figures)
    beside = ("validation", "validation-perplexity")  # which an experiment may have
    of_the_paper = [name for name in registry().tables if name not in beside]
    assert report_tables(experiment) == of_the_paper


def test_the_page_and_the_miniature_have_the_excerpts_of_the_paper_and_other_scales_only_named_ones() -> None:
    paper, miniature, *others = (
        load_experiment(experiment_path(name)).excerpts.keys()
        for name in ("paper", "miniature", "demo", "state-tracking")
    )
    page = (ROOT / "docs" / "paper.md").read_text()
    assert [name for name in paper if f"| `{name}` |" not in page] == []
    assert list(miniature) == list(paper)
    not_of_the_paper = {"figure_ablation", "figure_dropout", "figure_state_passing"}
    for other in others:
        assert other <= paper | not_of_the_paper


COMMIT = "0123456789abcdef0123456789abcdef01234567"


BABI = {"kind": "catbabi", "collection": "simulated", "length": 200, "vocab_size": 192, "seed": 0}
CORPUS = {"source": "python_library"}
SHARDS = {f"shard-{number:05d}": f"data/text-shard-{number:05d}" for number in range(3)}
TOKENIZER = {"kind": "tokenizer", "end_of_text": "<|endoftext|>", "vocab_size": 512}
NODES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # of LANGUAGE: configuration and inputs
    "data/babi-text": (
        {
            **{"kind": "babi_text", "source": "simulated", "seed": 0, "story_length": 10},
            **{"families": [1, 2], "stories": {"train": 8, "valid": 4, "test": 4}},
        },
        {},
    ),
    **{
        f"data/babi-{split}": (
            {**BABI, "split": split, "mode": mode, "drop_last_story": True},
            {"text": "data/babi-text"},
        )
        for split, mode in (("train", "qa"), ("valid", "lm"), ("test", "lm"))
    },
    "data/text-tokenizer": (
        {
            **{**TOKENIZER, "source": "trained", "corpus": CORPUS},
            **{"max_bytes": 100_000_000, "test_fraction": 0.1, "seed": 0},
        },
        {},
    ),
    **{
        f"data/text-{role}": (
            {
                **{"kind": "token_shard", "corpus": CORPUS, "shard": number, "num_shards": 3},
                **{"test_fraction": 0.1, "seed": 0, "vocab_size": 512},
            },
            {"tokenizer": "data/text-tokenizer"},
        )
        for number, role in enumerate(SHARDS)
    },
    **{
        f"data/text-{split}": ({"kind": "token_stream", "split": split, "length": 32}, SHARDS)
        for split in ("train", "test")
    },
    "evaluate/flat-s0/explicit/perplexity": (
        {"kind": "perplexity", "modes": [], "lengths": [64, 32], "max_tokens": 4096},
        {"model": "train/flat-s0/explicit", "text-test": "data/text-test"},
    ),
    "evaluate/flat-s0/explicit/agreement": (
        {
            **{"kind": "duality", "lengths": [32], "trace_tokens": 64},  # the shortest length
            "modes": [{"name": name, "eval_mode": name} for name in ("simultaneous", "sequential")],
        },
        {"model": "train/flat-s0/explicit", "text-test": "data/text-test"},
    ),
    "evaluate/babi-s0/explicit/questions": (
        {"kind": "catbabi", "modes": [], "protocols": ["windowed", "carried"]},
        {"model": "train/babi-s0/explicit", "babi-valid": "data/babi-valid", "babi-test": "data/babi-test"},
    ),
}


def test_every_piece_of_a_data_set_is_a_job_and_models_are_evaluated_on_what_was_held_out(
    language: ExperimentFile,
) -> None:
    nodes = build_graph(language.load())
    assert [key for key, node in nodes.items() if node.stage == "data"] == [key for key in NODES if "data/" in key]
    for key, described in NODES.items():
        assert (nodes[key].config, nodes[key].upstream) == described, key
    assert not nodes.keys() & {f"evaluate/babi-s0/explicit/{name}" for name in ("agreement", "perplexity")}


SIMULATED = LANGUAGE[LANGUAGE.index("source: simulated") : LANGUAGE.index("    length: 200")]
MISSING = "missing_files: [en-valid-10k/qa3_train.txt]\n"
FILES = {"source": "files", "files": ["a/*.txt"], "field": "text"}
HUB = {"source": "hub", "dataset": "a/b", "revision": None, "split": "train", "field": "text"}


@pytest.mark.parametrize(
    ("old", "new", "configs"),
    [
        (
            SIMULATED,
            f"source: archive\n      {MISSING}",
            {
                "data/babi-text": {"kind": "babi_text", "source": "archive", **yaml.safe_load(MISSING)},
                "data/babi-train": {**NODES["data/babi-train"][0], "collection": "en-valid-10k"},
            },
        ),
        (
            "{source: trained}",  # a tokenizer that is there knows nothing of the corpus
            "{source: file, file: t.json}",
            {"data/text-tokenizer": {**TOKENIZER, "source": "file", "file": "t.json", "sha256": None}},
        ),
        (
            "{source: trained}",
            "{source: hub, name: a/b, revision: v1}",
            {"data/text-tokenizer": {**TOKENIZER, "source": "hub", "name": "a/b", "revision": "v1"}},
        ),
        *(
            (
                "{source: python_library}",
                text,
                {key: {**NODES[key][0], "corpus": corpus} for key in ("data/text-tokenizer", "data/text-shard-00000")},
            )
            for text, corpus in (("{source: files, files: ['a/*.txt']}", FILES), ("{source: hub, dataset: a/b}", HUB))
        ),
    ],
)
def test_data_from_elsewhere_is_described_in_full(
    language: ExperimentFile, old: str, new: str, configs: dict[str, dict[str, Any]]
) -> None:
    nodes = build_graph(language.edit(old, new).load())
    assert {key: nodes[key].config for key in configs} == configs


def test_an_experiment_reads_the_files_of_a_folder_by_their_names_and_other_content_is_other_data(
    tiny: ExperimentFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.edit("group: S3", "group: S3\n    folder: words").edit("[0.5, 1]", "0.1")
    (tmp_path / "words").mkdir()
    path = tmp_path / "words" / "train_S3_L8_P090.bin"
    path.write_bytes(b"one")
    digests = FileDigests(tmp_path / "digests.json")
    nodes = build_graph(tiny.load(), digests)
    assert nodes["data/s3-train"].config["file"] == "words/train_S3_L8_P090.bin"
    assert nodes["data/s3-test-L16-h0.5"].config["file"] == "words/test_S3_L16_P050.bin"
    assert nodes["data/s3-train"].config["sha256"] == sha256_of(path)
    path.write_bytes(b"another")
    assert build_graph(tiny.load(), digests)["data/s3-train"].config["sha256"] == sha256_of(path)
    finish(tiny.plan())
    path.unlink()
    assert not keys(tiny.plan(), "stale")


def test_a_peer_is_imported_once_and_evaluated_like_a_run(language: ExperimentFile) -> None:
    plan = language.add(PEER).plan()
    assert plan.nodes["checkpoint/other"].config == {"hub": "owner/other", "revision": None, "sha256": {}}
    config, inputs = NODES["evaluate/flat-s0/explicit/perplexity"]
    mine = plan.nodes["evaluate/other/checkpoint/perplexity"]
    modes = [{"name": "blockwise", "eval_mode": "blockwise"}]  # it may be implicit, which only its import shows
    assert (mine.config, mine.upstream) == (config | {"modes": modes}, inputs | {"model": "checkpoint/other"})
    assert plan.nodes["report"].upstream["checkpoint:other"] == "checkpoint/other"
    assert "evaluate/other/checkpoint/questions" not in plan.nodes  # of other data


PRETRAINED = "models/llama3-130m-explicit.yaml"  # beside the experiment, so that it wins over that of the project


def test_a_pretrained_model_is_named_and_keeps_its_fields(language: ExperimentFile) -> None:
    hub = {"pretrained": "some/model", "revision": COMMIT}
    folder = language.beside(PRETRAINED, json.dumps(hub)).parent
    assert build_graph(language.load())["train/flat-s0/explicit"].config["model"] == hub
    language.beside(PRETRAINED, f"pretrained: {folder}\n")
    config = build_graph(language.load())["train/flat-s0/explicit"].config
    assert config["model"] == {"pretrained": str(folder), "sha256": {}}
    flat = "    model: llama3-130m-explicit\n    task: language-model\n    curriculum: explicit\n    override:\n"
    language.edit(flat, f"{flat}      model: {{hidden_size: 64}}\n")
    with pytest.raises(ConfigError, match=r"runs\.flat\.override\.model: .*pretrained"):
        language.load()


def test_other_weights_in_the_folder_of_a_pretrained_model_make_its_runs_stale(language: ExperimentFile) -> None:
    language.beside("models/mine/config.json", "{}")
    weights = language.beside("models/mine/model.safetensors", "one")
    language.beside(PRETRAINED, f"pretrained: {weights.parent}\n")
    finish(language.plan())
    weights.write_text("another")
    status = language.plan().statuses["train/flat-s0/explicit"]
    assert (status.state, "model.sha256" in status.why) == ("stale", True)
    weights.write_text("one")
    assert not keys(language.plan(), "stale")


def test_a_run_directory_is_no_pretrained_model_because_its_weights_have_no_digest(language: ExperimentFile) -> None:
    finish(plan := language.plan())
    run = plan.run_dir(plan.nodes["train/flat-s0/explicit"])
    language.beside(PRETRAINED, f"pretrained: {run}\n")
    assert language.load().runs["flat"]  # a manifest without a model
    record = FileRecord("work/0123/model/config.json", 2, "0" * 64)
    replace(Manifest.read(run / MANIFEST), files=(record,)).write(run / MANIFEST)
    with refused(f"pretrained: {re.escape(str(run))} is a run directory; give {re.escape(str(run))}/work/0123/model$"):
        language.load()
    (run / MANIFEST).write_text("{}")
    assert language.load().runs["flat"]  # a file of another program


def test_other_content_in_the_same_folder_is_another_model(tmp_path: Path) -> None:
    folder, digest = tmp_path / "peer", FileDigests(tmp_path / "cache.json")
    assert safe_digests(folder, digest) == {}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    first = safe_digests(folder, digest)
    assert set(first) == {"config.json", "model.safetensors"}
    assert safe_digests(folder, FileDigests(tmp_path / "cache.json")) == first
    (folder / "model.safetensors").write_bytes(b"another")
    assert safe_digests(folder, digest)["model.safetensors"] != first["model.safetensors"]
    (folder / "model-1.safetensors").write_bytes(b"one of two")
    shards = {"v": "model-1.safetensors", "w": "../peer/config.json"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert set(safe_digests(folder, digest)) == set(first)  # as the import reads it
    (folder / "model.safetensors").unlink()
    assert set(safe_digests(folder, digest)) == {"config.json", "model.safetensors.index.json", shards["v"]}


def test_another_commit_of_a_pretrained_model_makes_its_runs_stale(language: ExperimentFile) -> None:
    language.beside(PRETRAINED, f"pretrained: some/model\nrevision: {COMMIT}\n")
    finish(language.plan())
    language.beside(PRETRAINED, f"pretrained: some/model\nrevision: {'f' * 40}\n")
    evaluations = {f"evaluate/flat-s0/explicit/{name}" for name in ("perplexity", "agreement")}
    assert keys(language.plan(), "stale") == {"train/flat-s0/explicit", *evaluations, "report"}


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("tol: 0.1", "tol: 0.2", {*FREE, "report"}),
        ("batch_size: 8", "batch_size: 4", {*UNROLLED, *FREE, *EXPLICIT, "report"}),
        ("batch_size: 8}", "batch_size: 8, reduction: bf16}", {*UNROLLED, *FREE, *EXPLICIT, "report"}),
        ("hidden_size: 16", "hidden_size: 32", {*UNROLLED, *FREE, "report"}),
        (
            "eval_block_len: 4",
            "eval_block_len: 8",
            {*EVALUATIONS - EXPLICIT, "report"},
        ),  # an explicit model has no solver
        ("num_samples: 32", "num_samples: 16", {*TEST_SETS, *EVALUATIONS, "report"}),
        ("num_samples: 64", "num_samples: 48", {"data/s3-train", *UNROLLED, *FREE, *EXPLICIT, "report"}),
        ("group: S3", "group: S3\n    seed: 1", ALL),
        ("name: tiny", "name: tiny\ndescription: new", set()),
        ("seeds: [0, 1]", "seeds: [1, 0]", set()),
        ("tol: 0.1", "tol: 1e-1", set()),
        ("{steps: 4}", "{steps: 0.4}", set()),
    ],
)
def test_a_changed_field_makes_stale_what_depends_on_it(
    finished: ExperimentFile, old: str, new: str, stale: set[str]
) -> None:
    assert keys(finished.edit(old, new).plan(), "stale") == stale
    assert keys(finished.edit(new, old).plan(), "fresh") == ALL


def test_a_renamed_run_keeps_the_results_whose_folders_were_moved(finished: ExperimentFile) -> None:
    root = finished.plan().root
    for stage in ("train", "evaluate"):
        (root / stage / "explicit-s0").rename(root / stage / "baseline-s0")
    plan = finished.edit("  explicit:\n    data", "  baseline:\n    data").plan()
    assert (keys(plan, "missing"), keys(plan, "stale")) == (set(), {"report"})


@pytest.mark.parametrize(
    ("codes", "stale"),
    [
        ({"data": "new"}, ALL),
        ({"train": "new"}, {*UNROLLED, *FREE, *EXPLICIT, "report"}),
        ({"evaluate": "new"}, {*EVALUATIONS, "report"}),
        ({"report": "new"}, {"report"}),
    ],
)
def test_changed_code_makes_its_stage_and_what_follows_stale(
    finished: ExperimentFile, codes: Mapping[str, str], stale: set[str]
) -> None:
    plan = finished.plan(dict(codes))
    assert keys(plan, "stale") == stale
    (stage,) = codes
    assert any(f"the code of stage {stage} changed" in plan.statuses[key].why for key in stale)


@pytest.mark.parametrize(
    ("change", "key", "why"),
    [
        (("tol: 0.1", "tol: 0.2"), "train/implicit-s0/free", "config: phase.solver.tol 0.1 -> 0.2"),
        (("tol: 0.1", "tol: 0.2"), "evaluate/implicit-s0/free/word-problem", "input changed: train/implicit-s0/free"),
        (("tol: 0.1}", "tol: 0.1, block_len: 4}"), "train/implicit-s0/free", "config: phase.solver.block_len - -> 4"),
        (
            ("lengths: [8, 16]", "lengths: [8]"),
            EXPLICIT_EVALUATION := "evaluate/explicit-s0/explicit/word-problem",
            "no longer used: s3-test-L16-h0.5",
        ),
        (("lengths: [8, 16]", "lengths: [8, 16, 32]"), EXPLICIT_EVALUATION, "new input: data/s3-test-L32-h0.5"),
        (("[0.5, 1]", "[0.5, 0.75]"), "data/s3-train", "config: hard_fraction.1 1.0 -> 0.75"),
    ],
)
def test_the_reason_names_what_changed(finished: ExperimentFile, change: tuple[str, str], key: str, why: str) -> None:
    assert why in finished.edit(*change).plan().statuses[key].why


def test_an_evaluation_of_some_lengths_reads_only_these_and_is_not_stale_with_others(tiny: ExperimentFile) -> None:
    some = tiny.edit("    kind: word_problem\n    modes:", "    kind: word_problem\n    lengths: [16]\n    modes:")
    before = some.plan()
    assert [*before.nodes[EXPLICIT_EVALUATION].upstream] == ["model", "s3-test-L16-h0.5"]
    more = some.edit("test: {lengths: [8, 16]", "test: {lengths: [8, 16, 32]").plan()
    assert more.identities[EXPLICIT_EVALUATION] == before.identities[EXPLICIT_EVALUATION]
    with refused("evaluations.word-problem.lengths: no test set has sequences of 16 tokens; there are 8, 32: add"):
        some.edit("test: {lengths: [8, 16, 32]", "test: {lengths: [8, 32]").plan()


def test_the_reason_of_a_report_leaves_out_settings_that_change_with_its_inputs(finished: ExperimentFile) -> None:
    why = finished.edit("tol: 0.1", "tol: 0.2").plan().statuses["report"].why
    assert why.startswith("input changed: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"identity": 1}', "null"])
def test_a_damaged_manifest_is_not_what_is_shown_and_a_damaged_commit_is_stale(
    finished: ExperimentFile, text: str
) -> None:
    plan = finished.plan()
    assert not plan.shows_another("report")
    (plan.run_dir(plan.nodes["report"]) / "manifest.json").write_text(text)
    assert finished.plan().statuses["report"].state == "fresh"
    assert finished.plan().shows_another("report")
    commit = work_of(plan, "report") / "commit.json"
    commit.write_text(text)
    assert keys(finished.plan(), "stale") == {"report"}
    assert str(commit) in finished.plan().statuses["report"].why


def test_a_full_disk_stops_the_job_files_with_one_line_and_leaves_no_part_of_one(tiny: ExperimentFile) -> None:
    plan = tiny.plan()
    with file_size_limit(10), refused("cannot write .*: files may not be that large", StorageError):
        plan.write_job_files()
    assert [path for path in plan.root.rglob("*") if path.is_file()] == []
    plan.write_job_files()
    assert plan.identity_file(plan.nodes["report"]).is_file()


def test_a_missing_result_makes_nothing_else_stale_and_becomes_a_target(finished: ExperimentFile) -> None:
    report, missing = (finished.plan().manifest(finished.plan().nodes[key]) for key in ("report", "data/s3-train"))
    assert finished.plan().target_manifests == [report]
    Path(missing).unlink()
    assert keys(finished.plan(), "missing") == {"data/s3-train"}
    assert not keys(finished.plan(), "stale")
    assert finished.plan().target_manifests == [missing, report]


@pytest.mark.parametrize(
    "target", ["data/s3-train", "{root}/data/s3-train", "{root}/data/s3-train/", "{root}/data/s3-train/manifest.json"]
)
def test_a_job_is_found_by_key_folder_and_manifest(plan: Plan, target: str) -> None:
    assert plan.find(target.format(root=plan.root.as_posix())).key == "data/s3-train"
    with pytest.raises(
        UnknownTarget,
        match=r"no such job; `implicit-llm status \S+ --jobs` lists them, and `implicit-llm list` the exp",
    ):
        plan.find("q")


def test_jobs_of_equal_identity_and_different_name_have_identity_files_of_their_own(tiny: ExperimentFile) -> None:
    copied = "  twin:\n    data: s3\n    model: mamba2-explicit\n    task: word-problem\n    curriculum: explicit\n"
    plan = tiny.edit("evaluations:", f"{copied}evaluations:").plan()
    plan.write_job_files()
    for name in ("explicit-s0/explicit", "twin-s0/explicit"):
        identity = json.loads(plan.identity_file(plan.nodes[f"train/{name}"]).read_text())
        assert identity["name"] == name


def test_identity_files_are_written_again_only_if_they_differ(plan: Plan) -> None:
    plan.write_job_files()
    path = plan.identity_file(plan.nodes["report"])
    whole, written = path.read_text(), path.stat().st_ino
    plan.write_job_files()
    assert path.stat().st_ino == written
    for found in (whole.replace("train/", "train/renamed-"), ""):  # of inputs that were renamed; after a power loss
        path.write_text(found)
        plan.write_job_files()
        assert path.read_text() == whole
    assert len(list(plan.root.rglob("*.json"))) == len(plan.nodes) + 1  # and what the files of the experiment said


def test_what_is_made_from_a_result_is_found_with_it_and_nothing_else(plan: Plan) -> None:
    for first in plan.nodes.values():
        found = {node.key for node in plan.made_from([first.key])}
        assert found == {first.key} | {key for key, node in plan.nodes.items() if found & {*node.upstream.values()}}
        assert "report" in found


TEXT_JOBS = {"data/text-tokenizer", "data/text-shard-00000", "data/text-shard-00001"}


def test_other_files_of_a_corpus_make_its_data_stale_and_deleted_ones_do_not(
    language: ExperimentFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IMPLICIT_LLM_DATA", raising=False)
    language.edit("{source: python_library}", "{source: files, files: ['texts/*.txt']}").edit("shards: 3", "shards: 2")
    one = language.beside("texts/1.txt", "one")
    two = language.beside("texts/2.txt", "two")
    monkeypatch.chdir(one.parents[1])
    finish(language.plan())
    assert not keys(language.plan(), "stale")
    shard = language.plan().nodes["data/text-shard-00001"].config
    assert shard["file_sha256"] == {"texts/2.txt": sha256_of(two)}

    one.write_text("One")
    assert keys(language.plan(), "stale") >= TEXT_JOBS
    assert "corpus_sha256" in language.plan().statuses["data/text-shard-00001"].why
    one.write_text("one")
    assert not keys(language.plan(), "stale")
    three = language.beside("texts/3.txt", "three")
    assert keys(language.plan(), "stale") >= TEXT_JOBS
    three.unlink()
    assert not keys(language.plan(), "stale")
    one.unlink()
    assert keys(language.plan(), "stale") >= TEXT_JOBS
    two.unlink()
    (tmp_path / "results" / ".digests.json").unlink(missing_ok=True)
    assert not keys(language.plan(), "stale")  # the tokens are still those of the files
    one.write_text("one")
    two.write_text("two")
    assert not keys(language.plan(), "stale")


def test_the_digests_of_a_corpus_are_stored_once_and_a_job_hashes_nothing(
    language: ExperimentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IMPLICIT_LLM_DATA", raising=False)
    language.edit("{source: python_library}", "{source: files, files: ['texts/*.txt']}")
    paths = [language.beside(f"texts/{number}.txt", f"{number}") for number in range(4)]
    monkeypatch.chdir(language.path.parent)
    saved, hashed = [], []
    save, sha256 = Remembered.save, file_digests.sha256_of
    monkeypatch.setattr(Remembered, "save", lambda cache: (saved.append(1), save(cache)))
    monkeypatch.setattr(file_digests, "sha256_of", lambda path: (hashed.append(path.name), sha256(path))[1])
    plan = language.plan()
    assert (len(saved), sorted(hashed)) == (1, [path.name for path in paths])
    paths[0].write_text("another")
    plan_from_snakemake({PLANNED: plan.experiment.read}, [])
    assert len(hashed) == 4


def test_another_tokenizer_file_makes_the_tokens_stale(
    language: ExperimentFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IMPLICIT_LLM_DATA", raising=False)
    path = language.edit("{source: trained}", "{source: file, file: t.json}").beside("t.json", "one")
    monkeypatch.chdir(path.parent)
    finish(language.plan())
    assert not keys(language.plan(), "stale")
    path.write_text("another")
    assert keys(language.plan(), "stale") >= {"data/text-tokenizer", "data/text-shard-00000"}
    path.unlink()
    assert not keys(language.plan(), "stale")
