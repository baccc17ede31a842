"""Texts to token ids, as fast as two cores allow: bytes of little-endian uint16, equal to what the tokenizer gives.

Most of a byte-level tokenizer's time goes into cutting text into words (its regular expression) and into words that it
has just met. So, for tokenizers that cut text as GPT-2's does (GPT-NeoX, Pythia, OPT and the one trained here), text is
cut more coarsely first, into chunks of white space and what follows up to the next white space, and the ids of chunks
are remembered. A chunk's ids do not depend on its neighbours: such a tokenizer never joins a visible character to white
space after it. Every other tokenizer encodes whole documents, on all cores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from implicit_llm.data.shard_format import TOKEN_TYPE

# Remembered chunks with their ids: a few hundred MiB of Python objects at most, after which remembering starts anew.
MAX_REMEMBERED = 1 << 20
MAX_REMEMBERED_LENGTH = 64  # characters; longer chunks seldom come twice
PIECE_CHARACTERS = 1 << 20  # of a long text cut at once: the list of its chunks takes ten times as much memory

_WHITE = " \t\n\r"
# What Unicode or Python may take for white space, apart from the above: no chunk ends after one of these.
_DOUBTFUL = "\x0b\x0c\x1c-\x1f\x85\xa0\u1680\u180e\u2000-\u200f\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
_CHUNK = re.compile(rf"[{_WHITE}]*[^{_WHITE}]+(?:(?<=[{_DOUBTFUL}])[{_WHITE}]+[^{_WHITE}]*)*|[{_WHITE}]+")
_BORDER = re.compile(rf"(?<=[^{_WHITE}{_DOUBTFUL}])(?=[{_WHITE}])")
# GPT-2's expression for ASCII without control characters, where all engines agree on letters, digits and spaces.
_ASCII = re.compile(r"[ \t\n\r]*[!-~]*")
_WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[!-/:-@\[-`{-~]+|[ \t\n\r]+(?![^ \t\n\r])|[ \t\n\r]+")


class Encoder(Protocol):
    """Gives the ids of texts; special tokens are found in them, none are added."""

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text as little-endian uint16."""
        ...


def encoder_for(tokenizer: Tokenizer) -> Encoder:
    """The fastest encoder that gives the tokenizer's own ids; these must be below 65,536."""
    fields = json.loads(tokenizer.to_str())
    return ChunkEncoder(tokenizer) if cuts_like_gpt2(fields) else DocumentEncoder(tokenizer)


class DocumentEncoder:
    """Whole documents by the tokenizer itself, in parallel."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=TOKEN_TYPE).tobytes() for encoding in encodings]


class ChunkEncoder:
    """Looks chunks up and encodes those that are new; only for tokenizers that `cuts_like_gpt2` accepts."""

    def __init__(self, tokenizer: Tokenizer, max_remembered: int = MAX_REMEMBERED) -> None:
        fields = json.loads(tokenizer.to_str())
        self._whole = DocumentEncoder(tokenizer)
        self._words = DocumentEncoder(_word_tokenizer(tokenizer))
        added = sorted((token["content"] for token in fields["added_tokens"]), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._max_remembered = max_remembered
        self._ids: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        encoded = []
        for group in _groups(texts):
            chunks_of = [[_CHUNK.findall(piece) for piece in _pieces(text)] for text in group]
            self._learn(set().union(*(chunks for pieces in chunks_of for chunks in pieces)))
            ids_of = self._ids.__getitem__
            encoded += [b"".join(b"".join(map(ids_of, chunks)) for chunks in pieces) for pieces in chunks_of]
            self._forget()
        return encoded

    def _learn(self, chunks: set[str]) -> None:
        ids = self._ids
        new = chunks.difference(ids)
        plain = {chunk: _WORD.findall(chunk) for chunk in new if self._is_plain(chunk)}
        # A word alone is cut as within its chunk, so words and chunks can share the memory.
        self._remember(set().union(*plain.values()).difference(ids), self._words)
        for chunk, words in plain.items():
            ids[chunk] = b"".join(map(ids.__getitem__, words))
        self._remember(new.difference(plain), self._whole)

    def _remember(self, texts: Iterable[str], encoder: DocumentEncoder) -> None:
        new = list(texts)
        self._ids.update(zip(new, encoder.encode(new), strict=True))

    def _is_plain(self, chunk: str) -> bool:
        """Whether the words of a chunk are those of `_WORD`."""
        return _ASCII.fullmatch(chunk) is not None and (self._added is None or self._added.search(chunk) is None)

    def _forget(self) -> None:
        if len(self._ids) > self._max_remembered:
            self._ids.clear()


def cuts_like_gpt2(fields: dict[str, Any]) -> bool:
    """Whether a tokenizer (the content of its tokenizer.json) encodes chunks as it encodes the text they make up."""
    model, cutter = fields["model"], fields["pre_tokenizer"] or {}
    is_byte_level = cutter.get("type") == "ByteLevel" and cutter.get("use_regex", True)
    is_local = (fields["normalizer"] or {"type": "NFC"})["type"] == "NFC" and not cutter.get("add_prefix_space")
    is_plain_bpe = model.get("type") == "BPE" and not any(
        model.get(key) for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    is_whole = fields.get("truncation") is None and fields.get("padding") is None
    return is_byte_level and is_local and is_plain_bpe and is_whole and all(map(_is_local, fields["added_tokens"]))


def _is_local(token: dict[str, Any]) -> bool:
    """Whether an added token is never found across the border of two chunks, nor looks beyond one."""
    is_strict = not (token.get("lstrip") or token.get("rstrip") or token.get("single_word"))
    return (
        is_strict
        and _CHUNK.fullmatch(token["content"]) is not None
        and not re.search(rf"[^{_WHITE}][{_WHITE}]", token["content"])
    )


def _word_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The same model for text that is one word of ASCII: nothing to normalise, nothing to cut."""
    words = Tokenizer(tokenizer.model)
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return words


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in groups of bounded size; a longer text is a group of its own."""
    start = characters = 0
    for number, text in enumerate(texts):
        if characters and characters + len(text) > PIECE_CHARACTERS:
            yield texts[start:number]
            start, characters = number, 0
        characters += len(text)
    if start < len(texts):
        yield texts[start:]


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text between two chunks."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        border = _BORDER.search(text, start + PIECE_CHARACTERS)
        if border is None:
            break
        yield text[start : border.start()]
        start = border.start()
    yield text[start:] if start else text
