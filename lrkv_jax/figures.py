"""Pictures of runs, drawn from run files only; imports no JAX.

    python -m lrkv_jax.figures DIR [--out figures/]

DIR is any folder of runs: run directories, or the JSON files that a study keeps. Written: figure1 to figure4 (.png,
.svg), figures.csv with every plotted number, table.md. What lacks is told in both table and terminal.

1  test cross-entropy against cache, and validation cross-entropy against tokens by rank
2  bits per byte against cache, and compute saved to reach each baseline
3  test cross-entropy against the cache bytes of each device under tensor parallelism
4  diversity of heads by layer

Compute saved is 1 − (compute at which LRKV's validation curve first reaches the baseline's end) / (all of the
baseline's), seed by seed. The curve is not annealed there and the baseline's end is, so it is rather too small.
Error bars are standard deviations over seeds. The paper's models, of another corpus and scale, have panels of their
own, as differences to its MHA; differences by rank, compute saved and diversity stand beside ours in one panel.
"""

from __future__ import annotations

import argparse
import csv
import io

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lrkv_jax.grouping import Group, arrange
from lrkv_jax.metrics import read_rows
from lrkv_jax.panels import Panel, all_panels
from lrkv_jax.plots import pictures
from lrkv_jax.records import read_runs
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.storage import AnyPath, path

COLUMNS = ("figure", "panel", "series", "x", "y", "error", "seeds", "source")


def main(arguments: list[str] | None = None) -> int:
    """Command line to exit status."""
    parser = Parser("python -m lrkv_jax.figures", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=path, metavar="DIR")
    parser.add_argument("--out", type=path, default="figures", metavar="DIR")
    options = parser.parse_args(arguments)
    found, notes = arrange(read_runs(options.directory))
    panels = all_panels(found)
    notes += lacking(panels)
    files = {"table.md": table(found, notes).encode(), "figures.csv": numbers(panels).encode()}
    for name in dict.fromkeys(panel.figure for panel in panels):
        files |= pictures(f"figure{name}", [panel for panel in panels if panel.figure == name])
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (options.out / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"--out {options.out}: {error.strerror or error}") from None
    print(table(found, notes))
    print(f"written to {options.out}: {', '.join(sorted(files))}")
    return 0


def lacking(panels: list[Panel]) -> list[str]:
    """A line for each thing that a figure lacks, whether one panel says so or several."""
    names: dict[tuple[str, str], list[str]] = {}
    for panel in panels:
        if panel.note:
            names.setdefault((panel.figure, panel.note), []).append(panel.name)
    return [f"figure {figure} ({', '.join(found)}): {note}" for (figure, note), found in names.items()]


def numbers(panels: list[Panel]) -> str:
    """figures.csv: every plotted number, in full precision; empty where there is no error or no count of seeds."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for panel in panels:
        for point in panel.points:
            rows.writerow(
                [panel.figure, panel.name, point.series, point.x, point.y, point.error, point.seeds, point.source]
            )
    return text.getvalue()


def table(found: list[Group], notes: list[str]) -> str:
    """table.md: a line for every group of runs, and under it what lacks."""
    lines = [
        "| | seeds | parameters | cache, % of MHA | cache, bytes/token | training FLOPs | test CE | bits per byte |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in found:
        one = group.runs[0].eval
        (ce, sd), (bits, _) = group.mean("ce"), group.mean("bits_per_byte")
        spread = f"{ce:.4f}" if sd is None else f"{ce:.4f} ± {sd:.4f}"
        lines.append(
            f"| {group.label} | {', '.join(str(run.seed) for run in group.runs)} | {one['parameters']:,} "
            f"| {group.cache_percent:.1f} | {one['cache_bytes_per_token']:,} | {one['train_flops']:.3g} "
            f"| {spread} (n={group.seeds}) | {bits:.4f} |"
        )
    lines += ["", "Test cross-entropy in nats per token, ± standard deviation over n seeds.", ""]
    return "\n".join(lines + [f"- {note}" for note in notes]) + "\n"


def loss_curve(run_dir: AnyPath) -> AnyPath:
    """Draws training loss and held-out cross-entropy against tokens into run_dir/loss.png."""
    rows = read_rows(run_dir / "metrics.jsonl")
    train = [(row["tokens"] / 1e6, row["loss"]) for row in rows if row["kind"] == "train"]
    held_out = [(row["tokens"] / 1e6, row["ce"]) for row in rows if row["kind"] == "eval"]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(*zip(*train, strict=True), color="0.6", linewidth=0.8, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="C0", markersize=4, label="validation")
        axes.annotate(f"{held_out[-1][1]:.3f}", held_out[-1], textcoords="offset points", xytext=(-4, 8), ha="right")
    axes.set(xlabel="training tokens (millions)", ylabel="cross-entropy (nats/token)", title=run_dir.resolve().name)
    axes.legend()
    axes.grid(alpha=0.3)
    path, picture = run_dir / "loss.png", io.BytesIO()
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    path.write_bytes(picture.getvalue())
    return path


if __name__ == "__main__":
    command(main)()
