"""The stage `data` of kind `word_problem`: one data set of prefix products."""

from __future__ import annotations

import time
from dataclasses import asdict

from tqdm import tqdm

from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shard_format import DatasetSpec, ShardRecord
from implicit_llm_data.shard_writer import ShardWriter
from implicit_llm_data.word_problem import WordProblemConfig, generate


def run(context: StageContext) -> StageResult:
    """Make the data set that the configuration describes; shards of an interrupted attempt are kept.

    Raises: ConfigError for a wrong configuration; OutOfSpace.
    """
    fields = {key: value for key, value in context.config.items() if key != "kind"}
    config = fill(WordProblemConfig, fields, where=context.name)
    vocab_size = config.algebra.order
    source = {"kind": "word_problem", **asdict(config)}
    writer = ShardWriter(context.work, DatasetSpec(vocab_size, config.length, ("input_ids", "labels"), source))
    sizes = [config.samples_in_shard(shard) for shard in range(config.num_shards)]
    records = {shard: record for shard, size in enumerate(sizes) if (record := writer.find(shard, size)) is not None}
    missing = [shard for shard in range(config.num_shards) if shard not in records]
    if records:
        context.log.info("kept %d of %d shards of an earlier attempt", len(records), config.num_shards)
    writer.require_space(sum(sizes[shard] for shard in missing))
    records |= _make_missing(context, config, writer, missing)
    files = writer.finish([records[shard] for shard in range(config.num_shards)])
    summary = {
        "num_samples": config.num_samples,
        "num_tokens": config.num_samples * config.length,
        "num_shards": config.num_shards,
        "vocab_size": vocab_size,
    }
    return StageResult(files, summary)


def _make_missing(
    context: StageContext, config: WordProblemConfig, writer: ShardWriter, missing: list[int]
) -> dict[int, ShardRecord]:
    records = {}
    num_tokens, generate_s, start_s = 0, 0.0, time.perf_counter()
    for shard in tqdm(missing, desc=context.name, unit="shard", disable=None):  # None: a bar only on a terminal
        shard_start_s = time.perf_counter()
        inputs_NL, labels_NL = generate(config, shard)
        generate_s += time.perf_counter() - shard_start_s
        records[shard] = writer.write(shard, {"input_ids": inputs_NL, "labels": labels_NL})
        num_tokens += inputs_NL.size
    total_s = time.perf_counter() - start_s
    if missing:
        context.log.info(
            "made %d shards, %d tokens: %.1f million tokens/s (%.1f without writing)",
            *(len(missing), num_tokens, num_tokens / total_s / 1e6, num_tokens / generate_s / 1e6),
        )
    return records
