"""The token store, read: training batches by step, evaluation windows, counts, and who it is (fingerprint)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource

from lrkv_jax.data.config import DataConfig
from lrkv_jax.data.loader import Batches
from lrkv_jax.data.split import TRAIN
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.data.windows import ExampleWindows, Windows
from lrkv_jax.settings import UserError

FORMAT = 1
MANIFEST = "manifest.json"


class Counts(NamedTuple):
    """Sizes of a split."""

    documents: int
    tokens: int
    """What is predicted: ids and end tokens, not begin tokens."""
    bytes: int
    """Of the raw UTF-8 text."""


class Store:
    """A complete token store. Reading it raises UserError, naming the directory, where a file is damaged."""

    marked: bool = False
    """Whether records hold examples for supervised fine-tuning: marked ids, a record a row of T + 1 (marks.py)."""

    def __init__(self, directory: Path, config: DataConfig) -> None:
        """Checks each file against the manifest. Raises UserError naming the directory where one does not fit."""
        self.directory = directory
        self.context = config.context
        self._manifest = _manifest(directory)
        self.fingerprint: str = self._manifest["fingerprint"]
        """Identifies text, splits, tokenizer and record length; neither paths nor machine enter it."""
        self.record_tokens: int = self._manifest["record_tokens"]
        self.marked = self._manifest.get("marked", False)
        self.tokenizer = Tokenizer.load(directory / "tokenizer.json", config.begin_token, config.end_token)
        if self.tokenizer.sha256 != self._manifest["tokenizer_sha256"]:
            raise damaged(directory, "tokenizer.json is not the one it was made with")
        self._sources = {split: self._source(totals["shards"]) for split, totals in self._manifest["splits"].items()}

    def counts(self, split: str) -> Counts:
        """Documents, tokens and bytes of a split."""
        totals = self._manifest["splits"][split]
        return Counts(totals["documents"], totals["tokens"], totals["bytes"])

    @property
    def note(self) -> str:
        """What became of examples longer than the context; empty where there were none."""
        told = []
        for split, totals in self._manifest["splits"].items():
            if totals.get("long"):
                cut, lost = totals["long"] - totals["lost"], totals["lost"]
                shares = [f"{count:,} {what}" for count, what in ((cut, "cut"), (lost, "left out")) if count]
                told.append(f"{' and '.join(shares)} of {totals['documents'] + lost:,} in {split}")
        return f"examples longer than data.context = {self.context}: {', '.join(told)}" if told else ""

    @property
    def mixture(self) -> dict[str, dict[str, int]]:
        """sft: of each file, what the train split has of it (mixture.py's `told`); else empty."""
        return self._manifest["splits"][TRAIN].get("mixture", {})

    @property
    def dropped_tokens(self) -> int:
        """Train tokens behind the last full record, which no batch holds."""
        return self._manifest["splits"][TRAIN]["dropped"]

    @property
    def records(self) -> int:
        """Records of the train stream."""
        return len(self._sources[TRAIN])

    def record(self, number: int) -> np.ndarray:
        """Ids of record `number` of the train stream: [M + 1], the last of them the first of the next record."""
        return self._read(TRAIN, number)

    def batches(self, batch_size: int, seed: int) -> Batches:
        """Training batches of `batch_size` sequences (global), shuffled by `seed`, anew each epoch."""
        return Batches(self.record, self.records, self.record_tokens, self.context, batch_size, seed)

    def windows(self, split: str) -> Windows:
        """A held-out split for evaluation. Raises UserError for `train`, of which only the stream is kept."""
        if split == TRAIN or split not in self._sources:
            held_out = " or ".join(name for name in self._sources if name != TRAIN)
            raise UserError(f"split {split!r} cannot be scored by document; take {held_out}")
        files = [self.directory / shard["file"] for shard in self._manifest["splits"][split]["shards"]]
        table = np.concatenate([np.load(file.with_suffix(".npy")) for file in files])
        columns = (lambda number: self._read(split, number)), table[:, 0], table[:, 1], self.context
        if self.marked:
            return ExampleWindows(*columns, self.tokenizer.end_id)
        return Windows(*columns, self.tokenizer.begin_id, self.tokenizer.end_id)

    def _source(self, shards: list[dict]) -> ArrayRecordDataSource:
        files = []
        for shard in shards:
            file = self.directory / shard["file"]
            if not file.exists():
                raise damaged(self.directory, f"{shard['file']} is missing")
            if (size := file.stat().st_size) != shard["size"]:
                raise damaged(self.directory, f"{shard['file']} has {size} bytes instead of {shard['size']}")
            if not shard["file"].startswith(TRAIN) and not file.with_suffix(".npy").exists():
                raise damaged(self.directory, f"{file.with_suffix('.npy').name} is missing")
            files.append(str(file))
        try:
            source = ArrayRecordDataSource(files)
        except RuntimeError as error:
            raise damaged(self.directory, str(error)) from error
        if len(source) != (expected := sum(shard["records"] for shard in shards)):
            raise damaged(self.directory, f"{len(source)} records instead of {expected} in {shards[0]['file']} ...")
        return source

    def _read(self, split: str, number: int) -> np.ndarray:
        try:
            content = self._sources[split][number]
        except RuntimeError as error:  # ArrayRecord checks a hash of each record
            raise damaged(self.directory, f"{split} record {number}: {error}") from error
        dtype = np.dtype(np.uint32) if self.marked else self.tokenizer.dtype
        return np.frombuffer(content, dtype.newbyteorder("<")).astype(np.int32)


def damaged(directory: Path, what: str) -> UserError:
    """The error for a store that is not as its manifest says."""
    return UserError(
        f"the token store {directory} is damaged: {what}. Delete it; python -m lrkv_jax.prepare makes it anew"
    )


def _manifest(directory: Path) -> dict:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        raise UserError(
            f"the token store {directory} is half-written (no {MANIFEST}): python -m lrkv_jax.prepare completes it"
        ) from None
    except (OSError, ValueError) as error:
        raise damaged(directory, f"{MANIFEST}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise damaged(directory, f"{MANIFEST} is not of format {FORMAT}")
    return manifest
