"""The stage `data` of kind `token_shard`: some files of a corpus as streams of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from tokenizers import Tokenizer
from tqdm import tqdm

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.text.corpus import Share, open_share
from implicit_llm_data.text.encoding import encoder_for
from implicit_llm_data.text.token_shard import RECORD_NAME, Progress, TokenShardConfig, TokenShardWriter, read_record
from implicit_llm_data.text.tokenizer import FILE_NAME, load_tokenizer, require_ids_below

TOKENIZER_ROLE = "tokenizer"
REPORT_S = 10.0  # between two points in the journal


class ShardInputError(UserError):
    """The shard's job was not given what it reads."""


def run(context: StageContext) -> StageResult:
    """Encode the documents of the shard's files; what it writes depends on configuration and text alone.

    Raises: ConfigError, CorpusError, TokenizerError, StorageError.
    """
    fields = {key: value for key, value in context.config.items() if key != "kind"}
    config = fill(TokenShardConfig, fields, where=context.name)
    share = open_share(
        config.corpus, downloads_folder(context.runtime.get("downloads")), config.shard, config.num_shards
    )
    tokenizer, end_of_text = _tokenizer(context)
    require_ids_below(tokenizer, config.vocab_size)
    writer = TokenShardWriter(context.work, encoder_for(tokenizer), end_of_text, config.split)
    files = [{"name": file.name, "size": file.size} for file in share.files]
    listing = asdict(share.listing)
    about = {"vocab_size": config.vocab_size, "source": {**fields, "files": files}, "listing": listing}
    _report(context, share, writer.write(share.documents(), about))
    record = read_record(context.work)
    summary = {
        **{f"{split}_tokens": count for split, count in record["tokens"].items()},
        **{f"{name}_documents": count for name, count in record["documents"].items()},
        "text_bytes": record["text"]["bytes"],
        "text_sha256": record["text"]["sha256"],
    }
    return StageResult(["train.bin", "test.bin", RECORD_NAME], summary)


def _tokenizer(context: StageContext) -> tuple[Tokenizer, int]:
    """The tokenizer and the id of its end-of-text token."""
    given = context.inputs.get(TOKENIZER_ROLE)
    if given is None:
        raise ShardInputError(f"{context.name}: no tokenizer given; add --input {TOKENIZER_ROLE}=DIR")
    path = given.work / FILE_NAME
    return load_tokenizer(path.read_text(encoding="utf-8"), str(path)), int(given.manifest.summary["end_of_text_id"])


def _report(context: StageContext, share: Share, steps: Iterable[Progress]) -> None:
    """Take all steps; tell how far they are and how fast."""
    context.journal.rewind(0)  # points of an interrupted attempt do not count
    last: Progress | None = None
    reported_s = 0.0
    total = share.size
    with tqdm(total=total, desc=context.name, unit="B", unit_scale=True, disable=None) as bar:
        for step in steps:
            done = step.text_bytes if total is None else step.position
            bar.set_postfix_str(f"{step.tokens_per_s / 1e6:.2f}M tokens/s", refresh=False)
            bar.update(done - bar.n)
            if step.elapsed_s - reported_s >= REPORT_S:
                reported_s = step.elapsed_s
                _to_journal(context, step)
            last = step
    if last is None:
        context.log.warning("no documents in %s", ", ".join(file.name for file in share.files)[:300])
        return
    _to_journal(context, last)
    context.log.info(
        "encoded %d documents, %.1f MB of text, %d tokens in %.1f s: %.2f million tokens/s",
        *(last.num_documents, last.text_bytes / 1e6, last.num_tokens, last.elapsed_s, last.tokens_per_s / 1e6),
    )


def _to_journal(context: StageContext, step: Progress) -> None:
    metrics = {"tokens": step.num_tokens, "text_bytes": step.text_bytes, "tokens_per_s": step.tokens_per_s}
    context.journal.metrics(step.num_documents, metrics)
