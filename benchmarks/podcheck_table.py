"""docs/podcheck.md: every scale of the paper on four topologies, by podcheck.

    python benchmarks/podcheck_table.py run             compiles what benchmarks/results/podcheck/ lacks (hours of CPU)
    python benchmarks/podcheck_table.py                 writes docs/podcheck.md again from what is there

One plan a cell, the best by estimate that the compiler finds to fit; podcheck without --most compares four.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "podcheck"
SCALES = ("lrkv_128m", "lrkv_512m_8k", "lrkv_1_2b", "lrkv_2_5b", "lrkv_6_3b")
TOPOLOGIES = ("v5e:16x16", "v5p:4x4x4", "v5e:4x4", "v6e:16x16")
FAMILIES = ("lrkv", "mha")
DECODES = {"lrkv_2_5b": 16, "lrkv_6_3b": 8}
"""Rows of 32,768 slots whose cache fits beside the weights on sixteen chips of 16 GiB, in every family."""
GIB = 2**30
INTRODUCTION = """\
# What podcheck says of the paper's scales

Written by `python benchmarks/podcheck_table.py` from `benchmarks/results/podcheck/`. Every row is the real training
step, compiled for the topology with libtpu on a machine without a TPU; nothing here was run. Numbers are one device's.
The batch is the paper's, 32,768 tokens, which is little for 256 chips: 128 tokens each, while the work of Muon does not
shrink with the batch. A larger `train.batch_size` raises the bounds.

A bound is the largest of three times, as if they overlapped wholly: the compiled program's products over the chip's
peak, bytes that its operations read and write over HBM bandwidth, bytes that a device sends over all its links. MFU
counts the model's FLOPs, without recomputation and without Muon's, and by custom all T² scores, half of which attention
kernels skip: at 8,192 tokens its bound can pass 100 %. Rates and their sources: `lrkv_jax/chips.py`.

The training rows but those of v5e:4x4 from 512M on, of 128M on v5e:16x16, and of LRKV 128M on v6e:16x16, were compiled
just before two changes to the step (the loss cuts its chunks by device; the embedding is gathered before it is looked
up). The two of 128M compiled on both sides kept their bound and MFU within 0.5 %, their peak memory within 1 %, and
lost a fifth of their compute time.
"""


def cells() -> list[tuple[str, list[str]]]:
    """(name of the result, podcheck's arguments), what matters most first."""
    found = []
    for topology in TOPOLOGIES:
        for scale in SCALES:
            for family in FAMILIES:
                args = ["--config", f"configs/{scale}.py:{family}", "--topology", topology, "--most", "1"]
                found.append((f"{scale}-{family}-{topology.replace(':', '-')}", args))
    for scale, rows in DECODES.items():
        for family in (*FAMILIES, "mla"):
            args = ["--config", f"configs/{scale}.py:{family}", "--topology", "v5e:4x4", "--most", "1"]
            args += ["--decode", "--length", "32768", "--batch", str(rows)]
            found.append((f"decode-{scale}-{family}-v5e-4x4", args))
    return found


def run() -> None:
    """Runs podcheck for every cell that has no result yet, one after another."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, args in cells():
        path, scratch = RESULTS / f"{name}.json", RESULTS / f".{name}.json"
        if path.exists():
            continue
        command = [sys.executable, "-m", "lrkv_jax.podcheck", *args, "--json", str(scratch)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
        print(f"{name}: exit status {done.returncode}", flush=True)
        if done.returncode in (0, 1):
            scratch.replace(path)


def results(topology: str, *, decode: bool) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """(config, report) of a table's cells, in their order; None where podcheck hasn't been run, or was cut off."""
    for name, args in cells():
        if args[3] == topology and ("--decode" in args) == decode:
            path = RESULTS / f"{name}.json"
            text = path.read_text() if path.exists() else ""
            label = args[1].removeprefix("configs/").replace(".py:", " ")
            yield label, json.loads(text) if text else None


def mesh(row: dict[str, Any]) -> str:
    """Its axes of more than one device."""
    return " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1) or "one device"


def train_lines(topology: str) -> list[str]:
    """A topology's table."""
    lines = [
        "| | mesh | remat | peak, GiB | of HBM | compute, HBM, ICI, ms | bound, ms | MFU <= |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, report in results(topology, decode=False):
        if report is None:
            lines.append(f"| {name} | not compiled yet | | | | | | |")
            continue
        row = report["plans"][0]
        cells = [name, mesh(row), row["remat"]]
        if row["fits"]:
            times = ", ".join(f"{1e3 * second:.0f}" for second in row["seconds"].values())
            cells += [f"{row['peak_bytes'] / GIB:.1f}", f"{100 * row['peak_bytes'] / row['hbm_bytes']:.0f} %", times]
            cells += [f"{1e3 * row['step_seconds']:.0f} ({row['bound_by']})", f"{100 * row['mfu_bound']:.0f} %"]
        else:
            cells += ["-" if not row["peak_bytes"] else f"{row['peak_bytes'] / GIB:.1f}", "does not fit", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def decode_lines() -> list[str]:
    """The decode step's table."""
    lines = [
        "| | rows | mesh | weights, GiB | cache, GiB | peak, GiB | of HBM | read once, ms | bound, ms | tokens/s <= |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, report in results("v5e:4x4", decode=True):
        if report is None:
            lines.append(f"| {name} | | not compiled yet | | | | | | | |")
            continue
        row = report["plans"][0]
        cells = [
            name,
            str(report["batch"]),
            mesh(row),
            *(f"{row[part] / GIB:.2f}" for part in ("weight_bytes", "cache_bytes")),
        ]
        peak = row["peak_bytes"]
        cells += ["-", "-"] if not peak else [f"{peak / GIB:.1f}", f"{100 * peak / row['hbm_bytes']:.0f} %"]
        if row["fits"]:
            cells += [f"{1e3 * row[name]:.1f}" for name in ("least_seconds", "step_seconds")]
            cells += [f"{row['tokens_per_second']:,.0f}"]
        else:
            cells += ["-", "does not fit", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def document() -> str:
    """docs/podcheck.md."""
    parts = [INTRODUCTION]
    for topology in TOPOLOGIES:
        parts.append(f"## Training on {topology}\n\n" + "\n".join(train_lines(topology)) + "\n")
    title = "## Decoding on v5e:4x4 at 32,768 slots\n\n"
    title += "`read once`: weights and cache; `bound`: all that the compiled program's operations touch.\n\n"
    parts.append(title + "\n".join(decode_lines()) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run()
    (ROOT / "docs" / "podcheck.md").write_text(document())
