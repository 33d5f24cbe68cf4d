"""Which runs another one needs: what `--init-from` and `--distill-from` name, and the files that keep it.

origin.json and teacher.json name the step that was read and the other run's config as it was, so that the same command
means the same run when the other has trained on. Of its source a run is independent from then on; its teacher it reads
again whenever it is resumed.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import pydantic

from lrkv_jax import storage
from lrkv_jax.settings import Settings, UserError, describe
from lrkv_jax.storage import AnyPath


class Role(NamedTuple):
    """What another run can be to one."""

    flag: str
    """Names the other."""
    file: str
    """Keeps it, in the run directory."""
    verb: str
    """Stands between the two in messages."""


SOURCE = Role("--init-from", "origin.json", "began from")
TEACHER = Role("--distill-from", "teacher.json", "learns from")


class Origin(Settings):
    """A checkpoint of another run."""

    run_dir: str
    """The other run's directory, absolute."""
    which: str
    """What was asked for: newest, best or a step."""
    step: int
    """The step that this was."""
    fingerprint: str
    """Hash of the checksums of its parameters."""
    config: dict[str, Any]
    """Its config."""

    def is_meant_by(self, reference: str, role: Role) -> bool:
        """Whether the role's flag names this checkpoint."""
        run_dir, which = parse(reference, role)
        return str(run_dir) == self.run_dir and which in (self.which, str(self.step))

    def __str__(self) -> str:
        return f"{self.run_dir}@{self.which}"


def parse(reference: str, role: Role = SOURCE) -> tuple[AnyPath, str]:
    """Directory, absolute, and step of RUN_DIR[@STEP]; the newest where none is named. The directory may hold an @."""
    place, separator, which = reference.rpartition("@")
    if which.isdecimal() or which in ("newest", "best"):
        return storage.absolute(storage.path(place)), which
    run_dir = storage.absolute(storage.path(reference))
    if separator and "/" not in which and not run_dir.exists():
        raise UserError(f"{role.flag} {reference}: {which!r} should be a step, newest or best")
    return run_dir, "newest"


def recorded(run_dir: AnyPath, role: Role) -> Origin | None:
    """Who has the role for a run; None where nobody has, or it hasn't begun. Raises UserError for a file not ours."""
    place = run_dir / role.file
    if not (run_dir / "config.json").exists() or not place.exists():
        return None
    try:
        return Origin.model_validate_json(place.read_text())
    except pydantic.ValidationError as error:
        raise UserError(f"{place}: {describe(error)}") from None


def fingerprint(arrays: dict[str, Any]) -> str:
    """Of a manifest's entries by name: shapes, dtypes and checksums."""
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()
