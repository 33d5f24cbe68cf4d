"""TFDS datasets by name: our own builders, the TFDS catalogue, and folders TFDS prepared, without tensorflow."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import io
import logging
import os
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from lrkv_jax.data.config import DataConfig
from lrkv_jax.data.files import disk_is_full, key_of
from lrkv_jax.data.python_stdlib import PythonStdlib, source_files
from lrkv_jax.data.sft import Sft, example_files
from lrkv_jax.data.text_files import TextFiles, TextFilesConfig, text_files
from lrkv_jax.settings import UserError


def prepared_builder(config: DataConfig, root: Path, progress: bool) -> tuple[tfds.core.DatasetBuilder, str]:
    """The dataset, built below `root` if it was not, and the feature that holds its text.

    Raises UserError saying in one line what is missing.
    """
    with quiet(shown=False):
        builder = _builder(config, root)
    _build(builder, config, progress)
    if isinstance(builder, TextFiles):  # which has given the text its own name
        return builder, "text"
    texts = [name for name, feature in builder.info.features.items() if isinstance(feature, tfds.features.Text)]
    if config.text_feature not in texts:
        listed = ", ".join(texts) or "no text at all"
        raise UserError(f"data.text_feature = {config.text_feature}: dataset {config.dataset} has {listed}")
    return builder, config.text_feature


def source_key(config: DataConfig) -> str:
    """Names the built dataset. It changes when the source files do: by name below their folder, size or time of change.

    Raises UserError where they are missing.
    """
    name, _, variant = config.dataset.partition("/")
    if name == PythonStdlib.name:
        known = list(PythonStdlib.builder_configs)
        if variant and variant not in known:
            raise UserError(f"data.dataset = {config.dataset}: python_stdlib has {', '.join(known)}")
        root, files = source_files(variant == "with_tests")
    elif config.dataset == TextFiles.name:
        root, files = text_files(config.path)
    elif config.marked:
        root, files = example_files(config.path)
    elif config.path:
        root = Path(config.path).expanduser()
        if not root.is_dir():
            raise UserError(f"data.path = {config.path}: no such folder")
        files = sorted(path for path in root.rglob("*") if path.is_file())
    else:
        return key_of(config.dataset, config.text_feature)
    stats = [(file, file.stat()) for file in files]
    seen = [(file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    return key_of(config.dataset, config.text_feature, seen)


def _builder(config: DataConfig, root: Path) -> tfds.core.DatasetBuilder:
    """The TFDS builder of a dataset, reading and writing ArrayRecord below `root`."""
    keep = {"data_dir": str(root), "file_format": "array_record"}
    name, _, variant = config.dataset.partition("/")
    if name == PythonStdlib.name:
        return PythonStdlib(config=variant or "without_tests", **keep)
    if name == TextFiles.name or config.marked:
        files = TextFilesConfig(name="files", path=config.path, feature=config.text_feature)
        return (Sft if config.marked else TextFiles)(config=files, **keep)
    if config.path and (Path(config.path).expanduser() / "dataset_info.json").is_file():
        return tfds.builder_from_directory(Path(config.path).expanduser())
    with foreign_errors(config.dataset):
        try:
            builder = tfds.builder(config.dataset, **keep)
        except tfds.core.registered.DatasetNotFoundError:
            importlib.import_module("tensorflow_datasets.text")  # registers the older half of the text datasets
            try:
                builder = tfds.builder(config.dataset, **keep)
            except tfds.core.registered.DatasetNotFoundError:
                raise UserError(_unknown(config.dataset)) from None
    _do_without_tensorflow(builder)
    return builder


def _unknown(name: str) -> str:
    known = [PythonStdlib.name, TextFiles.name, Sft.name, *tfds.list_builders(with_community_datasets=False)]
    near = difflib.get_close_matches(name.partition("/")[0], known, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "take python_stdlib, text_files or a name of TFDS"
    return f"data.dataset = {name}: no such dataset; {hint}"


def _build(builder: tfds.core.DatasetBuilder, config: DataConfig, progress: bool) -> None:
    """Downloads and prepares, unless that is done. TFDS leaves a whole dataset or none."""
    target = Path(builder.data_dir)
    if not (target / "dataset_info.json").exists():
        for left in target.parent.glob("incomplete.*"):  # of a killed run: we hold the lock
            shutil.rmtree(left)
        manual = str(Path(config.path).expanduser()) if config.path else None
        ours = isinstance(builder, PythonStdlib | TextFiles)
        with quiet(shown=progress and not ours), foreign_errors(config.dataset):
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=manual))
    if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        kept = builder.info.file_format.value
        raise UserError(f"dataset {config.dataset} in {target} is kept as {kept}, which is not array_record")


@contextlib.contextmanager
def foreign_errors(name: str) -> Iterator[None]:
    """TFDS builders are other people's programs and fail in any way: says in one line what this one is missing."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        raise UserError(f"dataset {name} needs {package}, which is not installed: {first_line(error)}") from error
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"ConnectionError", "Timeout", "TransportError", "NetworkError", "DownloadError", "gaierror"}:
            raise UserError(f"dataset {name} needs the network, which failed: {first_line(error)}") from error
        if disk_is_full(error) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise UserError(f"dataset {name}: TFDS failed: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _do_without_tensorflow(builder: tfds.core.DatasetBuilder) -> None:
    """tiny_shakespeare's builder asks tensorflow for nothing but opening a file, which Python can do."""
    module = sys.modules[type(builder).__module__]
    if builder.name == "tiny_shakespeare" and importlib.util.find_spec("tensorflow") is None:

        def open_text(path: os.PathLike, mode: str = "r") -> io.TextIOBase:
            return open(path, mode, encoding="utf-8", newline="")

        module.tf = types.SimpleNamespace(
            io=types.SimpleNamespace(gfile=types.SimpleNamespace(isdir=os.path.isdir, GFile=open_text))
        )


@contextlib.contextmanager
def quiet(shown: bool) -> Iterator[None]:
    """TFDS talks on stdout and warns of what is normal: `shown` on stderr, with its progress bars, or not at all."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    (tfds.enable_progress_bar if shown else tfds.disable_progress_bar)()
    try:
        with contextlib.redirect_stdout(sys.stderr if shown else io.StringIO()):
            yield
    finally:
        logging.disable(before)
