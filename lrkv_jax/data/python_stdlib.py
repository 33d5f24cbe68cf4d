"""TFDS builder `python_stdlib`: the source files of the Python that runs this. Real text everywhere, no network."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from lrkv_jax.settings import UserError

FOREIGN = ("site-packages", "dist-packages", "__pycache__")  # not the standard library's
TESTS = ("test", "tests", "idle_test")


def source_files(with_tests: bool) -> tuple[Path, list[Path]]:
    """The library's folder and its .py files in the order of their names.

    What the build of Python wrote (config-*, _sysconfigdata*) is left out: it holds the builder's own paths, and would
    make two installations of one version differ.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = FOREIGN if with_tests else FOREIGN + TESTS

    def wanted(path: Path) -> bool:
        folders = path.relative_to(root).parts[:-1]
        generated = path.name.startswith("_sysconfigdata") or any(folder.startswith("config-") for folder in folders)
        return not generated and not any(folder in skipped for folder in folders)

    files = sorted(path for path in root.rglob("*.py") if wanted(path))
    if not files:
        raise UserError(f"data.dataset = python_stdlib: this Python has no source files in {root}; use text_files")
    return root, files


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """One document a file. Files that are empty or not UTF-8 (a few of the tests) are left out."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = (
        tfds.core.BuilderConfig(name="without_tests", description="without the library's own tests"),
        tfds.core.BuilderConfig(name="with_tests", description="with the library's own tests"),
    )

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"name": text, "text": text}))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        del dl_manager  # nothing to download
        return {"train": self._generate_examples(*source_files(self.builder_config.name == "with_tests"))}

    def _generate_examples(self, root: Path, files: list[Path]) -> Iterator[tuple[str, dict]]:
        for path in files:
            name, content = path.relative_to(root).as_posix(), path.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield name, {"name": name, "text": text}
