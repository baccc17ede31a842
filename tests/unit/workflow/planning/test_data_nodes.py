"""The jobs that make data, as the library is told them."""

from __future__ import annotations

import json
import re

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.planning.graph import build_graph
from tests.unit.workflow.experiments import ExperimentFile
from tests.unit.workflow.tiny_jobs import finish

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_every_piece_of_a_data_set_is_a_job(language: ExperimentFile) -> None:
    data = [key for key, node in build_graph(language.load()).items() if node.stage == "data"]
    assert data == [
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


def test_catbabi_is_made_from_the_text(language: ExperimentFile) -> None:
    nodes = build_graph(language.load())
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


def test_a_stream_is_read_from_all_shards_and_a_shard_with_the_tokenizer(language: ExperimentFile) -> None:
    nodes = build_graph(language.load())
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


def test_models_are_evaluated_on_what_was_held_out(language: ExperimentFile) -> None:
    nodes = build_graph(language.load())
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
    assert "evaluate/babi-s0/explicit/agreement" not in nodes
    assert "evaluate/babi-s0/explicit/perplexity" not in nodes


CASES = [
    ("kind: catbabi", "kind: catbab", "data.babi.kind: there is no 'catbab'; did you mean 'catbabi'?"),
    ("vocab_size: 192", "vocab_sise: 192", "data.babi: unknown key 'vocab_sise'; did you mean 'vocab_size'?"),
    ("vocab_size: 512", "vocab_size: 70000", "data.text.vocab_size: 70000 is not allowed; give an integer"),
    ("source: simulated", "source: simulation", "data.babi.text.source: the text 'simulation' is not one of simulated"),
    ("source: simulated", "source: archive", "data.babi.text: unknown key 'families'"),
    ("families: [2, 1]", "families: [21]", "data.babi.text.families[0]: 21 is not allowed"),
    ("length: 200", "length: 200\n    collection: en-valid", "data.babi.collection: a text of source simulated has no"),
    ("length: 200", "length: 200\n    mode: ra", "data.babi.mode: the text 'ra' is not one of qa"),
    ("{source: python_library}", "{source: hub}", "data.text.corpus: the key 'dataset' is missing; add it"),
    ("{source: python_library}", "{source: files, files: []}", "data.text.corpus.files: [] is not allowed"),
    (
        "{source: trained}",
        "{source: file, file: t, sha256: 12}",
        "data.text.tokenizer.sha256: expected a sha256 in",
    ),
    (
        "{source: trained}",
        "{source: train}",
        "data.text.tokenizer.source: the text 'train' is not one of file, hub, trained",
    ),
    ("num_shards: 3", "num_shards: 0", "data.text.num_shards: 0 is not allowed; give an integer from 1 to 100000"),
    ("task: catbabi", "task: language-model", "runs.babi.task: is for language_model data, data set 'babi' is catbabi"),
    (
        "{total_steps: 1000}",
        "{labels: aligned, total_steps: 1000}",
        "labels: kind language_model has labels 'next_token'",
    ),
    (
        "[windowed, carried]",
        "[windowed, carry]",
        "evaluations.questions.protocols[1]: the text 'carry' is not one of windowed",
    ),
    ("kind: duality", "kind: perplexity", "evaluations.agreement.trace_tokens: belongs to kind duality"),
    ("kind: perplexity", "kind: word_problem", "evaluations.perplexity.max_tokens: belongs to kind perplexity"),
    (
        "kind: catbabi\n    protocols: [windowed, carried]\n    modes",
        "kind: word_problem\n    modes",
        "evaluations.questions.kind: no run has word_problem",
    ),
    ("hidden_size: 64", "hidden_size: 72", "runs.trunk.model.head_dim: 64 does not divide expand * hidden_size = 144"),
    (
        "  flat:\n    data: text\n    model: llama3-130m-explicit\n    task: language-model\n    curriculum: explicit\n"
        "    override:\n",
        "  flat:\n    data: text\n    model: llama3-130m-explicit\n    task: language-model\n    curriculum: explicit\n"
        "    override:\n      model: {hidden_size: 60}\n",
        "runs.flat.model.num_attention_heads: 12 does not divide hidden_size 60 into heads of even width",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), CASES, ids=[case[2] for case in CASES])
def test_a_mistake_is_one_line(language: ExperimentFile, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        language.edit(old, new).load()
    assert "\n" not in str(caught.value)
    assert str(language.path) in str(caught.value)


def test_a_pretrained_model_is_named_and_keeps_its_fields(language: ExperimentFile) -> None:
    folder = language.path.parent / "models"
    folder.mkdir()
    other, hub = folder / "other.yaml", {"pretrained": "some/model", "revision": COMMIT}
    other.write_text(json.dumps(hub))
    language.edit("model: llama3-130m-explicit", "model: other")
    assert build_graph(language.load())["train/flat-s0/explicit"].config["model"] == hub
    other.write_text(f"pretrained: {folder}\n")
    config = build_graph(language.load())["train/flat-s0/explicit"].config
    assert config["model"] == {"pretrained": str(folder), "sha256": {}}
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
    other = language.path.parent / "models" / "other.yaml"
    other.parent.mkdir()
    other.write_text(text)
    monkeypatch.chdir(language.path.parent)
    with pytest.raises(ConfigError, match=rf"models/other\.yaml: {named}") as caught:
        language.edit("model: llama3-130m-explicit", "model: other").load()
    assert "\n" not in str(caught.value)


def test_other_weights_in_the_folder_of_a_pretrained_model_make_its_runs_stale(language: ExperimentFile) -> None:
    folder = language.path.parent / "models"
    (folder / "mine").mkdir(parents=True)
    (folder / "other.yaml").write_text(f"pretrained: {folder / 'mine'}\n")
    (folder / "mine" / "config.json").write_text("{}")
    (folder / "mine" / "model.safetensors").write_bytes(b"one")
    finish(language.edit("model: llama3-130m-explicit", "model: other").plan())
    (folder / "mine" / "model.safetensors").write_bytes(b"another")
    stale = {key: status.why for key, status in language.plan().statuses.items() if status.state == "stale"}
    assert "model.sha256" in stale["train/flat-s0/explicit"]
    (folder / "mine" / "model.safetensors").write_bytes(b"one")
    assert {status.state for status in language.plan().statuses.values()} == {"fresh"}


def test_another_commit_of_a_pretrained_model_makes_its_runs_stale(language: ExperimentFile) -> None:
    other = language.path.parent / "models" / "other.yaml"
    other.parent.mkdir()
    other.write_text(f"pretrained: some/model\nrevision: {COMMIT}\n")
    finish(language.edit("model: llama3-130m-explicit", "model: other").plan())
    assert {status.state for status in language.plan().statuses.values()} == {"fresh"}
    other.write_text(f"pretrained: some/model\nrevision: {'f' * 40}\n")
    stale = {key for key, status in language.plan().statuses.items() if status.state == "stale"}
    evaluations = {f"evaluate/flat-s0/explicit/{name}" for name in ("perplexity", "agreement")}
    assert stale == {"train/flat-s0/explicit", *evaluations, "report"}
