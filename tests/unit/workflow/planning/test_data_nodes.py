"""The jobs that make data, as the library is told them."""

import json

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.graph import build_graph
from tests.refusals import refused
from tests.unit.workflow.experiments import ExperimentFile, finish, keys

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def nodes(language: ExperimentFile) -> dict[str, Node]:
    return build_graph(language.load())


def test_every_piece_of_a_data_set_is_a_job(nodes: dict[str, Node]) -> None:
    assert [key for key, node in nodes.items() if node.stage == "data"] == [
        "data/babi-text",
        "data/babi-train",
        "data/babi-valid",
        "data/babi-test",
        "data/text-tokenizer",
        "data/text-shard-00000",
        "data/text-shard-00001",
        "data/text-shard-00002",
        "data/text-train",
        "data/text-test",
    ]


def test_catbabi_is_made_from_the_text(nodes: dict[str, Node]) -> None:
    assert nodes["data/babi-text"].config == {
        "kind": "babi_text",
        "source": "simulated",
        "seed": 0,
        "families": [1, 2],
        "stories": {"train": 8, "valid": 4, "test": 4},
        "story_length": 10,
    }
    train = {
        "kind": "catbabi",
        "collection": "simulated",
        "split": "train",
        "mode": "qa",
        "length": 200,
        "vocab_size": 192,
        "seed": 0,
        "drop_last_story": True,
    }
    assert nodes["data/babi-train"].config == train
    for split in ("valid", "test"):
        assert nodes[f"data/babi-{split}"].config == {**train, "split": split, "mode": "lm"}
        assert nodes[f"data/babi-{split}"].upstream == {"text": "data/babi-text"}


def test_an_archive_has_the_stories_of_10k_by_default(language: ExperimentFile) -> None:
    text = language.path.read_text()
    start, end = text.index("      source: simulated"), text.index("    length: 200")
    archive = "      source: archive\n      missing_files: [en-valid-10k/qa3_train.txt]\n"
    language.path.write_text(text[:start] + archive + text[end:])
    nodes = build_graph(language.load())
    assert nodes["data/babi-train"].config["collection"] == "en-valid-10k"
    assert nodes["data/babi-text"].config == {
        "kind": "babi_text",
        "source": "archive",
        "missing_files": ["en-valid-10k/qa3_train.txt"],
    }


def test_a_stream_is_read_from_all_shards_and_a_shard_with_the_tokenizer(nodes: dict[str, Node]) -> None:
    corpus = {"source": "python_library"}
    assert nodes["data/text-tokenizer"].config == {
        "kind": "tokenizer",
        "source": "trained",
        "max_bytes": 100_000_000,
        "end_of_text": "<|endoftext|>",
        "vocab_size": 512,
        "corpus": corpus,
        "test_fraction": 0.1,
        "seed": 0,
    }
    shard = nodes["data/text-shard-00001"]
    assert shard.upstream == {"tokenizer": "data/text-tokenizer"}
    assert shard.config == {
        "kind": "token_shard",
        "corpus": corpus,
        "shard": 1,
        "num_shards": 3,
        "test_fraction": 0.1,
        "seed": 0,
        "vocab_size": 512,
    }
    assert nodes["data/text-train"].config == {"kind": "token_stream", "split": "train", "length": 32}
    assert nodes["data/text-test"].config == {"kind": "token_stream", "split": "test", "length": 32}
    assert nodes["data/text-train"].upstream == nodes["data/text-test"].upstream
    assert nodes["data/text-train"].upstream["shard-00002"] == "data/text-shard-00002"


@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        (
            "{source: file, file: t.json}",
            {"source": "file", "file": "t.json", "sha256": None},
        ),
        (
            "{source: hub, name: a/b, revision: v1}",
            {"source": "hub", "name": "a/b", "revision": "v1"},
        ),
    ],
)
def test_a_tokenizer_that_is_there_knows_nothing_of_the_corpus(
    language: ExperimentFile, tokenizer: str, config: dict[str, object]
) -> None:
    language.edit("tokenizer: {source: trained}", f"tokenizer: {tokenizer}")
    shared = {"kind": "tokenizer", "end_of_text": "<|endoftext|>", "vocab_size": 512}
    assert build_graph(language.load())["data/text-tokenizer"].config == {**shared, **config}


@pytest.mark.parametrize(
    ("corpus", "config"),
    [
        ("{source: files, files: ['a/*.txt']}", {"source": "files", "files": ["a/*.txt"], "field": "text"}),
        (
            "{source: hub, dataset: a/b}",
            {"source": "hub", "dataset": "a/b", "revision": None, "split": "train", "field": "text"},
        ),
    ],
)
def test_a_corpus_is_described_in_full(language: ExperimentFile, corpus: str, config: dict[str, object]) -> None:
    language.edit("corpus: {source: python_library}", f"corpus: {corpus}")
    nodes = build_graph(language.load())
    assert nodes["data/text-shard-00000"].config["corpus"] == nodes["data/text-tokenizer"].config["corpus"] == config


def test_models_are_evaluated_on_what_was_held_out(nodes: dict[str, Node]) -> None:
    perplexity = nodes["evaluate/flat-s0/explicit/perplexity"]
    assert perplexity.upstream == {"model": "train/flat-s0/explicit", "text-test": "data/text-test"}
    assert perplexity.config == {
        "kind": "perplexity",
        "modes": [{"name": "blockwise", "eval_mode": "blockwise"}],
        "lengths": [64, 32],
        "max_tokens": 4096,
    }
    questions = nodes["evaluate/babi-s0/explicit/questions"]
    assert questions.upstream.keys() == {"model", "babi-valid", "babi-test"}
    assert questions.config["protocols"] == ["windowed", "carried"]
    agreement = nodes["evaluate/flat-s0/explicit/agreement"]
    assert agreement.upstream == perplexity.upstream
    assert (agreement.config["lengths"], agreement.config["trace_tokens"]) == ([32], 64)  # the shortest
    assert not nodes.keys() & {f"evaluate/babi-s0/explicit/{name}" for name in ("agreement", "perplexity")}


def test_a_pretrained_model_is_named_and_keeps_its_fields(language: ExperimentFile) -> None:
    hub = {"pretrained": "some/model", "revision": COMMIT}
    other = language.beside("models/other.yaml", json.dumps(hub))
    language.edit("model: llama3-130m-explicit", "model: other")
    assert build_graph(language.load())["train/flat-s0/explicit"].config["model"] == hub
    other.write_text(f"pretrained: {other.parent}\n")
    config = build_graph(language.load())["train/flat-s0/explicit"].config
    assert config["model"] == {"pretrained": str(other.parent), "sha256": {}}
    flat = "    model: other\n    task: language-model\n    curriculum: explicit\n    override:\n"
    language.edit(flat, f"{flat}      model: {{hidden_size: 64}}\n")
    with pytest.raises(ConfigError, match=r"runs\.flat\.override\.model: .*pretrained"):
        language.load()
    for text in ("pretrained: some/model", f"revision: {COMMIT}"):
        other.write_text(f"{text}\nconfig: llama3-130m-explicit\n")
        with pytest.raises(ConfigError, match="unknown key"):
            language.load()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pretrained: some/model", "revision: is missing, .*`git ls-remote https://huggingface.co/some/model HEAD`"),
        ("pretrained: some/model\nrevision: main", "revision: expected a commit in 40 lower-case"),
        (f"pretrained: some/model\nrevision: {COMMIT[:12]}", "revision: expected a commit in 40 lower-case"),
        (f"pretrained: some/model\nrevision: {COMMIT.upper()}", "revision: expected a commit in 40 lower-case"),
        ("pretrained: some/model\nrevision: null", "revision: is missing, and some/model is no folder"),
        (f"pretrained: models\nrevision: {COMMIT}", "revision: models is a folder, which has none; remove it"),
    ],
)
def test_a_pretrained_model_of_the_hub_is_named_with_its_commit(
    language: ExperimentFile, monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    language.beside("models/other.yaml", text)
    monkeypatch.chdir(language.path.parent)
    with refused(rf"models/other\.yaml: {named}", ConfigError):
        language.edit("model: llama3-130m-explicit", "model: other").load()


def test_other_weights_in_the_folder_of_a_pretrained_model_make_its_runs_stale(language: ExperimentFile) -> None:
    language.beside("models/mine/config.json", "{}")
    weights = language.beside("models/mine/model.safetensors", "one")
    language.beside("models/other.yaml", f"pretrained: {weights.parent}\n")
    finish(language.edit("model: llama3-130m-explicit", "model: other").plan())
    weights.write_text("another")
    status = language.plan().statuses["train/flat-s0/explicit"]
    assert (status.state, "model.sha256" in status.why) == ("stale", True)
    weights.write_text("one")
    assert not keys(language.plan(), "stale")


def test_another_commit_of_a_pretrained_model_makes_its_runs_stale(language: ExperimentFile) -> None:
    other = language.beside("models/other.yaml", f"pretrained: some/model\nrevision: {COMMIT}\n")
    finish(language.edit("model: llama3-130m-explicit", "model: other").plan())
    assert not keys(language.plan(), "stale")
    other.write_text(f"pretrained: some/model\nrevision: {'f' * 40}\n")
    evaluations = {f"evaluate/flat-s0/explicit/{name}" for name in ("perplexity", "agreement")}
    assert keys(language.plan(), "stale") == {"train/flat-s0/explicit", *evaluations, "report"}
