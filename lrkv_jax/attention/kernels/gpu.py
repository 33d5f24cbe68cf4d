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
the key that it stands for would: tests/test_kernel_gpu.py measures it.
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

# Four programs for each of an H200's 132 multiprocessors: enough to even out rows of different length.
PROGRAMS = 528
# The smallest operand of a tensor-core product, so also the smallest tile.
MIN_TILE = 16


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
    """Tiles in flight in Triton's software pipeline."""


def attend(
    queries: Queries,
    blocks: Blocks,
    lengths: Int[Array, "B 1"],
    *,
    scale: float,
    interpret: bool = False,
    plan: Plan | None = None,
) -> Sums:
    """`kernels.attend` on an NVIDIA GPU of compute capability 8.0 or more, or anywhere with `interpret`.

    Features (X, R, C, ...) may have any size, S is a multiple of 16 (of 128 to be fast). `plan` is for tuning.
    Raises ValueError for several queries a row and for an S that is no multiple of 16.
    """
    batch, groups, members = next(leaf for leaf in queries if leaf is not None).shape[:3]
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
    """Tiles that fit an H200's multiprocessor (65,536 registers, 227 KiB of shared memory); estimates, not tuned."""
    batch, groups, members = next(leaf for leaf in queries if leaf is not None).shape[:3]
    leaf = jax.tree.leaves(blocks)[0]
    capacity, size, wide = leaf.shape[0] * leaf.shape[-1], leaf.shape[-1], leaf.dtype.itemsize > 2
    widths = [0 if part is None else part.shape[-2] for part in (blocks.k_shared, blocks.v_shared)]
    # Sums of `rows` x width float32 live in registers all along.
    most = 32 if max(widths) <= 512 else 16
    together = blocks.k_shared is not None or queries.m_bias is not None
    rows = min(members, most) * (max(1, min(groups, most // members)) if together else 1)
    tile = 32 if wide or max(widths) > 256 else 128 if queries.m is not None else 64
    tile = min(tile, size & -size)
    programs = batch * pl.cdiv(groups * members, rows)
    return Plan(
        rows=rows,
        padded=max(MIN_TILE, pl.next_power_of_2(rows)),
        tile=tile,
        splits=max(1, min(pl.cdiv(PROGRAMS, programs), capacity // tile)),
        warps=8 if queries.m is not None or max(widths) > 256 else 4,
        stages=2 if wide else 3,
    )


def merge(top: Float[Array, "B N Q"], total: Float[Array, "B N Q"], sums: Sums) -> Sums:
    """Joins N partial softmaxes: their maxima, their sums of weights, and weighted sums [B, N, Q, ...].

    A query that saw nothing gets zeros.
    """
    share = jnp.exp(top - jnp.max(top, axis=1, keepdims=True))
    whole = jnp.maximum(jnp.sum(total * share, axis=1), 1e-30)
    return jax.tree.map(lambda part: jnp.sum(part * share[..., None], axis=1) / whole[..., None], sums)


def _rounded(queries: Queries, blocks: Blocks) -> Queries:
    """What meets the cache in a product, in the cache's dtype; what is only added, in float32."""
    cast = lambda leaf, other: None if leaf is None else leaf.astype(other.dtype)  # noqa: E731
    return Queries(
        shared=cast(queries.shared, blocks.k_shared),
        code=cast(queries.code, blocks.k_code),
        m=cast(queries.m, blocks.k_code),
        m_bias=cast(queries.m_bias, jnp.float32(0)),
        bias=cast(queries.bias, jnp.float32(0)),
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


class _Axis(NamedTuple):
    """Indices along one dimension, a power of two of them, and which of those exist (None: all)."""

    index: Int[Array, "X"]
    inside: Array | None = None

    @classmethod
    def span(cls, start: Any, width: int, stop: Any = None) -> _Axis:
        """`width` indices from `start`, those from `stop` on missing."""
        index = start + jnp.arange(width, dtype=jnp.int32)
        return cls(index, None if stop is None else index < stop)

    @classmethod
    def covering(cls, size: int) -> list[_Axis]:
        """Spans that cover 0 .. size: one, unless that wastes more than a quarter of more than 128."""
        axes, start = [], 0
        while start < size:
            width = max(MIN_TILE, pl.next_power_of_2(size - start))
            if width > 128 and width > 1.25 * (size - start):
                width //= 2
            axes.append(cls.span(start, width, None if start + width <= size else size))
            start += width
        return axes


def _place(where: tuple) -> tuple[tuple, Array | None]:
    """Index and mask for a ref at scalars and axes, in the order of its dimensions."""
    axes = [part for part in where if isinstance(part, _Axis)]
    spread = lambda vector, place: jnp.expand_dims(vector, [i for i in range(len(axes)) if i != place])  # noqa: E731
    places = iter(range(len(axes)))
    at = tuple(spread(part.index, next(places)) if isinstance(part, _Axis) else part for part in where)
    masks = [spread(axis.inside, place) for place, axis in enumerate(axes) if axis.inside is not None]
    if not masks:
        return at, None
    shape = tuple(axis.index.shape[0] for axis in axes)
    return at, functools.reduce(jnp.logical_and, [jnp.broadcast_to(mask, shape) for mask in masks])


def _load(ref: Any, *where: Any) -> Array:
    """What lies there, zeros where nothing does."""
    at, mask = _place(where)
    return triton.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


def _store(ref: Any, value: Array, *where: Any) -> None:
    """Writes what has a place."""
    at, mask = _place(where)
    triton.store(ref.at[at], value, mask=mask)


def _product(x: Float[Array, "P X"], y: Float[Array, "X S"], **transposed: bool) -> Float[Array, "P S"]:
    """A matrix product in y's dtype that accumulates in float32."""
    return triton.dot(x.astype(y.dtype), y, precision=lax.Precision.HIGHEST, **transposed)


class _Rows(NamedTuple):
    """The query rows of a program: `first` up to `stop` of a batch row's K·J."""

    first: Array
    stop: Array
    axis: _Axis
    members: int
    """J, rows of a head."""
    single: bool
    """All are of one head."""

    @classmethod
    def of_program(cls, chunk: Array, total: int, plan: Plan, members: int) -> _Rows:
        """Those of a chunk of `total` rows."""
        first = chunk * plan.rows
        stop = jnp.minimum(first + plan.rows, total)
        single = plan.rows <= members and members % plan.rows == 0
        return cls(first, stop, _Axis.span(first, plan.padded, stop), members, single)

    @property
    def heads(self) -> _Axis:
        """Each row's head."""
        return _Axis(lax.div(self.axis.index, jnp.int32(self.members)), self.axis.inside)

    def each_head(self, visit: Callable[[Array, Any], Any], carry: Any) -> Any:
        """Runs `carry = visit(head, carry)` for every head that these rows belong to."""
        head = lax.div(self.first, self.members)
        if self.single:  # no inner loop, so that Triton pipelines the one over tiles
            return visit(head, carry)
        return lax.fori_loop(head, lax.div(self.stop - 1, self.members) + 1, visit, carry)

    def each_of(self, head: Array, visit: Callable[[Array, Any], Any], carry: Any) -> Any:
        """Runs `carry = visit(row, carry)` for every row of a head."""
        if self.members == 1:
            return visit(head, carry)
        start = jnp.maximum(self.first, head * self.members)
        return lax.fori_loop(start, jnp.minimum(self.stop, (head + 1) * self.members), visit, carry)

    def only(self, head: Array, values: Float[Array, "P X"]) -> Float[Array, "P X"]:
        """Zeros in the rows of other heads."""
        return values if self.single else jnp.where((self.heads.index == head)[:, None], values, 0.0)


class _Tile(NamedTuple):
    """Some positions of one batch row's cache."""

    blocks: Any
    """Refs of `Blocks`."""
    block: Array
    row: Array
    positions: _Axis
    """Within the block."""

    def read(self, ref: Any, *where: Any) -> Float[Array, "X S"]:
        """[X, tile] of one array of the cache."""
        row = self.row if ref.shape[1] > 1 else 0
        return _load(ref, self.block, row, *where, self.positions)

    def pieces(self, ref: Any, *head: Array) -> list[Array]:
        """All of a shared array, or a head's codes, in the pieces of `_Axis.covering`; none where there is no array."""
        return [] if ref is None else [self.read(ref, *head, axis) for axis in _Axis.covering(ref.shape[-2])]


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
    rows = _Rows.of_program(pl.program_id(0), top_out.shape[2], plan, members)
    score = _scorer(queries, row, rows)
    per_block = jax.tree.leaves(blocks)[0].shape[-1] // plan.tile
    length = lengths[row]

    def step(index: Array, carry: tuple) -> tuple:
        top, total, sums = carry
        start = lax.rem(index, per_block) * plan.tile
        tile = _Tile(blocks, lax.div(index, per_block), row, _Axis.span(start, plan.tile))
        keys = tile.pieces(blocks.k_shared)
        seen = (index * plan.tile + jnp.arange(plan.tile, dtype=jnp.int32) < length)[None]
        scores = jnp.where(seen, score(tile, keys) * scale, NEGATIVE)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        sums = _weigh(weights, jax.tree.map(lambda old: old * shrink[:, None], sums), tile, keys, rows)
        return new_top, total * shrink + jnp.sum(weights, axis=1), sums

    tiles = pl.cdiv(length, plan.tile)
    share = lambda part: lax.div(tiles * part, plan.splits)  # noqa: E731
    zeros = lambda *shape: jnp.zeros((plan.padded, *shape), jnp.float32)  # noqa: E731
    places = jax.tree.map(lambda ref: _Axis.covering(ref.shape[3]), sums_out)
    sums = Sums(*([zeros(axis.index.shape[0]) for axis in axes or ()] for axes in places))
    top, total, sums = lax.fori_loop(share(split), share(split + 1), step, (zeros() + NEGATIVE, zeros(), sums))
    _store(top_out, top, row, split, rows.axis)
    _store(total_out, total, row, split, rows.axis)
    for ref, axes, parts in zip(sums_out, places, sums, strict=True):
        for axis, part in zip(axes or (), parts, strict=True):
            _store(ref, part, row, split, rows.axis, axis)


def _scorer(queries: Any, row: Array, rows: _Rows) -> Callable[[_Tile, list[Array]], Float[Array, "P S"]]:
    """Loads the queries and returns the function that scores a tile, given its shared keys; unscaled but for k_scale."""
    load = lambda ref: [] if ref is None else [_load(ref, row, rows.axis, a) for a in _Axis.covering(ref.shape[2])]  # noqa: E731
    shared, code = load(queries.shared), load(queries.code)
    bias = None if queries.bias is None else _load(queries.bias, row, rows.axis)[:, None]

    def score(tile: _Tile, keys: list[Array]) -> Float[Array, "P S"]:
        scores = jnp.zeros((rows.axis.index.shape[0], tile.positions.index.shape[0]), jnp.float32)
        for q, key in zip(shared, keys, strict=False):
            scores += _product(q, key)
        angles = [angle.T for angle in tile.pieces(tile.blocks.angles)]

        def score_head(head: Array, scores: Array) -> Array:
            codes = tile.pieces(tile.blocks.k_code, head)
            for q, key in zip(code, codes, strict=False):
                scores += rows.only(head, _product(q, key))
            if not angles:
                return scores
            return rows.each_of(head, lambda j, scores: scores + rotated(j, codes), scores)

        def rotated(query: Array, codes: list[Array]) -> Array:
            found = _rotated(queries, row, query, codes, angles)
            return jnp.where((rows.axis.index == query)[:, None], found[None], 0.0)

        if code or angles:
            scores = rows.each_head(score_head, scores)
        if bias is not None:
            scores += bias
        if tile.blocks.k_scale is None:
            return scores
        return scores * _load(tile.blocks.k_scale, tile.block, tile.row, rows.heads, tile.positions)

    return score


def _rotated(queries: Any, row: Array, query: Array, codes: list[Array], angles: list[Array]) -> Float[Array, "S"]:
    """One query row's Σ_c cs_c (Mᵀ code + m_bias)_c, of codes [R, S] and angles [S, C] in pieces."""
    m, m_bias = queries.m, queries.m_bias
    size = (m if m_bias is None else m_bias).shape[-1]
    found: Any = 0.0
    for axis, angle in zip(_Axis.covering(size), angles, strict=True):
        y: Any = 0.0
        if m is not None:
            for ranks, code in zip(_Axis.covering(m.shape[2]), codes, strict=True):
                y += _product(code, _load(m, row, query, ranks, axis), trans_a=True)
        if m_bias is not None:
            y += _load(m_bias, row, query, axis)[None]
        found += jnp.sum(y * angle, axis=1)
    return found


def _weigh(weights: Float[Array, "P S"], sums: Sums, tile: _Tile, keys: list[Array], rows: _Rows) -> Sums:
    """Adds a tile's weighted values to sums in pieces."""
    values = keys if tile.blocks.v_shared is None else tile.pieces(tile.blocks.v_shared)
    shared = [old + _product(weights, value, trans_b=True) for old, value in zip(sums.shared, values, strict=True)]

    def weigh_head(head: Array, code: list[Array]) -> list[Array]:
        values = tile.pieces(tile.blocks.v_code, head)
        added = [rows.only(head, _product(weights, value, trans_b=True)) for value in values]
        return [old + new for old, new in zip(code, added, strict=True)]

    return Sums(shared, rows.each_head(weigh_head, sums.code) if sums.code else [])
