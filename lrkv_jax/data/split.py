"""Which documents are held out: by a hash of their text, near-duplicates always together.

A document's place is a number in [0, 1) read off a hash of its text: below the test share it is tested on, in the
share after that it is validated on, else it is trained on. The number depends on the text alone, so two copies of a
document fall on the same side, and a corpus that grows keeps its test documents.

Near-duplicates (the standard library's hundred and twenty look-alike codec files) would leak the test set into
training. Two documents are near-duplicates when they have in common a third of the shorter one's lines, and four lines
at least; near-duplicates of near-duplicates count too. Lines count once a document, white space squeezed, and only if
longer than 16 bytes (shorter ones are the language's, not the author's) and in 200 documents at most (others are
formulas, such as a licence). The group stands where its member with the smallest hash stands. A group that outweighs
what is to be held out is trained on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)

SHARED_FRACTION, SHARED_LINES = 1 / 3, 4
SHORT_LINE, COMMON_LINE = 16, 200
GROUPED_BYTES = 64 * 2**20  # of text; grouping keeps all lines in memory. Beyond it only identical texts keep together


def digest(text: bytes) -> int:
    """The document's 64-bit hash."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"lrkv-split").digest(), "big")


def long_lines(text: bytes) -> set[bytes]:
    """The lines that tell a document from others, white space squeezed."""
    return {line for raw in text.splitlines() if len(line := b" ".join(raw.split())) > SHORT_LINE}


def group(texts: Sequence[bytes]) -> np.ndarray:
    """Near-duplicates share a number: [documents] int64, the index of their group's first member."""
    lines = [long_lines(text) for text in texts]
    documents_with = Counter(line for of_one in lines for line in of_one)
    lines = [{line for line in of_one if documents_with[line] <= COMMON_LINE} for of_one in lines]
    parent = list(range(len(texts)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    earlier: dict[bytes, list[int]] = {}
    for index, of_one in enumerate(lines):
        shared = Counter(other for line in of_one for other in earlier.get(line, ()))
        for other, count in shared.items():
            if count >= max(SHARED_LINES, SHARED_FRACTION * min(len(of_one), len(lines[other]))):
                first, second = sorted((root(index), root(other)))
                parent[second] = first
        for line in of_one:
            earlier.setdefault(line, []).append(index)
    return np.array([root(node) for node in range(len(parent))], np.int64)


def assign(digests: np.ndarray, sizes: np.ndarray, groups: np.ndarray, shares: dict[str, float]) -> np.ndarray:
    """Each document's split: [documents] uint8, an index into SPLITS.

    `digests` [documents] uint64, `sizes` in bytes, `groups` as from `group`; `shares` maps the splits to cut off
    (validation, test or both) to their share of documents. Each gets one group at least, so more groups than
    held-out splits are needed (ValueError).
    """
    _, members = np.unique(groups, return_inverse=True)
    count = int(members.max()) + 1
    if count <= len(shares):
        raise ValueError(f"{count} distinct documents cannot fill {len(shares) + 1} splits")
    smallest = np.full(count, 2**64 - 1, np.uint64)
    np.minimum.at(smallest, members, digests)
    weight = np.bincount(members, weights=sizes)
    # A group's smallest hash is no longer uniform: hash it once more.
    place = np.array([digest(int(value).to_bytes(8, "big")) for value in smallest]) / 2.0**64
    place[weight > min(shares.values()) * weight.sum()] = 1.0
    order = np.lexsort((smallest, weight, place))
    choice = np.full(count, SPLITS.index(TRAIN), np.uint8)
    start, below = 0, 0.0
    for name in (TEST, VALIDATION):
        if name in shares:
            below += shares[name]
            stop = max(start + 1, int(np.searchsorted(place[order], below)))
            choice[order[start:stop]] = SPLITS.index(name)
            start = stop
    return choice[members]
