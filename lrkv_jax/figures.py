"""Pictures of runs, drawn from run files only; imports no JAX."""

from __future__ import annotations

import io

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lrkv_jax.metrics import read_rows
from lrkv_jax.storage import AnyPath


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
