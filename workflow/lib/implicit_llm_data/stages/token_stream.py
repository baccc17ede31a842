"""Run the stage `data` of kind `token_stream`: combine one split of all shards into a data set.

The index of the training split points to the files of the shards' jobs. If only some sequences are wanted, the job
copies these. It merges the held-out splits, so that sequences of every length can cross the borders of shards.
"""

import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm_contracts.config.text import TokenStreamConfig
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import faults
from implicit_llm_contracts.runs.atomic import new_file
from implicit_llm_contracts.runs.manifest import FileRecord
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shard_writer import HashedFile, write_index
from implicit_llm_data.shards import TOKEN_TYPE, DatasetSpec, Index, open_dataset, rebuild_hint
from implicit_llm_data.stages.token_shard import RECORD_NAME

MERGED_NAME = "tokens.bin"
COPIED_BYTES = 1 << 22  # bytes copied at once
RAISE = {"train": "", "test": " or raise test_fraction", "validation": " or raise validation.fraction"}


class StreamError(UserError):
    """The shards do not form the requested stream, or cannot be read."""


def run(context: StageContext) -> StageResult:
    """Write the index and, unless the whole training split is wanted, the merged tokens.

    Raises: ConfigError; StreamError; StorageError.
    """
    config = context.settings(TokenStreamConfig)
    records = {
        role: json.loads((given.work / RECORD_NAME).read_bytes()) for role, given in sorted(context.inputs.items())
    }
    _check_listings(context, records)
    folders = {role: Path(os.path.relpath(context.inputs[role].work, context.work)) for role in records}
    files = {role: FileRecord(**record["files"][config.split]) for role, record in records.items()}
    parts = [replace(file, path=(folders[role] / file.path).as_posix()) for role, file in files.items()]
    is_whole = config.split == "train" and config.tokens is None
    if config.tokens is not None:
        parts = [_merge(context.work, parts, _chosen_rows(context, config, parts), config.length * TOKEN_TYPE.itemsize)]
    elif not is_whole:
        parts = [_merge(context.work, parts, [range(0, part.size, COPIED_BYTES) for part in parts], COPIED_BYTES)]
    first = records[min(records)]  # one tokenizer encoded all of them
    source = {"kind": "token_stream", "split": config.split, "end_of_text": first["end_of_text"]}
    spec = DatasetSpec(first["vocab_size"], config.length, ("input_ids",), source)
    num_tokens = sum(part.size for part in parts) // 2
    faults.point("token_stream.before_index")
    index = write_index(context.work, Index(spec, parts=tuple(part for part in parts if part.size) or tuple(parts)))
    num_rows = len(open_dataset(context.work))
    if num_rows == 0:
        raise StreamError(
            f"{context.name}: the {config.split} split has {num_tokens} tokens, not one row of {config.length}; "
            "add text, choose a shorter length" + RAISE[config.split]
        )
    context.log.info("%d tokens, %d rows of %d", num_tokens, num_rows, config.length)
    summary = {
        "num_tokens": num_tokens,
        "num_rows": num_rows,
        "num_shards": len(records),
        "corpus": first["source"]["corpus"],
    }
    return StageResult([index, *(context.work / part.path for part in parts if not is_whole)], summary)


def _check_listings(context: StageContext, records: dict[str, dict[str, Any]]) -> None:
    """Check that all shards were cut from one list of files; otherwise documents would be missing or duplicated.

    Raises: StreamError.
    """
    listings = {role: record["listing"] for role, record in records.items()}
    first, expected = next(iter(listings.items()))
    for role, found in listings.items():
        if found == expected:
            continue
        pattern = re.sub("[0-9]+$", "", os.path.relpath(context.inputs[role].dir))
        raise StreamError(
            f"{context.name}: {first} and {role} saw different files of the corpus ({expected['num_files']} with "
            f"digest {expected['sha256'][:12]}, {found['num_files']} with {found['sha256'][:12]}); see that all are "
            f"there, type `rm -f {shlex.quote(pattern)}*/manifest.json` and run the workflow again: it makes all "
            "shards from one list"
        )


def _chosen_rows(context: StageContext, config: TokenStreamConfig, parts: list[FileRecord]) -> list[np.ndarray]:
    """Choose `config.tokens // config.length` sequences, spread evenly over all parts; return byte offsets by part.

    Raises: StreamError if the parts have fewer sequences.
    """
    assert config.tokens is not None
    row_bytes, wanted = config.length * TOKEN_TYPE.itemsize, config.tokens // config.length
    ends = np.cumsum([part.size // row_bytes for part in parts])
    total = int(ends[-1])
    if wanted > total:
        raise StreamError(
            f"{context.name}: tokens: {config.tokens} are more than the {config.split} split has in rows of "
            f"{config.length}; give at most {total * config.length}, or add text"
        )
    chosen = np.arange(wanted) * total // wanted
    borders = itertools.pairwise([0, *ends])
    return [(chosen[(chosen >= start) & (chosen < end)] - start) * row_bytes for start, end in borders]


def _merge(work: Path, parts: list[FileRecord], places: Sequence[Iterable[int]], size: int) -> FileRecord:
    """Copy pieces of the parts to one file and return its record.

    places: the byte offsets of the pieces in each part. size: the bytes of a piece; one at the end of a part may have
    fewer.
    """
    with new_file(work / MERGED_NAME) as whole:
        merged = HashedFile(whole, MERGED_NAME)
        for part, starts in zip(parts, places, strict=True):
            faults.point("token_stream.before_part")
            for piece in _pieces(Path(os.path.normpath(work / part.path)), starts, size):
                merged.write(piece)
    return merged.record


def _pieces(path: Path, starts: Iterable[int], size: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            for start in starts:
                file.seek(int(start))
                yield file.read(size)
    except OSError as error:  # `new_file` would report it as an error of writing
        raise StreamError(f"{path}: cannot be read ({error.strerror}); {rebuild_hint(path.parent)}") from error
