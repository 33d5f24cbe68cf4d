"""What the GPU kernel is made of: indices with masks, query rows and their heads, tiles of the cache.

Triton knows arrays whose sizes are powers of two, so a dimension is covered by one or more of those, and what lies
beyond its end is masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

# The smallest side of a matrix product in Triton, so also the smallest tile.
MIN_TILE = 16


class Axis(NamedTuple):
    """Indices along one dimension, a power of two of them, and which of those exist (None: all)."""

    index: Int[Array, "X"]
    inside: Array | None = None

    @classmethod
    def span(cls, start: Any, width: int, stop: Any = None) -> Axis:
        """`width` indices from `start`, those from `stop` on missing."""
        index = start + jnp.arange(width, dtype=jnp.int32)
        return cls(index, None if stop is None else index < stop)

    @classmethod
    def covering(cls, size: int) -> list[Axis]:
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
    axes = [part for part in where if isinstance(part, Axis)]
    spread = lambda vector, place: jnp.expand_dims(vector, [i for i in range(len(axes)) if i != place])  # noqa: E731
    places = iter(range(len(axes)))
    at = tuple(spread(part.index, next(places)) if isinstance(part, Axis) else part for part in where)
    masks = [spread(axis.inside, place) for place, axis in enumerate(axes) if axis.inside is not None]
    if not masks:
        return at, None
    shape = tuple(axis.index.shape[0] for axis in axes)
    return at, functools.reduce(jnp.logical_and, [jnp.broadcast_to(mask, shape) for mask in masks])


def load(ref: Any, *where: Any) -> Array:
    """What lies there, zeros where nothing does."""
    at, mask = _place(where)
    return triton.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


def store(ref: Any, value: Array, *where: Any) -> None:
    """Writes what has a place."""
    at, mask = _place(where)
    triton.store(ref.at[at], value, mask=mask)


def product(x: Array, y: Array, trans_a: bool = False) -> Array:
    """A matrix product in x's dtype, the cache's, that accumulates in float32."""
    return triton.dot(x, y.astype(x.dtype), trans_a=trans_a, precision=lax.Precision.HIGHEST)


class Rows(NamedTuple):
    """The query rows of a program: `first` up to `stop` of a batch row's K·J."""

    first: Array
    stop: Array
    axis: Axis
    members: int
    """J, rows of a head."""
    single: bool
    """All are of one head."""

    @classmethod
    def of_chunk(cls, chunk: Array, size: int, padded: int, total: int, members: int) -> Rows:
        """Those of one of the chunks of `size` that `total` rows are cut into."""
        first = chunk * size
        stop = jnp.minimum(first + size, total)
        single = size <= members and members % size == 0
        return cls(first, stop, Axis.span(first, padded, stop), members, single)

    @property
    def heads(self) -> Axis:
        """Each row's head."""
        return Axis(lax.div(self.axis.index, jnp.int32(self.members)), self.axis.inside)

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

    def only(self, head: Array, values: Float[Array, "X P"]) -> Float[Array, "X P"]:
        """Zeros in the rows of other heads."""
        return values if self.single else jnp.where((self.heads.index == head)[None], values, 0.0)


class Tile(NamedTuple):
    """Some positions of one batch row's cache."""

    blocks: Any
    """Refs of `Blocks`."""
    block: Array
    row: Array
    positions: Axis
    """Within the block."""

    def read(self, ref: Any, *where: Any) -> Float[Array, "X S"]:
        """[X, tile] of one array of the cache."""
        row = self.row if ref.shape[1] > 1 else 0
        return load(ref, self.block, row, *where, self.positions)

    def pieces(self, ref: Any, *head: Array) -> list[Array]:
        """All of a shared array, or a head's codes, in the pieces of `Axis.covering`; none where there is no array."""
        return [] if ref is None else [self.read(ref, *head, axis) for axis in Axis.covering(ref.shape[-2])]
