"""The decode kernel for NVIDIA GPUs (Pallas, Triton backend): one query a row, flash-decoding over the cache.

A program takes one batch row, a chunk of its query rows, and one of `splits` equal shares of that row's cached
positions; what the shares found is merged outside, by log-sum-exp. Decoding is bound by the bytes of the cache, so:

- Where a part of the cache is shared by all heads, a program takes as many heads as its registers allow, and reads the
  shared tile once for all of them; the codes are each head's own and read once anyway.
- Heads are told apart by masks. A product of all query rows of the chunk with one head's codes costs no bytes, runs on
  the tensor cores, and adds up to the right scores when the rows of other heads are zero.
- Mode full forms y = Mᵀ code (the codes go from HBM straight into a product, so Triton prefetches them) and then
  Σ_c y_c cs_c, which is the same as w = M cs and Σ_r w_r code_r. cs stays float32; M is rounded to the cache's dtype.

Precision: float32 caches are read with float32 products (no TF32). With bfloat16 caches, queries, M and softmax weights
are rounded to bfloat16, products accumulate in float32, the softmax is float32. Rounding M costs as much as rounding
the key that it stands for would: tests/test_kernel_gpu.py measures it. float32 is there to check with, not for speed.

JAX 0.12 calls its Triton backend deprecated in favour of Mosaic GPU, which can't be tried without a Hopper GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.core import NEGATIVE
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums
from lrkv_jax.attention.kernels.gpu_tiles import MIN_TILE, Axis, Rows, Tile, load, product, store

# Four programs for each of an H200's 132 multiprocessors: enough to even out rows of different length.
PROGRAMS = 528
# What one turn of the innermost loop reads at most: two to four turns are in shared memory at once.
TURN_BYTES = 40 * 1024


class Plan(NamedTuple):
    """How the work is cut; all static."""

    rows: int
    """Query rows of a program, of the K·J of a batch row."""
    padded: int
    """The same as a power of two."""
    tile: int
    """Positions read at a time; a power of two that divides S."""
    splits: int
    """Shares that a row's positions are cut into."""
    warps: int
    stages: int
    """Turns of the innermost loop that are in flight in Triton's software pipeline."""


def attend(
    queries: Queries,
    blocks: Blocks,
    lengths: Int[Array, "B T"],
    *,
    scale: float,
    interpret: bool = False,
    plan: Plan | None = None,
) -> Sums:
    """`kernels.attend` on an NVIDIA GPU of compute capability 8.0 or more, or anywhere with `interpret`.

    Features (X, R, C, ...) may have any size, S is a multiple of 16 (of 128 to be fast). `plan` is for tuning.
    Raises ValueError for several queries a row and for an S that is no multiple of 16.
    """
    batch, groups, members = _leading(queries)
    if lengths.shape[1] != 1:
        raise ValueError(f"{lengths.shape[1]} queries a row: the GPU kernel takes 1; use implementation = 'blocked'")
    size = jax.tree.leaves(blocks)[0].shape[-1]
    if size % MIN_TILE:
        raise ValueError(f"blocks of {size} positions: the GPU kernel needs a multiple of {MIN_TILE}")
    plan = make_plan(queries, blocks) if plan is None else plan
    flat = jax.tree.map(lambda leaf: leaf.reshape(batch, groups * members, *leaf.shape[3:]), queries)
    parts = _call(_rounded(flat, blocks), blocks, lengths[:, 0], plan, members, scale, interpret)
    sums = merge(*parts)
    return jax.tree.map(lambda leaf: leaf.reshape(batch, groups, members, -1), sums)


def make_plan(queries: Queries, blocks: Blocks) -> Plan:
    """Tiles that fit an H200's multiprocessor: 65,536 registers, 227 KiB of shared memory.

    They were chosen by what Triton 3.9 and ptxas report for sm_90, not by timing: at the paper's shapes a program in
    bfloat16 takes up to 142 KiB and spills at most 8 bytes a thread.
    """
    batch, groups, members = _leading(queries)
    leaf = jax.tree.leaves(blocks)[0]
    capacity, size, itemsize = leaf.shape[0] * leaf.shape[-1], leaf.shape[-1], leaf.dtype.itemsize
    exact = itemsize > 2  # products without tensor cores, which hold their operands in registers
    shared = [part.shape[-2] for part in (blocks.k_shared, blocks.v_shared) if part is not None]
    codes = [part.shape[-2] for part in (blocks.k_code, blocks.v_code) if part is not None]
    widest = max(shared, default=0)
    # A program's sums, `rows` x width in float32, live in registers all along.
    most = 32 if widest <= 512 else 16
    rows = min(members, most) * (max(1, min(groups, most // members)) if shared else 1)
    # Features that one turn of the innermost loop reads: over heads where a program has several, else over tiles.
    streamed = max(codes) if codes and rows > members else sum(codes) + sum(shared)
    matrix = 0 if queries.m is None else queries.m.shape[-2] * queries.m.shape[-1]
    tile = pl.next_power_of_2(TURN_BYTES // (streamed * itemsize) + 1) // 2
    # M is read anew for every tile, from L2: the larger the tile, the less often.
    tile = MIN_TILE if exact else max(MIN_TILE, min(tile, 128 if matrix else 64))
    tile = min(tile, size & -size)
    warps = 8 if exact or matrix or widest > 256 else 4
    room = (192 if warps == 8 else 96) * 1024  # one program of 8 warps on a multiprocessor, two of 4
    return Plan(
        rows=rows,
        padded=max(MIN_TILE, pl.next_power_of_2(rows)),
        tile=tile,
        splits=max(1, min(pl.cdiv(PROGRAMS, batch * pl.cdiv(groups * members, rows)), capacity // tile)),
        warps=warps,
        stages=2 if exact else max(2, min(4, room // ((tile * streamed + matrix) * itemsize))),
    )


def merge(top: Float[Array, "B N Q"], total: Float[Array, "B N Q"], sums: Sums) -> Sums:
    """Joins N partial softmaxes: their maxima, their sums of weights, and weighted sums [B, N, Q, ...].

    A query that saw nothing gets zeros.
    """
    share = jnp.exp(top - jnp.max(top, axis=1, keepdims=True))
    whole = jnp.maximum(jnp.sum(total * share, axis=1), 1e-30)
    return jax.tree.map(lambda part: jnp.sum(part * share[..., None], axis=1) / whole[..., None], sums)


def _leading(queries: Queries) -> tuple[int, int, int]:
    """B, K, J."""
    return jax.tree.leaves(queries)[0].shape[:3]


def _rounded(queries: Queries, blocks: Blocks) -> Queries:
    """What meets the cache in a product, in the cache's dtype; what is only added, in float32."""

    def cast(leaf: Array | None, cached: Array | None = None) -> Array | None:
        return None if leaf is None else leaf.astype(jnp.float32 if cached is None else cached.dtype)

    return Queries(
        shared=cast(queries.shared, blocks.k_shared),
        code=cast(queries.code, blocks.k_code),
        m=cast(queries.m, blocks.k_code),
        m_bias=cast(queries.m_bias),
        bias=cast(queries.bias),
    )


def _call(
    queries: Queries, blocks: Blocks, lengths: Array, plan: Plan, members: int, scale: float, interpret: bool
) -> tuple[Array, Array, Sums]:
    """The kernel on flat query rows [B, Q, ...]; gives what `merge` takes."""
    batch, rows = jax.tree.leaves(queries)[0].shape[:2]
    v_shared = blocks.k_shared if blocks.v_shared is None else blocks.v_shared

    def out(*features: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, plan.splits, rows, *features), jnp.float32)

    sums = Sums(
        shared=None if v_shared is None else out(v_shared.shape[2]),
        code=None if blocks.v_code is None else out(blocks.v_code.shape[3]),
    )
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, members=members, scale=scale),
        grid=(pl.cdiv(rows, plan.rows), plan.splits, batch),
        out_shape=(out(), out(), sums),
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="lrkv_decode",
    )(queries, blocks, lengths)


def _kernel(
    queries: Any,
    blocks: Any,
    lengths: Any,
    top_out: Any,
    total_out: Any,
    sums_out: Any,
    *,
    plan: Plan,
    members: int,
    scale: float,
) -> None:
    """One share of a row's positions, for one chunk of its query rows."""
    split, row = pl.program_id(1), pl.program_id(2)
    rows = Rows.of_chunk(pl.program_id(0), plan.rows, plan.padded, top_out.shape[2], members)
    score = _scorer(queries, row, rows)
    per_block = jax.tree.leaves(blocks)[0].shape[-1] // plan.tile
    length = lengths[row]

    def step(index: Array, carry: tuple) -> tuple:
        top, total, sums = carry
        start = lax.rem(index, per_block) * plan.tile
        tile = Tile(blocks, lax.div(index, per_block), row, Axis.span(start, plan.tile))
        keys = tile.pieces(blocks.k_shared)
        seen = (index * plan.tile + jnp.arange(plan.tile, dtype=jnp.int32) < length)[:, None]
        scores = jnp.where(seen, score(tile, keys) * scale, NEGATIVE)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
        shrink = jnp.exp(top - new_top)
        sums = _weigh(weights, jax.tree.map(lambda old: old * shrink, sums), tile, keys, rows)
        return new_top, total * shrink + jnp.sum(weights, axis=0), sums

    tiles = pl.cdiv(length, plan.tile)
    share = lambda part: lax.div(tiles * part, plan.splits)  # noqa: E731
    zeros = lambda *shape: jnp.zeros((*shape, plan.padded), jnp.float32)  # noqa: E731
    places = jax.tree.map(lambda ref: Axis.covering(ref.shape[3]), sums_out)
    sums = Sums(*([zeros(axis.index.shape[0]) for axis in axes or ()] for axes in places))
    top, total, sums = lax.fori_loop(share(split), share(split + 1), step, (zeros() + NEGATIVE, zeros(), sums))
    store(top_out, top, row, split, rows.axis)
    store(total_out, total, row, split, rows.axis)
    for ref, axes, parts in zip(sums_out, places, sums, strict=True):
        for axis, part in zip(axes or (), parts, strict=True):
            store(ref, part.T, row, split, rows.axis, axis)


def _scorer(queries: Any, row: Array, rows: Rows) -> Callable[[Tile, list[Array]], Float[Array, "S P"]]:
    """Loads the queries; returns the function that scores a tile, whose shared keys it is given, but for `scale`."""

    def pieces(ref: Any) -> list[Array]:
        return [] if ref is None else [load(ref, row, rows.axis, axis).T for axis in Axis.covering(ref.shape[2])]

    shared, code = pieces(queries.shared), pieces(queries.code)
    bias = None if queries.bias is None else load(queries.bias, row, rows.axis)
    rotates = queries.m is not None or queries.m_bias is not None

    def score(tile: Tile, keys: list[Array]) -> Float[Array, "S P"]:
        scores = jnp.zeros((tile.positions.index.shape[0], rows.axis.index.shape[0]), jnp.float32)
        if shared:
            for q, key in zip(shared, keys, strict=True):
                scores += product(key, q, trans_a=True)
        angles = [angle.T for angle in tile.pieces(tile.blocks.angles if rotates else None)]

        def score_head(head: Array, scores: Array) -> Array:
            codes = tile.pieces(tile.blocks.k_code, head)
            if code:
                for q, key in zip(code, codes, strict=True):
                    scores += rows.only(head, product(key, q, trans_a=True))
            return rows.each_of(head, functools.partial(score_row, codes), scores) if rotates else scores

        def score_row(codes: list[Array], query: Array, scores: Array) -> Array:
            found = _rotated(queries, row, query, codes, angles)
            return scores + jnp.where((rows.axis.index == query)[None], found[:, None], 0.0)

        if code or rotates:
            scores = rows.each_head(score_head, scores)
        if bias is not None:
            scores += bias
        if tile.blocks.k_scale is None:
            return scores
        return scores * load(tile.blocks.k_scale, tile.block, tile.row, rows.heads, tile.positions).T

    return score


def _rotated(queries: Any, row: Array, query: Array, codes: list[Array], angles: list[Array]) -> Float[Array, "S"]:
    """One query row's Σ_c cs_c (Mᵀ code + m_bias)_c, of codes [R, S] and angles [S, C] in pieces."""
    m, m_bias = queries.m, queries.m_bias
    size = (m if m_bias is None else m_bias).shape[-1]
    found: Any = 0.0
    for axis, angle in zip(Axis.covering(size), angles, strict=True):
        y: Any = 0.0
        if m is not None:
            for ranks, code in zip(Axis.covering(m.shape[2]), codes, strict=True):
                y += product(code, load(m, row, query, ranks, axis), trans_a=True)
        if m_bias is not None:
            y += load(m_bias, row, query, axis)[None]
        found += jnp.sum(y * angle, axis=1)
    return found


def _weigh(weights: Float[Array, "S P"], sums: Sums, tile: Tile, keys: list[Array], rows: Rows) -> Sums:
    """Adds a tile's weighted values to sums in pieces."""
    values = keys if tile.blocks.v_shared is None else tile.pieces(tile.blocks.v_shared)
    shared = [old + product(value, weights) for old, value in zip(sums.shared, values, strict=True)]

    def weigh_head(head: Array, code: list[Array]) -> list[Array]:
        values = tile.pieces(tile.blocks.v_code, head)
        added = [rows.only(head, product(value, weights)) for value in values]
        return [old + new for old, new in zip(code, added, strict=True)]

    return Sums(shared, rows.each_head(weigh_head, sums.code) if sums.code else [])
