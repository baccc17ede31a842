"""The stage `data` of kind `tokenizer`: the tokenizer.json with which a corpus is encoded."""

from __future__ import annotations

import time

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.text.tokenizer import FILE_NAME, TokenizerConfig, load_tokenizer, make_tokenizer, num_ids_of


def run(context: StageContext) -> StageResult:
    """Write the tokenizer that the configuration names or describes.

    Raises: ConfigError, TokenizerError, CorpusError, StorageError.
    """
    fields = {key: value for key, value in context.config.items() if key != "kind"}
    config = fill(TokenizerConfig, fields, where=context.name)
    start_s = time.perf_counter()
    text = make_tokenizer(config, downloads_folder(context.runtime.get("downloads")))
    tokenizer = load_tokenizer(text, FILE_NAME)
    write_atomic(context.work / FILE_NAME, text)
    num_ids = num_ids_of(tokenizer)
    context.log.info("%s: %d ids, %.1f s", FILE_NAME, num_ids, time.perf_counter() - start_s)
    end_of_text_id = tokenizer.token_to_id(config.end_of_text)
    summary = {"num_ids": num_ids, "vocab_size": config.vocab_size, "end_of_text_id": end_of_text_id}
    return StageResult([FILE_NAME], summary)
