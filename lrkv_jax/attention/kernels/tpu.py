"""Decoding's attention as one Pallas TPU kernel for every family, bound by the bytes of the cache.

A grid step takes one block of one row's cache; a row's running softmax stays in VMEM while its blocks pass. Blocks beyond
a row's own length are neither fetched (their index is that of the last one used, which is there already) nor computed.

Positions lie in the lanes and features in the sublanes, so every product is one matrix product for all heads. Where heads
have codes of their own, their queries are laid out on the diagonal of a [K·J, K·R] matrix: K times the arithmetic, but no
more time, which a matrix unit spends on loading the codes. The sums of coded values come out as [K·J, K·V], likewise.

Products with a bfloat16 cache are single passes in bfloat16 summed in float32, M times the angles included; with a float32
cache they take the passes that float32 needs.

No kernel of jax.experimental.pallas.ops.tpu serves GQA here: paged, ragged paged and splash attention want the C features
in the lanes, and this cache would have to be copied at every step to get them there.
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

LANES = 128
# Long enough to hide what a grid step costs; twice this and the intermediates of a block still fit.
BLOCK_BYTES = 4 << 20
# v5p has 64 MiB, v5e and v6e 128.
VMEM_BYTES = 56 << 20


def padded_rows(size: int, dtype: Any) -> int:
    """Rows that `size` features take in a block: the next multiple of 8 in 4-byte dtypes, of 16 in 2-byte ones."""
    tile = 32 // jnp.dtype(dtype).itemsize
    return -(-size // tile) * tile


def block_size(bytes_per_position: int) -> int:
    """S for a cache of so many bytes a position, row and layer, padding included: 128 to 1024, a multiple of 128."""
    return min(max(BLOCK_BYTES // bytes_per_position // LANES, 1), 8) * LANES


def attend(
    queries: Queries, blocks: Blocks, lengths: Int[Array, "B T"], *, scale: float, interpret: bool = False
) -> Sums:
    """`kernels.attend` for T = 1 and blocks padded with zeros: features to `padded_rows`, S to a multiple of 128.

    Sums are as wide as the queries where values have the shape of their keys; else as the values' blocks are.
    Raises ValueError for T > 1 and for blocks that aren't padded.
    """
    if lengths.shape[1] != 1:
        raise ValueError(f"T = {lengths.shape[1]}: pallas_tpu takes one query a row; use implementation = blocked")
    for name, leaf in blocks._asdict().items():
        if leaf is not None and (leaf.shape[-2] != padded_rows(leaf.shape[-2], leaf.dtype) or leaf.shape[-1] % LANES):
            raise ValueError(f"{name} {leaf.dtype}{list(leaf.shape)}: rows and positions must be padded for pallas_tpu")
    rows, groups, members = next(a for a in queries if a is not None).shape[:3]
    shared, code = _call(_lay_out(queries, blocks), blocks, lengths[:, 0], groups, scale, interpret)
    if shared is not None:
        shared = shared.reshape(rows, groups, members, -1)
        if blocks.v_shared is None or blocks.v_shared.shape == blocks.k_shared.shape:
            shared = shared[..., : queries.shared.shape[-1]]
    if code is not None:
        code = jnp.einsum("bkjkv->bkjv", code.reshape(rows, groups, members, groups, -1))
        if blocks.v_code.shape == blocks.k_code.shape:
            code = code[..., : (queries.m if queries.code is None else queries.code).shape[3]]
    return Sums(shared, code)


def _lay_out(queries: Queries, blocks: Blocks) -> Queries:
    """Queries as matrices of K·J rows (M: K·J·R), zero-padded as the blocks are, in the dtype of their product."""
    rows, groups, members = next(a for a in queries if a is not None).shape[:3]
    heads = groups * members

    def padded(a: Array, like: Array, *sizes: int) -> Array:
        before = a.ndim - len(sizes)
        pads = [(0, 0)] * before + [(0, size - old) for size, old in zip(sizes, a.shape[before:], strict=True)]
        return jnp.pad(a.astype(like.dtype), pads)

    shared, code, m, m_bias, bias = queries
    if shared is not None:
        shared = padded(shared, blocks.k_shared, blocks.k_shared.shape[2]).reshape(rows, heads, -1)
    if code is not None:
        code = padded(code, blocks.k_code, blocks.k_code.shape[3])
        code = jnp.einsum("bkjr,kl->bkjlr", code, jnp.eye(groups, dtype=code.dtype)).reshape(rows, heads, -1)
    if m is not None:
        c = blocks.angles.shape[2]
        m = padded(m, blocks.k_code, blocks.k_code.shape[3], c).reshape(rows, -1, c)
    if m_bias is not None:
        m_bias = padded(m_bias, _coded(blocks), blocks.angles.shape[2]).reshape(rows, heads, -1)
    if bias is not None:
        bias = bias.astype(jnp.float32).reshape(rows, heads, 1)
    return Queries(shared, code, m, m_bias, bias)


def _coded(blocks: Blocks) -> Array:
    return next(a for a in (blocks.k_code, blocks.k_shared) if a is not None)


def _call(q: Queries, blocks: Blocks, lengths: Int[Array, " B"], groups: int, scale: float, interpret: bool) -> Sums:
    """Sums as matrices of K·J rows, of codes [B, K·J, K·V]."""
    rows, heads = next(a for a in q if a is not None and a is not q.m).shape[:2]
    count, size = _coded(blocks).shape[0], _coded(blocks).shape[-1]

    def of_row(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *a.shape[1:]), lambda row, i, lengths: (row, *[0] * (a.ndim - 1)))

    def of_block(a: Any) -> pl.BlockSpec:
        def index(row: Any, i: Any, lengths: Any) -> tuple:
            last = jax.lax.div(jnp.maximum(lengths[row] - 1, 0), size)
            return jnp.minimum(i, last), row if a.shape[1] > 1 else 0, *[0] * (a.ndim - 2)

        return pl.BlockSpec((None, None, *a.shape[2:]), index)

    v_shared = blocks.k_shared if blocks.v_shared is None else blocks.v_shared
    widths = (
        None if v_shared is None else v_shared.shape[2],
        None if blocks.v_code is None else blocks.v_code.shape[2] * blocks.v_code.shape[3],
    )
    sums = Sums(*(None if w is None else jax.ShapeDtypeStruct((rows, heads, w), jnp.float32) for w in widths))
    return pl.pallas_call(
        functools.partial(_kernel, groups=groups, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, count),
            in_specs=[jax.tree.map(of_row, q), jax.tree.map(of_block, blocks)],
            out_specs=[jax.tree.map(of_row, sums)],
            scratch_shapes=[pltpu.VMEM((heads, 1), jnp.float32)] * 2,
        ),
        out_shape=[sums],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="decode_attention",
    )(lengths, q, blocks)[0]


def _kernel(
    lengths: Any, q: Queries, block: Blocks, sums: Sums, top: Any, total: Any, *, groups: int, scale: float
) -> None:
    """One block of one row; the leaves are references to VMEM, the outputs accumulate until the row's last block."""
    i = pl.program_id(1)
    length = lengths[pl.program_id(0)]
    size = _coded(block).shape[-1]

    @pl.when(i == 0)
    def _() -> None:
        top[...] = jnp.full_like(top, NEGATIVE)
        for ref in (total, *_present(sums)):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(i * size < length)
    def _() -> None:
        scores = _score(q, block, groups) * scale
        seen = i * size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) < length
        scores = jnp.where(seen, scores, NEGATIVE)
        new_top = jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        shrink = jnp.exp(top[...] - new_top)
        top[...] = new_top
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        if sums.shared is not None:
            values = block.k_shared if block.v_shared is None else block.v_shared
            sums.shared[...] = sums.shared[...] * shrink + _product(weights, values[...], 1)
        if sums.code is not None:
            values = block.v_code[...].reshape(-1, size)
            sums.code[...] = sums.code[...] * shrink + _product(weights, values, 1)

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        for ref in _present(sums):
            ref[...] = ref[...] / jnp.maximum(total[...], 1e-30)


def _score(q: Queries, block: Blocks, groups: int) -> Float[Array, "H S"]:
    """Unscaled scores of all K·J heads."""
    scores: Any = 0.0
    if q.shared is not None:
        scores += _product(q.shared[...], block.k_shared[...])
    if q.code is not None:
        scores += _product(q.code[...], block.k_code[...].reshape(-1, block.k_code.shape[-1]))
    if q.m is not None:
        groups, rank, size = block.k_code.shape
        w = _product(q.m[...], block.angles[...].astype(q.m.dtype)).reshape(groups, -1, rank, size)
        code = block.k_code[...].astype(jnp.float32)[:, None]
        scores += jnp.sum((w * code).reshape(-1, rank, size), axis=1)
    if q.m_bias is not None:
        scores += _product(q.m_bias[...], block.angles[...].astype(q.m_bias.dtype))
    if q.bias is not None:
        scores += q.bias[...]
    if block.k_scale is not None:
        k_scale = block.k_scale[:groups]
        scores *= jnp.repeat(k_scale, scores.shape[0] // groups, axis=0)
    return scores


def _product(x: Array, y: Array, axis: int = 0) -> Float[Array, "H N"]:
    """x times y over x's columns and y's `axis`, in y's dtype, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(y.dtype), y, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _present(leaves: tuple) -> list:
    return [leaf for leaf in leaves if leaf is not None]
