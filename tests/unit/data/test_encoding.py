from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from implicit_llm_data.text import encoding
from implicit_llm_data.text.encoding import ChunkEncoder, cuts_like_gpt2, encoder_for
from tests.unit.data.text_samples import NEOX, real_file, sentence

# What word borders, white space of all kinds, accents, half-composed letters and special tokens are made of.
PIECES = [
    *(" ", " ", "  ", "     ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\x1c", "\x85"),
    *("\u00a0", "\u2003", "\u3000", "\u200b", "\ufeff", "\x00", "\x7f"),
    *("a", "the", "Don't", "we'LL", "'s", "'", "''ve", "x'd9", "123", "4", "...", "!?", "_", "-"),
    *("<|endoftext|>", "<|end", "\u00e9", "e\u0301", "\u0301", "\u4f60\u597d", "\u0928\u093f"),
    *("\U0001f600", "\u2019t", "\u212b", "\u0660"),
]  # fmt: skip


def trained(spaces_are_tokens: bool) -> Tokenizer:
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
    if spaces_are_tokens:
        tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in (2, 3, 5)])
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def decoded(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u2").tolist()


def random_texts(count: int) -> list[str]:
    source = random.Random(0)
    return ["".join(source.choices(PIECES, k=source.randrange(30))) for _ in range(count)]


@pytest.mark.parametrize("spaces_are_tokens", [False, True])
@pytest.mark.parametrize("piece_characters", [1 << 20, 7])
def test_chunks_give_the_ids_of_the_whole_text(
    spaces_are_tokens: bool, piece_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", piece_characters)
    tokenizer = trained(spaces_are_tokens)
    encode = encoder_for(tokenizer)
    assert cuts_like_gpt2(tokenizer)
    texts = random_texts(2000)
    for text, data in zip(texts, encode(texts), strict=True):
        assert decoded(data) == ids_of(tokenizer, text), repr(text)


def test_what_is_remembered_is_bounded_and_changes_nothing() -> None:
    tokenizer = trained(True)
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
    encode = encoder_for(tokenizer)
    assert cuts_like_gpt2(tokenizer)
    texts = [*random_texts(3000), "Hello world", " Hello world"]
    encoded = [decoded(data) for data in encode(texts)]
    assert encoded == [ids_of(tokenizer, text) for text in texts]
    assert encoded[-2:] == [[12092, 1533], [24387, 1533]]


def changed(**changes: object) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**json.loads(trained(False).to_str()), **changes}))


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
        changed(pre_tokenizer={"type": "Whitespace"}),
        changed(pre_tokenizer=None),
        changed(normalizer={"type": "Lowercase"}),
        changed(truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}),
    ],
)
def test_another_kind_of_tokenizer_encodes_whole_documents(tokenizer: Tokenizer) -> None:
    encode = encoder_for(tokenizer)
    assert not cuts_like_gpt2(tokenizer)
    texts = random_texts(100)
    assert [decoded(data) for data in encode(texts)] == [ids_of(tokenizer, text) for text in texts]


@pytest.mark.parametrize("token", [AddedToken("a b"), AddedToken("x", lstrip=True), AddedToken("y", single_word=True)])
def test_added_tokens_that_look_beyond_a_chunk_rule_chunks_out(token: AddedToken) -> None:
    tokenizer = trained(False)
    tokenizer.add_tokens([token])
    assert not cuts_like_gpt2(tokenizer)
