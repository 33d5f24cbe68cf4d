"""Where every array lives: mesh axes, the one table from logical names to mesh axes, shardings of state and batch.

Parameters carry their logical axis names as metadata (`axes`, set in layers.py); optimizer moments inherit them, since
Optax maps over the `nnx.Param`s. Nothing else in the project names a mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lrkv_jax.settings import Settings, UserError

MESH_AXES = ("slices", "data", "fsdp", "tensor", "context")

# Logical name -> mesh axis. Parameters are split over `fsdp` along the model width, over `tensor` along heads, MLP and
# vocabulary; activations over the batch and, for long sequences, over `context`.
TABLE: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("slices", "data", "fsdp"),
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

    slices: pydantic.PositiveInt = 1
    """Pod slices joined by the data-center network, each with copies of the model; only gradients cross it."""
    data: int = -1
    """Copies of the model, each on its own rows."""
    fsdp: int = 1
    """Ways in which parameters and optimizer state are split; rows are split over it too."""
    tensor: int = 1
    """Ways in which heads, MLP and vocabulary are split."""
    context: int = 1
    """Ways in which the sequence is split."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of all devices, or of those given; neighbours on the innermost axes are neighbours on the interconnect.

    Raises UserError where the sizes don't multiply to the devices at hand, or to the slices they come in.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [getattr(config, axis) for axis in MESH_AXES]
    free = [axis for axis, size in zip(MESH_AXES, sizes, strict=True) if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh = {sizes}: every size is a positive number, and at most one of them -1 (the rest)")
    fixed = int(np.prod([size for size in sizes if size != -1]))
    count = len(devices)
    if count % fixed or (not free and fixed != count):
        raise UserError(f"mesh {dict(zip(MESH_AXES, sizes, strict=True))} needs {fixed} devices; there are {count}")
    sizes = [count // fixed if size == -1 else size for size in sizes]
    return Mesh(_arranged(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _arranged(sizes: list[int], devices: list[jax.Device]) -> np.ndarray:
    """Devices as an array of these sizes. Raises UserError where slices and devices don't match."""
    slices, *inner = sizes
    # A GPU's slice is its host, and hosts are joined by what `data` and the others may cross.
    numbers = {getattr(device, "slice_index", 0) or 0 for device in devices if device.platform == "tpu"}
    if len(numbers) > 1:
        if len(numbers) != slices:
            raise UserError(f"mesh.slices = {slices}: the devices come in {len(numbers)} slices")
        dcn = (slices, *(1 for _ in inner))
        return mesh_utils.create_hybrid_device_mesh((1, *inner), dcn, devices, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def row_ways(mesh: Mesh) -> int:
    """Ways in which the rows of a batch are split."""
    return int(np.prod([mesh.shape[axis] for axis in TABLE["batch"]]))


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


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Which of a global batch's rows this process feeds, ascending: those that its own devices hold.

    Where `tensor` or `context` reaches over processes, several of them feed the same rows.
    """
    indices = batch_sharding(mesh).addressable_devices_indices_map((rows, 1)).values()
    return np.unique(np.concatenate([np.arange(rows)[index[0]] for index in indices]))


def place_rows(mesh: Mesh, local: np.ndarray, rows: int) -> jax.Array:
    """The global batch [rows, ...] out of what every process holds of it: `local`, its rows `local_rows`."""
    held = local_rows(mesh, rows)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(rows)
        first = int(np.searchsorted(held, start))
        return local[first : first + stop - start]

    return jax.make_array_from_callback((rows, *local.shape[1:]), batch_sharding(mesh), part)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation to its logical axes in the mesh of the context; outside any mesh there is nothing to pin.

    Inside `over_context` the length is a device's own and needs no pin.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    if mesh.manual_axes:
        axes = tuple(None if name == "length" else name for name in axes)
    return jax.lax.with_sharding_constraint(x, sharding_of(x.shape, axes, mesh).spec)


def over_context(function: Callable) -> Callable:
    """`function(params, *arrays)` on each device's part of a split sequence; as it is where the sequence is whole.

    Arrays are [B, T, ...], or trees of them, and so is the result; params are whole along the sequence. Other axes of
    the mesh stay the compiler's.
    """
    if context_ways() == 1:
        return function
    part = P(None, "context")

    def local(params: Any, *arrays: Any) -> Any:
        specs = (P(), *(part for _ in arrays))
        split = jax.shard_map(function, in_specs=specs, out_specs=part, axis_names={"context"}, check_vma=False)
        return split(params, *arrays)

    return local


def gather_context(tree: Any) -> Any:
    """Inside `over_context`, arrays [B, T, ...] of all devices' positions in order; elsewhere the arrays given."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree

    def gather(a: jax.Array) -> jax.Array:
        # XLA's CPU backend aborts on the gradient's bfloat16 reduce-scatter.
        wide = platform() == "cpu" and a.dtype == jnp.bfloat16
        whole = jax.lax.all_gather(a.astype(jnp.float32) if wide else a, "context", axis=1, tiled=True)
        return whole.astype(a.dtype)

    return jax.tree.map(gather, tree)


def platform() -> str:
    """Where the program being traced will run (cpu, gpu, tpu): on the mesh of the context, else JAX's default."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


def first_of_context(length: int) -> jax.Array | None:
    """Inside `over_context`, the place in the sequence of a device's first of `length` positions; elsewhere None."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return jax.lax.axis_index("context") * length


def context_ways() -> int:
    """Ways in which the sequence is split in the mesh of the context; 1 inside `over_context`, which sees a part."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.manual_axes else mesh.shape.get("context", 1)
