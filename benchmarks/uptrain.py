"""How fast a converted model recovers: results/convert/, from one MHA run of configs/study.py.

    python -m lrkv_jax.sweep configs/study.py                     (its run mha-s0 suffices)
    python benchmarks/uptrain.py run runs/study/mha-s0 runs/uptrain
    python benchmarks/uptrain.py                                  draws the picture and prints the table again

The run becomes LRKV at three cache budgets (calibrated on 65,536 tokens) and GQA at two like ones (mean pooling), and
each trains on as configs/uptrain.py has it. So does the original itself, since training on changes any model; and one
of the conversions again, learning from the original too, and without that for as many FLOPs as this costs. Validation
CE is of the same windows.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))
from lrkv_jax.records import Record, read_runs, summarise, write_summary

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "convert"
CONVERSIONS = {
    "lrkv-50": ("LRKV", ["--cache-percent", "50", "--calibrate", "65536", "--ranks"]),
    "lrkv-35": ("LRKV", ["--cache-percent", "35", "--calibrate", "65536", "--ranks"]),
    "lrkv-25": ("LRKV", ["--cache-percent", "25", "--calibrate", "65536", "--ranks"]),
    "gqa-50": ("GQA-3", ["--to", "gqa", "--kv-heads", "3"]),
    "gqa-33": ("GQA-2", ["--to", "gqa", "--kv-heads", "2"]),
}
# The conversion that trains on otherwise too, with what a label says of it; a weight brings the original as a teacher.
VARIANTS = {
    "lrkv-35-w0.5": ("lrkv-35", ", distilled w=0.5", ["--train.distill-weight", "0.5"]),
    "lrkv-35-w1": ("lrkv-35", ", distilled w=1", ["--train.distill-weight", "1"]),
    "lrkv-35-longer": ("lrkv-35", ", 136 steps", ["--train.steps", "136", "--train.eval-every", "34"]),
}
COLOURS = {"MHA": "#000000", "LRKV": "#0072B2", "GQA": "#D55E00"}  # Okabe and Ito


def run(source: Path, work: Path) -> None:
    """Converts and trains what is not there yet, one after another."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    starts = {"mha": ("MHA, trained on", source)}
    for name, (label, flags) in CONVERSIONS.items():
        made = work / f"{name}-start"
        if not (made / "eval.json").exists():
            call("-m", "lrkv_jax.convert", source, *flags, "--out", made)
        starts[name] = label, made
    for name in (*starts, *VARIANTS):
        key, addition, flags = VARIANTS.get(name, (name, "", []))
        (label, start), run_dir = starts[key], work / name
        flags = [*flags, "--distill-from", source] if "--train.distill-weight" in flags else flags
        if not (run_dir / "eval.json").exists():
            config = f"configs/uptrain.py:{key}"
            call("train.py", "--config", config, "--init-from", start, "--run-dir", run_dir, *flags)
        write_summary(RESULTS / f"{name}.json", summarise(run_dir, name, 1, label + addition))
    write_summary(RESULTS / "original.json", summarise(source, "original", 0, "MHA"))


def call(*words: object) -> None:
    """A command of ours; its failure is ours."""
    print("python", *words, flush=True)
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)


def show() -> None:
    """results/convert/uptraining.png, without the variants, and the table with them; from the summaries."""
    runs = {record.name: record for record in read_runs(RESULTS)}
    original = runs.pop("original")
    goal = original.curve()[-1][1]
    print("| | cache, % of MHA | before uptraining | after | of the gap made up | test CE after |")
    print("|---|---|---|---|---|---|")
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    axes.axhline(goal, color="0.4", linestyle=":", label=f"the original, {goal:.3f}")
    for record in sorted(runs.values(), key=lambda record: -record.eval["cache_percent_of_mha"]):
        tokens, ces = zip(*record.curve(), strict=True)
        percent, label = record.eval["cache_percent_of_mha"], name(record)
        family = record.label.split("-")[0].split(",")[0]
        style = {"MHA": "--", "LRKV": "-", "GQA": "-."}[family]
        shade = 1.0 if percent > 45 else 0.65 if percent > 30 else 0.4
        if record.name not in VARIANTS:
            look = {"color": COLOURS[family], "alpha": shade, "marker": "o", "markersize": 3, "label": label}
            axes.plot([t / 1e6 for t in tokens], ces, style, **look)
        gap = f"{100 * (ces[0] - ces[-1]) / (ces[0] - goal):.0f} %" if ces[0] > goal + 1e-3 else "n/a"
        print(f"| {label} | {percent:.1f} | {ces[0]:.3f} | {ces[-1]:.3f} | {gap} | {record.eval['ce']:.3f} |")
    axes.set(xlabel="uptraining tokens (millions)", ylabel="validation cross-entropy (nats/token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(RESULTS / "uptraining.png", dpi=150)


def name(record: Record) -> str:
    """With its rank and share of the cache."""
    attention, percent = record.config["attention"], record.eval["cache_percent_of_mha"]
    family, *rest = record.label.split(", ")
    family += f" R={attention['rank']}" if attention["family"] == "lrkv" else ""
    return ", ".join([family, *rest, f"{percent:.0f} % cache"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve())
    show()
