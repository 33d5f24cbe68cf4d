"""Kernels that read a compressed cache: `form` says what they are given, `blocked` is their plain-JAX twin."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from lrkv_jax import sharding
from lrkv_jax.attention import cache
from lrkv_jax.attention.cache import Cache, Entry, Layout, allocate, bytes_of
from lrkv_jax.attention.kernels import blocked
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums
from lrkv_jax.settings import UserError

Implementation = Literal["reference", "blocked", "pallas_tpu", "pallas_gpu"]

BLOCK = 512
"""Slots of a block where no kernel asks for another size (docs/log.md)."""

PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}
"""The one platform that a kernel runs on; what is not named runs on all."""

TILE = {"pallas_tpu": 128, "pallas_gpu": 128}
"""What S must be a multiple of."""


def choose(name: str | None, platform: str, absorbs: bool, interpret: bool = False) -> Implementation:
    """The implementation of that name, or with None the fastest that runs on a platform (cpu, gpu, tpu).

    `absorbs`: whether the family has a `read`, which the kernels need. With `interpret` they run anywhere.
    Raises UserError where there is none of that name, or it can't run there, with those that can.
    """
    every = get_args(Implementation)
    if name is not None and name not in every:
        raise UserError(f"implementation = {name}: unknown; there are {', '.join(every)}")
    if platform == "gpu" and not interpret and not _recent_gpu():
        platform = "gpu older than NVIDIA's compute capability 8.0"
    able = [
        known for known in every if known not in PLATFORM or (absorbs and (interpret or PLATFORM[known] == platform))
    ]
    if name is None:
        return next((known for known in able if known in PLATFORM and not interpret), "blocked")
    if name not in able:
        where = f"on {platform}" if absorbs else f"on {platform} for a family that has no `read`"
        raise UserError(f"implementation = {name}: cannot run {where}; these can: {', '.join(able)}")
    return name


def _recent_gpu() -> bool:
    """Whether the GPU here is one that the kernel was written for."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return bool(re.fullmatch(r"\d+\.\d+", capability)) and float(capability) >= 8


def layout(
    implementation: Implementation,
    shapes: dict[str, jax.ShapeDtypeStruct],
    axes: dict[str, tuple[str | None, ...]],
    slots: int,
    block: int | None = None,
    tensor: int = 1,
) -> Layout:
    """How an implementation wants the cache of entries of these shapes [1, 1, *f] stored; `block` overrides its S.

    `axes` names the features (`AttentionBase.cache_axes`): where heads are split over `tensor` > 1 devices their axis
    isn't padded, since a device's part would begin at another head in the padded leaves than in the others.
    Raises UserError for a block of another size than the implementation can read.
    """
    tile = TILE.get(implementation, 1)
    if block is not None and (block < 1 or block % tile):
        raise UserError(f"block = {block}: must be a multiple of {tile} slots for {implementation}")
    rows, best = {}, BLOCK
    if implementation == "pallas_tpu":
        from lrkv_jax.attention.kernels import tpu

        rows = {
            name: tpu.padded_rows(shape.shape[-1])
            for name, shape in shapes.items()
            if tensor == 1 or axes.get(name, ("heads",))[-1] not in ("heads", "kv_heads")
        }
        best = tpu.block_size(bytes_of(jax.eval_shape(lambda: allocate(shapes, 1, Layout(1, 1, rows)))))
    return Layout(slots, block or min(best, -(-slots // tile) * tile), rows)


def stored_tables(tables: Any, implementation: Implementation, dtype: Any) -> Any:
    """Tables of key positions as an implementation reads them: the TPU kernel would round them at every step."""
    return jax.tree.map(lambda table: table.astype(dtype), tables) if implementation == "pallas_tpu" else tables


def write(
    stored: Cache,
    entry: Entry,
    slots: Int[Array, "B T"],
    axes: dict[str, tuple[str | None, ...]],
    *,
    implementation: Implementation,
    interpret: bool = False,
) -> Cache:
    """`cache.write`, in place on every platform; `axes` are the family's `cache_axes`."""
    if implementation != "pallas_tpu" or slots.shape[1] != 1:
        return cache.write(stored, entry, slots)
    from lrkv_jax.attention.kernels import tpu

    run = functools.partial(tpu.write, interpret=interpret)
    mesh, axes = jax.sharding.get_abstract_mesh(), cache.axes(axes, stored)

    def put(name: str, leaf: Array) -> Array:
        new = cache.padded(entry[name], leaf.shape[-2])[:, 0]
        if mesh.empty:
            return run(leaf, new, slots[:, 0])
        spec = sharding.sharding_of(leaf.shape, axes[name], mesh).spec
        rows = sharding.spec(("batch",))
        split = jax.shard_map(run, mesh=mesh, in_specs=(spec, P(*spec[1:-1]), rows), out_specs=spec, check_vma=False)
        return split(leaf, new, slots[:, 0])

    return {name: put(name, leaf) for name, leaf in stored.items()}


def attend(
    queries: Queries,
    blocks: Blocks,
    lengths: Int[Array, "B T"],
    *,
    scale: float,
    implementation: Implementation,
    interpret: bool = False,
) -> Sums:
    """Reads the cache: query t of row b sees its first lengths[b, t] positions; blocks beyond all lengths aren't read.

    The Pallas kernels take one query a row, T = 1; with `interpret` they run anywhere, step by step in plain JAX.
    Raises ValueError for an implementation that has no absorbed form.
    """
    if implementation == "blocked":
        return blocked.attend(queries, blocks, lengths, scale=scale)
    if implementation == "pallas_tpu":
        from lrkv_jax.attention.kernels import tpu as kernel
    elif implementation == "pallas_gpu":
        from lrkv_jax.attention.kernels import gpu as kernel
    else:
        raise ValueError(f"implementation = {implementation!r}: no kernel; have blocked, {', '.join(PLATFORM)}")
    run = functools.partial(kernel.attend, scale=scale, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    return run(queries, blocks, lengths) if mesh.empty else _on_shards(run, mesh, queries, blocks, lengths)


def _on_shards(run: Callable[..., Sums], mesh, queries: Queries, blocks: Blocks, lengths: Array) -> Sums:
    """Each device runs the kernel on its rows and key/value heads: a Pallas call can't be split by the compiler."""

    def of_query(name: str, leaf: Array) -> P:
        return sharding.sharding_of(leaf.shape, ("batch", "kv_heads", *(None,) * (leaf.ndim - 2)), mesh).spec

    def of_block(name: str, leaf: Array) -> P:
        rows = "batch" if leaf.shape[1] == lengths.shape[0] else None  # angles may be the same for all rows
        heads = ("kv_heads",) if name in ("k_code", "v_code", "k_scale") else ()
        axes = (None, rows, *heads)
        return sharding.sharding_of(leaf.shape, axes + (None,) * (leaf.ndim - len(axes)), mesh).spec

    def specs(of: Callable, operands: Queries | Blocks) -> Queries | Blocks:
        named = operands._asdict().items()
        return type(operands)(**{name: None if leaf is None else of(name, leaf) for name, leaf in named})

    in_specs = (specs(of_query, queries), specs(of_block, blocks), sharding.spec(("batch", None)))
    count = next(leaf for leaf in queries if leaf is not None).shape[1]
    sums = sharding.sharding_of((lengths.shape[0], count, 1, 1), ("batch", "kv_heads", None, None), mesh).spec
    out_specs = Sums(
        shared=None if blocks.k_shared is None else sums,
        code=None if blocks.v_code is None else sums,
    )
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        queries, blocks, lengths
    )
