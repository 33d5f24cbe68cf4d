"""Checkpoints: Orbax saves and restores a pytree; this file decides which one to trust.

    RUN_DIR/checkpoints/newest/<step>   the newest few, for resuming
    RUN_DIR/checkpoints/best/<step>     the one with the lowest validation cross-entropy

A step directory holds two Orbax items: `state`, the arrays, and `manifest`, our JSON with the shape, dtype and checksum
of every array. The manifest is needed because tensorstore keeps no checksum of array data: a flipped byte there would
be restored without a word. Orbax writes into a temporary directory and renames it when all is on disk, so a save that
is cut, however brutally, leaves no step directory at all (in a bucket, which has no rename, one without its commit
marker); what else disks and hands do to one, reading finds out.

Of several processes every one writes and reads its own part of the arrays. What they do next must not differ, so what a
directory holds is looked up by process 0 alone and agreed, and a part that one can't read is damage for all.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import logging
import math
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from pydantic import Field

from lrkv_jax import storage
from lrkv_jax.distributed import agreed, gathered, is_first
from lrkv_jax.inventory import compare, inventory, short
from lrkv_jax.settings import Settings, UserError
from lrkv_jax.storage import AnyPath

logger = logging.getLogger(__name__)

STATE, MANIFEST = "state", "manifest"
MANIFEST_FILE = f"{MANIFEST}/metadata"  # where Orbax's JSON handler writes its item
# Without any of these a step directory is no checkpoint; Orbax itself misses some of them only when it is too late.
REQUIRED = (
    "commit_success.txt",
    "_CHECKPOINT_METADATA",
    MANIFEST_FILE,
    f"{STATE}/_METADATA",
    f"{STATE}/manifest.ocdbt",
)
# What Orbax and tensorstore raise on files they did not write so. Not RuntimeError: that is the device's trouble.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OSError)


class CheckpointConfig(Settings):
    """When to save, and how much to keep."""

    every_steps: Annotated[int, Field(ge=1)] = 500
    """Steps between saves."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept, beside the best. Two, so that a damaged newest costs one interval and not the run."""


class Damaged(Exception):
    """A step directory that holds no usable checkpoint; the text is the reason."""


class Checkpointer:
    """Saves and restores the checkpoints of one run.

    State is a dict of pytrees of arrays. A template for restoring is the same with shape, dtype and sharding in the
    arrays' places (jax.ShapeDtypeStruct; without a sharding, the first device); it need not have the devices or the
    mesh that saved. Restored arrays belong to JAX and may be donated.
    """

    def __init__(self, run_dir: AnyPath, config: CheckpointConfig):
        _quieten()
        self._root = storage.absolute(run_dir) / "checkpoints"  # Orbax refuses relative paths, and only at a save
        self._newest = Shelf(self._root / "newest", config.keep)
        self._best = Shelf(self._root / "best", 1)

    def steps(self) -> list[int]:
        """Steps of the newest checkpoints on disk, ascending; neither damaged ones nor a save still running."""
        return self._newest.steps()

    def best_step(self) -> int | None:
        """Step of the best checkpoint on disk; None where there is none."""
        return min(self._best.steps(), key=self._best.cross_entropy, default=None)

    def best_ce(self) -> float:
        """Validation cross-entropy (nats/token) of the best checkpoint on disk; infinity where there is none."""
        return min(map(self._best.cross_entropy, self._best.steps()), default=math.inf)

    def save(self, step: int, state: PyTree) -> None:
        """Starts saving `state`; returns once it may be donated. A step that is already saved is left as it is.

        Raises:
            UserError: this save or the one before it failed, with the reason; or later steps are already saved.
        """
        self._newest.wait()
        later = agreed(lambda: [other for other in self.steps() if other > step])
        if later:
            raise UserError(f"step {step} is not saved: {self._newest.directory} already holds step {later[-1]}")
        self._newest.save(step, state)

    def save_best(self, step: int, state: PyTree, ce: float) -> None:
        """As `save`, if `ce` (validation nats/token) is below the best so far, which goes once this one is on disk."""
        self._best.wait()
        if agreed(lambda: ce < self.best_ce()):
            self._best.save(step, state, ce)

    def restore(self, template: PyTree, which: int | str = "newest") -> tuple[PyTree, int] | None:
        """The state and its step. `which` is a step, "newest" or "best".

        "newest" walks from the newest checkpoint of either kind to older ones and passes over damaged ones with a
        warning; None where the run has no checkpoint at all.

        Raises:
            UserError: every checkpoint is damaged (a run never starts afresh by itself); the one asked for is missing
                or damaged; the template differs in names, shapes or dtypes, found out before anything is allocated.
        """
        reasons = []
        shelves = {"newest": self._newest, "best": self._best}
        for step, name in agreed(lambda: self._candidates(which)):
            shelf = shelves[name]
            try:
                return shelf.read(step, template), step
            except Damaged as damage:
                reasons.append(f"{shelf.path(step)}: {damage}")
                if is_first():
                    logger.warning("checkpoint passed over, %s", reasons[-1])
        if which == "newest" and not reasons:
            return None
        raise self._none(which, reasons)

    def _none(self, which: int | str, reasons: list[str]) -> UserError:
        fault = f"unreadable ({'; '.join(reasons)})" if reasons else "missing"
        there = f"{self._root} has steps {self.steps()} and best {self.best_step()}"
        return UserError(f"checkpoint {which} is {fault}; {there}")

    def restore_params(self, template: PyTree, which: int | str = "newest") -> tuple[PyTree, int]:
        """The entry `params` of the state alone, and its step; as `restore`, but no checkpoint is an error too."""
        restored = self.restore({"params": template}, which)
        if restored is None:
            raise UserError(f"{self._root} holds no checkpoint")
        state, step = restored
        return state["params"], step

    def look_up(self, entry: str, which: int | str = "newest") -> tuple[int, dict[str, Any], AnyPath]:
        """What reading an entry of the state would find: step, arrays by name (shape, dtype, checksum), directory.

        Reads no array. Raises UserError where there is no such checkpoint, or each lacks a readable manifest.
        """
        reasons = []
        shelves = {"newest": self._newest, "best": self._best}
        for step, name in self._candidates(which):
            shelf = shelves[name]
            reason, arrays = shelf.look(step)
            if not reason:
                return step, {name: of for name, of in arrays.items() if name.startswith(f"{entry}.")}, shelf.path(step)
            reasons.append(f"{shelf.path(step)}: {reason}")
        raise self._none(which, reasons)

    def wait(self) -> None:
        """Returns when every save is on disk. Raises UserError with the reason if one failed."""
        self._newest.wait()
        self._best.wait()

    def close(self) -> None:
        """As `wait`, and frees Orbax's threads. Saving again afterwards is allowed."""
        self._newest.close()
        self._best.close()

    def _candidates(self, which: int | str) -> list[tuple[int, str]]:
        """Steps and the shelves' names, in the order in which to look."""
        shelves = {"newest": self._newest, "best": self._best}
        if which == "newest":
            for path in (path for shelf in shelves.values() for path in shelf.unfinished()):
                logger.warning("checkpoint passed over, %s: its save was not finished", path)
            found = [(step, name) for name, shelf in shelves.items() for step in shelf.listed()]
            return sorted(found, key=lambda pair: pair[0], reverse=True)
        if which == "best":
            return [(step, "best") for step in sorted(self._best.listed(), key=self._best.cross_entropy)]
        if not str(which).isdecimal():
            raise UserError(f"checkpoint {which!r}: should be a step, newest or best")
        return [(int(which), name) for name, shelf in shelves.items() if int(which) in shelf.listed()]


@dataclasses.dataclass
class Shelf:
    """One directory of step directories, of which the `keep` saved last are kept."""

    directory: AnyPath
    keep: int
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
    """Reason by step, of those that reading found damaged."""
    manager: ocp.CheckpointManager | None = None
    """Made at the first save: a reader must not write, and the manager lists damaged steps as good ones."""

    def path(self, step: int) -> AnyPath:
        """Directory of a step."""
        return self.directory / str(step)

    def listed(self) -> list[int]:
        """All steps that have a directory, good or not, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdecimal())

    def unfinished(self) -> list[AnyPath]:
        """What Orbax leaves of a save that was killed: its temporary directory."""
        return sorted(self.directory.glob("*.orbax-checkpoint-tmp*"))

    def steps(self) -> list[int]:
        """The steps not known or seen at a glance to be damaged, ascending."""
        return [step for step in self.listed() if self.complaint(step) is None]

    def complaint(self, step: int) -> str | None:
        """Why a step is not usable, as far as can be told without reading its arrays; None if nothing is wrong."""
        missing = next((name for name in REQUIRED if not (self.path(step) / name).is_file()), None)
        return self.damaged.get(step) or (missing and f"{missing} is missing")

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a step. Raises Damaged."""
        try:
            manifest = json.loads((self.path(step) / MANIFEST_FILE).read_text())
            return {"ce": float(manifest.get("ce", math.inf)), "arrays": dict(manifest["arrays"])}
        except UNREADABLE as error:
            raise Damaged(f"the manifest is unreadable ({_reason(error)})") from error

    def cross_entropy(self, step: int) -> float:
        """Validation cross-entropy a step was saved with, nats/token; infinity where it can't be read."""
        try:
            return self.manifest(step)["ce"]
        except Damaged:
            return math.inf

    def read(self, step: int, template: PyTree) -> PyTree:
        """The arrays of `template`, checked. Raises Damaged, or UserError where the template doesn't fit."""
        try:
            return self._read(step, template)
        except Damaged as damage:
            self.damaged[step] = str(damage)
            raise

    def _read(self, step: int, template: PyTree) -> PyTree:
        reason, stored = agreed(lambda: self.look(step))
        if reason:
            raise Damaged(reason)
        prefixes = tuple(f"{key}." for key in template)
        stored = {name: entry for name, entry in stored.items() if name in template or name.startswith(prefixes)}
        compare(template, stored, self.path(step))
        state, reason = _read_arrays(self.path(step), jax.tree.map(_placed, template))
        if failures := [failure for failure in gathered(reason) if failure]:
            raise Damaged(failures[0])
        for name, entry in inventory(state).items():
            if entry["checksum"] != stored[name]["checksum"]:
                raise Damaged(f"the data of {short(name)} do not match their checksum")
        return state

    def look(self, step: int) -> tuple[str, dict[str, Any]]:
        """Why a step is not usable, else "" and what its manifest says of the arrays."""
        try:
            return self.complaint(step) or "", self.manifest(step)["arrays"]
        except Damaged as damage:
            return self.complaint(step) or str(damage), {}

    def save(self, step: int, state: PyTree, ce: float = math.inf) -> None:
        """Starts saving, after any earlier save has ended. Raises UserError with the reason of a failure."""
        self.wait()
        if agreed(lambda: step in self.steps()):
            return
        manifest = {"arrays": inventory(state)} | ({} if ce == math.inf else {"ce": ce})
        items = {STATE: ocp.args.PyTreeSave(state), MANIFEST: ocp.args.JsonSave(manifest)}
        try:
            # force: Orbax would otherwise decline, in silence, a step below the highest.
            self._writer().save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:  # whatever Orbax raises, the save has failed
            self._fail(error)

    def wait(self) -> None:
        """Returns when the running save is on disk. Raises UserError with the reason if it failed."""
        try:
            if self.manager is not None:
                self.manager.wait_until_finished()
                _give_memory_back()
        except Exception as error:  # raised in Orbax's thread, of any type
            self._fail(error)

    def close(self) -> None:
        """As `wait`, and frees Orbax's threads."""
        self.wait()
        if self.manager is not None:
            self.manager.close()
            self.manager = None

    def _fail(self, error: Exception) -> None:
        self.manager = None  # it would report the same failure for ever
        raise UserError(f"a checkpoint could not be saved in {self.directory}: {_reason(error)}") from error

    def _writer(self) -> ocp.CheckpointManager:
        """The manager, made once damaged steps are out of its sight: it would count, keep and never replace them."""
        if agreed(lambda: any(map(self.complaint, self.listed()))):
            self.close()
            agreed(self._set_bad_aside)  # the others wait until it is done
        self.damaged.clear()
        if self.manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(self.keep),
                cleanup_tmp_directories=True,
                # Two shelves saving the same step would meet at each other's barriers, and wait there for ever.
                multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=self.directory.name),
                # Where a directory can't be made in the background, Orbax's threads wait for it and hold up the exit.
                async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            )
            self.manager = ocp.CheckpointManager(self.directory, options=options)
        return self.manager

    def _set_bad_aside(self) -> None:
        for step in self.listed():
            if reason := self.complaint(step):
                self._set_aside(step, reason)

    def _set_aside(self, step: int, reason: str) -> None:
        """Renames a damaged step: on a better day of a network disk it may be readable after all.

        In a bucket, which has no rename, it is removed: what lies there without a commit marker is a save that was cut.
        """
        if sum(newer > step for newer in self.steps()) >= self.keep:  # due to go; a kill cut its removal short
            storage.remove_tree(self.path(step))
            return
        if storage.in_bucket(self.directory):
            storage.remove_tree(self.path(step))
            logger.warning("damaged checkpoint %s removed (%s)", self.path(step), reason)
            return
        aside = self.path(step).with_suffix(".damaged")
        storage.remove_tree(aside)
        self.path(step).rename(aside)
        logger.warning("damaged checkpoint renamed to %s (%s)", aside, reason)


def _read_arrays(path: AnyPath, template: PyTree) -> tuple[PyTree, str]:
    """The part of a step's arrays that belongs to this process, and why it can't be read ("" where it can)."""
    arguments = ocp.args.PyTreeRestore(
        template, restore_args=ocp.checkpoint_utils.construct_restore_args(template), partial_restore=True
    )
    # Each process on its own: Orbax would have one wait, for minutes, for another that has found its part damaged.
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"read_{here}"
    )
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=alone))
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            return reader.restore(path, args=ocp.args.Composite(**{STATE: arguments}))[STATE], ""
    except Exception as error:
        if not isinstance(error, UNREADABLE) and not storage.is_clients(error):
            raise
        return None, _reason(error)


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _reason(error: BaseException) -> str:
    """One short line out of an error of Orbax or tensorstore, which may run to pages."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    if found := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(found[1]))
    codes = {"OUT_OF_RANGE": "a file is truncated", "DATA_LOSS": "a file is corrupt", "NOT_FOUND": "a file is missing"}
    return codes.get(text.split(":")[0]) or f"{type(error).__name__}: {(text.splitlines() or [''])[0][:160]}"


def _give_memory_back() -> None:
    """Has glibc return freed memory to the system: it keeps what Orbax's threads wrote from, and after some saves more
    of it, up to the size of a state."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@functools.cache
def _quieten() -> None:
    """Drops what Orbax logs, and what tensorstore's threads print when a read fails.

    Nothing is lost: a failure reaches the caller as an exception, here or in `wait`. The threads' "Event loop is
    closed" comes of Orbax leaving its loop at the first array that fails, while others are being read.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # "exception was never retrieved", after it was raised
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in Path(record.pathname).parts)
    hook = sys.unraisablehook

    def quiet(unraisable: Any) -> None:
        if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
            hook(unraisable)

    sys.unraisablehook = quiet
