"""Reading the compressed cache as it lies against expanding it block by block, for n queries a row.

    python benchmarks/absorb_or_expand.py [--length 8192] [--batch 4] [--dtype float32] [--rounds 8] [--json FILE]

at the standard shape of `bench decode`; attention alone, without projections. A family's `absorbed_queries` is the
largest n at which absorbing is the faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1]))
from lrkv_jax import bench_decode, bench_shapes
from lrkv_jax.attention import kernels
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.timing import aligned, machine, positive, ratio

QUERIES = (1, 2, 4, 6, 8, 16, 64, 128)


class Reader:
    """Both ways of one family and n, compiled, on a cache that is made for each turn."""

    def __init__(self, stepper: bench_decode.Stepper, n: int):
        self.stepper = stepper
        batch, length = stepper.batch, stepper.length
        positions = jnp.broadcast_to(jnp.arange(length - n, length, dtype=jnp.int32), (batch, n))
        x = jax.random.normal(jax.random.key(1), (batch, n, stepper.width), stepper.dtype)

        def attend(way: str, stored, weights, tables):
            module = nnx.merge(stepper.graph, weights)
            q = module.query(x, positions)
            if way == "expanded":
                return module._attend_expanded(q, stored, stepper.key_positions(), positions + 1)
            queries, blocks = module.read(q, stored, tables)
            return module.release(
                kernels.attend(queries, blocks, positions + 1, scale=module.scale, implementation="blocked")
            )

        self.ways = {way: jax.jit(functools.partial(attend, way)) for way in ("absorbed", "expanded")}

    def turn(self) -> dict[str, list[float]]:
        """Seconds of two calls each, after one that isn't timed."""
        stored, seconds = jax.block_until_ready(self.stepper.fill()), {}
        for way, attend in self.ways.items():
            seconds[way] = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(attend(stored, *self.stepper.others[1:]))
                seconds[way].append(time.perf_counter() - start)
            seconds[way].pop(0)
        return seconds


def measure(length: int, batch: int, dtype: str, rounds: int) -> dict:
    """The report: for each family and n the median milliseconds of both ways and the median ratio within rounds."""
    shape = {name: value for name, value in bench_shapes.STANDARD.items() if name != "width"}
    readers = {}
    for name in bench_shapes.FAMILIES:
        config = bench_shapes.standard(name, **shape)
        stepper = bench_decode.Stepper(config, bench_shapes.STANDARD["width"], length, batch, dtype, "blocked")
        readers |= {(name, n): Reader(stepper, n) for n in QUERIES}
    turns = {key: [] for key in readers}
    for _ in range(rounds):
        for key, reader in readers.items():
            turns[key].append(reader.turn())
    rows = [
        {"family": name, "queries": n}
        | {
            f"{way}_ms": 1e3 * statistics.median(statistics.median(t[way]) for t in turns[name, n])
            for way in turns[name, n][0]
        }
        | {
            "absorbed_of_expanded": ratio(
                [t["absorbed"] for t in turns[name, n]], [t["expanded"] for t in turns[name, n]]
            )
        }
        for name, n in readers
    ]
    return machine() | {"length": length, "batch": batch, "dtype": dtype, "rounds": rounds, "rows": rows}


def table(report: dict) -> str:
    """The report as text."""
    lines = [("family", "queries", "absorbed ms", "expanded ms", "absorbed / expanded")]
    for row in report["rows"]:
        numbers = (f"{row[name]:.2f}" for name in ("absorbed_ms", "expanded_ms", "absorbed_of_expanded"))
        lines.append((row["family"], str(row["queries"]), *numbers))
    return "\n".join(aligned(lines))


@command
def main() -> None:
    """Entry point."""
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=positive, default=8192, help="tokens in the cache (default 8192)")
    parser.add_argument("--batch", type=positive, default=4, help="rows (default 4)")
    parser.add_argument("--dtype", choices=bench_shapes.DTYPES, default="float32")
    parser.add_argument("--rounds", type=positive, default=8, help="turns of each (default 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    options = parser.parse_args()
    if options.length < max(QUERIES):
        raise UserError(f"--length {options.length}: must be at least {max(QUERIES)}, the most queries that are timed")
    report = measure(options.length, options.batch, options.dtype, options.rounds)
    print(table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
