"""Run the stage `data` of kind `word_problem`: draw sequences over a finite group, with prefix products as targets.

    target[0] = input[0]        target[j] = target[j-1] * input[j]

A token is an element's index. With a monoid it is `monoid.order * g + m`, from the indices of both factors, which are
multiplied independently. If the configuration names a file of the authors' generator, its sequences replace the draws.

`hard_fraction` is the probability that a position is drawn from the group. Such a hard position is uniform over the
WHOLE group, including the identity, so a group part differs from the identity with probability hard_fraction * (1 -
1/|G|). Any other position has the identity. The monoid part is uniform at every position.

The published data sets instead have the percentage of identity draws in their file names:

    published suffix   P000   P050   P075   P090   P095   P098   P100
    hard_fraction      1.0    0.5    0.25   0.1    0.05   0.02   0.0

The paper writes D_p with p = hard_fraction: P090 is D_0.1.

Source: the A5 x monoid task of Schöne et al. 2025 (Figure 3). The sampling is that of their data generator, but the
random numbers differ.
Dimensions: N samples, L positions, B samples of a block, P positions of a strip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from implicit_llm_contracts.config.word_problem import WordProblemConfig, product_order
from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_contracts.runs.places import local_folder
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.groups import Algebra, load_group, load_product
from implicit_llm_data.released_words import ReleasedWordsError, read_words
from implicit_llm_data.shard_writer import write_shards
from implicit_llm_data.shards import DatasetSpec, token_dtype

# Each number is part of the seed of its split's shards: a change of it changes all data of the split.
SPLIT_KEYS = {"train": 0, "test": 1}

Pair = tuple[np.ndarray, np.ndarray]  # inputs and targets

# A strip of P x B tokens with its random bits fits into a level-2 cache, and B tokens are enough to hide the cost of a
# numpy call. Both numbers fix the order of the random bits: a change of one changes all data.
BLOCK_SAMPLES = 8192
STRIP_POSITIONS = 16
# Rows of a strip are this much longer than B. Rows whose distance is a power of two share cache sets, and transposing
# them takes six times as long.
ROW_PADDING = 64


def run(context: StageContext) -> StageResult:
    """Build the data set that the configuration describes; finished shards of an interrupted attempt are used.

    Raises: ConfigError for a wrong configuration; ReleasedWordsError; StorageError.
    """
    config = context.settings(WordProblemConfig)
    columns, vocab_size = ("input_ids", "labels"), product_order(config.group, config.monoid)
    source = {key: value for key, value in asdict(config).items() if value is not None}
    spec = DatasetSpec(vocab_size, config.length, columns, {"kind": "word_problem", **source})
    make = generate if config.file is None else _released(config, context.downloads)
    files = write_shards(
        context, spec, config.num_shards, lambda shard: dict(zip(columns, make(config, shard), strict=True))
    )
    summary = {
        "num_samples": config.num_samples,
        "num_tokens": config.num_samples * config.length,
        "num_shards": config.num_shards,
        "vocab_size": vocab_size,
    }
    return StageResult(files, summary)


def generate(config: WordProblemConfig, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the inputs and targets of one shard, each (N, L) in the token type of the vocabulary.

    The result depends only on the configuration and `shard`, so shards can be drawn in any order and repeated.
    """
    num_samples = min(config.shard_samples, config.num_samples - shard * config.shard_samples)
    algebra, group_order = load_product(config.group, config.monoid), load_group(config.group).order
    inputs_NL = np.empty((num_samples, config.length), dtype=token_dtype(algebra.order))
    targets_NL = np.empty_like(inputs_NL)
    seed = np.random.SeedSequence(config.seed, spawn_key=(SPLIT_KEYS[config.split], shard))
    bits = np.random.SFC64(seed)  # one of numpy's fastest generators, about 2 ns for 8 bytes
    fractions = np.array(config.hard_fractions)
    for block in _pieces(num_samples, BLOCK_SAMPLES):
        samples = np.arange(block.start, block.stop) + shard * config.shard_samples
        sampler = _TokenSampler(bits, algebra.order, group_order, fractions[samples % len(fractions)])
        _generate_block(sampler, algebra, inputs_NL[block], targets_NL[block])
    return inputs_NL, targets_NL


def _released(config: WordProblemConfig, downloads: Path) -> Callable[[WordProblemConfig, int], Pair]:
    """Return a reader of a released file's shards.

    Raises: ReleasedWordsError if the file is damaged, changed or does not fit; the reader raises it for wrong products.
    """
    given = Path(str(config.file))
    path = (local_folder(given.parent, downloads) or given.parent) / given.name
    inputs_NL, targets_NL, vocab_size = read_words(path)
    algebra, (num_samples, length) = load_product(config.group, config.monoid), inputs_NL.shape
    if (length, vocab_size) != (config.length, algebra.order) or num_samples < config.num_samples:
        raise ReleasedWordsError(
            f"{path}: has {num_samples:,} words of {length} tokens out of {vocab_size}, and the data set wants "
            f"{config.num_samples:,} of {config.length} out of {algebra.order}; correct length, num_samples, group or "
            "monoid"
        )
    if sha256_of(path) != config.sha256:
        raise ReleasedWordsError(f"{path}: has changed since this job was planned; plan it again")

    def read(config: WordProblemConfig, shard: int) -> Pair:
        rows = slice(shard * config.shard_samples, min((shard + 1) * config.shard_samples, config.num_samples))
        inputs, targets = inputs_NL[rows], targets_NL[rows]
        is_token = min(inputs.min(), targets.min()) >= 0 and max(inputs.max(), targets.max()) < algebra.order
        is_first = (targets[:, 0] == inputs[:, 0]).all()
        if not (is_token and is_first) or (targets[:, 1:] != algebra.table[targets[:, :-1], inputs[:, 1:]]).any():
            raise ReleasedWordsError(
                f"{path}: its targets are no products of its inputs in {config.group} with monoid {config.monoid}; "
                "correct group or monoid"
            )
        return inputs.astype(token_dtype(algebra.order)), targets.astype(token_dtype(algebra.order))

    return read


def _generate_block(sampler: _TokenSampler, algebra: Algebra, inputs_BL: np.ndarray, targets_BL: np.ndarray) -> None:
    """Fill the two arrays strip by strip; positions are rows during the computation and columns in the result."""
    num_samples, length = inputs_BL.shape
    rows = np.empty((2, STRIP_POSITIONS, num_samples + ROW_PADDING), dtype=inputs_BL.dtype)
    inputs_PB, targets_PB = rows[:, :, :num_samples]
    state_B = np.zeros(num_samples, dtype=inputs_BL.dtype)  # the identity is element 0
    for strip in _pieces(length, STRIP_POSITIONS):
        num_positions = strip.stop - strip.start
        inputs_PB[:num_positions] = sampler.draw(num_positions)
        state_B = prefix_products(algebra, state_B, inputs_PB[:num_positions], out=targets_PB[:num_positions])
        inputs_BL[:, strip] = inputs_PB[:num_positions].T
        targets_BL[:, strip] = targets_PB[:num_positions].T


def prefix_products(algebra: Algebra, start_B: np.ndarray, words_PB: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write start * words[0] * ... * words[j] to out[j] for B sequences at once; return a copy of the last row.

    words and out: (P, B) with contiguous rows; out has the type of `algebra.table`.
    """
    flat_table = algebra.table.ravel()
    index_B = np.empty(start_B.shape, dtype=np.uint16 if flat_table.size <= 1 << 16 else np.uint32)
    state_B = start_B
    for word_B, out_B in zip(words_PB, out, strict=True):
        np.multiply(state_B, algebra.order, out=index_B, dtype=index_B.dtype)
        np.add(index_B, word_B, out=index_B)
        # With mode "raise", numpy writes to a buffer first and copies; no index is ever out of range.
        np.take(flat_table, index_B, out=out_B, mode="clip")
        state_B = out_B
    return state_B.copy()


def _take(bits: np.random.SFC64, count: int, dtype: type[np.unsignedinteger]) -> np.ndarray:
    """Return `count` uniform integers over the whole range of `dtype`.

    Their only source is the bit generator's `random_raw`, which numpy promises never to change, unlike Generator.
    """
    words = bits.random_raw(-(-count * np.dtype(dtype).itemsize // 8)).astype("<u8", copy=False)
    return words.view(np.dtype(dtype).newbyteorder("<"))[:count]


class _TokenSampler:
    """A sampler of tokens for a block of B samples; probabilities are exact, not rounded to a token's random bits."""

    def __init__(self, bits: np.random.SFC64, vocab_size: int, group_order: int, hard_fraction_B: np.ndarray) -> None:
        self._bits = bits
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._monoid_order = self._dtype.type(vocab_size // group_order)
        # A position is hard if its random byte is below `whole`. If the byte equals `whole`, the position is hard with
        # the probability `rest`.
        self._whole_B = np.minimum(np.floor(hard_fraction_B * 256), 255).astype(np.uint8)
        self._rest_B = hard_fraction_B * 256 - self._whole_B

    def draw(self, num_positions: int) -> np.ndarray:
        """Return tokens of shape (num_positions, B)."""
        tokens = self._uniform_tokens(num_positions * len(self._whole_B)).reshape(num_positions, -1)
        # Subtract the group part `monoid_order * g` of the tokens that are not hard, so that the monoid part m remains.
        # (numpy's `%`, which would give m, is ten times slower than `//`.)
        group_part = tokens // self._monoid_order
        group_part *= self._draw_hard(num_positions) ^ True
        group_part *= self._monoid_order
        tokens -= group_part
        return tokens

    def _uniform_tokens(self, count: int) -> np.ndarray:
        """Return uniform tokens: divide 2**16 values equally among the tokens, and redraw the few values left over."""
        per_token = np.uint16(min((1 << 16) // self._vocab_size, (1 << 16) - 1))
        tokens = np.empty(count, dtype=self._dtype)
        np.floor_divide(_take(self._bits, count, np.uint16), per_token, out=tokens, casting="unsafe")
        left_over = np.flatnonzero(tokens >= self._vocab_size)
        while left_over.size:
            redrawn = _take(self._bits, left_over.size, np.uint16) // per_token
            tokens[left_over] = redrawn.astype(self._dtype)
            left_over = left_over[redrawn >= self._vocab_size]
        return tokens

    def _draw_hard(self, num_positions: int) -> np.ndarray:
        """Return bools of shape (num_positions, B): whether each position is drawn from the group."""
        num_samples = len(self._whole_B)
        bytes_PB = _take(self._bits, num_positions * num_samples, np.uint8).reshape(num_positions, num_samples)
        is_hard = bytes_PB < self._whole_B
        undecided = np.flatnonzero(bytes_PB == self._whole_B)
        uniform = (_take(self._bits, undecided.size, np.uint64) >> 11) * 2.0**-53  # doubles in [0, 1) of 53 random bits
        is_hard.ravel()[undecided] = uniform < self._rest_B[undecided % num_samples]
        return is_hard


def _pieces(total: int, size: int) -> Iterator[slice]:
    """Cut range(total) into slices of `size`; the last one may be shorter."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
