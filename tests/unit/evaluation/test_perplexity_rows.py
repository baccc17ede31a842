from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from implicit_llm.evaluation.kinds.perplexity import TextRows
from tests.unit.evaluation.small_streams import write_stream

# Documents of three, one, nine and two tokens, and end-of-text (0) behind each: shorter and longer than rows of five.
STREAM = [3, 4, 5, 0, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 1, 0]


def all_rows(rows: TextRows, batch_size: int) -> list[dict[str, np.ndarray]]:
    """The rows as an evaluation reads them, a batch a time."""
    batches, start = [], 0
    while start < len(rows):
        batches.append(rows.fetch(np.arange(start, min(start + batch_size, len(rows)))))
        start += len(batches[-1]["input_ids"])
    return batches


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_rows_inputs_targets_and_starts_of_documents_are_those_found_by_hand(tmp_path: Path, batch_size: int) -> None:
    write_stream(tmp_path, STREAM)
    batches = all_rows(TextRows(tmp_path, 5), batch_size)
    found = {key: [row.tolist() for batch in batches for row in batch[key]] for key in batches[0]}
    assert found["input_ids"] == [[3, 4, 5, 0, 6], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 2, 1]]
    assert found["labels"] == [[4, 5, 0, 6, 0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [2, 1, 0]]
    # The second, third and fourth document start at the targets 6, 1 and 2; the first document's start is no target.
    assert [[int(flag) for flag in row] for row in found["is_document_start"]] == [
        [0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 0, 0],
    ]


@pytest.mark.parametrize("length", [2, 3, 5, 9, 18, 19, 40])
def test_every_token_but_the_first_is_a_target_once_at_every_length(tmp_path: Path, length: int) -> None:
    write_stream(tmp_path, STREAM)
    rows = TextRows(tmp_path, length)
    targets = [token for batch in all_rows(rows, 3) for token in batch["labels"].ravel().tolist()]
    assert targets == STREAM[1:]
    assert rows.num_targets == len(STREAM) - 1
    assert rows.num_full_rows == (len(STREAM) - 1) // length


def test_stream_of_one_token_has_nothing_to_predict(tmp_path: Path) -> None:
    write_stream(tmp_path, [3])
    assert len(TextRows(tmp_path, 4)) == 0
