"""Training attention by the kernels of accelerators: `splash` (Pallas, TPU) and `cudnn` (GPU).

Both take memory linear in T, except that cuDNN is given masks of documents, and of a split sequence, as a bias of
T·S numbers a row of the batch. The compiler can't split such a call over a mesh, so each device runs it on its own rows
and heads, and on its own queries where the sequence is split.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from lrkv_jax import sharding
from lrkv_jax.settings import UserError

PLATFORM = {"splash": "tpu", "cudnn": "gpu"}
"""The one platform that a kernel runs on."""

LANES = 128  # a TPU's tile: features and positions come in multiples of it
MOST_ROWS = 512  # of a block of queries or keys: of scores, a megabyte in float32

Segments = tuple[Array, Array] | None  # of queries and of keys


def fastest(q: Array, k: Array, v: Array, segments: Segments, first: Array | None) -> str:
    """The kernel that takes these arrays on this platform, else `chunked`, which runs everywhere."""
    able = (name for name in PLATFORM if refusal(name, sharding.platform(), q, k, v, segments, first) is None)
    return next(able, "chunked")


def refusal(name: str, where: str, q: Array, k: Array, v: Array, segments: Segments, first: Array | None) -> str | None:
    """Why a kernel can't take these arrays on a platform, as the end of a sentence; None where it can."""
    if where != PLATFORM[name]:
        return f"runs on {PLATFORM[name]} only, and this is {where}"
    length, width = q.shape[1], max(q.shape[-1], v.shape[-1])
    if name == "splash":
        if first is not None and length % LANES:
            return f"needs data.context / mesh.context = {length} to be a multiple of {LANES}"
        return None
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16 only (model.dtype), not in {q.dtype}"
    generation = _gpu_generation()
    if generation < 8:
        return f"needs a GPU of compute capability 8.0, and this one has {generation}"
    most = 256 if generation >= 9 else 128
    if width > most:
        return f"takes heads of at most {most} dimensions on this GPU, not {width}"
    if (segments is not None or first is not None) and (length % 2 or k.shape[1] % 2):
        return f"needs an even data.context where documents are masked or the sequence is split, not {length}"
    return None


def check(module: nnx.Module, rows: int, length: int, documents: bool, mesh: Mesh) -> None:
    """Traces an attention module of shapes on rows [rows, length] over a mesh, to hear now what it would say later.

    Raises UserError where its implementation can't run there.
    """
    x = jax.ShapeDtypeStruct((rows, length, module.width), module.dtype)
    places = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    with jax.set_mesh(mesh):
        nnx.eval_shape(lambda module, *args: module(*args), module, x, places, places if documents else None)


def attend(
    name: str,
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K W"],
    segments: Segments,
    first: Int[Array, ""] | None,
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B T H W"]:
    """`core.dot_product_attention` by one of the kernels; `interpret` runs a Pallas one anywhere, step by step.

    Raises UserError, naming what can run, where the kernel can't.
    """
    where = PLATFORM[name] if interpret else sharding.platform()
    reason = refusal(name, where, q, k, v, segments, first)
    if reason is not None:
        able = [other for other in PLATFORM if refusal(other, where, q, k, v, segments, first) is None]
        raise UserError(
            f"attention.implementation = {name}: {reason}; these can run here: {', '.join([*able, 'chunked'])}, "
            f"or auto, which takes the first of them"
        )
    if name == "splash":
        return _on_devices(functools.partial(splash, scale=scale, interpret=interpret), q, k, v, segments, first)
    return _on_devices(functools.partial(cudnn, scale=scale), q, k, v, segments, first)


def splash(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K W"],
    segments: Segments,
    first: Int[Array, ""] | None,
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B T H W"]:
    """jax.experimental's splash attention on one device, which never visits blocks of the future.

    Features are padded with zeros to whole lanes, as they lie in a TPU's memory anyway. Positions are padded at the
    end, where no query sees them, unless the sequence is split: then T is a multiple of 128 and `first` one of T.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, width = q.shape[1], v.shape[-1]
    parts = 1 if first is None else k.shape[1] // length
    # The kernel has no scale of its own, and wants heads before positions.
    q, k, v = (_pad(_pad(a.swapaxes(1, 2), 2), 3) for a in (q * scale, k, v))
    rows, size = q.shape[2], k.shape[2]
    block = math.gcd(rows, MOST_ROWS)
    sizes = kernels.BlockSizes(*(block,) * 8)
    mask = masks.MultiHeadMask([masks.CausalMask((rows * parts, size))] * q.shape[1])
    kernel = kernels.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=parts, interpret=interpret)
    if first is not None:
        kernel = jax.tree.map(functools.partial(_part, index=first // length, parts=parts), kernel)
    if segments is not None:
        segments = kernels.SegmentIds(*(_pad(ids, 1) for ids in segments))
    out = jax.vmap(kernel)(q, k, v, segments)
    return out[:, :, :length, :width].swapaxes(1, 2)


def _part(table: Array, index: Array, parts: int) -> Array:
    """A device's part of one of the kernel's tables: of which blocks to visit [1, blocks of queries, ...], or of the
    queries' positions [T]."""
    axis = 0 if table.ndim == 1 else 1
    size = table.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(table, index * size, size, axis)


def cudnn(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K W"],
    segments: Segments,
    first: Int[Array, ""] | None,
    *,
    scale: float,
) -> Float[Array, "B T H W"]:
    """cuDNN's flash attention on one device; keys and values are padded with zeros to one width, a multiple of 8.

    Raises UserError where cuDNN is missing or refuses what `refusal` doesn't know of.
    """
    width, size = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_pad(a, 3, -(-size // 8) * 8) for a in (q, k, v))
    mask = None if segments is None else segments[0][:, None, :, None] == segments[1][:, None, None, :]
    if first is not None:
        past = (first + jnp.arange(q.shape[1]))[None, None, :, None] >= jnp.arange(k.shape[1])[None, None, None, :]
        mask = past if mask is None else mask & past
    try:
        out = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, is_causal=first is None, implementation="cudnn"
        )
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(f"attention.implementation = cudnn, or auto: {error} Use chunked") from error
    return out[..., :width]


def _gpu_generation() -> float:
    """Compute capability of this machine's GPU; 8.0 (A100) where there is none, as JAX itself assumes."""
    if jax.default_backend() != "gpu":
        return 8.0
    capability = str(jax.local_devices()[0].compute_capability)
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0  # AMD's are called otherwise


def _pad(array: Array, axis: int, multiple: int = LANES) -> Array:
    """The array with zeros at the end of an axis, up to a multiple of a size."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths)


def _on_devices(
    run: Callable[..., Array], q: Array, k: Array, v: Array, segments: Segments, first: Array | None
) -> Array:
    """`run` on each device's rows and heads, in the mesh of the context; the length is whole, or a device's own."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(q, k, v, segments, first)
    queries, keys, values = (
        sharding.sharding_of(a.shape, ("batch", None, name, None), mesh).spec
        for a, name in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads"))
    )
    heads = q.shape[2]

    def local(q: Array, k: Array, v: Array, segments: Segments, first: Array | None) -> Array:
        if keys[2] is None and queries[2] is not None:
            k, v = _read(queries[2], heads, q.shape[2], k, v)
        return run(q, k, v, segments, first)

    # Inside `over_context` one axis is the device's own already; a Pallas call wants all of them to be.
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    in_specs = (queries, keys, values, sharding.spec(("batch", None)), P())
    split = jax.shard_map(local, in_specs=in_specs, out_specs=queries, axis_names=axes, check_vma=False)
    return split(q, k, v, segments, first)


def _read(axis: str, heads: int, count: int, k: Array, v: Array) -> tuple[Array, Array]:
    """Of key/value heads that every device holds, those that a device's `count` of all query heads read.

    They come out in an order in which each is read by equally many: some twice, where a device's first query heads
    belong to a group that it has only half of.
    """
    group = heads // k.shape[2]
    run = math.gcd(group, count)
    read = (jax.lax.axis_index(axis) * count + jnp.arange(0, count, run)) // group
    return k[:, :, read], v[:, :, read]
