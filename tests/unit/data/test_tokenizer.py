"""Tokenizers, and texts that are encoded in chunks."""

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_data.stages import tokenizer as stage
from implicit_llm_data.stages.tokenizer import TokenizerConfig
from implicit_llm_data.text import encoding
from implicit_llm_data.text.corpus import DocumentSplit
from implicit_llm_data.text.encoding import ChunkEncoder, cuts_like_gpt2, encoder_for
from tests.refusals import refused
from tests.unit.data.text_samples import NEOX, Project, real_file, sentence, write_corpus, write_jsonl

TRAINED: dict[str, Any] = {
    "source": "trained",
    "vocab_size": 300,
    "max_bytes": 100_000,
    "test_fraction": 0.2,
    "seed": 1,
}


def make(downloads: Path, **fields: Any) -> str:
    """The text of tokenizer.json."""
    return stage.make_tokenizer(fill(TokenizerConfig, fields, where="x-tokenizer"), downloads)[0].decode()


def refusal(downloads: Path, **fields: Any) -> str:
    with refused("") as caught:
        make(downloads, **fields)
    return str(caught.value)


def write_trained(folder: Path) -> Path:
    """A tokenizer.json in the folder, trained on sentences."""
    path = folder / "small.json"
    path.write_text(make(folder, **TRAINED, corpus=write_corpus(folder)))
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
    corpus = write_corpus(tmp_path)
    # The hash tables inside differ each time.
    assert len({make(tmp_path, **TRAINED, corpus=corpus) for _ in range(4)}) == 1


def test_training_does_not_see_the_test_documents(tmp_path: Path) -> None:
    texts = [sentence(number) + f" ({number})" for number in range(60)]
    split = DocumentSplit(0.2, 1)
    training = [text for text in texts if split.of(text.encode()) == "train"]
    assert 0 < len(training) < len(texts)
    write_jsonl(tmp_path / "all.jsonl", texts)
    write_jsonl(tmp_path / "training.jsonl", training)
    all_texts, only_training = ({"source": "files", "files": [name]} for name in ("all.jsonl", "training.jsonl"))
    assert make(tmp_path, **TRAINED, corpus=all_texts) == make(tmp_path, **TRAINED, corpus=only_training)


def test_training_reads_no_more_than_it_may(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["abab abab abab"])
    (tmp_path / "b.jsonl").write_text("damaged")
    fields = {**TRAINED, "test_fraction": 0.0, "corpus": {"source": "files", "files": ["a.jsonl", "b.jsonl"]}}
    make(tmp_path, **{**fields, "max_bytes": 5})
    assert "b.jsonl: line 1: not JSON" in refusal(tmp_path, **fields)


def test_a_file_is_taken_as_it_is_if_its_digest_is_right(tmp_path: Path) -> None:
    digest = hashlib.sha256(write_trained(tmp_path).read_bytes()).hexdigest()
    fields = {"source": "file", "file": "small.json", "vocab_size": 300}
    assert make(tmp_path, **fields, sha256=digest) == (tmp_path / "small.json").read_text()
    message = refusal(tmp_path, **fields, sha256="0" * 64)
    assert f"sha256 is {digest[:16]}..., expected 0000000000000000..." in message


def test_the_real_tokenizer_fits_the_padded_vocabulary_and_no_smaller_one() -> None:
    folder = real_file(NEOX).parent
    fields = {"source": "file", "file": NEOX}
    digest = "56ac4821e129d2c520fdaba60abd920fa852ada51b45c0dd52bbb6bd8c985ade"
    make(folder, **fields, sha256=digest, vocab_size=50_288)
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


# What word borders, white space of all kinds, accents, half-composed letters and special tokens are made of.
PIECES = [
    *(" ", " ", "  ", "     ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\x1c", "\x85"),
    *("\u00a0", "\u2003", "\u3000", "\u200b", "\ufeff", "\x00", "\x7f"),
    *("a", "the", "Don't", "we'LL", "'s", "'", "''ve", "x'd9", "123", "4", "...", "!?", "_", "-"),
    *("<|endoftext|>", "<|end", "\u00e9", "e\u0301", "\u0301", "\u4f60\u597d", "\u0928\u093f"),
    *("\U0001f600", "\u2019t", "\u212b", "\u0660"),
]  # fmt: skip


SPACES = [AddedToken(" " * count, normalized=True) for count in (2, 3, 5)]


@cache
def trained_fields() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    blanks = ["  \n\n x", "\n\n\n y", " \u00a0\n\n z", "!\x1c a", "a\u3000\n b"] * 9
    tokenizer.train_from_iterator([*(sentence(number) for number in range(200)), *blanks], trainer)
    return json.loads(tokenizer.to_str())


def trained(added: Sequence[AddedToken] = (), **changes: Any) -> Tokenizer:
    """With `changes` in its tokenizer.json."""
    tokenizer = Tokenizer.from_str(json.dumps({**trained_fields(), **changes}))
    tokenizer.add_tokens([*added])
    return tokenizer


def random_texts(count: int) -> list[str]:
    source = random.Random(0)
    return ["".join(source.choices(PIECES, k=source.randrange(30))) for _ in range(count)]


def check_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """The encoder gives the ids that the tokenizer gives for whole texts."""
    for text, data in zip(texts, encoder_for(tokenizer)(texts), strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert np.frombuffer(data, dtype="<u2").tolist() == ids, repr(text)


@pytest.mark.parametrize("added", [(), SPACES])
@pytest.mark.parametrize("piece_characters", [1 << 20, 7])
def test_chunks_give_the_ids_of_the_whole_text(
    added: Sequence[AddedToken], piece_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", piece_characters)
    tokenizer = trained(added)
    assert cuts_like_gpt2(tokenizer)
    check_ids(tokenizer, random_texts(2000))


def test_what_is_remembered_is_bounded_and_changes_nothing() -> None:
    tokenizer = trained(SPACES)
    texts = random_texts(500)
    forgetful, encoder = ChunkEncoder(tokenizer, remembered_bytes=5000), ChunkEncoder(tokenizer)
    for start in range(0, 500, 50):
        batch = texts[start : start + 50]
        assert forgetful.encode(batch) == encoder.encode(batch)
        remembered = forgetful._ids
        assert sum(map(sys.getsizeof, [*remembered, *remembered.values()])) < 10_000
    assert forgetful.encode([]) == []
    assert forgetful.encode(["", "a", ""])[::2] == [b"", b""]


def test_chunks_give_the_ids_of_the_real_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(real_file(NEOX)))
    assert cuts_like_gpt2(tokenizer)
    check_ids(tokenizer, [*random_texts(3000), "Hello world", " Hello world"])
    assert tokenizer.encode("Hello world").ids == [12092, 1533]


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"added": [AddedToken("a b")]},  # these look beyond a chunk
        {"added": [AddedToken("x", lstrip=True)]},
        {"added": [AddedToken("y", single_word=True)]},
    ],
)
def test_another_kind_of_tokenizer_encodes_whole_documents(changes: dict[str, Any]) -> None:
    tokenizer = trained(**changes)
    assert not cuts_like_gpt2(tokenizer)
    check_ids(tokenizer, random_texts(100))
