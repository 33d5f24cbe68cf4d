"""Evaluation windows: each document as begin + ids + end, in windows of T, every token after begin scored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lrkv_jax import marks


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

    def pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each document in order, the tokens scored and those before them."""
        for sequence in self.sequences():
            yield sequence[:-1], sequence[1:]

    def sequence(self, number: int) -> np.ndarray:
        """Document `number` as begin + ids + end, int32."""
        return np.concatenate([[self._begin_id], self._read(number), [self._end_id]]).astype(np.int32)

    def sequences(self) -> Iterator[np.ndarray]:
        """All documents in order."""
        return map(self.sequence, range(len(self.document_tokens)))


class ExampleWindows(Windows):
    """A held-out split of examples (chat.py), a row each; scored is what the model is to say, and each end."""

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        tokens: np.ndarray,
        document_bytes: np.ndarray,
        context: int,
        end_id: int,
    ) -> None:
        """`read(number)` gives an example's marked ids, T + 1 at most; `tokens` [documents] are those scored."""
        super().__init__(read, np.zeros_like(tokens), document_bytes, context, end_id, end_id)
        self.document_tokens = tokens

    def rows(self, start: int, stop: int) -> Rows:
        """Rows start to stop - 1; fewer where the split ends before."""
        numbers = np.arange(start, max(start, min(stop, len(self))), dtype=np.int32)
        shape = len(numbers), self._context
        found = Rows(*(np.full(shape, self._end_id, np.int32) for _ in range(2)), np.zeros(shape, np.float32), numbers)
        for row, number in enumerate(numbers):
            marked = self._read(int(number))
            ids = marked & marks.IDS
            found.inputs[row, : ids.size - 1] = ids[:-1]
            found.labels[row, : ids.size - 1] = ids[1:]
            found.weights[row, : ids.size - 1] = marked[1:] & marks.SCORED != 0
        return found

    def sequence(self, number: int) -> np.ndarray:
        """Example `number` as ids, int32: what it begins with, all its parts and ends."""
        return self._read(number) & marks.IDS

    def pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each example in order, the tokens scored and those before them."""
        return (marks.pairs(self._read(number)) for number in range(len(self)))
