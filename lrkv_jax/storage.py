"""Files and folders on a disk or in a bucket (`gs://`): what differs between the two, in one place.

A bucket has no append, no rename and no locks; writing one object is atomic there. A path on a disk is a pathlib.Path
and one in a bucket a `Bucket`, which read the same; what writes asks `in_bucket`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from etils import epath
from etils.epath import gpath

from lrkv_jax.settings import REFUSALS, UserError

AnyPath = Path | epath.Path

# What code asks a folder for on purpose; in a bucket as on a disk it must go on meaning just this.
EXPECTED = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
# Who raises types of their own when a bucket refuses or can't be reached: gcsfs, and what it is built on.
CLIENTS = {"aiohttp", "fsspec", "gcsfs", "google", "requests"}


def is_clients(error: BaseException) -> bool:
    """Whether the type of an error is one of a bucket's client, which may derive from nothing but Exception."""
    return type(error).__module__.partition(".")[0] in CLIENTS


@contextlib.contextmanager
def refusals(place: AnyPath, *, writing: bool = False) -> Iterator[None]:
    """Turns what a bucket's client raises inside (no access, no credentials, no network) into a UserError in one line.

    Nothing is turned on a disk, nor what says that a file is missing or in the way, or that a disk has refused. But
    where `writing` finds something missing it is the bucket, since there are no folders in one.
    """
    try:
        yield
    except Exception as error:
        missing = writing and isinstance(error, FileNotFoundError)
        meant = isinstance(error, EXPECTED) or (isinstance(error, OSError) and error.errno in REFUSALS)
        theirs = isinstance(error, OSError | ValueError) or is_clients(error)
        if not in_bucket(place) or not theirs or (meant and not missing):
            raise
        reason = "there is no such bucket" if missing else " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{place}: {reason}") from error


def _telling(name: str) -> Callable[..., Any]:
    """A method of epath's that says what a bucket refuses."""
    method = getattr(gpath.PosixGPath, name)

    @functools.wraps(method)
    def told(self: Bucket, *args: Any, **options: Any) -> Any:
        with refusals(self, writing=name.startswith("write")):
            return method(self, *args, **options)

    return told


class Bucket(gpath.PosixGPath):
    """A path in a bucket. Each of its calls raises UserError, with path and reason, where the bucket refuses.

    Reading and writing whole files is among them since data are sent when a file is closed.
    """

    mkdir, open, rmtree, stat, unlink = map(_telling, ("mkdir", "open", "rmtree", "stat", "unlink"))
    read_bytes, read_text, write_bytes, write_text = map(
        _telling, ("read_bytes", "read_text", "write_bytes", "write_text")
    )

    def exists(self) -> bool:
        """Whether it is there. (epath's own takes a refusal for a no.)"""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether it is a folder, which in a bucket means that something lies under its name."""
        try:
            return self.stat().is_directory
        except FileNotFoundError:
            return False

    def iterdir(self) -> Iterator[Bucket]:
        """The paths in it."""
        with refusals(self):
            yield from super().iterdir()

    def glob(self, pattern: str) -> Iterator[Bucket]:
        """The paths of a pattern."""
        with refusals(self):
            yield from super().glob(pattern)


def path(text: str) -> AnyPath:
    """The path that a command line or a config names. Raises UserError for a bucket that can't be reached from here."""
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Path(os.path.expanduser(text))
    if scheme != "gs":
        raise UserError(f"{text}: a folder on a disk, or a bucket gs://...")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{text}: needs the package gcsfs (pip install gcsfs)")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints the traceback of what it raises
    return Bucket(text)


def in_bucket(place: AnyPath) -> bool:
    """Whether a path lies in a bucket."""
    return not isinstance(place, Path)


def absolute(place: AnyPath) -> AnyPath:
    """The path from the root on; a bucket's is so already."""
    return place if in_bucket(place) else Path(os.path.abspath(place))


def write_atomically(place: AnyPath, content: bytes) -> None:
    """Writes a small file so that a reader sees the old one or the new one, never half of it. Raises OSError."""
    if in_bucket(place):
        place.write_bytes(content)
        return
    scratch = place.with_name(place.name + ".tmp")
    scratch.write_bytes(content)
    os.replace(scratch, place)


def remove_tree(place: AnyPath) -> None:
    """Removes a folder and all that is in it, if it is there."""
    if not in_bucket(place):
        shutil.rmtree(place, ignore_errors=True)
    elif place.exists():
        place.rmtree()


def copy_tree(source: AnyPath, target: AnyPath) -> None:
    """Copies the files below `source` to the same names below `target`, those in folders too."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            copy_tree(entry, target / entry.name)
        else:
            copy_file(entry, target / entry.name)


def copy_file(source: AnyPath, target: AnyPath) -> None:
    """Copies one file piece by piece, since it may be larger than memory."""
    with refusals(source), source.open("rb") as read:
        with refusals(target, writing=True), target.open("wb") as written:
            shutil.copyfileobj(read, written, 2**24)


@contextlib.contextmanager
def all_or_nothing(place: AnyPath) -> Iterator[AnyPath]:
    """A folder to fill that becomes `place` when the block ends, or vanishes where it ends with an error.

    In a bucket, which has no rename, it is `place` from the beginning. Raises UserError where something is there, or a
    folder can't be made.
    """
    place = absolute(place)
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise UserError(f"{place} exists; name a folder that doesn't")
    folder = place if in_bucket(place) else place.with_name(f".{place.name}.unfinished")
    remove_tree(folder)  # one that a kill has left
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place}: {error.strerror or error}") from None
    try:
        yield folder
        if folder != place:
            os.replace(folder, place)
    except BaseException:
        remove_tree(folder)
        raise


@contextlib.contextmanager
def scratch_for(place: AnyPath) -> Iterator[Path]:
    """A folder on a disk to write to in place of `place`: itself, or for a bucket one of which copies are put there."""
    if not in_bucket(place):
        yield Path(place)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
