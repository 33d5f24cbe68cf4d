"""The cache's files: each is whole or not there, one process makes it, and a machine's refusal is one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from lrkv_jax.settings import UserError
from lrkv_jax.storage import AnyPath, in_bucket


def write_atomically(path: AnyPath, content: bytes) -> None:
    """Writes a file that a reader finds complete or not at all, even when the machine dies meanwhile."""
    if in_bucket(path):
        path.write_bytes(content)
        return
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a name beside `path` to write to; on success the file takes the name `path`, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def key_of(*parts: object) -> str:
    """A short name for whatever `parts` (JSON) decide."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def only_process(path: Path, what: str) -> Iterator[None]:
    """Holds the lock `path`, so that two runs started at once do not make the same thing twice.

    A lock left by a killed process is free again. Files are replaced whole, so even on a file system that ignores
    locks the worst is work done twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process to prepare {what}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says so; ArrayRecord passes it on as a RuntimeError with the system's words in it."""
    return getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)


@contextlib.contextmanager
def machine_refusals(cache: Path) -> Iterator[None]:
    """Turns a full disk, a read-only folder and the like into a UserError that names the place."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if disk_is_full(error):
            raise UserError(
                f"the disk that holds {cache} is full: free some space or set LRKV_CACHE elsewhere"
            ) from error
        if isinstance(error, RuntimeError):
            raise
        place = error.filename or cache
        raise UserError(
            f"data cache {cache}: {place}: {error.strerror or error} (set LRKV_CACHE elsewhere?)"
        ) from error
