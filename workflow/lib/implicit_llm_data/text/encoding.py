"""Texts to token ids by `tokenizers`, on all cores; a long text in pieces, since it takes a hundred times its size."""

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from implicit_llm_data.shards import TOKEN_TYPE

PIECE_CHARACTERS = 1 << 20  # and as many more as come before the next white space


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
    """The tokenizer's own ids of each text, as little-endian uint16; they must be below 65,536.

    Special tokens are found in the texts, none are added.
    """
    if max(map(len, texts), default=0) <= PIECE_CHARACTERS or not may_be_cut(tokenizer):
        return encode_whole(tokenizer, texts)
    piece = re.compile(rf".{{{PIECE_CHARACTERS}}}.*?\S(?=[ \t\n\r])|.+", re.DOTALL)
    return [b"".join(encode_whole(tokenizer, [found[0]])[0] for found in piece.finditer(text)) for text in texts]


def encode_whole(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
    """Work like `encode`, no text cut."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, TOKEN_TYPE).tobytes() for encoding in encodings]


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its pieces, if it is cut before white space.

    They are for a tokenizer that splits text into words as GPT-2's does (GPT-NeoX, Pythia, OPT, the one trained here):
    it never joins white space to what comes before it.
    """
    cutter = tokenizer.pre_tokenizer
    if not (isinstance(cutter, pre_tokenizers.ByteLevel) and cutter.use_regex and not cutter.add_prefix_space):
        return False
    if not isinstance(tokenizer.normalizer, normalizers.NFC | None) or tokenizer.truncation or tokenizer.padding:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    return not any(token.rstrip or re.search(r"\S[ \t\n\r]", token.content) for token in added)
