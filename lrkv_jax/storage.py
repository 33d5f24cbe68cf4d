"""Files and folders on a disk or in a bucket (`gs://`): what differs between the two, in one place.

A bucket has no append, no rename and no locks; writing one object is atomic there. A path on a disk is a pathlib.Path
and one in a bucket an epath.Path, which read the same; what writes asks `in_bucket`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from lrkv_jax.settings import UserError

AnyPath = Path | epath.Path


def path(text: str) -> AnyPath:
    """The path that a command line or a config names. Raises UserError for a bucket that can't be reached from here."""
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Path(os.path.expanduser(text))
    if scheme != "gs":
        raise UserError(f"{text}: a folder on a disk, or a bucket gs://...")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{text}: needs the package gcsfs (pip install gcsfs)")
    return epath.Path(text)


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
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 2**24)


@contextlib.contextmanager
def scratch_for(place: AnyPath) -> Iterator[Path]:
    """A folder on a disk to write to in place of `place`: itself, or for a bucket one of which copies are put there."""
    if not in_bucket(place):
        yield Path(place)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
