"""The commands as a person runs them: train, kill, resume, evaluate; and mistakes, each ending in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from eval import main as score
from lrkv_jax import sharding
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data import open_store
from lrkv_jax.metrics import TIMINGS, read_rows
from lrkv_jax.rundir import make_run_program
from lrkv_jax.settings import command
from train import main as train

ROOT = Path(__file__).parent.parent
DEBUG = ["--config", "configs/debug.py"]
# 29 steps an epoch: 40 cross a boundary.
LONG = [*DEBUG, "--train.steps", "40", "--checkpoint.every-steps", "3", "--train.eval-every", "20"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Token stores and compiled programs, shared by the commands of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def start(cache):
    """Starts a command in a process of its own, one CPU device."""

    def run(script, *args, **env):
        variables = {
            **os.environ,
            "LRKV_CACHE": str(cache / "data"),
            "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            **env,
        }
        command = [sys.executable, script, *map(str, args)]
        return subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return run


@pytest.fixture
def here(cache, monkeypatch, capsys):
    """Runs a command in this process, on its eight devices; starting another takes seconds. Returns what it printed."""
    monkeypatch.setenv("LRKV_CACHE", str(cache / "data"))
    monkeypatch.chdir(ROOT)

    def run(main, *args, status=0):
        monkeypatch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            command(main)()
        out, err = capsys.readouterr()
        assert (stopped.value.code or 0) == status, err
        return out, err

    return run


@pytest.fixture
def mistake(here):
    """Runs a command in this process that must end in one line, which is returned, and exit status 2."""

    def run(main, *args):
        out, err = here(main, *args, "--compile-cache", "off", status=2)
        return the_line(out, err)

    return run


def finish(process, status=0):
    """Output of a command that must end with a status."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, err[-3000:]
    return out, err


def the_line(out, err):
    """The one line that a mistake must end in."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err, err
    assert len(lines) == 1, err
    assert out == ""
    return lines[0]


def wait_until(condition, process, patience=240):
    """Polls until a condition holds; fails if the process ends first."""
    deadline = time.monotonic() + patience
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def last_step(run_dir):
    """The newest step in metrics.jsonl; 0 before there is one."""
    path = run_dir / "metrics.jsonl"
    return max((row["step"] for row in read_rows(path)), default=0) if path.exists() else 0


def final_state(run_dir):
    """All arrays of the last step."""
    return state_of(run_dir, RunConfig.load(run_dir).train.steps)


def state_of(run_dir, step):
    """All arrays of a checkpoint by path: parameters, moments, counters."""
    config = RunConfig.load(run_dir)
    mesh = sharding.make_mesh(config.mesh)
    store = open_store(config.data, config.model.vocab, tokenizer=run_dir / "tokenizer.json", progress=False)
    program = make_run_program(config, store)
    checkpoints = Checkpointer(run_dir, config.checkpoint)
    state, _ = checkpoints.restore(program.abstract_state(mesh), step)
    checkpoints.close()
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def history(run_dir):
    """Metrics without the timings."""
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in read_rows(run_dir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, start):
    """An uninterrupted run, which the killed ones are compared with."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    out, _ = finish(start("train.py", *LONG, "--run-dir", run_dir, "--profile", "2:3"))
    assert "test CE" in out
    return run_dir


def test_killed_run_continues_bit_for_bit(start, whole_run, tmp_path, cache, monkeypatch):
    """Bugs: resuming forgets something (moments, data order, schedule), doubles rows in metrics, uses a torn save."""
    monkeypatch.setenv("LRKV_CACHE", str(cache / "data"))
    run_dir = tmp_path / "killed"
    newest = run_dir / "checkpoints" / "newest"
    moments = [
        lambda: last_step(run_dir) >= 4,
        lambda: any(newest.glob("*orbax-checkpoint-tmp*")) and last_step(run_dir) >= 10,  # in the middle of a save
        lambda: last_step(run_dir) >= 33,
    ]
    for moment in moments:
        process = start("train.py", *LONG, "--run-dir", run_dir)
        wait_until(moment, process)
        process.kill()
        process.communicate()
    finish(start("train.py", *LONG, "--run-dir", run_dir))
    expected, found = final_state(whole_run), final_state(run_dir)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(expected[path], found[path], err_msg=path)
    assert history(run_dir) == history(whole_run)
    ours, theirs = (json.loads((path / "eval.json").read_text()) for path in (run_dir, whole_run))
    assert ours == theirs


def test_evaluation_alone_gives_the_same_bits(start, mistake, whole_run):
    """Bugs: eval.py needs more than the directory, or scores another model than training ended with."""
    before = json.loads((whole_run / "eval.json").read_text())
    (whole_run / "eval.json").unlink()
    out, _ = finish(start("eval.py", whole_run))
    assert json.loads((whole_run / "eval.json").read_text()) == before
    assert f"{before['ce']:.4f}" in out
    required = (
        "split step ce ce_stderr perplexity bits_per_byte tokens bytes documents unigram_ce parameters "
        "cache_values_per_token_per_layer cache_bytes_per_token cache_percent_of_mha train_tokens train_flops family"
    )
    assert set(required.split()) <= before.keys()
    finish(start("eval.py", whole_run, "--split", "validation", "--step", "best"))
    assert json.loads((whole_run / "eval-validation-best.json").read_text())["split"] == "validation"
    assert "checkpoint 7 is missing" in mistake(score, whole_run, "--step", "7")


def test_finished_run_only_prints_again(start, whole_run):
    """Bugs: a second run of the same command trains or scores again; what computes the same may not differ."""
    times = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if path.is_file()}
    out, _ = finish(start("train.py", *LONG, "--checkpoint.keep", "5", "--mesh.data", "1", "--run-dir", whole_run))
    assert "test CE" in out
    assert times == {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if path.is_file()}


def test_run_directory_holds_all(whole_run):
    """Bug: a file that later commands or people rely on is not written."""
    names = {path.name for path in whole_run.iterdir()}
    assert names >= {
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "tensorboard",
        "loss.png",
        "checkpoints",
        "eval.json",
    }
    assert list((whole_run / "profile").rglob("*.xplane.pb"))  # --profile 2:3, for XProf
    assert (whole_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    kinds = {(row["kind"], row.get("split")) for row in read_rows(whole_run / "metrics.jsonl")}
    assert kinds == {("train", None), ("eval", "validation")}


def test_sigterm_saves_and_the_run_resumes(start, mistake, tmp_path):
    """Bugs: the last finished step is lost, the status is not 143, or the same command can't go on; two runs of one
    command at once interleave their metrics and remove each other's saves."""
    run_dir = tmp_path / "stopped"
    args = [*DEBUG, "--train.steps", "4000", "--checkpoint.every-steps", "4000", "--train.eval-every", "4000"]
    process = start("train.py", *args, "--run-dir", run_dir)
    wait_until(lambda: last_step(run_dir) >= 5, process)
    assert "another process is training in it" in mistake(train, *args, "--run-dir", run_dir)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process, status=143)
    step = int(re.search(r"step (\d+) is saved", out).group(1))
    assert step >= 5
    assert last_step(run_dir) == step
    process = start("train.py", *args, "--run-dir", run_dir)
    wait_until(lambda: last_step(run_dir) > step, process)
    process.send_signal(signal.SIGTERM)
    finish(process, status=143)
    rows = [row["step"] for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert rows == list(range(1, len(rows) + 1))


def test_nan_stops_the_run_and_spares_the_checkpoints(start, tmp_path, cache, monkeypatch):
    """Bugs: parameters that are not numbers are saved over good ones; the line doesn't say where it happened."""
    monkeypatch.setenv("LRKV_CACHE", str(cache / "data"))
    run_dir = tmp_path / "nan"
    args = [*DEBUG, "--checkpoint.every-steps", "1", "--run-dir", run_dir, "--model.logit-softcap", "None"]
    args += ["--optimizer.peak-lr", "1e38", "--optimizer.schedule", "constant"]
    line = the_line(*finish(start("train.py", *args), status=2))
    assert re.search(r"at step (\d+) \(batch_at\(\d+\) of train.seed = 0\); last good checkpoint: (step|none)", line)
    for step in (run_dir / "checkpoints" / "newest").glob("[0-9]*"):
        for path, leaf in state_of(run_dir, int(step.name)).items():
            assert np.isfinite(leaf).all(), (step, path)


def test_two_devices_and_then_one_without_the_source(start, tmp_path):
    """Bugs: the last line of a run on several devices fails; it can't be scored on other devices, or once the text that
    it was made from has moved."""
    text, run_dir = tmp_path / "text.jsonl", tmp_path / "two"
    text.write_bytes((ROOT / "tests" / "text.jsonl").read_bytes())
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    out, _ = finish(start("train.py", *DEBUG, "--data.path", text, "--run-dir", run_dir, "--mesh.data", "2", **two))
    assert "test CE" in out
    on_two = json.loads((run_dir / "eval.json").read_text())
    text.rename(tmp_path / "moved.jsonl")
    _, err = finish(start("eval.py", run_dir))
    assert "needs 2 devices; there are 1" in err
    on_one = json.loads((run_dir / "eval.json").read_text())
    for name, value in on_two.items():
        assert on_one[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name


def test_dry_run_allocates_nothing_even_at_6_3b(here):
    """Bug: accounting builds the model."""
    out, _ = here(train, "--config", "configs/lrkv_6_3b.py:mha", "--dry-run")
    assert "6,854,541,312" in out


def test_help_lists_the_flags(here):
    """Bug: --help fails, or leaves out the flags that are not fields."""
    out, _ = here(train, "--help")
    for flag in ("--config", "--run-dir", "--dry-run", "--train.steps", "--attention.rank", "--data.dataset"):
        assert flag in out


@pytest.mark.parametrize(
    ("main", "args", "says"),
    [
        (train, ["--train.stepz", "3"], "--train.stepz: no such flag; did you mean --train.steps"),
        (train, ["--data.dataset", "no_such_set"], "no_such_set"),
        (train, [*DEBUG, "--mesh.data", "3"], "needs 3 devices; there are 8"),
        (score, ["/nowhere"], "/nowhere is no run directory"),
        (score, ["/nowhere", "--splitt", "test"], "unrecognized arguments: --splitt"),
    ],
)
def test_mistakes_end_in_one_line(mistake, tmp_path, main, args, says):
    """Bug: a bare traceback, or status 0, for a user's mistake. Every other refusal is tested where it is raised."""
    if main is train:
        args = [*args, "--run-dir", tmp_path / "never"]
    assert says in mistake(main, *args)
    assert not (tmp_path / "never" / "config.json").exists()


def test_another_config_is_refused(start, mistake, whole_run):
    """Bug: a run continues with other mathematics, or in a directory that holds something else."""
    config = (whole_run / "config.json").read_bytes()
    line = the_line(*finish(start("train.py", *LONG, "--attention.rank", "2", "--run-dir", whole_run), status=2))
    assert "attention.rank = 2 (the run has 3)" in line
    line = mistake(train, "--config", "configs/debug.py:mla", "--run-dir", whole_run)
    assert "attention.family = mla (the run has lrkv)" in line
    assert config == (whole_run / "config.json").read_bytes()
    other = whole_run.parent / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert "holds thesis.txt and no config.json" in mistake(train, *DEBUG, "--run-dir", other)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
