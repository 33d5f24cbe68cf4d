"""Decoding's attention as one Pallas TPU kernel for every family.

A grid step takes one block of one row's cache; a row's running softmax stays in VMEM while its blocks pass. Blocks
beyond a row's own length are not computed, nor fetched: their index is that of the row's last one, which is there.

Positions lie in the lanes and features in the sublanes, so that every product is one matrix product for all heads.
Where heads have codes of their own, their queries stand on the diagonal of a [K·J, K·R] matrix: K times the arithmetic,
which a matrix unit should hide behind loading the codes (an estimate: no TPU was at hand). Sums of coded values are
[K·J, K·V].

Products with a float32 cache take all the passes that float32 needs. With a bfloat16 cache they are single passes
summed in float32, M times the angles too, which in six passes would take longer than reading the cache. Relative error
of the sums, by the residual's size against the shared key (docs/log.md says how it was measured):

    residual                                           0.1     0.5     1.0
    this kernel                                        0.0009  0.0025  0.0039
    attention over the same keys composed in bfloat16  0.0052  0.0046  0.0043

No kernel of jax.experimental.pallas.ops.tpu serves GQA here: paged, ragged paged and splash attention want features in
the lanes, and the cache would have to be copied at every step to get them there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.core import NEGATIVE
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums

# What is padded to neither, XLA lays out otherwise and copies at every step to get it here.
ROWS, LANES = 8, 128
# Takes a TPU longer to read than a grid step costs; two of these and what is computed from one fit in VMEM.
BLOCK_BYTES = 4 << 20
# Of v5p's 64 MiB; v5e and v6e have 128. The kernels of the paper's shapes take less than 20.
VMEM_BYTES = 56 << 20


def padded_rows(size: int) -> int:
    """Rows that `size` features take in a block: the next multiple of 8, be the dtype float32 or bfloat16."""
    return -(-size // ROWS) * ROWS


def block_size(bytes_per_position: int) -> int:
    """S for a cache of so many bytes a position, row and layer, padding included: 128 to 1024, a multiple of 128."""
    return min(max(BLOCK_BYTES // bytes_per_position // LANES, 1), 8) * LANES


def attend(
    queries: Queries, blocks: Blocks, lengths: Int[Array, "B T"], *, scale: float, interpret: bool = False
) -> Sums:
    """`kernels.attend` for T = 1 and blocks padded with zeros: features to `padded_rows`, S to a multiple of 128.

    `k_scale` and `angles` cost a copy of them a step where they aren't. Padded heads can't be split over devices.
    Sums are as wide as the queries where values have the shape of their keys, else as wide as the values' blocks.
    Raises ValueError for T > 1 and for blocks that aren't padded.
    """
    if lengths.shape[1] != 1:
        raise ValueError(f"T = {lengths.shape[1]}: pallas_tpu takes one query a row; use implementation = blocked")
    for name, a in blocks._replace(k_scale=None, angles=None)._asdict().items():
        if a is not None and (a.shape[-2] % ROWS or a.shape[-1] % LANES):
            raise ValueError(f"{name} {a.dtype}{list(a.shape)}: rows and positions must be padded for pallas_tpu")
    rows, groups, members = next(a for a in queries if a is not None).shape[:3]
    q = _lay_out(queries, blocks)
    shared, code = _call(q, _merge_heads(blocks), lengths[:, 0], groups, groups * members, scale, interpret)
    if shared is not None:
        shared = shared.reshape(rows, groups, members, -1)
        if blocks.v_shared is None or blocks.v_shared.shape == blocks.k_shared.shape:
            shared = shared[..., : queries.shared.shape[-1]]
    if code is not None:
        code = jnp.einsum("bkjkv->bkjv", code.reshape(rows, groups, members, groups, -1))
        if blocks.v_code.shape == blocks.k_code.shape:
            code = code[..., : (queries.m if queries.code is None else queries.code).shape[3]]
    return Sums(shared, code)


def write(stored: Array, new: Array, slots: Int[Array, " B"], *, interpret: bool = False) -> Array:
    """Puts one token of each row, new [B, *f], into its slot of a leaf [n, B, *f, S], in place: 128 slots move.

    XLA's scatter would copy the whole leaf into another layout and back. A slot beyond the cache is left out.
    """
    size, capacity = stored.shape[-1], stored.shape[0] * stored.shape[-1]
    features = stored.shape[2:-1]

    def kernel(slots: Any, new: Any, old: Any, out: Any) -> None:
        slot = slots[pl.program_id(0)]
        lane = jax.lax.broadcasted_iota(jnp.int32, old.shape, len(features))
        here = (lane == jax.lax.rem(slot, LANES)) & (slot < capacity)
        out[...] = jnp.where(here, new[...], old[...])

    def tile(row: Any, slots: Any) -> tuple:
        slot = jnp.minimum(slots[row], capacity - 1)
        return jax.lax.div(slot, size), row, *[0] * len(features), jax.lax.div(jax.lax.rem(slot, size), LANES)

    old = pl.BlockSpec((None, None, *features, LANES), tile)
    column = pl.BlockSpec((None, *features, 1), lambda row, slots: (row, *[0] * (len(features) + 1)))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(len(slots),), in_specs=(column, old), out_specs=old
        ),
        out_shape=jax.ShapeDtypeStruct(stored.shape, stored.dtype),
        input_output_aliases={2: 0},
        interpret=interpret,
        name="cache_write",
    )(slots, new[..., None], stored)


def _lay_out(queries: Queries, blocks: Blocks) -> Queries:
    """Queries as one matrix a row of the batch, padded as the blocks are and in their dtype.

    Their rows are the K·J heads, of M the K·J·R code features of heads; a code's columns are K·R.
    """
    rows, groups = next(a for a in queries if a is not None).shape[:2]
    dtype = _values(blocks).dtype

    def pad(a: Array, *sizes: int) -> Array:
        kept = a.ndim - len(sizes)
        after = [size - old for size, old in zip(sizes, a.shape[kept:], strict=True)]
        return jnp.pad(a.astype(dtype), [(0, 0)] * kept + [(0, more) for more in after])

    shared, code, m, m_bias, bias = queries
    if shared is not None:
        shared = pad(shared, blocks.k_shared.shape[2])
        shared = shared.reshape(rows, -1, shared.shape[-1])
    if code is not None:
        code = pad(code, blocks.k_code.shape[3])
        code = jnp.einsum("bkjr,kl->bkjlr", code, jnp.eye(groups, dtype=dtype))
        code = code.reshape(rows, -1, groups * code.shape[-1])
    if m is not None:
        m = pad(m, blocks.k_code.shape[3], blocks.angles.shape[2])
        m = m.reshape(rows, -1, m.shape[-1])
    if m_bias is not None:
        m_bias = pad(m_bias, blocks.angles.shape[2])
        m_bias = m_bias.reshape(rows, -1, m_bias.shape[-1])
    if bias is not None:
        bias = bias.astype(jnp.float32).reshape(rows, -1, 1)
    return Queries(shared, code, m, m_bias, bias)


def _merge_heads(blocks: Blocks) -> Blocks:
    """Codes with K·R rows: where R is whole tiles, another name for the same memory."""

    def merge(code: Array | None) -> Array | None:
        return None if code is None else code.reshape(*code.shape[:2], -1, code.shape[-1])

    return blocks._replace(k_code=merge(blocks.k_code), v_code=merge(blocks.v_code))


def _call(
    q: Queries, blocks: Blocks, lengths: Int[Array, " B"], groups: int, heads: int, scale: float, interpret: bool
) -> Sums:
    """The sums [B, K·J, W] and [B, K·J, K·V]."""
    size = _values(blocks).shape[-1]

    def of_row(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *a.shape[1:]), lambda row, i, lengths: (row, *[0] * (a.ndim - 1)))

    def of_block(a: Any) -> pl.BlockSpec:
        def index(row: Any, i: Any, lengths: Any) -> tuple:
            last = jax.lax.div(jnp.maximum(lengths[row] - 1, 0), size)
            return jnp.minimum(i, last), row if a.shape[1] > 1 else 0, *[0] * (a.ndim - 2)

        return pl.BlockSpec((None, None, *a.shape[2:]), index)

    def output(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(lengths), heads, width), jnp.float32)

    v_shared, v_code = _v_shared(blocks), blocks.v_code
    sums = Sums(
        shared=None if v_shared is None else output(v_shared.shape[2]),
        code=None if v_code is None else output(v_code.shape[2]),
    )
    (sums,) = pl.pallas_call(
        functools.partial(_kernel, groups=groups, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(lengths), _values(blocks).shape[0]),
            in_specs=(jax.tree.map(of_row, q), jax.tree.map(of_block, blocks)),
            out_specs=(jax.tree.map(of_row, sums),),
            scratch_shapes=[pltpu.VMEM((heads, 1), jnp.float32)] * 2,
        ),
        out_shape=(sums,),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="decode_attention",
    )(lengths, q, blocks)
    return sums


def _kernel(
    lengths: Any, q: Queries, block: Blocks, sums: Sums, top: Any, total: Any, *, groups: int, scale: float
) -> None:
    """One block of one row: all are references, to the row's queries, the block, and the row's sums so far.

    `top` and `total` [K·J, 1] are the largest score yet and the sum of the weights relative to it.
    """
    i, length = pl.program_id(1), lengths[pl.program_id(0)]
    size = _values(block).shape[-1]
    outputs = [ref for ref in sums if ref is not None]

    @pl.when(i == 0)
    def start() -> None:
        top[...] = jnp.full_like(top, NEGATIVE)
        for ref in (total, *outputs):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(i * size < length)
    def add() -> None:
        scores = _score(q, block, groups) * scale
        seen = i * size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) < length
        scores = jnp.where(seen, scores, NEGATIVE)
        old_top, new_top = top[...], jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
        # The block has a position that is seen, so new_top is a score and what isn't seen weighs 0.
        weights, shrink = jnp.exp(scores - new_top), jnp.exp(old_top - new_top)
        top[...] = new_top
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        if sums.shared is not None:
            sums.shared[...] = sums.shared[...] * shrink + _product(weights, _v_shared(block)[...], axis=1)
        if sums.code is not None:
            sums.code[...] = sums.code[...] * shrink + _product(weights, block.v_code[...], axis=1)

    @pl.when(i == pl.num_programs(1) - 1)
    def finish() -> None:
        for ref in outputs:
            ref[...] = ref[...] / jnp.maximum(total[...], 1e-30)


def _score(q: Queries, block: Blocks, groups: int) -> Float[Array, "heads S"]:
    """Unscaled scores of all K·J heads."""
    scores: Any = 0.0
    if q.shared is not None:
        scores += _product(q.shared[...], block.k_shared[...])
    if q.code is not None:
        scores += _product(q.code[...], block.k_code[...])
    if q.m is not None:
        rank, size = block.k_code.shape[0] // groups, block.k_code.shape[1]
        w = _product(q.m[...], block.angles[...].astype(q.m.dtype)).reshape(groups, -1, rank, size)
        parts = w * block.k_code[...].astype(jnp.float32).reshape(groups, 1, rank, size)
        scores += jnp.sum(parts.reshape(-1, rank, size), axis=1)
    if q.m_bias is not None:
        scores += _product(q.m_bias[...], block.angles[...].astype(q.m_bias.dtype))
    if q.bias is not None:
        scores += q.bias[...]
    if block.k_scale is not None:
        scores *= jnp.repeat(block.k_scale[:groups], scores.shape[0] // groups, axis=0)
    return scores


def _product(x: Float[Array, "M k"], y: Array, axis: int = 0) -> Float[Array, "M N"]:
    """x times y [k, N], or [N, k] with axis = 1, in y's dtype, summed in float32."""
    exact = y.dtype == jnp.float32
    return jax.lax.dot_general(
        x.astype(y.dtype),
        y,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _v_shared(blocks: Blocks) -> Any:
    return blocks.k_shared if blocks.v_shared is None else blocks.v_shared


def _values(blocks: Blocks) -> Any:
    """A leaf that has the cache's dtype, its number of blocks and their size."""
    return blocks.k_shared if blocks.v_code is None else blocks.v_code
