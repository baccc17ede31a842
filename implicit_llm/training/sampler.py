"""Which samples a step trains on: a pure function of (seed, step), whatever the world size and the accumulation."""

import math

import numpy as np

_ROUNDS = 4
_CACHED_SAMPLES = 4096  # permuted at once: numpy's cost per call would otherwise show in steps of a few milliseconds


class IndexPermutation:
    """A seeded permutation of 0..size - 1 in constant memory.

    A Feistel network on Z_a x Z_b with a * b a little above `size`; indices that fall outside walk on until they are
    inside. `key` is any tuple of integers.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._keys = np.random.SeedSequence(key).generate_state(2 * _ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Images of `indices` (int64, any shape, each in 0..size - 1)."""
        images = self._encrypt(indices)
        outside = images >= self.size
        while outside.any():
            images[outside] = self._encrypt(images[outside])
            outside = images >= self.size
        return images

    def _encrypt(self, indices: np.ndarray) -> np.ndarray:
        row, column = np.divmod(indices.astype(np.uint64), np.uint64(self._columns))
        for number in range(_ROUNDS):
            row = (row + _mix(column + self._keys[2 * number]) % np.uint64(self._rows)) % np.uint64(self._rows)
            column = (column + _mix(row + self._keys[2 * number + 1]) % np.uint64(self._columns)) % np.uint64(
                self._columns
            )
        return (row * np.uint64(self._columns) + column).astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class StepSampler:
    """Shuffled epochs without replacement, one after another; a batch may span two of them."""

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self._seed = seed
        self._steps_cached = max(1, _CACHED_SAMPLES // batch_size)
        self._cache_first = -1
        self._cache = np.empty(0, dtype=np.int64)

    def indices(self, step: int) -> np.ndarray:
        """Samples of the update that follows `step` finished ones: int64 of shape (batch_size,)."""
        first = step - step % self._steps_cached
        if first != self._cache_first:
            count = self._steps_cached * self.batch_size
            self._cache = self._indices_at(np.arange(first * self.batch_size, first * self.batch_size + count))
            self._cache_first = first
        offset = (step - first) * self.batch_size
        return self._cache[offset : offset + self.batch_size]

    def _indices_at(self, positions: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(positions, self.num_samples)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = IndexPermutation(self.num_samples, (self._seed, int(epoch)))(places[chosen])
        return indices
