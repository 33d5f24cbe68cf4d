"""A mixture of files: how often the train split takes the examples of each (`data.repeats`)."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

import numpy as np

from lrkv_jax.settings import UserError

PAIR = re.compile(r"(.+)=([1-9][0-9]{0,2})")  # copies are stored, so thousands of them can't be meant
SHOWN = 6  # files named in an error


def parse(pair: str) -> tuple[str, int]:
    """Pattern and count of PATTERN=COUNT. Raises ValueError for anything else."""
    match = PAIR.fullmatch(pair)
    if not match:
        raise ValueError(f"repeats = {pair!r}: must be PATTERN=COUNT with COUNT a whole number from 1 to 999")
    return match[1], int(match[2])


def times_of(repeats: Sequence[str], names: Sequence[str], path: str) -> dict[str, int]:
    """How often each of the files is taken, once where no pattern matches.

    `names` are relative to `path`, which only errors name. Raises UserError for a pattern that matches no file, and for
    two that match the same.
    """
    matched: dict[str, str] = {}
    for pair in repeats:
        found = [name for name in names if fnmatch.fnmatchcase(name, parse(pair)[0])]
        if not found:
            more = ", ..." if len(names) > SHOWN else ""
            raise UserError(
                f"data.repeats = {pair!r}: matches no file; data.path = {path} has {', '.join(names[:SHOWN])}{more}"
            )
        for name in found:
            if name in matched:
                raise UserError(
                    f"data.repeats = {pair!r}: {name} matches {matched[name]!r} too; each file must match one pattern "
                    f"at most"
                )
            matched[name] = pair
    return {name: parse(matched[name])[1] if name in matched else 1 for name in names}


def spread(times: np.ndarray) -> np.ndarray:
    """An order in which document i comes times[i] times, [sum of times] numbers.

    Copies lie evenly apart, so that in a store of several shards they are packed with different neighbours. Where all
    come once the order is 0, 1, 2, ...
    """
    numbers = np.repeat(np.arange(times.size), times)
    copies = np.arange(numbers.size) - np.repeat(np.cumsum(times) - times, times)
    places = (numbers / times.size + copies / times[numbers]) % 1.0
    return numbers[np.argsort(places, kind="stable")]


def told(times: Mapping[str, int], shards: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, dict[str, int]]:
    """Of each file its `examples` in the train split, those left out for their length aside, their scored `tokens`, its
    `repeats`, and the products `examples_taken` and `tokens_taken`, which `shards` have by file."""
    found = {}
    for file, repeats in times.items():
        examples, tokens = (sum(shard[file][i] for shard in shards if file in shard) for i in (0, 1))
        found[file] = {
            "examples": examples // repeats,
            "tokens": tokens // repeats,
            "repeats": repeats,
            "examples_taken": examples,
            "tokens_taken": tokens,
        }
    return found
