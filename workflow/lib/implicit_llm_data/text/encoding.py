"""Texts to token ids, as fast as two cores allow: bytes of little-endian uint16, equal to what the tokenizer gives.

Most of a byte-level tokenizer's time goes into cutting text into words (its regular expression) and into words that it
has just met. So, for tokenizers that cut text as GPT-2's does (GPT-NeoX, Pythia, OPT and the one trained here), text is
cut more coarsely first, into chunks of white space and what follows up to the next white space, and the ids of chunks
are remembered. A chunk's ids do not depend on its neighbours: such a tokenizer never joins a visible character to white
space after it. Every other tokenizer encodes whole documents, on all cores.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

# When the remembered chunks take about this many bytes, a million chunks of English, they are all forgotten. An entry
# costs ENTRY_BYTES for Python's objects and, with the widest letters and their ids, so many bytes a character.
REMEMBERED_BYTES = 1 << 28
ENTRY_BYTES, CHARACTER_BYTES = 200, 6
PIECE_CHARACTERS = 1 << 20  # of a long text cut at once: the list of its chunks takes ten times as much memory

_WHITE = " \t\n\r"
# What Unicode or Python may take for white space, apart from the above: no chunk ends after one of these.
_DOUBTFUL = "\x0b\x0c\x1c-\x1f\x85\xa0\u1680\u180e\u2000-\u200f\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
_CHUNK = re.compile(rf"[{_WHITE}]*[^{_WHITE}]+(?:(?<=[{_DOUBTFUL}])[{_WHITE}]+[^{_WHITE}]*)*|[{_WHITE}]+")
_BORDER = re.compile(rf"(?<=[^{_WHITE}{_DOUBTFUL}])(?=[{_WHITE}])")

# GPT-2's expression for ASCII without control characters, where all engines agree on letters, digits and spaces.
_ASCII = re.compile(r"[ \t\n\r]*[!-~]*")
_WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[!-/:-@\[-`{-~]+|[ \t\n\r]+(?![^ \t\n\r])|[ \t\n\r]+")
# How GPT-2's alphabet of bytes spells white space; visible ASCII is spelled as it is.
_SPELLED = str.maketrans({" ": "\u0120", "\t": "\u0109", "\n": "\u010a", "\r": "\u010d"})

# Ids of each text as little-endian uint16. Special tokens are found in the texts, none are added.
Encode = Callable[[Sequence[str]], list[bytes]]


def encoder_for(tokenizer: Tokenizer) -> Encode:
    """The fastest encoder that gives the tokenizer's own ids; these must be below 65,536."""
    return ChunkEncoder(tokenizer).encode if cuts_like_gpt2(tokenizer) else partial(encode_documents, tokenizer)


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
    """Encode whole documents by the tokenizer itself, in parallel. Raises: struct.error for an id above 65,535."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [_packed(encoding.ids) for encoding in encodings]


def _encode_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[bytes]:
    """Encode single words of ASCII by the model alone: nothing to normalise, nothing to cut, nothing to set up."""
    tokenize = tokenizer.model.tokenize
    return [_packed([token.id for token in tokenize(word.translate(_SPELLED))]) for word in words]


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}H", *ids)


class ChunkEncoder:
    """Looks chunks up and encodes those that are new; only for tokenizers that `cuts_like_gpt2` accepts."""

    def __init__(self, tokenizer: Tokenizer, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._tokenizer = tokenizer
        added = [re.escape(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(added) or "(?!)")  # found before text is cut into words
        self._max_bytes = remembered_bytes
        self._ids: dict[str, bytes] = {}
        self._bytes = 0

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Encode the texts together, but where one of them is long, each by itself and in pieces."""
        if max(map(len, texts), default=0) <= PIECE_CHARACTERS:
            return self._encode_together(texts)
        return [b"".join(self._encode_together([piece])[0] for piece in _pieces(text)) for text in texts]

    def _encode_together(self, texts: Sequence[str]) -> list[bytes]:
        chunks_of = [_CHUNK.findall(text) for text in texts]
        new = set().union(*chunks_of).difference(self._ids)
        # The words of these chunks are those of `_WORD`.
        plain = {
            chunk: _WORD.findall(chunk)
            for chunk in new
            if _ASCII.fullmatch(chunk) is not None and self._added.search(chunk) is None
        }
        # A word alone is cut as within its chunk, so words and chunks can share the memory.
        self._remember(set().union(*plain.values()).difference(self._ids), _encode_words)
        for chunk, words in plain.items():
            self._ids[chunk] = b"".join(map(self._ids.__getitem__, words))
        self._remember(new.difference(plain), encode_documents)
        encoded = [b"".join(map(self._ids.__getitem__, chunks)) for chunks in chunks_of]
        self._bytes += sum(ENTRY_BYTES + CHARACTER_BYTES * len(chunk) for chunk in plain)
        if self._bytes > self._max_bytes:
            self._ids.clear()
            self._bytes = 0
        return encoded

    def _remember(self, texts: set[str], encode: Callable[[Tokenizer, Sequence[str]], list[bytes]]) -> None:
        new = list(texts)
        self._ids.update(zip(new, encode(self._tokenizer, new), strict=True))
        self._bytes += ENTRY_BYTES * len(new) + CHARACTER_BYTES * sum(map(len, new))


def cuts_like_gpt2(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its chunks, one after another."""
    model, cutter = tokenizer.model, tokenizer.pre_tokenizer
    if not (isinstance(cutter, pre_tokenizers.ByteLevel) and cutter.use_regex and not cutter.add_prefix_space):
        return False
    if not isinstance(tokenizer.normalizer, normalizers.NFC | None):
        return False
    if not isinstance(model, models.BPE) or any(
        (model.dropout, model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix)
    ):
        return False
    for token in tokenizer.get_added_tokens_decoder().values():
        # It must never be found across the border of two chunks, nor look beyond one.
        looks_beyond = token.lstrip or token.rstrip or token.single_word
        if looks_beyond or re.search(rf"[^{_WHITE}][{_WHITE}]", token.content):
            return False
    return tokenizer.truncation is None and tokenizer.padding is None


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
