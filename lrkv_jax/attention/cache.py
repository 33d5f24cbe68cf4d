"""The cache of one layer: what `compress` returns, stored in blocks with positions last (kernels/form.py says why).

A leaf [B, T, *f] of an entry is stored as [n, B, *f, S]: n blocks of S slots, slot i of a row being position i mod S of
block i // S. Where a device's tiles ask for it, the last feature dimension is padded with zeros.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from lrkv_jax.settings import UserError

Entry = dict[str, Array]
Cache = dict[str, Array]


class Layout(NamedTuple):
    """How a cache is stored."""

    slots: int
    """Tokens that a row can hold."""
    block: int
    """S, slots of a block; the last block may have some that are never used."""
    rows: Mapping[str, int] = MappingProxyType({})
    """What the last feature dimension of a leaf is padded to, by its name."""

    @property
    def blocks(self) -> int:
        """n."""
        return -(-self.slots // self.block)


def allocate(shapes: dict[str, jax.ShapeDtypeStruct], batch: int, layout: Layout) -> Cache:
    """A zeroed cache for `batch` rows of entries whose leaves for one token have these shapes, [1, 1, *f]."""

    def leaf(name: str, shape: jax.ShapeDtypeStruct) -> Array:
        *features, last = shape.shape[2:]
        padded = layout.rows.get(name, last)
        return jnp.zeros((layout.blocks, batch, *features, padded, layout.block), shape.dtype)

    return {name: leaf(name, shape) for name, shape in shapes.items()}


def axes(of_features: dict[str, tuple[str | None, ...]], cache: Any) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of the leaves, from those that a family names of their features; others are split over rows only."""

    def leaf(name: str, ndim: int) -> tuple[str | None, ...]:
        known = (None, "batch", *of_features.get(name, ()))
        return known + (None,) * (ndim - len(known))

    return {name: leaf(name, stored.ndim) for name, stored in cache.items()}


def write(cache: Cache, entry: Entry, slots: Int[Array, "B T"]) -> Cache:
    """Puts the tokens of an entry into the given slots of their rows; slots beyond the cache are left out."""
    rows = jnp.arange(slots.shape[0], dtype=slots.dtype)[:, None]

    def put(stored: Array, new: Array) -> Array:
        block = stored.shape[-1]
        return stored.at[slots // block, rows, ..., slots % block].set(padded(new, stored.shape[-2]))

    return {name: put(stored, entry[name]) for name, stored in cache.items()}


def write_blocks(cache: Cache, entry: Entry, first: Int[Array, ""] | int) -> Cache:
    """Puts the tokens of an entry into whole blocks from block `first` on: one copy, whatever the number of tokens.

    The last block's slots beyond the entry are overwritten with zeros.
    """

    def put(stored: Array, new: Array) -> Array:
        start = (first, *(0,) * (stored.ndim - 1))
        return jax.lax.dynamic_update_slice(stored, to_blocks(padded(new, stored.shape[-2]), stored.shape[-1]), start)

    return {name: put(stored, entry[name]) for name, stored in cache.items()}


def to_blocks(leaf: Array, block: int) -> Array:
    """[B, T, *f] -> [n, B, *f, S], the last block filled up with zeros."""
    blocks = -(-leaf.shape[1] // block)
    filled = jnp.pad(leaf, [(0, 0), (0, blocks * block - leaf.shape[1])] + [(0, 0)] * (leaf.ndim - 2))
    split = filled.reshape(leaf.shape[0], blocks, block, *leaf.shape[2:])
    return jnp.moveaxis(split, (1, 2), (0, -1))


def restore(cache: Cache, shapes: dict[str, jax.ShapeDtypeStruct]) -> Entry:
    """The entry of a whole cache, [B, n·S, *f], or of one block of it, [B, S, *f], without padding."""

    def leaf(stored: Array, shape: jax.ShapeDtypeStruct) -> Array:
        stored = stored[None] if stored.ndim == len(shape.shape) else stored
        entry = jnp.moveaxis(stored, (0, -1), (1, 2))
        return entry.reshape(entry.shape[0], -1, *entry.shape[3:])[..., : shape.shape[-1]]

    return {name: leaf(stored, shapes[name]) for name, stored in cache.items()}


def bytes_of(cache: Any) -> int:
    """Bytes of all leaves, concrete or abstract."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def check_memory(caches: Any, what: str) -> None:
    """Raises UserError where abstract caches, with their shardings if they have some, can't fit a device's memory."""
    device, needed = jax.local_devices()[0], 0
    for leaf in jax.tree.leaves(caches):
        shape, holders = leaf.shape, 1
        if leaf.sharding is not None:
            shape, holders = leaf.sharding.shard_shape(shape), len(leaf.sharding.device_set)
        needed += math.prod(shape) * leaf.dtype.itemsize * (holders if device.platform == "cpu" else 1)
    if device.platform == "cpu":  # its devices share the machine's memory
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    if needed > limit:
        raise UserError(f"{what} needs {needed / 2**30:.1f} GiB; there are {limit / 2**30:.1f} GiB of memory")


def padded(new: Array, size: int) -> Array:
    """An entry's leaf with zeros after its last feature dimension, up to `size`."""
    missing = size - new.shape[-1]
    return jnp.pad(new, [(0, 0)] * (new.ndim - 1) + [(0, missing)]) if missing else new
