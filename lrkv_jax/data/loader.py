"""Training batches: a pure function of (seed, step, global batch), whatever the number of hosts or restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from lrkv_jax.settings import UserError

LAST_STEP = 2**40  # an end for Grain's range of steps; nobody trains so long


class _Sequences:
    """The T + 1 ids of every window of the train stream, by number: M / T windows a record."""

    def __init__(self, record: Callable[[int], np.ndarray], records: int, record_tokens: int, context: int) -> None:
        self._record = record
        self._context = context
        self._per_record = record_tokens // context
        self._count = records * self._per_record

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> np.ndarray:
        record, window = divmod(int(number), self._per_record)
        return self._record(record)[window * self._context :][: self._context + 1]


class Batches:
    """Batches by step: epoch after epoch, every window once an epoch, in an order of its own each.

    A batch may straddle two epochs. Row r of step s is element s * batch_size + r of one endless sequence.
    """

    def __init__(
        self,
        record: Callable[[int], np.ndarray],
        records: int,
        record_tokens: int,
        context: int,
        batch_size: int,
        seed: int,
    ) -> None:
        """`record(number)` gives the M + 1 ids of a record. Raises UserError for a seed that Grain cannot take."""
        if not 0 <= seed < 2**32:
            raise UserError(f"seed = {seed}: must be in [0, 2**32)")
        self.batch_size = batch_size
        sequences = _Sequences(record, records, record_tokens, context)
        self.sequences_per_epoch = len(sequences)
        self._dataset = grain.MapDataset.source(sequences).seed(seed).shuffle().repeat(None)

    def batch_at(self, step: int, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Batch `step` (from 0): [rows, T + 1] int32, inputs and labels one apart; `rows` picks of the global batch."""
        first = int(step) * self.batch_size
        return np.stack([self._dataset[first + int(row)] for row in np.arange(self.batch_size)[rows]])

    def iterate(
        self, start_step: int = 0, rows: slice | np.ndarray = slice(None), threads: int = 2, ahead: int = 8
    ) -> Iterator[np.ndarray]:
        """batch_at(start_step), batch_at(start_step + 1), ... read by background threads, `ahead` batches in advance.

        Close it (`contextlib.closing`) to end the threads.
        """
        steps = grain.MapDataset.range(start_step, LAST_STEP).map(lambda step: self.batch_at(step, rows))
        iterator = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)))
        try:
            yield from iterator
        finally:
            iterator.close()
