"""Where every array lives: mesh axes, the one table from logical names to mesh axes, shardings of state and batch.

Parameters carry their logical axis names as metadata (`axes`, set in layers.py); optimizer moments inherit them, since
Optax maps over the `nnx.Param`s. Nothing else in the project names a mesh axis.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lrkv_jax.settings import Settings, UserError

MESH_AXES = ("data", "fsdp", "tensor", "context")

# Logical name -> mesh axis. Parameters are split over `fsdp` along the model width, over `tensor` along heads, MLP and
# vocabulary; activations over the batch and, for long sequences, over `context`.
TABLE: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": "context",
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "layers": None,
    "width": None,
    "head_dim": None,
    "rank": None,
    "latent": None,
    "rotary": None,
}


class MeshConfig(Settings):
    """Devices along each mesh axis; one axis may be -1, which takes the devices that are left."""

    data: int = -1
    """Copies of the model, each on its own rows."""
    fsdp: int = 1
    """Ways in which parameters and optimizer state are split; rows are split over it too."""
    tensor: int = 1
    """Ways in which heads, MLP and vocabulary are split."""
    context: int = 1
    """Ways in which the sequence is split."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The device mesh. Raises UserError where the sizes don't multiply to the devices at hand."""
    count = jax.device_count()
    sizes = [getattr(config, axis) for axis in MESH_AXES]
    free = [axis for axis, size in zip(MESH_AXES, sizes, strict=True) if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh = {sizes}: every size is a positive number, and at most one of them -1 (the rest)")
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if count % fixed or (not free and fixed != count):
        raise UserError(f"mesh {dict(zip(MESH_AXES, sizes, strict=True))} needs {fixed} devices; there are {count}")
    sizes = [count // fixed if size == -1 else size for size in sizes]
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def row_ways(mesh: Mesh) -> int:
    """Ways in which the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def spec(axes: tuple[str | None, ...]) -> P:
    """PartitionSpec of logical names. Raises ValueError for an unknown name or a mesh axis used twice."""
    unknown = [name for name in axes if name is not None and name not in TABLE]
    if unknown:
        raise ValueError(f"unknown logical axis {unknown[0]!r} in {axes}; known: {', '.join(TABLE)}")
    entries = [None if name is None else TABLE[name] for name in axes]
    used = [axis for entry in entries if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {axes} put one mesh axis on two dimensions: {entries}")
    return P(*entries)


def sharding_of(shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Sharding of one array; key/value heads that a mesh axis doesn't divide are replicated, all else must divide."""
    entries = []
    for size, name, entry in zip(shape, axes, spec(axes), strict=True):
        ways = int(np.prod([mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ())]))
        if size % ways and name != "kv_heads":
            raise UserError(f"{name} = {size} does not divide over mesh axis {entry} = {ways}")
        entries.append(entry if size % ways == 0 else None)
    return NamedSharding(mesh, P(*entries))


def is_param(node: Any) -> bool:
    """Whether a tree node is one of our annotated parameters (or a moment that mirrors one)."""
    return isinstance(node, nnx.Variable)


def with_shardings(abstract: Any, mesh: Mesh) -> Any:
    """The abstract state with a sharding on every leaf: parameters and moments by their axes, the rest replicated."""

    def place(node):
        if is_param(node):
            leaf = node.get_value()
            sharding = sharding_of(leaf.shape, node.axes, mesh)
            return node.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
        return jax.ShapeDtypeStruct(node.shape, node.dtype, sharding=NamedSharding(mesh, P()))

    return jax.tree.map(place, abstract, is_leaf=is_param)


def shardings(abstract: Any) -> Any:
    """The shardings alone, as jax.jit's in_shardings and out_shardings take them."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a host batch [B, T]: rows over data and fsdp; the length stays whole until it is cut in the step."""
    return NamedSharding(mesh, spec(("batch", None)))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation to its logical axes in the mesh of the context; outside any mesh there is nothing to pin."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, sharding_of(x.shape, axes, mesh).spec)
