"""What every measurement shares: ratios within rounds, the rate of copying, the machine's name, the text of a table."""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

MIB = 2**20
COPY_BYTES = {"cpu": 2**28, "gpu": 2**31, "tpu": 2**30}
"""The array that is copied: far beyond any processor's own caches."""


def ratio(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Median over rounds of the ratio of their median times."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def copy_timer() -> Callable[[], float]:
    """Returns a function that times copies of a large array and gives the bytes read and written per second."""
    size = COPY_BYTES[jax.default_backend()]
    source, target = (jnp.full((size // 4,), value, jnp.float32) for value in (1, 0))
    # The sum keeps JAX from returning the source itself; a donated target costs no page faults.
    copy = jax.jit(lambda target, source: source + 1, donate_argnums=0, keep_unused=True)

    def rate() -> float:
        nonlocal target
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            target = copy(target, source).block_until_ready()
            seconds.append(time.perf_counter() - start)
        return 2 * size / statistics.median(seconds)

    rate()  # compiles
    return rate


def machine() -> dict[str, str]:
    """The device and the versions that a report names."""
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def peak_rss_mib() -> float:
    """The most memory this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as lines of text, every column as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def factor(value: Any) -> str:
    """A ratio's cell; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}"


def positive(text: str) -> int:
    """A flag's whole number from 1 up."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)
