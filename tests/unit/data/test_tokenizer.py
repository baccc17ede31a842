from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_data.stages import tokenizer as stage
from implicit_llm_data.stages.tokenizer import TokenizerConfig
from implicit_llm_data.text.corpus import DocumentSplit
from tests.refusals import refused
from tests.unit.data.text_samples import NEOX, Project, real_file, sentence, write_corpus, write_jsonl

TRAINED: dict[str, Any] = {
    "source": "trained",
    "vocab_size": 300,
    "max_bytes": 100_000,
    "test_fraction": 0.2,
    "seed": 1,
}


def config_of(**fields: Any) -> TokenizerConfig:
    return fill(TokenizerConfig, fields, where="x-tokenizer")


def make_tokenizer(config: TokenizerConfig, downloads: Path) -> str:
    return stage.make_tokenizer(config, downloads)[0].decode()


def refusal(downloads: Path, **fields: Any) -> str:
    with refused("") as caught:
        make_tokenizer(config_of(**fields), downloads)
    return str(caught.value)


def write_trained(folder: Path) -> Path:
    """A tokenizer.json in the folder, trained on sentences."""
    path = folder / "small.json"
    path.write_text(make_tokenizer(config_of(**TRAINED, corpus=write_corpus(folder)), folder))
    return path


def test_a_trained_tokenizer_has_the_wanted_size_gives_text_back_and_says_which_id_ends_a_text(tmp_path: Path) -> None:
    project = Project(tmp_path)
    work = project.run("x", {"kind": "tokenizer", **TRAINED, "corpus": write_corpus(project.downloads)})
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    text = "the cat sat, naïve \U0001f600\n  12"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the cat").ids) < len("the cat")
    manifest = project.input("x").manifest
    assert manifest.summary == {"num_ids": 300, "vocab_size": 300, "end_of_text_id": 0}
    assert [record.path.rpartition("/")[2] for record in manifest.files] == ["tokenizer.json"]


def test_training_again_gives_equal_bytes(tmp_path: Path) -> None:
    config = config_of(**TRAINED, corpus=write_corpus(tmp_path))
    made = {make_tokenizer(config, tmp_path) for _ in range(4)}  # the hash tables inside differ each time
    assert len(made) == 1


def test_training_does_not_see_the_test_documents(tmp_path: Path) -> None:
    texts = [sentence(number) + f" ({number})" for number in range(60)]
    split = DocumentSplit(0.2, 1)
    training = [text for text in texts if split.of(text.encode()) == "train"]
    assert 0 < len(training) < len(texts)
    write_jsonl(tmp_path / "all.jsonl", texts)
    write_jsonl(tmp_path / "training.jsonl", training)
    made = [
        make_tokenizer(config_of(**TRAINED, corpus={"source": "files", "files": [name]}), tmp_path)
        for name in ("all.jsonl", "training.jsonl")
    ]
    assert made[0] == made[1]


def test_training_reads_no_more_than_it_may(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["abab abab abab"])
    (tmp_path / "b.jsonl").write_text("damaged")
    corpus = {"source": "files", "files": ["a.jsonl", "b.jsonl"]}
    make_tokenizer(config_of(**{**TRAINED, "max_bytes": 5, "test_fraction": 0.0}, corpus=corpus), tmp_path)
    assert "b.jsonl: line 1: not JSON" in refusal(tmp_path, **{**TRAINED, "test_fraction": 0.0}, corpus=corpus)


def test_a_file_is_taken_as_it_is_if_its_digest_is_right(tmp_path: Path) -> None:
    path = write_trained(tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert make_tokenizer(config_of(source="file", file="small.json", sha256=digest, vocab_size=300), tmp_path)
    message = refusal(tmp_path, source="file", file="small.json", sha256="0" * 64, vocab_size=300)
    assert f"sha256 is {digest[:16]}..., expected 0000000000000000..." in message


def test_the_real_tokenizer_fits_the_padded_vocabulary_and_no_smaller_one() -> None:
    folder = real_file(NEOX).parent
    fields = {"source": "file", "file": NEOX}
    digest = "56ac4821e129d2c520fdaba60abd920fa852ada51b45c0dd52bbb6bd8c985ade"
    make_tokenizer(config_of(**fields, sha256=digest, vocab_size=50_288), folder)
    assert refusal(folder, **fields, vocab_size=50_000).startswith(
        "vocab_size: 50000 is less than the tokenizer's 50277"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "file", "file": "no.json"}, "no.json is there; correct the name, or fetch the file"),
        ({"source": "file", "file": "broken.json"}, "no tokenizer.json that `tokenizers` reads"),
        ({"source": "file", "file": "small.json", "end_of_text": "<eos>"}, "end_of_text: the tokenizer has no token"),
        ({"source": "file", "file": "small.json", "vocab_size": 299}, "vocab_size: 299 is less than"),
        ({"source": "file", "test_fraction": -0.1}, "x-tokenizer.test_fraction: -0.1 is not allowed; give a number"),
        ({"source": "hub", "name": "who/nobody"}, "hub/who/nobody; type `implicit-llm prefetch"),
    ],
)
def test_a_tokenizer_that_is_not_usable_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_trained(tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    assert message in refusal(tmp_path, **{"vocab_size": 300, **fields})
