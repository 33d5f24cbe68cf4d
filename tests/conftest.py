"""Before JAX is imported: the CPU as eight devices, and jaxtyping's shape checks compiled into our modules."""

import gc
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimisation takes half the time of compiling programs as small as these, and the suite compiles hundreds.
for flag in ("xla_force_host_platform_device_count=8", "xla_backend_optimization_level=0"):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}".strip()

import pytest
from jaxtyping import install_import_hook

# Kept for the whole run: every function of ours that says a shape is held to it, in tests only.
install_import_hook("lrkv_jax", "beartype.beartype")

# The files that take longest come first, so that neither of two workers is left alone with one at the end.
LONGEST = ("test_multihost", "test_cli", "test_step", "test_podcheck", "test_checkpoint_damage", "test_storage")


def pytest_collection_modifyitems(items):
    """Sorts by file; within a file the order stays."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish():
    """Spares the garbage collector what lives as long as the process, and most of its rounds: a seventh of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(scope="module")
def in_root(tmp_path_factory):
    """Commands run where a person would run them, with a cache of the file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent.parent)
        patch.setenv("LRKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command's `main` in this process; returns its output, or the line of its error."""
    from lrkv_jax import rundir
    from lrkv_jax.settings import command

    def command_line(main, *args, status=0):
        compiled = str(tmp_path / "compiled")
        monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, args), "--compile-cache", compiled])
        with pytest.raises(SystemExit) as stopped:
            command(main)()
        rundir._held.clear()  # gives the lock back, as a process that ends does
        out, err = capsys.readouterr()
        assert (stopped.value.code or 0) == status, err
        return next(line for line in err.splitlines() if line.startswith("error: ")) if status else out

    return command_line
