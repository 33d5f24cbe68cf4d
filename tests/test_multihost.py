"""Several processes as one run: the same numbers, one output, and an end that is everybody's.

Two processes of four CPU devices each, on this machine. The runs are made once and shared by the tests.
"""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import models
import numpy as np
import pytest
from test_evaluate import LENGTHS, windows

from lrkv_jax import sharding
from lrkv_jax.attention import lrkv
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data import open_store
from lrkv_jax.evaluate import evaluate, make_eval_step
from lrkv_jax.metrics import read_rows
from lrkv_jax.rundir import make_run_program
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import compile_train_step

ROOT = Path(__file__).parent.parent
STEPS, EVERY, HEARTBEAT = 40, 5, 10
TRAIN = ["train.py", "--config", "configs/debug.py", "--train.steps", STEPS, "--train.eval-every", STEPS // 2]
TRAIN += ["--checkpoint.every-steps", EVERY, "--checkpoint.keep", 50]
PATIENCE = 240


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Token stores and compiled programs of all runs here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def start(cache):
    """Starts a command in a process of its own with some CPU devices; output in files, which can't fill up."""

    def run(devices, *command, log):
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "LRKV_CACHE": str(cache)}
        env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
            return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=env, stdout=out, stderr=err)

    return run


@pytest.fixture(scope="module")
def pair(start, tmp_path_factory):
    """Starts a command as two processes of four devices; returns both, and the stem of each one's output files."""

    def run(*command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder = tmp_path_factory.mktemp("pair")
        flags = ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", 2]
        flags += ["--distributed.heartbeat-seconds", HEARTBEAT, "--distributed.process-id"]
        logs = [folder / str(number) for number in range(2)]
        return [start(4, *command, *flags, number, log=log) for number, log in enumerate(logs)], logs

    return run


def finish(processes, logs, status=0):
    """Outputs of processes that must end with a status; all are killed where one doesn't end."""
    try:
        for process in processes:
            process.wait(PATIENCE)
    finally:
        for process in processes:
            process.kill()
    outputs = [(log.with_suffix(".out").read_text(), log.with_suffix(".err").read_text()) for log in logs]
    assert [process.returncode for process in processes] == [status] * len(processes), outputs
    return outputs


def wait_for_step(run_dir, step, processes):
    """Returns once a run has written the metrics of a step."""
    deadline = time.monotonic() + PATIENCE
    while last_step(run_dir) < step:
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def last_step(run_dir):
    path = run_dir / "metrics.jsonl"
    return max((row["step"] for row in read_rows(path)), default=0) if path.exists() else 0


def losses(run_dir):
    """Training loss by step."""
    return {row["step"]: row["loss"] for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train"}


def saved_steps(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints/newest").glob("[0-9]*") if path.name.isdecimal())


def state_of(run_dir, step, devices):
    """All arrays of a checkpoint by path, restored on some of this process's devices."""
    config = RunConfig.load(run_dir)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
    store = open_store(config.data, config.model.vocab, tokenizer=run_dir / "tokenizer.json", progress=False)
    state, _ = Checkpointer(run_dir, config.checkpoint).restore(
        make_run_program(config, store).abstract_state(mesh), step
    )
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


@pytest.fixture(scope="module")
def whole(pair, tmp_path_factory):
    """An uninterrupted run of two processes, parameters split over the devices of both."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    outputs = finish(*pair(*TRAIN, "--mesh.fsdp", 8, "--mesh.data", 1, "--run-dir", run_dir))
    return run_dir, outputs


@pytest.fixture(scope="module")
def killed(pair, tmp_path_factory):
    """The same run, first its process 0 killed on the way and then, gone on with by the same command, process 1; with
    what each time came of the other: its seconds to live, status and stderr."""
    run_dir = tmp_path_factory.mktemp("runs") / "killed"
    ends = []
    for victim, survivor in ((0, 1), (1, 0)):
        begin = max(saved_steps(run_dir), default=0)
        processes, logs = pair(*TRAIN, "--mesh.fsdp", 8, "--mesh.data", 1, "--run-dir", run_dir)
        # A row of this attempt; what the one before wrote beyond its checkpoint is dropped when it begins.
        wait_for_step(run_dir, begin + EVERY + 2, processes)
        processes[victim].kill()
        died = time.monotonic()
        processes[survivor].wait(PATIENCE)
        seconds = time.monotonic() - died
        ends.append((seconds, processes[survivor].returncode, logs[survivor].with_suffix(".err").read_text()))
    return run_dir, ends


def test_everything_comes_out_once(whole):
    """Bugs: each process prints, or writes metrics; a process reads its own corpus; the end hangs or is no 0."""
    run_dir, ((out, _), (other_out, other_err)) = whole
    assert "test CE" in out
    assert "test CE" not in other_out + other_err
    assert "step/s" not in other_err
    steps = [row["step"] for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    assert json.loads((run_dir / "eval.json").read_text())["step"] == STEPS
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run(killed, victim):
    """Bugs: the other waits for ever, or longer than the heartbeat; it ends well, or without a word. (That the same
    command resumes is seen in the next test, which goes on from there.)"""
    seconds, status, err = killed[1][victim]
    assert status not in (0, 2)
    assert seconds < 3 * HEARTBEAT  # it is noticed within one, and aborting takes a moment on a busy machine
    assert "another task died" in err


def test_sigterm_to_one_saves_in_all_and_the_run_resumes_bit_for_bit(pair, whole, killed, cache, monkeypatch):
    """Bugs: the same command can't resume; the signalled process stops alone; they save different steps."""
    monkeypatch.setenv("LRKV_CACHE", str(cache))
    run_dir = killed[0]
    begin = saved_steps(run_dir)[-1]
    processes, logs = pair(*TRAIN, "--mesh.fsdp", 8, "--mesh.data", 1, "--run-dir", run_dir)
    wait_for_step(run_dir, begin + EVERY + 1, processes)
    processes[1].send_signal(signal.SIGTERM)
    (out, _), (other_out, _) = finish(processes, logs, status=143)
    step = int(re.search(r"stopped by SIGTERM; step (\d+) is saved", out).group(1))
    assert "stopped" not in other_out
    assert saved_steps(run_dir)[-1] == step == last_step(run_dir)
    whole_dir = whole[0]
    assert {s: loss for s, loss in losses(whole_dir).items() if s <= step} == losses(run_dir)
    common = begin + EVERY
    expected, found = state_of(whole_dir, common, 1), state_of(run_dir, common, 4)
    for name, leaf in expected.items():
        np.testing.assert_array_equal(leaf, found[name], err_msg=name)


def test_a_run_of_two_processes_resumes_on_one(start, whole, tmp_path, cache, monkeypatch):
    """Bugs: a checkpoint or the order of the data depends on the number of processes or devices."""
    monkeypatch.setenv("LRKV_CACHE", str(cache))
    whole_dir = whole[0]
    runs = {}
    for devices in (4, 1):
        run_dir = tmp_path / str(devices)
        shutil.copytree(whole_dir, run_dir)
        (run_dir / "eval.json").unlink()
        for step in saved_steps(run_dir):
            if step > STEPS - 2 * EVERY:
                shutil.rmtree(run_dir / f"checkpoints/newest/{step}")
        shutil.rmtree(run_dir / "checkpoints/best")
        mesh = ["--mesh.fsdp", devices, "--mesh.data", 1]
        runs[run_dir] = start(devices, *TRAIN, *mesh, "--run-dir", run_dir, log=tmp_path / f"log{devices}")
    for run_dir, process in runs.items():
        finish([process], [tmp_path / f"log{run_dir.name}"])
        ours, theirs = losses(run_dir), losses(whole_dir)
        # The same batches in the same state: what differs is the order in which devices add (float32).
        np.testing.assert_allclose([ours[s] for s in sorted(ours)], [theirs[s] for s in sorted(theirs)], rtol=1e-5)
        assert ours[STEPS - 2 * EVERY] == theirs[STEPS - 2 * EVERY]  # not run again
        expected, found = state_of(whole_dir, STEPS, 1), state_of(run_dir, STEPS, 1)
        for name, leaf in expected.items():
            np.testing.assert_allclose(found[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name)
        a, b = (json.loads((path / "eval.json").read_text()) for path in (run_dir, whole_dir))
        assert a["ce"] == pytest.approx(b["ce"], rel=1e-5)
        assert (a["tokens"], a["bytes"], a["documents"]) == (b["tokens"], b["bytes"], b["documents"])


SCORER = """
import itertools, json, signal, sys, jax
from pathlib import Path
from jax.experimental import multihost_utils
from lrkv_jax import distributed, sharding
from lrkv_jax.attention import lrkv
from lrkv_jax.checkpoint import CheckpointConfig, Checkpointer
from lrkv_jax.settings import command
from lrkv_jax.sharding import MeshConfig
from test_evaluate import score
from test_multihost import split_heads
from train import Stopped

def save_often(run_dir, mesh):
    make = jax.jit(lambda step: jax.numpy.full((64, 100), step), out_shardings=sharding.batch_sharding(mesh))
    checkpoints = Checkpointer(run_dir, CheckpointConfig(keep=2))
    for step in range(1, 16):
        state = {"x": make(step)}
        checkpoints.save_best(step, state, 1 / step)
        checkpoints.save(step, state)
    checkpoints.close()
    print("saved", checkpoints.steps(), checkpoints.best_step(), flush=True)

def stop_early(mesh):
    usual = signal.getsignal(signal.SIGTERM)
    with Stopped(mesh) as stopped, jax.set_mesh(mesh):
        if jax.process_index() == 1:
            signal.raise_signal(signal.SIGTERM)
        steps = list(itertools.takewhile(lambda step: not stopped.before(step), range(500, 510)))
    print("stopped", int(stopped.signal), steps, flush=True)
    with Stopped(mesh) as stopped:
        if jax.process_index() == 0:
            signal.raise_signal(signal.SIGINT)
    print("late", int(stopped.signal), flush=True)
    assert usual == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

@command
@distributed.together
def main():
    found = score(4, MeshConfig(data=2, fsdp=4))
    print(json.dumps([found.nats.tolist(), found.tokens.tolist(), found.bytes.tolist()]), flush=True)
    print("losses", json.dumps(split_heads(sharding.make_mesh(MeshConfig(data=1, tensor=8)))), flush=True)
    mesh = sharding.make_mesh(MeshConfig())
    save_often(Path(sys.argv[1]), mesh)
    stop_early(mesh)
    distributed.check_same({"same": 1, "zeta": jax.process_index(), "alpha": jax.process_index()})
    multihost_utils.sync_global_devices("the other never comes")

main()
"""


def split_heads(mesh):
    """Losses of three steps with eight heads, which split over eight devices reach over the processes."""
    prog, rows = models.program(lrkv.Config(heads=8, head_dim=4, rank=2)), sharding.local_rows(mesh, models.B)
    losses = []
    with jax.set_mesh(mesh):
        abstract, step = compile_train_step(prog, mesh)
        state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))
        for seed in range(3):
            state, metrics = step(state, sharding.place_rows(mesh, np.asarray(models.batch(seed))[rows], models.B))
            losses.append(float(metrics["loss"]))
    return losses


def test_two_processes_score_save_stop_and_fail_as_one(pair, tmp_path):
    """Bugs: padding or a document counts twice where rows are split over processes (13 documents); a process that holds
    some heads of all rows feeds a part of them, or sums over heads stay within a process; the best and the newest saved
    at once wait for each other for ever; SIGTERM before the loop of a resumed run is lost, after the loop's last step
    stops one process only, or outside of the loop is caught; a value that differs is let through, or another one named
    each time; a failure of one process leaves the other waiting, goes untold, or is told twice."""
    script = tmp_path / "scorer.py"
    script.write_text(SCORER)
    (out, err), (other_out, other_err) = finish(*pair(script, tmp_path / "run"), status=2)
    assert out.count("saved [14, 15] 15\n") == other_out.count("saved [14, 15] 15\n") == 1
    assert out.count("stopped 15 []\nlate 2\n") == other_out.count("stopped 15 []\nlate 2\n") == 1
    assert err.count("error: ") == 1
    assert "error: process 1: alpha = 1 here and 0 on process 0: must be the same\n" in err
    assert "alpha" not in other_err
    alone = score_on(1)
    expected = split_heads(sharding.make_mesh(MeshConfig(), jax.devices()[:1]))
    for text in (out, other_out):
        losses = json.loads(re.search(r"^losses (.*)$", text, re.MULTILINE).group(1))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        nats, tokens, size = json.loads(re.search(r"^\[\[.*$", text, re.MULTILINE).group())
        np.testing.assert_allclose(nats, alone.nats, rtol=1e-6)
        assert tokens == alone.tokens.tolist() == [n + 1 for n in LENGTHS]
        assert size == alone.bytes.tolist()


@functools.cache
def score_on(devices):
    """Score of the thirteen documents on the first devices of this process."""
    prog, mesh = models.program(), sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
    with jax.set_mesh(mesh):
        placed = sharding.shardings(prog.abstract_state(mesh)["params"])
        params = jax.jit(lambda key: prog.init_state(key)["params"], out_shardings=placed)(jax.random.key(0))
        return evaluate(make_eval_step(prog, mesh), params, windows(), 4, mesh)


def test_thirteen_documents_on_three_devices():
    """Bug: a batch that the devices don't divide loses rows or repeats them."""
    alone, three = score_on(1), score_on(3)
    np.testing.assert_allclose(three.nats, alone.nats, rtol=1e-6)
    np.testing.assert_array_equal(three.tokens, alone.tokens)
    np.testing.assert_array_equal(three.bytes, alone.bytes)


FAILER = """
import sys
from pathlib import Path
from lrkv_jax import distributed, rundir
from lrkv_jax.settings import command

@command
@distributed.together
def main():
    shared = Path(sys.argv[1])
    rundir.check_shared(shared)
    assert distributed.gathered(distributed.is_first()) == [True, False]
    own = shared / ("first" if distributed.is_first() else "second")
    own.mkdir()
    rundir.check_shared(own)

main()
"""


def test_an_error_of_process_0_ends_the_other(pair, tmp_path):
    """Bugs: a run directory that each host has on its own disk is taken, or a shared one refused; what process 0
    refuses leaves the others waiting for its word; the mark it writes stays."""
    script = tmp_path / "failer.py"
    script.write_text(FAILER)
    (_, err), (_, other_err) = finish(*pair(script, tmp_path), status=2)
    line = f"error: --run-dir {tmp_path / 'first'}: process 1 does not see what process 0 writes there; must be"
    assert err.splitlines()[-1].startswith(line)
    assert "error" not in other_err
    assert not list(tmp_path.rglob(".shared*"))
