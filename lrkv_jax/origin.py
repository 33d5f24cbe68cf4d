"""Which run another one began from: what `--init-from` names, and origin.json, which keeps it in the new run.

The file makes the new run independent of its source: it names the step that was read and the source's config as it was,
so that the same command means the same run when the source has trained on, or is gone.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pydantic

from lrkv_jax import storage
from lrkv_jax.settings import Settings, UserError, describe
from lrkv_jax.storage import AnyPath

FILE = "origin.json"


class Origin(Settings):
    """The checkpoint that a run's parameters come from."""

    run_dir: str
    """The source's directory, absolute."""
    which: str
    """What was asked for: newest, best or a step."""
    step: int
    """The step that this was."""
    fingerprint: str
    """Hash of the checksums of the source's parameters."""
    config: dict[str, Any]
    """The source's config."""

    def is_meant_by(self, reference: str) -> bool:
        """Whether `--init-from` names this checkpoint."""
        run_dir, which = parse(reference)
        return str(run_dir) == self.run_dir and which in (self.which, str(self.step))

    def __str__(self) -> str:
        return f"{self.run_dir}@{self.which}"


def parse(reference: str) -> tuple[AnyPath, str]:
    """Directory, absolute, and step of RUN_DIR[@STEP]; the newest where none is named. The directory may hold an @."""
    place, separator, which = reference.rpartition("@")
    if which.isdecimal() or which in ("newest", "best"):
        return storage.absolute(storage.path(place)), which
    run_dir = storage.absolute(storage.path(reference))
    if separator and "/" not in which and not run_dir.exists():
        raise UserError(f"--init-from {reference}: {which!r} should be a step, newest or best")
    return run_dir, "newest"


def recorded(run_dir: AnyPath) -> Origin | None:
    """The origin of a run; None where it has none, or hasn't begun. Raises UserError where the file is not ours."""
    place = run_dir / FILE
    if not (run_dir / "config.json").exists() or not place.exists():
        return None
    try:
        return Origin.model_validate_json(place.read_text())
    except pydantic.ValidationError as error:
        raise UserError(f"{place}: {describe(error)}") from None


def fingerprint(arrays: dict[str, Any]) -> str:
    """Of a manifest's entries by name: shapes, dtypes and checksums."""
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()
