"""The README's table of the five families: gathers finished runs of configs/tiny.py into results/tiny/ and prints it.

    for seed in 0 1 2; do for family in lrkv mha gqa mqa mla; do
        python train.py --config configs/tiny.py:$family --train.seed $seed --run-dir runs/tiny-$family-s$seed
    done; done
    python benchmarks/tiny_table.py runs
    python benchmarks/tiny_table.py                 # prints the table again from results/tiny/

The spread is over seeds (initial parameters and order of the data); the test documents are the same in all runs.
"""

import json
import statistics
import sys
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results" / "tiny"
FAMILIES = ("lrkv", "mha", "gqa", "mqa", "mla")
NAMES = {"lrkv": "LRKV R=12", "mha": "MHA", "gqa": "GQA-3", "mqa": "MQA", "mla": "MLA L=32"}


def gather(runs: Path) -> None:
    """Copies each finished run's eval.json, with its seed and the final validation CE, into results/tiny/."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in sorted(runs.glob("tiny-*/eval.json")):
        result = json.loads(path.read_text())
        seed = json.loads((path.parent / "config.json").read_text())["train"]["seed"]
        result = {"seed": seed, **result}
        (RESULTS / f"{result['family']}-s{seed}.json").write_text(json.dumps(result, indent=2) + "\n")


def table() -> str:
    """Markdown: per family the test CE by seed, mean and spread, cache, parameters, FLOPs."""
    lines = [
        "| | test CE by seed | mean (min to max) | cache, % of MHA | bytes/token | parameters | training FLOPs |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{family}-s*.json"))]
        if not runs:
            lines.append(f"| {NAMES[family]} | no run | | | | | |")
            continue
        scores = [run["ce"] for run in runs]
        spread = f"{statistics.mean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})"
        by_seed = ", ".join(f"{score:.3f}" for score in scores)
        one = runs[0]
        lines.append(
            f"| {NAMES[family]} | {by_seed} | {spread} | {one['cache_percent_of_mha']:.1f} | "
            f"{one['cache_bytes_per_token']:,} | {one['parameters']:,} | {one['train_flops']:.3g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gather(Path(sys.argv[1]))
    print(table())
