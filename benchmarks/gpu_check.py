"""What benchmarks/gpu_check.sh runs: every part in a process of its own with a time budget, one table at the end.

A part writes a row as soon as it has one. If it runs out of time or dies, its rows stand and one more says so; the
exit status is 1 if any row failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 460
"""For everything; with unpacking and starting, under 8 minutes."""
LARGEST = {"float32": 1e-5, "bfloat16": 0.008}
"""Error against the largest sum; tests/test_kernel_gpu.py holds interpreted kernels to these or less."""
FAMILIES = ("mha", "lrkv", "lrkv_shared", "mla", "gqa", "mqa")
CONFIG = ROOT / "configs/lrkv_2_5b.py"
LENGTHS = (32768, 8192, 131072)


@dataclasses.dataclass
class Row:
    """A line of the table."""

    part: str
    what: str
    result: str
    failed: bool = False
    data: Any = None
    """For the JSON."""


def attempt(part: str, what: str, measure: Callable[..., Row], *arguments: Any) -> Row:
    """The row, or one that tells how it failed: nothing that one row meets may end the others."""
    try:
        return measure(what, *arguments)
    except Exception as error:
        return Row(part, what, f"{type(error).__name__}: {last_line(str(error))}", failed=True)


def last_line(text: str) -> str:
    """The last line that says something, cut to a table's width."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-160:] if lines else "nothing said"


def numerics(smoke: bool) -> Iterator[Row]:
    """Every kernel case, and the paper's shapes, against the formula in float64 NumPy."""
    sys.path.insert(0, str(ROOT / "tests"))
    import jax
    from kernel_cases import cases
    from test_kernel_gpu import LARGE, LOWERED

    from lrkv_jax.attention.kernels import blocked, gpu

    small = [param.values[0] for param in cases()]
    kernel = jax.jit(functools.partial(gpu.attend, interpret=smoke), static_argnames="scale")
    twin = jax.jit(blocked.attend, static_argnames="scale")
    if smoke:
        todo = [("pallas_gpu", kernel, small[-3:-2], dtype) for dtype in LARGEST]
    else:
        todo = [("pallas_gpu", kernel, some, dtype) for some in (LOWERED, small) for dtype in ("bfloat16", "float32")]
        todo += [("blocked", twin, LOWERED[:4], dtype) for dtype in LARGEST] + [
            ("pallas_gpu", kernel, LARGE, "float32")
        ]
    for name, run, some, dtype in todo:
        for case in some:
            yield attempt("numerics", f"{name} {case.name} {dtype}", compare, run, case, dtype, 32 if smoke else 128)


def compare(what: str, run: Callable, case: Any, dtype: str, block: int) -> Row:
    """Largest error against the largest sum, of 3 rows and as many blocks."""
    import jax
    import numpy as np
    from kernel_cases import oracle

    queries, blocks, lengths = case.build(dtype, batch=3, blocks=3, block=block)
    got = jax.device_get(run(queries, blocks, lengths, scale=case.scale))
    wanted = oracle(queries, blocks, lengths, case.scale)
    error = max(
        float(np.abs(getattr(got, name) - want).max() / np.abs(want).max())
        for name, want in wanted.items()
        if want is not None
    )
    failed = not error <= LARGEST[dtype]  # NaN fails
    return Row("numerics", what, f"largest error {error:.1e} of at most {LARGEST[dtype]:.0e}", failed, error)


def decode(smoke: bool, implementation: str) -> Iterator[Row]:
    """One layer's attention step at the 2.5B shape, batch 8, bfloat16: the families in turn, length by length."""
    from lrkv_jax import bench_decode, bench_shapes

    if smoke:
        configs = {name: bench_shapes.standard(name, **SMOKE_SHAPE) for name in ("mha", "lrkv")}
        width, lengths, batch, rounds = 64, (64,), 2, 1
    else:
        configs, width = bench_shapes.of_file(str(CONFIG), list(FAMILIES))
        lengths, batch, rounds = LENGTHS, 8, 3
    for length in lengths:
        rest = (width, [length], batch, "bfloat16", implementation, rounds)
        yield from together(
            "decode", bench_decode.measure, configs, rest, functools.partial(decode_row, implementation)
        )


SMOKE_SHAPE = {"heads": 2, "head_dim": 16, "kv_heads": 1, "latent": 16, "rank": 6}


def together(part: str, measure: Callable, configs: dict[str, Any], rest: tuple, row: Callable) -> Iterator[Row]:
    """Rows of a report over all configs, which are compared within it; where that fails, of one config at a time."""

    def report(configs: dict[str, Any]) -> list[Row]:
        found = measure(configs, *rest)
        return [row(name, figures, found) for name, figures in found["rows"].items()]

    try:
        yield from report(configs)
    except Exception as error:
        print(f"{part}, together: {last_line(str(error))}; one by one now", file=sys.stderr)
        for name, config in configs.items():
            yield attempt(part, f"{name} {rest}", lambda _, name, config: report({name: config})[0], name, config)


def decode_row(implementation: str, key: str, row: dict[str, Any], report: dict[str, Any]) -> Row:
    """A row of bench_decode's report."""
    against = "" if row["of_mha"] is None else f", {row['of_mha']:.3f} x MHA"
    result = (
        f"{row['step_ms']:.3f} ms, {row['bytes_read'] / 1e6:,.0f} MB read at {row['of_copy']:.2f} "
        f"of {report['copy_bytes_per_s'] / 1e12:.2f} TB/s{against}"
    )
    return Row("decode", f"{implementation} {key}", result, data=row)


def train(smoke: bool) -> Iterator[Row]:
    """Training steps of configs/lrkv_128m.py, LRKV and MHA in turn."""
    from lrkv_jax import bench
    from lrkv_jax.config import load_configs

    file = ROOT / ("configs/debug.py" if smoke else "configs/lrkv_128m.py")
    configs = {name: load_configs(f"{file}:{name}")[1] for name in ("lrkv", "mha")}
    yield from together("train", bench.measure, configs, (1, 1) if smoke else (3, 5), train_row)


def train_row(name: str, row: dict[str, Any], report: dict[str, Any]) -> Row:
    """A row of bench's report."""
    against = "" if row["step_of_mha"] is None else f", {row['step_of_mha']:.3f} x MHA"
    result = (
        f"{row['step_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s, {row['flops'] / 1e12:.2f} TFLOP/s, "
        f"{row['flops_of_product']:.2f} of a square product{against}"
    )
    return Row("train", f"{report['layers']} layers {name}", result, data=row)


# Tile, warps, stages, splits (None: the plan's own): what to compare with the plan that kernels/gpu.py makes.
PLANS: dict[str, list[tuple[int, int, int, int | None]]] = {
    "full": [(128, 8, 3, None), (64, 8, 4, None), (64, 4, 3, None), (128, 8, 4, 33), (128, 8, 4, 132)],
    "shared": [(128, 8, 4, None), (64, 4, 3, None), (64, 8, 4, None), (64, 4, 4, 33)],
    "mla": [(32, 8, 3, None), (64, 8, 2, None), (32, 8, 4, 33)],
    "mha": [(128, 8, 3, None), (64, 4, 4, None), (64, 4, 3, 8), (64, 4, 3, 16)],
}


def plans(smoke: bool) -> Iterator[Row]:
    """Ways to cut the kernel's work at 32K tokens, against the one that is used."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_kernel_gpu import LOWERED

    from lrkv_jax.attention.kernels import gpu

    for case in [case for case in LOWERED if case.name in PLANS][: 1 if smoke else None]:
        if smoke:
            case = dataclasses.replace(case, groups=2)
        queries, blocks, lengths = filled(case, 2 if smoke else 8, 1 if smoke else 256, 128)
        own = gpu.make_plan(queries, blocks)
        others = [
            own._replace(tile=tile, warps=warps, stages=stages, splits=splits or own.splits)
            for tile, warps, stages, splits in PLANS[case.name]
        ]
        for plan in [own, *others][: 2 if smoke else None]:
            cut = f"tile {plan.tile} warps {plan.warps} stages {plan.stages} splits {plan.splits}"
            what = f"{case.name} {cut}{' (used)' if plan == own else ''}"
            yield attempt("plans", what, timed, queries, blocks, lengths, plan, smoke)


def filled(case: Any, batch: int, blocks: int, block: int) -> tuple[Any, Any, Any]:
    """A case in bfloat16 whose blocks are all the same, every position seen."""
    import jax
    import jax.numpy as jnp

    queries, cached, _ = case.build(jnp.bfloat16, batch=batch, blocks=1, block=block)
    cached = jax.tree.map(lambda a: jnp.tile(a, (blocks, *[1] * (a.ndim - 1))), cached)
    return queries, cached, jnp.full((batch, 1), blocks * block, jnp.int32)


def timed(what: str, queries: Any, blocks: Any, lengths: Any, plan: Any, smoke: bool) -> Row:
    """The kernel's time in a chain of calls, each waiting for the one before."""
    import jax
    import jax.numpy as jnp

    from lrkv_jax.attention.kernels import gpu

    calls = 2 if smoke else 30

    def chain(queries: Any, blocks: Any, lengths: Any) -> Any:
        def call(_: Any, queries: Any) -> Any:
            sums = gpu.attend(queries, blocks, lengths, scale=0.1, interpret=smoke, plan=plan)
            nudge = 1e-6 * jnp.mean(jax.tree.leaves(sums)[0])
            return jax.tree.map(lambda a: a + nudge.astype(a.dtype), queries)

        return jax.lax.fori_loop(0, calls, call, queries)

    run = jax.jit(chain)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(queries, blocks, lengths))
        seconds.append((time.perf_counter() - start) / calls)
    seconds = min(seconds[2:])  # the first compiles, and now and then the second does too
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(blocks))
    return Row("plans", what, f"{1e3 * seconds:.3f} ms, {size / seconds / 1e12:.2f} TB/s", data=1e3 * seconds)


PARTS: dict[str, tuple[Callable[[bool], Iterator[Row]], int]] = {
    "numerics": (numerics, 150),
    "decode pallas_gpu": (lambda smoke: decode(smoke, "blocked" if smoke else "pallas_gpu"), 130),
    "train": (train, 90),
    "decode blocked": (lambda smoke: decode(smoke, "blocked"), 90),
    "plans": (plans, 60),
}
"""What runs, in this order, and its seconds at most; the kernels come before what they are compared with."""


def run_part(name: str, seconds: float, smoke: bool) -> list[Row]:
    """A part's rows, from a process of its own that is stopped when its time is up."""
    with tempfile.TemporaryDirectory() as directory:
        rows, errors = Path(directory, "rows"), Path(directory, "errors")
        command = [sys.executable, __file__, "--part", name, "--rows", str(rows), *(["--smoke"] if smoke else [])]
        with errors.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
            try:
                status = process.wait(timeout=max(seconds, 1))
                ended = None if status == 0 else f"exit status {status}: {last_line(errors.read_text())}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended = f"out of time after {seconds:.0f} s"
        lines = rows.read_text().splitlines() if rows.exists() else []
        found = [Row(**json.loads(line)) for line in lines if line.endswith("}")]  # a killed part may leave half a line
    return found if ended is None else [*found, Row(name, "-", ended, failed=True)]


def child(name: str, rows: Path, smoke: bool) -> None:
    """Runs one part here, appending its rows."""
    sys.path.insert(0, str(ROOT))
    with rows.open("a") as file:
        for row in PARTS[name][0](smoke):
            print(json.dumps(dataclasses.asdict(row)), file=file, flush=True)


def table(rows: list[Row]) -> str:
    """The rows as text."""
    cells = [(row.part, row.what, "FAILED" if row.failed else "", row.result) for row in rows]
    widths = [max(len(cell[i]) for cell in cells) for i in range(3)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(cell, widths, strict=False)), cell[3]]) for cell in cells)


def main() -> int:
    """Runs all parts, writes the JSON, prints the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, kernels interpreted: tries this script")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        child(options.part, options.rows, options.smoke)
        return 0
    start, rows, spent = time.perf_counter(), [], {}
    for name, (_, budget) in PARTS.items():
        begun = time.perf_counter()
        rows += run_part(name, min(budget, SECONDS - (begun - start)), options.smoke)
        spent[name] = time.perf_counter() - begun
        print(f"{name}: {spent[name]:.0f} s", file=sys.stderr)
    about = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout if not options.smoke else ""
    directory = Path(os.environ.get("OUT") or ROOT / "benchmarks/results")
    report = {"gpu": about.strip(), "seconds": spent, "rows": [dataclasses.asdict(row) for row in rows]}
    file = directory / ("gpu_check_smoke.json" if options.smoke else "gpu_check.json")
    file.write_text(json.dumps(report, indent=1) + "\n")
    failed = sum(row.failed for row in rows)
    print(table(rows))
    print(f"{about.strip() or 'smoke'}; {sum(spent.values()):.0f} s; {failed} of {len(rows)} rows failed; {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
