"""A data cache in a bucket: what one machine has made, others fetch onto their own disks.

Batches are read record by record in random order, which a disk does thousands of times faster than a bucket. Of the
cache only tokenizers and token stores are kept there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lrkv_jax.data.files import only_process, replacing
from lrkv_jax.storage import AnyPath, copy_file


def fetch(bucket: AnyPath, cache: Path, place: str, last: str = "") -> None:
    """Copies a file of the bucket, or a folder known to be whole by its file `last`, to the same place of the cache.

    Nothing is done where it is there already, or not in the bucket either.
    """
    done = cache / place / last
    if done.exists() or not (bucket / place / last).exists():
        return
    with only_process(cache / "locks" / f"fetch-{Path(place).name}", f"{place} out of {bucket}"):
        if done.exists():
            return
        print(f"fetching {bucket / place}", file=sys.stderr)
        names = sorted(path.name for path in (bucket / place).iterdir()) if last else [""]
        for name in sorted(names, key=lambda name: name == last):  # what says that all is there comes last
            with replacing(cache / place / name) as unfinished:
                copy_file(bucket / place / name, unfinished)


def publish(bucket: AnyPath, cache: Path, place: str, last: str = "") -> None:
    """The other way round; several machines that publish the same thing at once write the same bytes."""
    if (bucket / place / last).exists():
        return
    names = sorted(path.name for path in (cache / place).iterdir() if path.name[0] != ".") if last else [""]
    for name in sorted(names, key=lambda name: name == last):
        (bucket / place / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(cache / place / name, bucket / place / name)
