"""metrics.jsonl across restarts, and the picture drawn from it."""

import json
import math

import pytest

from lrkv_jax import figures
from lrkv_jax.metrics import Metrics, NotFinite, read_rows


def write(run_dir, start, stop):
    with Metrics(run_dir, step=start, steps=9, tokens_per_step=100) as log:
        for step in range(start + 1, stop + 1):
            log.train(step, {"loss": 1.0 / step, "lr": 0.1, "grad_norm": 1.0})
        log.evaluation(stop, "validation", 2.0, 0.5)


def test_rows_beyond_the_restored_step_are_dropped(tmp_path):
    """Bugs: steps doubled after a resume; a row that a kill cut in half spoils the file."""
    write(tmp_path, 0, 5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "step": 6, "lo')
    write(tmp_path, 3, 6)
    steps = [row["step"] for row in read_rows(path) if row["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_rows(path) if row["kind"] == "eval"] == [6]


def test_rows_have_the_promised_fields(tmp_path):
    """Bug: a field that outside scripts read is renamed."""
    write(tmp_path, 0, 2)
    train, evaluation = (
        json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0]),
        read_rows(tmp_path / "metrics.jsonl")[-1],
    )
    assert train.keys() == {"kind", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s"}
    assert evaluation.keys() == {"kind", "step", "tokens", "split", "ce", "bits_per_byte"}
    assert train["tokens"] == 100


@pytest.mark.parametrize("steps", [1, 5])
def test_loss_curve_is_drawn(tmp_path, steps):
    """Bug: a run of one step, or one without evaluations, has no picture."""
    write(tmp_path, 0, steps)
    assert figures.loss_curve(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_metrics_lag_behind_and_settle(tmp_path):
    """Bugs: the host waits for the newest step; steps still waiting at the end are lost; NaN passes."""
    with Metrics(tmp_path, step=0, steps=9, tokens_per_step=100, lag=1) as log:
        log.train(1, {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0})
        assert read_rows(tmp_path / "metrics.jsonl") == []
        log.train(2, {"loss": 1.0, "lr": 0.1, "grad_norm": math.nan})
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]
        with pytest.raises(NotFinite, match="at step 2"):
            log.settle()
