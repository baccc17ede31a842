"""A test text cut into rows in which every token is predicted once.

    stream      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9          rows of 4
    inputs      t0 t1 t2 t3 | t4 t5 t6 t7 | t8
    targets     t1 t2 t3 t4 | t5 t6 t7 t8 | t9

A row reads its tokens from an empty state and predicts after each of them the next one, the first token of the row that
follows included. So every token of the stream but the first is a target exactly once at every length, and perplexities
at several lengths are over the same tokens: only what is known of the text before them differs. The last row is as
short as it comes out.

Documents stand in the stream one after another, each with end-of-text behind it. Nothing is reset between them, as in
training. End-of-text is a target like any other token. So is the first token of a document, whose row has only other
documents before it; `is_document_start` marks these targets.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from implicit_llm_data.text.token_stream import open_stream


class TextRows:
    """The rows of `length` tokens of the stream in `directory`; the short one at the end, if there is one, is the last.

    end_of_text: its token, None when the stream does not say.
    """

    def __init__(self, directory: Path, length: int) -> None:
        self._tokens = open_stream(directory, length=1)  # any token by its number, over the borders of files
        self.length = length
        self.vocab_size = self._tokens.vocab_size
        self.end_of_text: int | None = self._tokens.source.get("end_of_text")

    @property
    def num_targets(self) -> int:
        return max(0, len(self._tokens) - 1)

    @property
    def num_full_rows(self) -> int:
        return self.num_targets // self.length

    def __len__(self) -> int:
        return -(-self.num_targets // self.length)

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """input_ids, labels (the next tokens) and is_document_start, each (B, length).

        `indices` are consecutive. A short row is given by itself: of rows that end with it only those before it are
        given, and it comes when it is asked for first.
        Raises: IndexError outside 0..len-1.
        """
        first, last = int(indices[0]), int(indices[-1])
        if first < self.num_full_rows:
            last = min(last, self.num_full_rows - 1)
        start, end = first * self.length, min((last + 1) * self.length, self.num_targets)
        tokens = self._tokens.fetch(np.arange(start, end + 1))["input_ids"][:, 0]
        input_ids = tokens[:-1].reshape(last - first + 1, -1)
        is_start = np.zeros_like(input_ids, dtype=bool) if self.end_of_text is None else input_ids == self.end_of_text
        return {
            "input_ids": input_ids,
            "labels": tokens[1:].reshape(input_ids.shape),
            "is_document_start": is_start,
        }
