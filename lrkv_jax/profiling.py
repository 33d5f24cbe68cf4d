"""A trace of some steps for XProf, and the cache of compiled programs that makes a restart quick."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from lrkv_jax.settings import UserError
from lrkv_jax.storage import AnyPath, copy_tree, in_bucket, scratch_for


class Profile:
    """Traces steps first to last (counted from 1, both included) into RUN_DIR/profile; without a span, nothing.

    `xprof RUN_DIR/profile` shows it. Process 0 traces its own devices.
    """

    def __init__(self, run_dir: AnyPath, span: tuple[int, int] | None):
        self._directory, self._span = run_dir / "profile", span
        self._running = contextlib.ExitStack()
        self._on = False
        self._untold = span is not None  # till a trace starts, or it is said that none will

    def before(self, step: int, state: Any) -> None:
        """To be called before each step; `state` is what the step before it made, which a trace waits for."""
        if self._untold and step > self._span[1]:
            self._tell(f"no trace: the run goes on at step {step}")
        wanted = self._span is not None and self._span[0] <= step <= self._span[1]
        if wanted == self._on:
            return
        if not wanted:
            self.finish(state)
            return
        jax.block_until_ready(state)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._scratch = self._running.enter_context(scratch_for(self._directory))
        jax.profiler.start_trace(str(self._scratch))
        self._on, self._untold = True, False

    def finish(self, state: Any) -> None:
        """Ends a trace that is on, with the step that made `state`; to be called where the loop ends."""
        if self._on:
            jax.block_until_ready(state)
            self._stop()

    def _tell(self, line: str) -> None:
        print(f"\n--profile {self._span[0]}:{self._span[1]}: {line}", file=sys.stderr)
        self._untold = False

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        if in_bucket(self._directory):
            copy_tree(self._scratch, self._directory)
        self._running.close()
        self._on = False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._on:
            self._stop()
        elif self._untold:
            self._tell("no trace: the run ended before")


def parse_span(text: str) -> tuple[int, int]:
    """FIRST:LAST. Raises UserError for anything else."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--profile {text}: must be FIRST:LAST, two steps counted from 1, such as 10:15")
    return int(first), int(last)


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --compile-cache."""
    parser.add_argument(
        "--compile-cache",
        default="",
        metavar="DIR|off",
        help="where compiled programs are kept (default: the folder `compiled` of the data cache)",
    )


def keep_compiled(where: str, cache: Path) -> None:
    """Has JAX keep compiled programs in `where`: a folder, a bucket, `off`, or "" for a folder of the data cache.

    JAX_COMPILATION_CACHE_DIR in the environment goes before the last. JAX's key holds the program, the versions and an
    accelerator's kind, but not which instructions a CPU has, so CPUs that differ get folders of their own.
    """
    if where == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        return
    if not where and jax.config.jax_compilation_cache_dir:
        return
    directory = where or str(cache / "compiled")
    if "://" not in directory:
        folder = Path(os.path.expanduser(directory)).absolute()
        directory = str(folder / cpu_key() if jax.default_backend() == "cpu" else folder)
    jax.config.update("jax_compilation_cache_dir", directory)


def cpu_key() -> str:
    """A name for CPUs that run each other's programs: the architecture and a hash of the features it lists."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else [platform.processor()]
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), lines[0])
    return f"cpu-{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
