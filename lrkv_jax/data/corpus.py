"""A dataset by name, as documents in train, validation and test.

Every corpus is a TFDS dataset read without tensorflow (ArrayRecord files through `as_data_source`). Documents come in
the order TFDS stores them, which for our builders is that of a hash of their names. A split the dataset has is used as
it is; a missing validation or test split is cut off train (split.py), or, where train is one single text (a book, tiny
Shakespeare), off its end, at the end of a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from tqdm import tqdm

from lrkv_jax.data import split as splitting
from lrkv_jax.data.config import DataConfig
from lrkv_jax.data.datasets import first_line, prepared_builder, source_key
from lrkv_jax.data.files import key_of, replacing
from lrkv_jax.data.mixture import spread
from lrkv_jax.data.sft import file_times
from lrkv_jax.data.split import SPLITS, TEST, TRAIN, VALIDATION
from lrkv_jax.settings import UserError


class Corpus:
    """A dataset's documents by split. Nothing is read or built before `prepare`."""

    def __init__(self, config: DataConfig) -> None:
        """Raises UserError for a path or a configuration name that does not exist, or `repeats` that fit no files."""
        self.name = config.dataset
        self._config = config
        self._cache = config.cache()
        self._shares = {VALIDATION: config.validation_percent / 100, TEST: config.test_percent / 100}
        source = source_key(config)
        self._root = self._cache / "datasets" / source
        self.key = key_of(source, self._shares)
        self._splits: dict[str, Texts | list[bytes]] = {}
        self.times = file_times(config)
        """sft: how often the train split takes the examples of each file."""
        self.files: list[str] = []
        """sft, after `prepare`: the file of each document of the train split."""

    def prepare(self, progress: bool) -> None:
        """Builds the dataset and its splits where that is not done yet. Raises UserError saying what is missing."""
        builder, feature = prepared_builder(self._config, self._root, progress)
        own = {name: Texts(builder, name, feature) for name in SPLITS if name in builder.info.splits}
        if TRAIN not in own:
            raise UserError(f"dataset {self.name} has no train split; it has {', '.join(builder.info.splits)}")
        shares = {name: share for name, share in self._shares.items() if name not in own}
        self._splits = own | (self._cut_off(own[TRAIN], shares, progress) if shares else {})
        if self.times:
            self._repeat(self._splits[TRAIN], progress)

    def documents(self, split: str, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """(number, UTF-8 text) of a split's documents from number `start` on."""
        texts = self._splits[split]
        for number in range(start, len(texts)):
            text = texts[number]
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"dataset {self.name}, {split} document {number}: not UTF-8 at byte {error.start}"
                ) from None
            yield number, text

    def count(self, split: str) -> int:
        """Documents of a split."""
        return len(self._splits[split])

    def _cut_off(self, train: Texts, shares: dict[str, float], progress: bool) -> dict[str, Texts | list[bytes]]:
        if len(train) == 1 and not self._config.marked:  # a single example is not to be cut
            return cut_text(train[0], shares)
        path = self._cache / "splits" / f"{self.key}.npy"
        if not path.exists():
            texts = tqdm(train, "splitting", disable=not progress, unit=" documents", file=sys.stderr)
            try:
                choice = splitting.assign(*_measure(texts, grouped=train.bytes <= splitting.GROUPED_BYTES), shares)
            except ValueError as error:
                raise UserError(f"dataset {self.name}: {error}; add documents") from None
            with replacing(path) as unfinished, unfinished.open("wb") as file:
                np.save(file, choice)
        choice = np.load(path)
        return {name: train.only(choice == SPLITS.index(name)) for name in (TRAIN, *shares)}

    def _repeat(self, train: Texts, progress: bool) -> None:
        """Takes each train example as often as its file is to be taken."""
        names = tqdm(train.names(), "mixing", len(train), disable=not progress, unit=" documents", file=sys.stderr)
        files = [name.rpartition(":")[0] for name in names]  # of `file:line`
        order = spread(np.array([self.times[file] for file in files]))
        self._splits[TRAIN] = train.only(order)
        self.files = [files[number] for number in order]


class Texts:
    """The texts of a TFDS split, or of some of its documents."""

    def __init__(self, builder: tfds.core.DatasetBuilder, split: str, feature: str) -> None:
        self._directory = Path(builder.data_dir)
        try:
            self._source = builder.as_data_source(split)
        except (RuntimeError, FileNotFoundError) as error:
            raise _damaged(self._directory, error) from error
        self._feature = feature
        self._numbers = np.arange(len(self._source))
        self.bytes = builder.info.splits[split].num_bytes  # as stored, a little more than the texts alone

    def only(self, chosen: np.ndarray) -> Texts:
        """The documents `chosen`: those where it is true [documents], or those of its numbers, in their order."""
        copy = object.__new__(Texts)
        copy.__dict__ |= self.__dict__ | {"_numbers": self._numbers[chosen]}
        return copy

    def names(self) -> Iterator[str]:
        """The documents' names, which our builders keep beside the text."""
        return (self._read(number, "name").decode() for number in range(len(self)))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> bytes:
        return self._read(number, self._feature)

    def _read(self, number: int, feature: str) -> bytes:
        try:
            return self._source[int(self._numbers[number])][feature]
        except RuntimeError as error:  # ArrayRecord checks a hash of each record
            raise _damaged(self._directory, error) from error


def _damaged(directory: Path, error: Exception) -> UserError:
    return UserError(f"the dataset in {directory} is damaged ({first_line(error)}): delete it to have it made anew")


def _measure(texts: Iterable[bytes], grouped: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Digest, size and group of each document; without `grouped` a group is what has the same digest."""
    kept: list[bytes] = []
    measured = []
    for text in texts:
        measured.append((splitting.digest(text), len(text)))
        if grouped:
            kept.append(text)
    digests, sizes = np.array(measured, np.uint64).reshape(-1, 2).T
    groups = splitting.group(kept) if grouped else np.unique(digests, return_inverse=True)[1]
    return digests, sizes, groups


def cut_text(text: bytes, shares: dict[str, float]) -> dict[str, list[bytes]]:
    """Cuts one text in order into train, validation and test, each split a list of one document.

    A cut falls behind the last line end in the half share before it, or between two characters where there is none.
    """
    pieces, stop = {}, len(text)
    for name in (TEST, VALIDATION):
        if name in shares:
            length = int(shares[name] * len(text))
            start = text.rfind(b"\n", stop - length - length // 2, stop - length) + 1 or stop - length
            while start < stop and text[start] & 0xC0 == 0x80:  # the inside of a UTF-8 character
                start += 1
            pieces[name], stop = [text[start:stop]], start
    pieces[TRAIN] = [text[:stop]]
    if not all(piece for (piece,) in pieces.values()):
        raise UserError(f"the corpus is one text of {len(text)} bytes, too short to be cut into {len(pieces)} splits")
    return pieces
