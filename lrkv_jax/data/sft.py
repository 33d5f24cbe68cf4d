"""TFDS builder `sft`: a person's own .jsonl of prompts and completions, or of chats (chat.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from lrkv_jax.data.chat import canonical
from lrkv_jax.data.text_files import decoded, text_files
from lrkv_jax.settings import UserError


def example_files(path: str) -> tuple[Path, list[Path]]:
    """The folder and its .jsonl files, as `text_files` has them. Raises UserError where there are none."""
    if not path:
        raise UserError("data.path is empty: dataset = sft needs a .jsonl file of examples, or a folder of them")
    return text_files(path, (".jsonl",))


@dataclasses.dataclass(kw_only=True)
class SftConfig(tfds.core.BuilderConfig):
    """Where the examples are: a file or folder."""

    path: str


class Sft(tfds.core.GeneratorBasedBuilder):
    """One document a line, the JSON of what is read of it."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"name": text, "text": text}))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        del dl_manager  # nothing to download
        return {"train": self._generate_examples(*example_files(self.builder_config.path))}

    def _generate_examples(self, root: Path, files: list[Path]) -> Iterator[tuple[str, dict]]:
        for file in files:
            for number, line in enumerate(decoded(file).split("\n"), 1):
                if line.strip():
                    name = f"{file.relative_to(root).as_posix()}:{number}"
                    yield name, {"name": name, "text": canonical(line, f"{file}:{number}")}
