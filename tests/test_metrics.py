"""metrics.jsonl across restarts, and the picture drawn from it."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from lrkv_jax import figures, profiling
from lrkv_jax.metrics import TIMINGS, Metrics, NotFinite, read_rows
from lrkv_jax.settings import UserError


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
    assert train.keys() == {"kind", "step", "tokens", "loss", "lr", "grad_norm", *TIMINGS}
    assert "tokens_per_s" in TIMINGS
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


def test_rates_and_where_the_time_went(tmp_path):
    """Bugs: MFU on an unknown device is a crash or a number; rates are of one device, or count evaluations; what was
    spent on data is counted again as the step's."""
    options = {"step": 0, "steps": 9, "tokens_per_step": 1000, "devices": 4, "flops_per_token": 3e6}
    for peak in (None, 1e9):
        run_dir = tmp_path / str(peak)
        run_dir.mkdir()
        with Metrics(run_dir, peak_flops=peak, **options) as log:
            start = time.perf_counter()
            for what in ("data", "checkpoint", "eval"):
                with log.timed(what):
                    time.sleep(0.02)
            log.train(1, {"loss": 1.0})
            elapsed = time.perf_counter() - start
        (row,) = read_rows(run_dir / "metrics.jsonl")
        parts = [row[f"{what}_s"] for what in ("data", "step", "checkpoint", "eval")]
        assert min(parts[0], *parts[2:]) >= 0.02
        assert parts[1] < 0.02 + elapsed - 0.06
        rate = 1000 / (sum(parts) - row["eval_s"])
        assert row["tokens_per_s"] == pytest.approx(rate, rel=1e-3)
        assert row["tokens_per_s_per_device"] == pytest.approx(rate / 4, rel=1e-3)
        assert row["mfu"] == (None if peak is None else pytest.approx(3e6 * rate / 4e9, abs=1e-3))


def test_a_process_that_does_not_write_still_notices(tmp_path):
    """Bug: only process 0 sees that a loss is no number, and the others train on."""
    with Metrics(tmp_path, step=0, steps=9, tokens_per_step=100, writes=False) as log:
        log.train(1, {"loss": 1.0})
        with pytest.raises(NotFinite):
            log.train(2, {"loss": math.inf})
    assert list(tmp_path.iterdir()) == []


def test_a_profile_of_some_steps(tmp_path):
    """Bugs: a trace of no steps or of all; a run that ends inside the span, or began inside it, leaves none."""
    started, stopped = [], []
    for first, last, span in ((1, 4, (2, 3)), (3, 4, (2, 3)), (1, 2, (2, 9)), (1, 2, None)):
        with pytest.MonkeyPatch.context() as patch, profiling.Profile(tmp_path, span) as profile:
            now = []
            patch.setattr(jax.profiler, "start_trace", lambda where, now=now: started.append((where, now[-1])))
            patch.setattr(jax.profiler, "stop_trace", lambda now=now: stopped.append(now[-1]))
            for step in range(first, last + 1):
                now.append(step)
                profile.before(step, None)
            now.append("end")
            profile.__exit__(None, None, None)
    where = str(tmp_path / "profile")
    assert started == [(where, 2), (where, 3), (where, 2)]
    assert stopped == [4, 4, "end"]
    for text in ("10", "5:4", "0:3", "a:b"):
        with pytest.raises(UserError, match="must be FIRST:LAST"):
            profiling.parse_span(text)


COMPILER = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from lrkv_jax import profiling
profiling.keep_compiled(sys.argv[1], Path(sys.argv[2]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.monitoring.register_event_listener(lambda event, **_: print(event) if "cache_" in event else None)
jax.jit(lambda x: jnp.tanh(x @ x))(jnp.ones((8, 8)))
"""


def test_compiled_programs_are_found_again(tmp_path):
    """Bugs: a restart compiles everything again; CPUs that differ share programs; `off` is not off."""

    def events(where):
        env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        command = [sys.executable, "-c", COMPILER, where, str(tmp_path)]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert "/jax/compilation_cache/cache_hits" not in events("")
    assert any((tmp_path / "compiled" / profiling.cpu_key()).iterdir())
    again = events("")
    assert "/jax/compilation_cache/cache_hits" in again
    assert "/jax/compilation_cache/cache_misses" not in again
    assert "/jax/compilation_cache/cache_hits" not in events("off")
