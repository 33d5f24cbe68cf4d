"""Runs and data caches in a bucket, which has no append, no rename and no locks; and what saving costs in memory."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gcs_server
import pytest
from etils import epath

from lrkv_jax import figures, rundir
from lrkv_jax.config import RunConfig, load_configs, parse_command
from lrkv_jax.data import mirror
from lrkv_jax.metrics import Metrics, read_rows
from lrkv_jax.settings import UserError
from lrkv_jax.storage import Bucket, copy_file, copy_tree, path, refusals, remove_tree

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bucket(tmp_path):
    """A folder that refuses what a bucket can't do. (An epath.Path is what our code takes for one.)"""

    where = str(tmp_path / "bucket")

    def opened(original, place, mode):
        assert "a" not in mode or not str(place).startswith(where)
        return original(place, mode)

    def renamed(original, place, target):
        assert not str(place).startswith(where)
        return original(place, target)

    (tmp_path / "bucket").mkdir()
    with epath.testing.mock_epath(open=opened, rename=renamed, replace=renamed):
        yield epath.Path(where)


def test_metrics_grow_in_a_bucket(bucket):
    """Bugs: a file that can't be appended to loses its earlier rows, or those before a save; events stay behind."""
    for start, stop in ((0, 5), (3, 6)):
        with Metrics(bucket, step=start, steps=9, tokens_per_step=100) as log:
            for step in range(start + 1, stop + 1):
                log.train(step, {"loss": 1.0 / step})
            log.settle()
            assert [row["step"] for row in read_rows(bucket / "metrics.jsonl")] == list(range(1, stop + 1))
            log.evaluation(stop, "validation", 2.0, 0.5)
        assert read_rows(bucket / "metrics.jsonl")[-1]["kind"] == "eval"
    assert list((bucket / "tensorboard").iterdir())
    assert figures.loss_curve(bucket).read_bytes().startswith(b"\x89PNG")


def test_a_run_directory_in_a_bucket(bucket, tmp_path, monkeypatch):
    """Bugs: the first files of a run need a lock or a rename; the same run can't be entered again; another can."""
    monkeypatch.setenv("LRKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    config = load_configs("configs/debug.py")[1]
    store = rundir.enter(bucket / "run", config)
    assert RunConfig.load(bucket / "run") == config
    assert rundir.enter(bucket / "run", config).fingerprint == store.fingerprint
    with pytest.raises(UserError, match="is a run of another config"):
        rundir.enter(bucket / "run", load_configs("configs/debug.py:mha")[1])


def test_a_shared_cache_is_fetched_whole(bucket, tmp_path, capfd):
    """Bugs: a store that is still being published is taken for whole; one that is here is fetched again."""
    made, here = tmp_path / "made", tmp_path / "here"
    (made / "stores/one").mkdir(parents=True)
    for name in ("a", "manifest.json", "z"):
        (made / "stores/one" / name).write_text(name)
    mirror.publish(bucket, made, "stores/one", "manifest.json")
    (bucket / "stores/one/manifest.json").unlink()
    mirror.fetch(bucket, here, "stores/one", "manifest.json")
    assert not here.exists()
    mirror.publish(bucket, made, "stores/one", "manifest.json")
    for _ in range(2):
        mirror.fetch(bucket, here, "stores/one", "manifest.json")
        assert {file.name: file.read_text() for file in (here / "stores/one").iterdir()} == {
            name: name for name in ("a", "manifest.json", "z")
        }
    assert capfd.readouterr().err.count("fetching") == 1


def test_copying_and_removing_trees(bucket, tmp_path):
    """Bug: files in folders of folders are left out."""
    (tmp_path / "tree/in/in").mkdir(parents=True)
    (tmp_path / "tree/in/in/file").write_bytes(b"x")
    copy_tree(tmp_path / "tree", bucket / "copy")
    assert (bucket / "copy/in/in/file").read_bytes() == b"x"
    remove_tree(bucket / "copy")
    remove_tree(bucket / "copy")
    assert not (bucket / "copy").exists()


def test_places_that_are_none():
    """Bug: `s3://...` becomes a folder of that name, and a run is written where nobody looks."""
    assert path("runs/one") == Path("runs/one")
    with pytest.raises(UserError, match="a folder on a disk, or a bucket gs://"):
        path("s3://bucket/run")


class HttpError(Exception):
    """As gcsfs has one, out of `Exception` alone."""

    __module__ = "gcsfs.retry"


@pytest.mark.parametrize(
    "error",
    [HttpError("Invalid Credentials, 401"), OSError("Forbidden: b/private/o\nno access"), ValueError("bad name")],
)
def test_a_bucket_that_refuses(error, tmp_path):
    """Bugs: a traceback where an account has no access; a refusal taken for "nothing there", so that a run starts
    afresh; what is no refusal (a fault of ours, a full disk) hidden behind one."""

    def refuse(*_, **__):
        raise error

    place = Bucket("gs://private/run")
    asked = ("glob", "listdir", "makedirs", "mkdir", "open", "remove", "rmtree", "stat")
    (tmp_path / "here").write_bytes(b"x")
    with epath.testing.mock_epath(**dict.fromkeys(asked, refuse)):
        for ask in (
            place.exists,
            place.is_dir,
            (place / "config.json").read_text,
            lambda: list(place.iterdir()),
            lambda: list(place.glob("*")),
            lambda: place.mkdir(parents=True),
            lambda: (place / "metrics.jsonl").write_bytes(b"x"),
            lambda: copy_file(tmp_path / "here", place / "there"),
            lambda: copy_file(place / "there", tmp_path / "here"),
            lambda: remove_tree(place),
        ):
            with pytest.raises(UserError, match=rf"^gs://private/run.*: {' '.join(str(error).split())}$"):
                ask()
        error = TypeError("a fault of ours")
        with pytest.raises(TypeError):
            place.exists()
        error = FileNotFoundError("b/private/o")
        assert not place.exists()
        with pytest.raises(UserError, match="there is no such bucket"):
            (place / "config.json").write_bytes(b"x")
    with epath.testing.mock_epath(), pytest.raises(OSError, match="No space left"), refusals(place):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_home_is_expanded(monkeypatch):
    """Bug: `--run-dir=~/x`, which no shell expands, makes a folder named `~`."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse_command("train.py", "", ["--config", "configs/debug.py", "--run-dir=~/x"]).run_dir == Path(
        "/home/someone/x"
    )


def test_a_run_in_a_bucket_of_google_cloud_storage(tmp_path):
    """Bugs: anything that needs a disk: training, saving, resuming, scoring. A save cut short (in a bucket, a step
    without its commit marker) is resumed from, or is never replaced.

    gcsfs and tensorstore are the real clients; the server is ours.
    """
    pytest.importorskip("gcsfs")
    server = gcs_server.Bucket()

    def train(cache):
        env = {**os.environ, **gcs_server.environment(server), "LRKV_CACHE": str(tmp_path / cache)}
        env |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        command = [sys.executable, "train.py", "--config", "configs/debug.py", "--run-dir", "gs://test/run"]
        command += ["--data.cache-dir", "gs://test/cache"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout, done.stderr

    out, _ = train("first")
    result = json.loads(server.objects["run/eval.json"])
    assert f"{result['ce']:.4f}" in out
    history = [json.loads(row)["step"] for row in server.objects["run/metrics.jsonl"].splitlines()]
    for name in list(server.objects):
        cut = name == "run/checkpoints/newest/8/commit_success.txt"
        if cut or name == "run/eval.json" or name.startswith("run/checkpoints/best/"):
            server.remove(name)
    _, err = train("second")
    assert "checkpoint passed over, gs://test/run/checkpoints/newest/8: commit_success.txt is missing" in err
    assert err.count("fetching gs://test/cache/") == 1  # the run knows its store by name
    assert json.loads(server.objects["run/eval.json"]) == result
    assert "run/checkpoints/newest/8/commit_success.txt" in server.objects
    assert [json.loads(row)["step"] for row in server.objects["run/metrics.jsonl"].splitlines()] == history
    assert server.unknown == []
    server.denied = True
    env = {**os.environ, **gcs_server.environment(server)}
    done = subprocess.run(
        [sys.executable, "eval.py", "gs://test/run"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.search("^error: gs://test/run.*: Forbidden: .*no access\n$", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr


def test_thirty_saves_take_no_more_memory_than_five(tmp_path):
    """Bug: every save keeps a copy of the state, or its buffers, and a long run dies of it.

    Of arrays under 32 MB glibc keeps some freed buffers for itself, as many as there are threads, so these are larger.
    """
    command = [sys.executable, "benchmarks/save_memory.py", "--megabytes", "33", "--result", tmp_path / "result.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["resident_mb"]) == 30
    assert result["growth_percent"] < 5, result["resident_mb"]
