"""Ids that say what the loss needs: whether a token is scored, and whether a document begins with it.

In supervised fine-tuning neither can be told from the ids: a prompt's tokens look like an answer's, and a chat's turns
end with the token that may also begin a document. So both are decided when the store is written, and ride in two high
bits of the id (no vocabulary comes near them), through store, loader and batch to the step, which takes them off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SCORED, BEGINS = 1 << 30, 1 << 29
IDS = BEGINS - 1


def mark(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """One document as marked ids [n] uint32; `labels[i]` says whether token i is scored where it is the label."""
    marked = ids.astype(np.uint32) | np.where(labels, SCORED, 0).astype(np.uint32)
    marked[:1] |= BEGINS
    return marked


def scored(marked: np.ndarray) -> int:
    """How many of a document's ids are scored."""
    return int(np.count_nonzero(marked & SCORED))


def pairs(marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of marked ids [..., n] the tokens before those scored, and these, [scored] each."""
    hits = marked[..., 1:] & SCORED != 0
    return marked[..., :-1][hits] & IDS, marked[..., 1:][hits] & IDS


def pack(documents: Sequence[np.ndarray], size: int, fill: int) -> np.ndarray:
    """Whole documents in rows of `size` ids, [rows, size] uint32; what is left of a row is `fill`, and not scored.

    Longest first, each into the row with the least room that it fits (best fit decreasing), so that the same documents
    give the same rows. No document may be longer than a row.
    """
    rows: list[list[np.ndarray]] = []
    with_room: dict[int, list[int]] = {}  # rows by the room that is left in them
    rooms = 0  # bit r is set where a row has room r
    for document in sorted(documents, key=len, reverse=True):
        fitting = rooms >> len(document)
        if fitting:
            room = len(document) + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            rooms &= ~(0 if with_room[room] else 1 << room)
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(document)
        left = room - len(document)
        with_room.setdefault(left, []).append(row)
        rooms |= 1 << left
    packed = np.full((len(rows), size), fill, np.uint32)
    for target, row in zip(packed, rows, strict=True):
        line = np.concatenate(row)
        target[: line.size] = line
        target[line.size : line.size + 1] |= BEGINS  # what fills up is a document of its own
    return packed
