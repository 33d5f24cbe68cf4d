"""Writes a token store: shard by shard, each from a position in the corpus, so that a killed run goes on.

    <split>-00000.array_record   records
    <split>-00000.json           what is in it, and the position behind it; written after it
    <split>-00000.npy            held-out splits: [documents, 2] int64, ids and bytes of each document
    tokenizer.json
    manifest.json                written last: a directory without it is not a store yet

The train split is one stream, every document followed by the end token (and preceded by the begin token where that is
another), cut into records of M + 1 ids of which the last is the next record's first: as many labels as inputs, none
lost between records. What is left over at the end is dropped and counted. Held-out splits keep one record a document.

Examples for supervised fine-tuning stay whole. Their records are marked ids (marks.py): in the train split rows of
T + 1 into which examples are packed, in the others one example each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from tqdm import tqdm

from lrkv_jax import marks
from lrkv_jax.data.chat import Form
from lrkv_jax.data.corpus import Corpus
from lrkv_jax.data.files import replacing, write_atomically
from lrkv_jax.data.mixture import told
from lrkv_jax.data.split import SPLITS, TRAIN
from lrkv_jax.data.store import FORMAT, MANIFEST
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.settings import UserError

SHARD_TOKENS = 2**24  # about 32 MB of ids, and what a restart may have to do again
BATCH_BYTES = 2**20  # of text handed to the tokenizer's threads at once
PROBED = 16  # train documents on which a tokenizer is tried


COUNTED = ("documents", "tokens", "bytes", "records", "dropped")  # summed over the shards of a split


class Encoded(NamedTuple):
    """A document: its number in its split, its ids without begin and end, the bytes of its text.

    An example (chat.py): its marked ids, none where it is left out, the bytes of its answers, whether it is whole.
    """

    number: int
    ids: np.ndarray
    bytes: int
    whole: bool = True


def write_store(
    directory: Path, corpus: Corpus, tokenizer: Tokenizer, record_tokens: int, form: Form | None, progress: bool
) -> None:
    """Makes `directory` a complete store, keeping the shards that are already there.

    With a `form` documents are examples, and a record holds M + 1 marked ids of whole ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(".*"):  # half-written by a killed run
        left.unlink()
    _check_lossless(corpus, tokenizer)
    tokenizer.save(directory / "tokenizer.json")
    splits = {}
    for split in SPLITS:
        bar = tqdm(
            total=corpus.count(split),
            desc=f"tokenizing {split}",
            unit=" documents",
            disable=not progress,
            file=sys.stderr,
        )
        with bar:
            splits[split] = _write_split(directory, split, corpus, tokenizer, record_tokens, form, bar)
    if form is not None:
        _check_examples(splits, record_tokens)
    elif not splits[TRAIN]["records"]:
        raise UserError(
            f"the train split has {splits[TRAIN]['tokens']} tokens, fewer than one record of data.record_tokens = "
            f"{record_tokens} and its last label: add text or lower data.record_tokens"
        )
    content = {
        "format": FORMAT,
        "record_tokens": record_tokens,
        "begin_id": tokenizer.begin_id,
        "end_id": tokenizer.end_id,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "splits": splits,
        **({} if form is None else {"marked": True}),
    }
    manifest = {"fingerprint": fingerprint_of(content), "dataset": corpus.name} | content
    write_atomically(directory / MANIFEST, json.dumps(manifest, indent=1).encode())


def fingerprint_of(content: dict) -> str:
    """Hash of all a manifest says but the files' sizes, which are up to the ArrayRecord library, and the names of a
    mixture's files."""
    shards = {split: [shard["sha256"] for shard in totals["shards"]] for split, totals in content["splits"].items()}
    left_out = ("shards", "mixture")
    totals = {
        split: {k: v for k, v in totals.items() if k not in left_out} for split, totals in content["splits"].items()
    }
    text = json.dumps([content | {"splits": totals}, shards], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_split(
    directory: Path,
    split: str,
    corpus: Corpus,
    tokenizer: Tokenizer,
    record_tokens: int,
    form: Form | None,
    bar: tqdm,
) -> dict:
    """Writes the shards of a split that are missing; returns its totals and its shards, for the manifest."""
    shards: list[dict] = []
    position: list[int] | None = [0, 0]
    while position is not None:
        path = directory / f"{split}-{len(shards):05d}.array_record"
        shard = _finished(path)
        if shard is None:
            documents = watched(encode(corpus, tokenizer, split, position[0], form), bar)
            if form is not None:
                shard = _write_examples(path, documents, tokenizer.end_id, record_tokens + 1, corpus.files)
            elif split == TRAIN:
                shard = _write_stream(path, documents, position, tokenizer, record_tokens)
            else:
                shard = _write_documents(path, documents, position, tokenizer)
            write_atomically(path.with_suffix(".json"), json.dumps(shard).encode())
        shards.append(shard)
        position = shard["next"]
    totals = {
        name: sum(shard[name] for shard in shards) for name in (*COUNTED, *(() if form is None else ("long", "lost")))
    }
    if form is not None and split == TRAIN:
        totals["mixture"] = told(corpus.times, [shard["by_file"] for shard in shards])
    return totals | {
        "shards": [{name: shard[name] for name in ("file", "records", "size", "sha256")} for shard in shards]
    }


def _check_lossless(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuses a given tokenizer that loses text (case, rare characters): bits per byte would count bytes never seen."""
    for number, text in itertools.islice(corpus.documents(TRAIN), PROBED):
        if tokenizer.decode(tokenizer.encode(text.decode())) != text.decode():
            raise UserError(f"the tokenizer does not give the text back: train document {number} comes out otherwise")


def watched(documents: Iterator[Encoded], bar: tqdm) -> Iterator[Encoded]:
    """The same documents, the bar following."""
    for document in documents:
        bar.update(document.number + 1 - bar.n)
        yield document


def _finished(path: Path) -> dict | None:
    """What a finished shard's .json says, None where the shard is not finished or not as it says."""
    try:
        shard = json.loads(path.with_suffix(".json").read_text())
        whole = path.stat().st_size == shard["size"]
        return shard if whole and (path.name.startswith(TRAIN) or path.with_suffix(".npy").exists()) else None
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None


def encode(corpus: Corpus, tokenizer: Tokenizer, split: str, start: int, form: Form | None) -> Iterator[Encoded]:
    """The documents of a split from number `start` on, tokenized some at a time on all cores."""
    batch: list[tuple[int, bytes]] = []

    def encoded() -> Iterator[Encoded]:
        texts = [text.decode() for _, text in batch]
        if form is not None:
            found = [tuple(example) for example in form.encode(texts, training=split == TRAIN)]
        else:
            found = zip(tokenizer.encode_batch(texts), (len(text) for _, text in batch), strict=True)
        yield from (Encoded(number, *of_one) for (number, _), of_one in zip(batch, found, strict=True))
        batch.clear()

    size = 0
    for number, text in corpus.documents(split, start):
        batch.append((number, text))
        size += len(text)
        if size >= BATCH_BYTES:
            yield from encoded()
            size = 0
    yield from encoded()


def _write_stream(
    path: Path, documents: Iterator[Encoded], position: list[int], tokenizer: Tokenizer, record_tokens: int
) -> dict:
    """One shard of the train stream from `position` = (document, ids of it already stored)."""
    capacity = max(1, SHARD_TOKENS // record_tokens)
    before = [] if tokenizer.begin_id == tokenizer.end_id else [tokenizer.begin_id]
    skipped = position[1]
    started: list[tuple[int, Encoded]] = []  # where in this shard's stream each document begins
    pieces, length, last = [], -skipped, True
    for document in documents:
        started.append((length, document))
        pieces.append(np.concatenate([before, document.ids, [tokenizer.end_id]]).astype(tokenizer.dtype))
        length += pieces[-1].size
        if length > capacity * record_tokens:
            last = False
            break
    stream = np.concatenate([*pieces, np.zeros(0, tokenizer.dtype)])[skipped:]
    records = max(0, min(capacity, (length - 1) // record_tokens))
    stop = records * record_tokens
    shard = _write_records(path, [stream[at : at + record_tokens + 1] for at in range(0, stop, record_tokens)])
    inside = [document for start, document in started if start >= 0 and (last or start < stop)]
    behind = max(([document.number, stop - start] for start, document in started if start <= stop), default=None)
    return shard | {
        "documents": len(inside),
        "tokens": sum(document.ids.size + 1 for document in inside),
        "bytes": sum(document.bytes for document in inside),
        "dropped": max(0, length - 1 - stop) if last else 0,
        "next": None if last else behind,
    }


def _write_documents(path: Path, documents: Iterator[Encoded], position: list[int], tokenizer: Tokenizer) -> dict:
    """One shard of a held-out split, whole documents from number position[0] on."""
    payloads, index, length, last = [], [], 0, True
    for document in documents:
        payloads.append(document.ids.astype(tokenizer.dtype))
        index.append((document.ids.size, document.bytes))
        length += document.ids.size + 1
        if length >= SHARD_TOKENS:
            last = False
            break
    table = np.array(index, np.int64).reshape(-1, 2)
    _write_table(path, table)
    return _write_records(path, payloads) | {
        "documents": len(index),
        "tokens": length,
        "bytes": int(table[:, 1].sum()),
        "dropped": 0,
        "next": None if last else [position[0] + len(index), 0],
    }


def _write_examples(path: Path, documents: Iterator[Encoded], end_id: int, size: int, files: Sequence[str]) -> dict:
    """One shard of examples: packed into rows of `size` ids for training, one a record where they are held out.

    `files` are those of the train split's documents.
    """
    read, length, last = [], 0, True
    for document in documents:
        read.append(document)
        length += document.ids.size
        if length >= SHARD_TOKENS:
            last = False
            break
    kept = [document for document in read if document.ids.size]
    table = np.array([(marks.scored(document.ids), document.bytes) for document in kept], np.int64).reshape(-1, 2)
    rows = [document.ids for document in kept]
    by_file: dict[str, tuple[int, int]] = {}
    if path.name.startswith(TRAIN):
        rows = list(marks.pack(rows, size, end_id))
        for document, tokens in zip(kept, table[:, 0].tolist(), strict=True):
            file = files[document.number]
            examples, scored = by_file.get(file, (0, 0))
            by_file[file] = examples + 1, scored + tokens
    else:
        _write_table(path, table)
    return _write_records(path, rows) | {
        "documents": len(kept),
        "tokens": int(table[:, 0].sum()),
        "bytes": int(table[:, 1].sum()),
        "dropped": 0,
        "long": sum(not document.whole for document in read),
        "lost": len(read) - len(kept),
        "by_file": by_file,
        "next": None if last else [read[-1].number + 1, 0],
    }


def _check_examples(splits: dict[str, dict], context: int) -> None:
    """Refuses a split none of whose examples fits."""
    for split, totals in splits.items():
        if not totals["documents"]:
            raise UserError(
                f"the {split} split has no example of at most data.context + 1 = {context + 1} tokens among "
                f"{totals['lost']}: raise data.context{' or set data.too_long' if split == TRAIN else ''}"
            )


def _write_table(path: Path, table: np.ndarray) -> None:
    """Counts of each document of a held-out split, [documents, 2]."""
    with replacing(path.with_suffix(".npy")) as unfinished, unfinished.open("wb") as file:
        np.save(file, table)


def _write_records(path: Path, payloads: list[np.ndarray]) -> dict:
    """Writes little-endian ids, a record each, uncompressed and one a group: read at random, one at a time."""
    digest = hashlib.sha256()
    with replacing(path) as unfinished:
        writer = ArrayRecordWriter(str(unfinished), "group_size:1,uncompressed")
        for payload in payloads:
            content = payload.astype(payload.dtype.newbyteorder("<")).tobytes()
            digest.update(len(content).to_bytes(8, "little") + content)
            writer.write(content)
        writer.close()
        size = unfinished.stat().st_size
    return {"file": path.name, "records": len(payloads), "size": size, "sha256": digest.hexdigest()}
