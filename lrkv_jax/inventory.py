"""What a checkpoint holds, as its manifest says it: shape, dtype and checksum of every array by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from lrkv_jax.settings import UserError
from lrkv_jax.storage import AnyPath


def inventory(state: PyTree) -> dict[str, dict[str, Any]]:
    """Shape, dtype and checksum of every array, by its dotted name; small and the same on any number of devices."""
    checksums = jax.device_get(_checksums(jax.tree.leaves(state)))
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(checksum)}
        for (name, leaf), checksum in zip(named(state).items(), checksums, strict=True)
    }


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
    return [_checksum(leaf) for leaf in leaves]


def _checksum(x: jax.Array) -> jax.Array:
    """Sum over words of mix(bits ^ spread position), modulo 2^32; a uint32 scalar.

    A sum of integers does not depend on the order, so neither on how the array is sharded. Mixing is a bijection, so a
    change of one word always shows; the position keeps equal words from cancelling and exchanged ones from passing.
    """
    if x.dtype != jnp.bool_:
        x = jax.lax.bitcast_convert_type(x, f"uint{min(32, 8 * x.dtype.itemsize)}")
    position, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for dim in reversed(range(x.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    word = x.astype(jnp.uint32) ^ (position * jnp.uint32(0x9E3779B1))
    for shift in (16, 15):
        word = (word ^ (word >> shift)) * jnp.uint32(0x85EBCA6B)
    return jnp.sum(word ^ (word >> 16), dtype=jnp.uint32)


def named(tree: PyTree) -> dict[str, Any]:
    """Leaves by dotted path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def short(name: str) -> str:
    """The name as a person knows it."""
    return name.removesuffix(".value")  # the Param around the array


def compare(template: PyTree, stored: dict[str, dict[str, Any]], path: AnyPath) -> None:
    """Raises UserError that lists every array in which the template and the checkpoint differ."""
    wanted = named(template)
    here = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()}
    there = {name: f"{entry['dtype']}{entry['shape']}" for name, entry in stored.items()}
    faults = [f"{short(name)} is not in the checkpoint, {here[name]} here" for name in here.keys() - there.keys()]
    faults += [f"{short(name)} is in the checkpoint only, {there[name]}" for name in there.keys() - here.keys()]
    faults += [
        f"{short(name)} is {there[name]} in the checkpoint, {here[name]} in this configuration"
        for name in here.keys() & there.keys()
        if here[name] != there[name]
    ]
    if faults:
        raise UserError(f"{path} does not fit: {'; '.join(sorted(faults))}")
