"""Evaluation windows: each document as begin + ids + end, in windows of T, every token after begin scored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """Some rows of the windows; T is the context length."""

    inputs: np.ndarray
    """[rows, T] int32; the end token where padded."""
    labels: np.ndarray
    """[rows, T] int32: the token that follows each input."""
    weights: np.ndarray
    """[rows, T] float32: 1 where the label is scored, 0 where padded."""
    document: np.ndarray
    """[rows] int32: number of the document in its split."""


class Windows:
    """A held-out split as rows of T tokens. Only the documents of the rows asked for are read."""

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        document_ids: np.ndarray,
        document_bytes: np.ndarray,
        context: int,
        begin_id: int,
        end_id: int,
    ) -> None:
        """`read(number)` gives a document's ids; `document_ids` and `document_bytes` [documents] are counts."""
        self._read = read
        self._context = context
        self._begin_id, self._end_id = begin_id, end_id
        self.document_bytes = document_bytes
        """[documents] int64: bytes of the raw UTF-8 text."""
        self.document_tokens = document_ids + 1
        """[documents] int64: scored tokens, the ids and the end."""
        rows = -(-self.document_tokens // context)
        self._first_row = np.concatenate([[0], np.cumsum(rows)])  # [documents + 1]

    def __len__(self) -> int:
        """Rows."""
        return int(self._first_row[-1])

    def whole_documents(self, limit: int) -> int:
        """Rows of the first documents that fit whole into `limit` rows; of the first alone where none fits."""
        documents = max(int(np.searchsorted(self._first_row, limit, side="right")) - 1, 1)
        return int(self._first_row[documents])

    def rows(self, start: int, stop: int) -> Rows:
        """Rows start to stop - 1; fewer where the split ends before."""
        stop = max(start, min(stop, len(self)))
        context, count = self._context, stop - start
        inputs = np.full((count, context), self._end_id, np.int32)
        labels = np.full((count, context), self._end_id, np.int32)
        weights = np.zeros((count, context), np.float32)
        numbers = np.searchsorted(self._first_row, np.arange(start, stop), side="right") - 1
        for number in np.unique(numbers):
            sequence = self.sequence(int(number))
            for row in np.flatnonzero(numbers == number):
                at = (start + int(row) - int(self._first_row[number])) * context
                following = sequence[at + 1 : at + 1 + context]
                inputs[row, : following.size] = sequence[at : at + following.size]
                labels[row, : following.size] = following
                weights[row, : following.size] = 1
        return Rows(inputs, labels, weights, numbers.astype(np.int32))

    def sequence(self, number: int) -> np.ndarray:
        """Document `number` as begin + ids + end, int32."""
        return np.concatenate([[self._begin_id], self._read(number), [self._end_id]]).astype(np.int32)

    def sequences(self) -> Iterator[np.ndarray]:
        """All documents in order."""
        return map(self.sequence, range(len(self.document_tokens)))
