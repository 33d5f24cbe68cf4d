"""What is damaged, cut short or can't be written is never mistaken for a checkpoint."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import assert_same, finish_run, make_state, open_run, template
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lrkv_jax.checkpoint import inventory
from lrkv_jax.settings import UserError


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    """A run with steps 10 and 20, best 10."""
    return finish_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run_dir(finished_run, tmp_path) -> Path:
    """A copy of that run, to be damaged; without its best, so that `newest` is all there is."""
    shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("best"))
    return tmp_path / "run"


def data_files(step_dir: Path) -> list[Path]:
    """Files that hold arrays or their index, largest first."""
    return sorted((step_dir / "state").rglob("d/*"), key=lambda path: path.stat().st_size, reverse=True)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, seed: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 0x10
    path.write_bytes(content)


def empty_step(step_dir: Path) -> None:
    shutil.rmtree(step_dir)
    step_dir.mkdir()


DAMAGE = {
    "truncated data": lambda d: [truncate(path) for path in data_files(d)],
    "flipped data": lambda d: [flip(path) for path in data_files(d)],
    "missing data": lambda d: [path.unlink() for path in data_files(d)],
    "truncated index": lambda d: truncate(d / "state/manifest.ocdbt"),
    "missing index": lambda d: (d / "state/manifest.ocdbt").unlink(),
    "missing metadata": lambda d: (d / "state/_METADATA").unlink(),
    "truncated metadata": lambda d: truncate(d / "state/_METADATA"),
    "missing commit marker": lambda d: (d / "commit_success.txt").unlink(),
    "missing step metadata": lambda d: (d / "_CHECKPOINT_METADATA").unlink(),
    "missing manifest": lambda d: (d / "manifest/metadata").unlink(),
    "truncated manifest": lambda d: truncate(d / "manifest/metadata"),
    "manifest of another kind": lambda d: (d / "manifest/metadata").write_text("[]"),
    "empty directory": empty_step,
}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # tensorstore's "Event loop is closed"
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_passed_over_and_replaced(run_dir, kind, caplog):
    """Fails if the damage is restored, stops the run, goes untold, counts as newest later, or blocks its step."""
    step_dir = run_dir / "checkpoints/newest/20"
    DAMAGE[kind](step_dir)
    checkpointer = open_run(run_dir)
    with caplog.at_level(logging.WARNING, "lrkv_jax"):
        state, step = checkpointer.restore(template())
    assert step == 10
    assert_same(state, 10)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"checkpoint passed over, {step_dir}: ")
    assert len(message) < 400
    assert "\n" not in message
    assert checkpointer.steps() == [10]

    checkpointer.save(15, make_state(15))
    checkpointer.wait()
    assert checkpointer.steps() == [10, 15]  # the damaged step is not among the two that are kept
    checkpointer.save(20, make_state(20))
    checkpointer.close()
    state, step = open_run(run_dir).restore(template())
    assert step == 20
    assert_same(state, 20)
    assert checkpointer.steps() == [15, 20]


def test_no_flipped_bit_is_restored(run_dir, caplog):
    """Fails if arrays are trusted without a checksum: tensorstore hands out flipped data without a word."""
    step_dir = run_dir / "checkpoints/newest/20"
    for path in data_files(step_dir):
        whole = path.read_bytes()
        for seed in range(3):
            flip(path, seed)
            state, step = open_run(run_dir).restore(template())
            assert_same(state, step)  # either passed over, or in bytes that nothing refers to
            path.write_bytes(whole)
    assert "do not match their checksum" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_checksums_tell_arrays_apart(dtype):
    """Fails if equal words cancel, exchanged words pass, a type is not covered, or sharding changes the checksum."""
    ones = np.ones((8, 256), dtype)
    one_off, moved = ones.copy(), ones.copy()
    one_off[3, 7] = moved[0, 0] = 0
    arrays = {"ones": ones, "zeros": 0 * ones, "one off": one_off, "moved": moved, "short": ones[:4]}
    checksums = {name: entry["checksum"] for name, entry in inventory(arrays).items()}
    assert len(set(checksums.values())) == len(arrays)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(one_off, NamedSharding(mesh, P(None, "x")))
    assert inventory({"one off": sharded})["one off"]["checksum"] == checksums["one off"]


def test_half_removed_checkpoints_do_not_pile_up(run_dir):
    """Fails if each kill during the removal of an old step leaves its remains on the disk for ever."""
    old = run_dir / "checkpoints/newest/5"
    shutil.copytree(old.with_name("10"), old)
    (old / "commit_success.txt").unlink()
    checkpointer = open_run(run_dir)
    checkpointer.save(30, make_state(30))
    checkpointer.close()
    assert sorted(entry.name for entry in old.parent.iterdir()) == ["20", "30"]


def test_a_killed_first_save_is_a_fresh_start_and_damage_is_not(run_dir, caplog):
    """Fails if a run killed in its first save can't start again, or one whose checkpoints all broke starts afresh."""
    newest = run_dir / "checkpoints/newest"
    for step in (10, 20):
        (newest / f"{step}/commit_success.txt").unlink()
    with pytest.raises(UserError) as error:
        open_run(run_dir).restore(template())
    for step in (10, 20):
        assert f"{newest / str(step)}: commit_success.txt is missing" in str(error.value)
        shutil.rmtree(newest / str(step))
    (newest / "30.orbax-checkpoint-tmp/state").mkdir(parents=True)
    caplog.clear()
    checkpointer = open_run(run_dir)
    assert checkpointer.restore(template()) is None
    assert "30.orbax-checkpoint-tmp: its save was not finished" in caplog.text
    checkpointer.save(30, make_state(30))
    checkpointer.close()
    assert [entry.name for entry in newest.iterdir()] == ["30"]
    assert_same(open_run(run_dir).restore(template())[0], 30)


@pytest.mark.parametrize(
    ("which", "text"), [(15, "15 is missing"), ("best", "best is missing"), (20, "20 is unreadable")]
)
def test_a_named_checkpoint_is_never_another(run_dir, which, text):
    """Fails if `--step 20` quietly evaluates step 10, or the error does not say what there is."""
    DAMAGE["flipped data"](run_dir / "checkpoints/newest/20")
    with pytest.raises(UserError) as error:
        open_run(run_dir).restore_params(template()["params"], which)
    assert text in str(error.value)
    assert "has steps [10" in str(error.value)
    with pytest.raises(UserError, match="should be a step, newest or best"):
        open_run(run_dir).restore(template(), "latest")


# ---- kill -9, full and unwritable disks


def start(script: str, run_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), str(run_dir)]
    root = Path(__file__).parents[1]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def big(step: int) -> dict:
    """Incompressible, 2 MB, so that a save takes its time and its space."""
    return {"x": jax.random.normal(jax.random.key(step), (512, 1024)), "step": jnp.int32(step)}


SAVER = """
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp
    from lrkv_jax.checkpoint import CheckpointConfig, Checkpointer

    big = jax.jit(lambda step: {"x": jax.random.normal(jax.random.key(step), (512, 1024)), "step": jnp.int32(step)})
    checkpointer = Checkpointer(Path(sys.argv[1]), CheckpointConfig())
    restored = checkpointer.restore(jax.eval_shape(big, 0))
    for step in range(restored[1] + 1 if restored else 1, 10**6):
        checkpointer.save(step, big(step))
        checkpointer.save_best(step, big(step), 1 / step)
        print(step, flush=True)
"""


def test_kill_9_in_the_middle_of_a_save(tmp_path):
    """Fails if a cut save is taken for a checkpoint, or takes the one before it along."""
    reached = 0
    for shelf, delay in (("newest", 0.0), ("best", 0.0), ("newest", 0.02), ("best", 0.05)):
        with start(SAVER, tmp_path) as child:
            # The third line means that the saves of at least one new step are complete, and others under way.
            begun = [int(child.stdout.readline()) for _ in range(3)]
            give_up = time.monotonic() + 60
            while not list((tmp_path / "checkpoints" / shelf).glob("*.orbax-checkpoint-tmp*")):
                assert time.monotonic() < give_up
            time.sleep(delay)
            child.send_signal(signal.SIGKILL)
        assert begun[0] > reached
        reader = open_run(tmp_path)
        for which in ("newest", "best"):
            state, step = reader.restore(jax.eval_shape(big, 0), which)
            assert step >= begun[1]
            assert int(state["step"]) == step
            np.testing.assert_array_equal(state["x"], big(step)["x"])
        reached = reader.steps()[-1]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", where], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_disk_stops_the_run_with_the_reason(small_disk):
    """Fails if an asynchronous save fails in silence, or takes the checkpoint before it along."""
    checkpointer = open_run(small_disk)
    checkpointer.save(1, big(1))
    checkpointer.wait()
    checkpointer.save(2, big(2))
    with pytest.raises(UserError) as error:
        checkpointer.save(3, big(3))
    assert str(error.value).endswith(f"could not be saved in {small_disk}/checkpoints/newest: No space left on device")
    state, step = open_run(small_disk).restore(jax.eval_shape(big, 0))
    assert step == 1
    np.testing.assert_array_equal(state["x"], big(1)["x"])
    # With space again, the same run goes on.
    checkpointer.save(3, {"x": jnp.zeros((512, 1024)), "step": jnp.int32(3)})
    checkpointer.close()
    assert checkpointer.steps() == [1, 3]


STOPPED = """
    import sys
    from pathlib import Path
    import jax.numpy as jnp
    from lrkv_jax.checkpoint import CheckpointConfig, Checkpointer
    from lrkv_jax.settings import command

    @command
    def main():
        checkpointer = Checkpointer(Path(sys.argv[1]), CheckpointConfig())
        checkpointer.save(30, {"x": jnp.zeros(2)})
        checkpointer.close()

    main()
"""


def test_a_read_only_run_directory(small_disk, finished_run):
    """Fails if evaluation writes into the run it reads, or a save that can't be written hangs or ends in a traceback.

    (Skipped where nothing can be mounted; the next test needs no root.)
    """
    run_dir = small_disk / "run"
    shutil.copytree(finished_run, run_dir)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    state, step = open_run(run_dir).restore(template())
    assert_same(state, step)
    # A process of its own: Orbax's threads can keep one alive for minutes after such a failure.
    with start(STOPPED, run_dir) as child:
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == 2
    assert stderr == f"error: a checkpoint could not be saved in {run_dir}/checkpoints/newest: Read-only file system\n"


def test_a_file_in_the_way(tmp_path):
    """Fails if a directory that can't be made ends in a traceback."""
    (tmp_path / "checkpoints").write_text("")
    checkpointer = open_run(tmp_path)
    assert checkpointer.restore(template()) is None
    with pytest.raises(UserError, match=r"could not be saved in .*: (Not a directory|File exists)"):
        checkpointer.save(1, make_state(1))
