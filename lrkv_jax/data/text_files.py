"""TFDS builder `text_files`: a person's own .txt, .jsonl and .parquet files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tensorflow_datasets as tfds

from lrkv_jax.settings import UserError

SUFFIXES = (".txt", ".jsonl", ".parquet")


def text_files(path: str, suffixes: tuple[str, ...] = SUFFIXES) -> tuple[Path, list[Path]]:
    """The folder and its text files, subfolders included, in the order of their names; a single file counts as one.

    Raises UserError where there are none.
    """
    root = Path(path).expanduser().absolute()
    if not root.exists():
        raise UserError(f"data.path = {path}: no such file or folder")
    found = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
    files = [file for file in found if file.suffix in suffixes]
    if not files:
        raise UserError(f"data.path = {path}: no {', '.join(suffixes)} file")
    return (root.parent if root.is_file() else root), files


def read_texts(file: Path, feature: str) -> Iterator[str]:
    """The documents of one file: a .txt is one, a line of .jsonl one, a row of .parquet one.

    Raises UserError naming file and place for text that is not UTF-8, and for a line or row without `feature`.
    """
    if file.suffix == ".parquet":
        yield from _parquet_texts(file, feature)
        return
    if file.suffix == ".txt":
        yield decoded(file)
        return
    for number, line in lines(file):
        yield _json_text(line, feature, f"{file}:{number}")


def lines(file: Path) -> Iterator[tuple[int, str]]:
    """A file's lines that are not blank, by their number from 1."""
    for number, line in enumerate(decoded(file).split("\n"), 1):
        if line.strip():
            yield number, line


def decoded(file: Path) -> str:
    """A file's text. Raises UserError naming the place where it is not UTF-8."""
    content = file.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 at byte {error.start} ({content[error.start : error.start + 1]!r})"
        ) from None


def _json_text(line: str, feature: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: no JSON: {error.msg}") from None
    text = record.get(feature) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{place}: no string under {feature!r} (data.text_feature)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: half a surrogate pair at character {error.start}, which UTF-8 cannot hold") from None
    return text


def _parquet_texts(file: Path, feature: str) -> Iterator[str]:
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = table.schema_arrow.names
        if feature not in columns:
            raise UserError(f"{file}: no column {feature!r} (data.text_feature); it has {', '.join(columns)}")
        row = 0
        for batch in table.iter_batches(columns=[feature]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise UserError(f"{file}: row {row} of {feature!r} is {type(text).__name__}, no text")
                yield text
                row += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {str(error).splitlines()[0]}") from None


@dataclasses.dataclass(kw_only=True)
class TextFilesConfig(tfds.core.BuilderConfig):
    """Where the text is: a file or folder, and the key or column of the documents in .jsonl and .parquet."""

    path: str
    feature: str


class TextFiles(tfds.core.GeneratorBasedBuilder):
    """One document a .txt file, .jsonl line or .parquet row; empty ones are left out."""

    VERSION = tfds.core.Version("1.0.0")
    SUFFIXES = SUFFIXES

    def texts(self, file: Path) -> Iterator[tuple[int, str]]:
        """A file's documents, numbered."""
        return enumerate(read_texts(file, self.builder_config.feature))

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"name": text, "text": text}))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        del dl_manager  # nothing to download
        return {"train": self._generate_examples(*text_files(self.builder_config.path, self.SUFFIXES))}

    def _generate_examples(self, root: Path, files: list[Path]) -> Iterator[tuple[str, dict]]:
        empty = True
        for file in files:
            for number, text in self.texts(file):
                if text.strip():
                    empty = False
                    name = f"{file.relative_to(root).as_posix()}:{number}"
                    yield name, {"name": name, "text": text}
        if empty:
            raise UserError(f"data.path = {self.builder_config.path}: no text in {len(files)} file(s)")
