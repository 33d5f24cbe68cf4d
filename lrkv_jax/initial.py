"""Where a run's parameters come from: drawn afresh, or read out of another run (`--init-from RUN_DIR[@STEP]`).

Parameters are taken by name and must agree in shape; optimizer, schedule and data are the new run's own. Adapters
(lora.py) that the source doesn't have are drawn, all else must be there. What shapes don't show (rotary base, context,
norms) may be changed, and is told. The tokenizer must be the source's, since an id means a row of the embedding.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

from lrkv_jax import distributed, sharding, storage
from lrkv_jax import origin as origins
from lrkv_jax.accounting import abstract_parameters
from lrkv_jax.checkpoint import CheckpointConfig, Checkpointer
from lrkv_jax.config import Command, RunConfig, flatten
from lrkv_jax.inventory import compare
from lrkv_jax.origin import SOURCE, Origin, Role
from lrkv_jax.rundir import read_json
from lrkv_jax.settings import UserError
from lrkv_jax.step import Program, TrainState
from lrkv_jax.storage import AnyPath

# How a model is computed, not which it is.
UNTOLD = {
    "model": {"dtype", "scan_layers", "remat", "lora_rank", "lora_alpha", "lora_targets"},
    "attention": {"implementation"},
}


def find_origin(options: Command) -> Origin | None:
    """The checkpoint that a command's run begins from, or began from; None where it draws its parameters.

    Nothing is allocated. Raises UserError where the source doesn't fit the config, every name and shape listed, has
    another tokenizer or no such step, or where the run is there already and began otherwise.
    """
    return find(SOURCE, options.init_from, options.run_dir, lambda: _source(options.config, options.init_from))


def find(role: Role, asked: str, run_dir: AnyPath, seek: Callable[[], Origin]) -> Origin | None:
    """Who has the role for a run: as recorded, or what `seek` finds for a new run that asks for one.

    Raises UserError where the run is there already and has another, or none.
    """

    def meant() -> dict[str, Any] | None:
        known = origins.recorded(run_dir, role)
        if known is not None and asked and not known.is_meant_by(asked, role):
            known = _moved(known, asked, role) or known
        if known is not None and not (asked and known.is_meant_by(asked, role)):
            given = f"{role.flag} {asked}" if asked else f"no {role.flag}"
            raise UserError(f"{given}: {run_dir} {role.verb} {known}; use another --run-dir, or {role.flag} {known}")
        if not asked:
            return None
        if known is None and (run_dir / "config.json").exists():
            raise UserError(f"{role.flag} {asked}: {run_dir} {role.verb} no other run; use another --run-dir")
        return (known or seek()).model_dump(mode="json")

    found = distributed.agreed(meant)
    return None if found is None else Origin.model_validate(found)


def _moved(known: Origin, asked: str, role: Role) -> Origin | None:
    """The very checkpoint in another place; None where the one there is another."""
    run_dir, which = origins.parse(asked, role)
    if which not in (known.which, str(known.step)) or not (run_dir / "config.json").exists():
        return None
    with _opened(run_dir) as checkpoints:
        _, arrays, _ = checkpoints.look_up("params", known.step)
    same = origins.fingerprint(arrays) == known.fingerprint
    return known.model_copy(update={"run_dir": str(run_dir), "which": which}) if same else None


def look(
    role: Role, reference: str, config: RunConfig, wanted: Callable[[RunConfig, dict[str, Any]], PyTree]
) -> Origin:
    """The checkpoint that a reference names; `wanted` gives, from its config and arrays, the parameters to be in it.

    Raises UserError where there is none, or its parameters or its tokenizer are others.
    """
    run_dir, which = origins.parse(reference, role)
    other = RunConfig.load(run_dir)
    _check_tokenizer(config, run_dir)
    with _opened(run_dir) as checkpoints:
        step, arrays, place = checkpoints.look_up("params", which)
    compare({"params": wanted(other, arrays)}, arrays, place)
    return Origin(
        run_dir=str(run_dir),
        which=which,
        step=step,
        fingerprint=origins.fingerprint(arrays),
        config=other.model_dump(mode="json"),
    )


def _source(config: RunConfig, reference: str) -> Origin:
    """The checkpoint named, checked against the config of the run that is to begin from it."""
    origin = look(SOURCE, reference, config, lambda _, arrays: _there(abstract_parameters(config), arrays)[0])
    ours, theirs = (_ranks(each) for each in (config, config_of(origin)))
    if ours != theirs:
        raise UserError(
            f"{SOURCE.flag} {reference}: attention.ranks = {ours}, and the source has {theirs}; must be the "
            f"same, since what its layers store beyond their ranks was never trained"
        )
    tell(f"parameters of {origin.run_dir}, step {origin.step}", config, config_of(origin))
    return origin


def _ranks(config: RunConfig) -> tuple[int, ...]:
    """Of layers that differ in rank; empty of others, whose ranks their shapes tell."""
    return getattr(config.attention, "ranks", ())


def config_of(origin: Origin) -> RunConfig:
    """The other run's config as it was."""
    return RunConfig.parse(json.dumps(origin.config), storage.path(origin.run_dir) / "config.json")


def _opened(run_dir: AnyPath) -> contextlib.closing[Checkpointer]:
    return contextlib.closing(Checkpointer(run_dir, CheckpointConfig()))


@contextlib.contextmanager
def reopened(origin: Origin, role: Role) -> Iterator[tuple[Checkpointer, dict[str, Any]]]:
    """The other run's checkpoints, and what its manifest says of the parameters.

    Raises UserError where the checkpoint is damaged, gone, or not the one that it was.
    """
    with _opened(storage.path(origin.run_dir)) as checkpoints:
        _, arrays, place = checkpoints.look_up("params", origin.step)
        if origins.fingerprint(arrays) != origin.fingerprint:
            raise UserError(f"{place} is not the checkpoint that the run {role.verb}: it has been written anew since")
        yield checkpoints, arrays


def _check_tokenizer(config: RunConfig, source: AnyPath) -> None:
    """Raises UserError unless the config names the source's tokenizer, or one of the same content."""
    ours, theirs = storage.path(config.data.tokenizer), source / "tokenizer.json"
    if ours != theirs and read_json(ours) != read_json(theirs):
        raise UserError(f"data.tokenizer = {ours}: is not {theirs}, whose ids the parameters of {source} know")


def _there(params: PyTree, arrays: dict[str, Any]) -> tuple[PyTree, PyTree]:
    """Parameters to read, and adapters to draw since the source has none under their names."""

    def is_new(path: tuple[str, ...], param: nnx.Param) -> bool:
        return param.role == "adapter" and f"params.{'.'.join(path)}.value" not in arrays

    new, old = nnx.split_state(params, is_new, ...)
    return old, new


def tell(what: str, config: RunConfig, source: RunConfig) -> None:
    """Says on stderr in which fields that shapes don't show the model differs from its source."""
    ours, theirs = (
        flatten(json.loads(each.model_dump_json(include={"model", "attention"}, exclude=UNTOLD)))
        | {f"data.{name}": getattr(each.data, name) for name in ("context", "begin_token", "end_token")}
        for each in (config, source)
    )
    changes = [
        f"{name} = {ours.get(name)} (there {theirs.get(name)})" for name in ours if ours[name] != theirs.get(name)
    ]
    print("; ".join([what, *changes]), file=sys.stderr)


def initial_state(program: Program, abstract: TrainState, seed: int, origin: Origin | None) -> TrainState:
    """The state at step 0, each device making or reading its own part.

    Raises UserError where the origin's checkpoint is damaged, gone, or not the one that it was.
    """
    key, placed = jax.random.key(seed), sharding.shardings(abstract)
    if origin is None:
        return jax.jit(program.init_state, out_shardings=placed)(key)
    with reopened(origin, SOURCE) as (checkpoints, arrays):
        old, new = _there(abstract["params"], arrays)
        params, _ = checkpoints.restore_params(old, origin.step)
    draw = jax.jit(lambda key: _there(program.init_params(key), arrays)[1], out_shardings=sharding.shardings(new))
    return jax.jit(program.start, out_shardings=placed, donate_argnums=0)(nnx.merge_state(params, draw(key)))
