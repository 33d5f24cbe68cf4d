"""TFDS builder `sft`: a person's own .jsonl of prompts and completions, or of chats (chat.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lrkv_jax.data.chat import canonical
from lrkv_jax.data.config import DataConfig
from lrkv_jax.data.mixture import times_of
from lrkv_jax.data.text_files import TextFiles, lines, text_files
from lrkv_jax.settings import UserError


def example_files(path: str) -> tuple[Path, list[Path]]:
    """The folder and its .jsonl files, as `text_files` has them. Raises UserError where there are none."""
    if not path:
        raise UserError("data.path is empty: dataset = sft needs a .jsonl file of examples, or a folder of them")
    return text_files(path, Sft.SUFFIXES)


def file_times(config: DataConfig) -> dict[str, int]:
    """How often the train split takes the examples of each file, by its name below the folder; {} of other datasets.

    Raises UserError for `repeats` that don't fit the files.
    """
    if not config.marked:
        return {}
    root, files = example_files(config.path)
    return times_of(config.repeats, [file.relative_to(root).as_posix() for file in files], config.path)


class Sft(TextFiles):
    """One document a line, the JSON of what is read of it."""

    SUFFIXES = (".jsonl",)

    def texts(self, file: Path) -> Iterator[tuple[int, str]]:
        """A file's examples by line, from 1."""
        for number, line in lines(file):
            yield number, canonical(line, f"{file}:{number}")
