"""How the rates of configs/study.py were chosen: three of Muon for each of the five families, a quarter of the tokens.

    python -m lrkv_jax.sweep configs/study_rates.py

15 runs of 1.0M tokens, each about three minutes on one core. Results: results/study_rates/, and what was concluded from
them in docs/fidelity.md.
"""

from pathlib import Path
from runpy import run_path

from lrkv_jax.study import FAMILY, Comparison, Stage, Study

whole = run_path(str(Path(__file__).with_name("study.py")))
RATES = (0.01, 0.02, 0.04)


def at(name, rate):
    """A run of the study with another rate of Muon, a quarter as long; warm-up and schedule in proportion."""
    config = whole["runs"][name]
    optimizer = config.optimizer.model_copy(update={"peak_lr": rate, "warmup_steps": 12})
    train = config.train.model_copy(update={"steps": 250})
    return config.model_copy(update={"optimizer": optimizer, "train": train})


runs = {f"{name}-lr{rate}": at(name, rate) for rate in RATES for name in whole["five"]}
study = Study(
    runs=runs,
    stages=(Stage("three rates of the five families", tuple(runs)),),
    comparisons=(Comparison("rates", tuple(runs), differ=(*FAMILY, "optimizer.peak_lr")),),
    labels={
        f"{name}-lr{rate}": f"{whole['study'].labels.get(name, name)}, {rate}"
        for rate in RATES
        for name in whole["five"]
    },
)
configs = study.runs
