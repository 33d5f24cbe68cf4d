"""Resident memory over thirty saves of one state: does a long run grow?

    python benchmarks/save_memory.py                writes benchmarks/results/save_memory.json

Expected: under 5 % more in the last ten saves than in the ten from the fourth on, each by its least, since a thread
that still frees its buffer shows as much as one that never will. About a minute and a half on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import psutil

from lrkv_jax.checkpoint import CheckpointConfig, Checkpointer

SAVES = 30


def measure(megabytes: int, folder: Path) -> dict:
    """Resident megabytes after each save is on disk, and the seconds that each took."""
    make = jax.jit(lambda seed: {"x": jax.random.normal(jax.random.key(seed), (megabytes, 2**18))})  # 1 MiB a row
    checkpoints = Checkpointer(folder, CheckpointConfig(keep=1))
    resident, seconds = [], []
    for step in range(1, SAVES + 1):
        start = time.perf_counter()
        checkpoints.save(step, make(step))
        checkpoints.wait()
        seconds.append(round(time.perf_counter() - start, 2))
        resident.append(psutil.Process().memory_info().rss >> 20)
    checkpoints.close()
    return {"resident_mb": resident, "seconds": seconds}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the state")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/save_memory.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.megabytes, Path(folder))
    early, late = (min(found["resident_mb"][part]) for part in (slice(3, 13), slice(-10, None)))
    growth = round(100 * (late / early - 1), 1)
    print(f"resident in the ten saves from the fourth on {early} MB, in the last ten {late} MB: {growth:+} %")
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "jax": jax.__version__}
    result = {"megabytes": options.megabytes, "growth_percent": growth, **found, **machine}
    options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
