"""podcheck's `--decode`: the decode step compiled for a topology, its weights and cache against the memory."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from lrkv_jax import accounting, aot, compiled, sharding
from lrkv_jax.config import RunConfig
from lrkv_jax.decode import Decoder
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MeshConfig


def check(config: RunConfig, at: Any, length: int, batch: int, most: int, *, fixed: bool) -> dict[str, Any]:
    """The report: the mesh given, or those of data x tensor that hold least on a device. `at` is a podcheck.Target.

    Raises UserError where rows or heads divide over no mesh.
    """
    if fixed:
        mesh = sharding.make_mesh(config.mesh, at.devices)
        meshes = [MeshConfig(**mesh.shape)]
    else:
        meshes = candidates(config, len(at.devices), batch)
    decoders = [decoder(config.model_copy(update={"mesh": mesh}), at.devices, length, batch) for mesh in meshes]
    held = sorted(zip(map(holdings, decoders), range(len(meshes)), strict=True), key=lambda pair: sum(pair[0].values()))
    rows = [check_mesh(meshes[i], decoders[i], found, at) for found, i in held[:most]]
    logical = accounting.cache_bytes(config).logical
    return {
        "kind": "decode",
        "length": length,
        "batch": batch,
        "implementation": decoders[0].implementation,
        "cache_bytes_logical": logical * length * batch,
        "plans": sorted(rows, key=lambda row: (not row["fits"], row.get("step_seconds", math.inf))),
    }


def candidates(config: RunConfig, devices: int, batch: int) -> list[MeshConfig]:
    """Rows over `slices` and `data`, heads over `tensor`. Raises UserError where they divide over no such mesh."""
    heads, slices = config.attention.heads, config.mesh.slices
    inner = devices // slices
    tensors = [size for size in range(1, inner + 1) if inner % size == 0 and heads % size == 0]
    fitting = [size for size in tensors if batch % (devices // size) == 0]
    found = [MeshConfig(slices=slices, data=inner // size, tensor=size) for size in fitting]
    if not found:
        raise UserError(
            f"--batch {batch}: no mesh slices x data x tensor of {devices} devices divides it and {heads} heads; "
            f"{devices // tensors[-1]} rows or a multiple would"
        )
    return found


def decoder(config: RunConfig, devices: list[jax.Device], length: int, batch: int) -> Decoder:
    """A decoder of shapes alone."""
    mesh = sharding.make_mesh(config.mesh, devices)
    return Decoder(accounting.textless_program(config), None, mesh, batch=batch, slots=length)


def holdings(decoder: Decoder) -> dict[str, int]:
    """Bytes of weights and of cache on one device."""
    weights, caches = decoder.abstract_weights(), decoder.abstract_state()["caches"]
    return {
        name: sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))
        for name, tree in (("weight_bytes", weights), ("cache_bytes", caches))
    }


def check_mesh(mesh: MeshConfig, decoder: Decoder, held: dict[str, int], at: Any) -> dict[str, Any]:
    """Compiles the step for one mesh. Its roofline is that of bytes: `least_seconds` reads weights and cache once,
    `seconds` moves what the compiled program does."""
    row: dict[str, Any] = {"mesh": mesh.model_dump(), **held, "hbm_bytes": at.hbm, "fits": False}
    if sum(held.values()) > at.hbm:
        return row | {"peak_bytes": sum(held.values()), "why": "weights and cache alone take"}
    weights, state = decoder.abstract_weights(), decoder.abstract_state()
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    rows = NamedSharding(decoder.mesh, sharding.spec(("batch",)))
    tokens = jax.ShapeDtypeStruct((decoder.batch,), jnp.int32, sharding=rows)
    step = jax.jit(decoder.step, donate_argnums=1, out_shardings=placed)
    try:
        with jax.set_mesh(decoder.mesh):
            program = aot.compiled(step, weights, state, tokens)
    except (aot.OutOfMemory, aot.Refused) as error:
        return row | error.report()
    memory, costs = compiled.memory(program), compiled.costs(program)
    carried = sum(c.times * c.carried for c in costs.collectives)
    bandwidth = at.chip.hbm_bandwidth / at.per_chip
    seconds = {
        "HBM": costs.traffic / bandwidth,
        "ICI": carried / (at.chip.ici_bandwidth / at.per_chip),
    }
    return row | {
        "fits": memory.peak <= at.hbm,
        "peak_bytes": memory.peak,
        "memory": memory._asdict(),
        "collectives": compiled.by_kind(costs.collectives),
        "kernels": costs.kernels,
        "least_seconds": sum(held.values()) / bandwidth,
        "hbm_bytes_per_device": costs.traffic,
        "seconds": seconds,
        "step_seconds": max(seconds.values()),
        "bound_by": max(seconds, key=seconds.__getitem__),
        "tokens_per_second": decoder.batch / max(seconds.values()),
    }
