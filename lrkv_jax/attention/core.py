"""Scaled dot-product attention behind one argument: the plain reference, blocks that skip the future, and kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Implementation = Literal["auto", "reference", "chunked", "splash", "cudnn"]

Segments = tuple[Array, Array] | None  # of queries and of keys

NEGATIVE = -1e30  # finite, so that a row with nothing to see gives no NaN
MOST_ROWS = 512  # queries of which `chunked` forms all scores at a time


def dot_product_attention(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K W"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    first: Int[Array, ""] | None = None,
    implementation: Implementation = "chunked",
    interpret: bool = False,
) -> Float[Array, "B T H W"]:
    """Causal self-attention; query head h reads key/value head h // (H / K).

    The queries are those of all keys (T = S), or of T positions from `first` on, which a device holds of a longer
    sequence. With segment ids a query sees its own segment only; `key_segment_ids` default to the queries'.
    `reference` forms all T·S scores; `chunked` those of a block of queries at a time, against the keys before the end
    of its quarter of the sequence: that skips most of the future, and keeps memory linear in T. `splash` and `cudnn`
    are kernels for TPU and GPU (backends.py; with `interpret` the first runs anywhere, slowly), and `auto` is the one
    that runs where the program will, else `chunked`. Softmax in float32.
    Raises ValueError for an implementation that is not one of these, UserError for a kernel that can't run.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"attention implementation {implementation!r}: have {', '.join(get_args(Implementation))}")
    segments = None
    if segment_ids is not None:
        segments = (segment_ids, segment_ids if key_segment_ids is None else key_segment_ids)
    if implementation in ("auto", "splash", "cudnn"):
        from lrkv_jax.attention import backends  # imported where it is needed: Pallas takes its time

        if implementation == "auto":
            implementation = backends.fastest(q, k, v, segments, first)
        if implementation != "chunked":
            return backends.attend(implementation, q, k, v, segments, first, scale=scale, interpret=interpret)
    if implementation == "chunked":
        return _chunked(q, k, v, segments, first, scale)
    rows = _rows(q, segments, first)
    weights, _ = _weights(_scores(rows, k, None if segments is None else segments[1], scale))
    out = jnp.einsum("bkgts,bskw->btkgw", weights.astype(v.dtype), v)
    return out.reshape(*q.shape[:3], v.shape[-1])


class Rows(NamedTuple):
    """Queries, with what decides which keys they see; any leaf may be cut along its second axis."""

    q: Float[Array, "B T H C"]
    at: Int[Array, "1 T"]
    """Places in the sequence."""
    segment_ids: Int[Array, "B T"] | None


def _rows(q: Float[Array, "B T H C"], segments: Segments, first: Array | None) -> Rows:
    at = jnp.arange(q.shape[1]) if first is None else first + jnp.arange(q.shape[1])
    return Rows(q, at[None], None if segments is None else segments[0])


def _scores(
    rows: Rows, k: Float[Array, "B S K C"], segment_ids: Int[Array, "B S"] | None, scale: float
) -> Float[Array, "B K G T S"]:
    """Scaled float32 scores of queries and the sequence's first S keys; what a query may not see is NEGATIVE."""
    mask = rows.at[:, :, None] >= jnp.arange(k.shape[1])[None, None, :]
    if segment_ids is not None:
        mask = mask & (rows.segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.einsum("btkgc,bskc->bkgts", _group(rows.q, k), k).astype(jnp.float32) * scale
    return jnp.where(mask[:, None, None], scores, NEGATIVE)


def _weights(scores: Float[Array, "B K G T S"]) -> tuple[Float[Array, "B K G T S"], Float[Array, "B K G T 1"]]:
    """The softmax, and the log of its denominator."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    return exponentials / total, top + jnp.log(total)


def _group(q: Float[Array, "B T H C"], k: Float[Array, "B S K Q"]) -> Float[Array, "B T K G C"]:
    """Query heads by the key/value head they read."""
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunked(q: Array, k: Array, v: Array, segments: Segments, first: Array | None, scale: float) -> Array:
    """Attention whose backward pass keeps of each query one number, the log of its denominator, and forms scores anew.

    Autodiff would keep all weights, T·S a head.
    """
    return _chunked_forward(q, k, v, segments, first, scale)[0]


class Part(NamedTuple):
    """Consecutive queries, from `start` to before `stop`, that are given the same keys: the first `seen`."""

    start: int
    stop: int
    seen: int
    blocks: int
    """Blocks that they come in, one after the other, so that the scores of one exist at a time."""

    def cut(self, tree: Any) -> Any:
        """Of leaves [B, T, ...] the part's blocks [blocks, B, t, ...], the last one padded with zeros."""

        def leaf(a: Array) -> Array:
            size = self.stop - self.start
            a = a[:, self.start : self.stop]
            a = jnp.pad(a, [(0, 0), (0, -size % self.blocks)] + [(0, 0)] * (a.ndim - 2))
            return jnp.moveaxis(a.reshape(a.shape[0], self.blocks, -1, *a.shape[2:]), 1, 0)

        return jax.tree.map(leaf, tree)

    def join(self, a: Array) -> Array:
        """The inverse for one leaf: [B, stop - start, ...]."""
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], -1, *a.shape[3:])[:, : self.stop - self.start]

    def run(self, function: Callable, blocks: Any) -> tuple[Any, Any]:
        """`function(block) -> (kept, summed)` of every block: `kept` stacked, `summed` added up in float32."""
        if self.blocks == 1:
            kept, summed = function(jax.tree.map(lambda a: a[0], blocks))
            return jax.tree.map(lambda a: a[None], kept), summed

        def step(sums: Any, block: Any) -> tuple[Any, Any]:
            kept, new = function(block)
            return jax.tree.map(jnp.add, sums, new), kept

        shapes = jax.eval_shape(function, jax.tree.map(lambda a: a[0], blocks))[1]
        start = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), shapes)
        sums, kept = jax.lax.scan(step, start, blocks)
        return kept, sums


def _parts(length: int, size: int, first: Array | None) -> list[Part]:
    """Quarters of the queries, but of 64 at least, in blocks of at most MOST_ROWS.

    Of `size` keys they are given those before their end, or all where only the run tells the first query's place.
    """
    step = max(-(-length // 4), 64)
    cuts = [(start, min(start + step, length)) for start in range(0, length, step)]
    return [Part(start, stop, stop if first is None else size, -(-(stop - start) // MOST_ROWS)) for start, stop in cuts]


class Keys(NamedTuple):
    """The keys that a part of the queries is given."""

    k: Float[Array, "B S K C"]
    v: Float[Array, "B S K W"]
    segment_ids: Int[Array, "B S"] | None


def _keys(k: Array, v: Array, segments: Segments, seen: int) -> Keys:
    return Keys(k[:, :seen], v[:, :seen], None if segments is None else segments[1][:, :seen])


def _chunked_forward(
    q: Array, k: Array, v: Array, segments: Segments, first: Array | None, scale: float
) -> tuple[Array, tuple]:
    rows, outputs, log_totals = _rows(q, segments, first), [], []
    for part in _parts(q.shape[1], k.shape[1], first):
        block = functools.partial(_forward_block, _keys(k, v, segments, part.seen), scale)
        (out, log_total), _ = part.run(block, part.cut(rows))
        outputs.append(part.join(out))
        log_totals.append(log_total)
    out = jnp.concatenate(outputs, axis=1).reshape(*q.shape[:3], v.shape[-1])
    return out, (q, k, v, segments, first, log_totals)


def _forward_block(keys: Keys, scale: float, rows: Rows) -> tuple[tuple[Array, Array], tuple[()]]:
    """Output [B, t, K, G, W] and log of the denominator; nothing to add up."""
    weights, log_total = _weights(_scores(rows, keys.k, keys.segment_ids, scale))
    return (jnp.einsum("bkgts,bskw->btkgw", weights.astype(keys.v.dtype), keys.v), log_total), ()


def _chunked_backward(scale: float, saved: tuple, d_out: Array) -> tuple[Array, Array, Array, None, None]:
    q, k, v, segments, first, log_totals = saved
    rows, d_q, d_k, d_v = _rows(q, segments, first), [], [], []
    for part, log_total in zip(_parts(q.shape[1], k.shape[1], first), log_totals, strict=True):
        block = functools.partial(_backward_block, _keys(k, v, segments, part.seen), scale)
        d_rows, (d_keys, d_values) = part.run(block, (*part.cut((rows, d_out)), log_total))
        d_q.append(part.join(d_rows))
        d_k.append(d_keys)
        d_v.append(d_values)
    return jnp.concatenate(d_q, axis=1).reshape(q.shape), _sum(d_k, k.dtype), _sum(d_v, v.dtype), None, None


def _backward_block(keys: Keys, scale: float, given: tuple[Rows, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
    """Gradient of queries [B, t, K, G, C]; to be added up, those of keys [B, K, C, S] and values [B, K, W, S]."""
    rows, d_out, log_total = given
    d_out = _group(d_out, keys.k)
    weights = jnp.exp(_scores(rows, keys.k, keys.segment_ids, scale) - log_total)
    d_weights = jnp.einsum("btkgw,bskw->bkgts", d_out, keys.v).astype(jnp.float32)
    product = weights * d_weights
    d_scores = ((product - weights * jnp.sum(product, axis=-1, keepdims=True)) * scale).astype(rows.q.dtype)
    d_q = jnp.einsum("bkgts,bskc->btkgc", d_scores, keys.k)
    # Keys last: XLA's CPU backend would turn the other order into a product three times as slow in bfloat16.
    d_k = jnp.einsum("btkgc,bkgts->bkcs", _group(rows.q, keys.k), d_scores)
    d_v = jnp.einsum("btkgw,bkgts->bkws", d_out, weights.astype(keys.v.dtype))
    return d_q, (d_k, d_v)


def _sum(parts: list[Array], dtype: Any) -> Array:
    """What each part of the queries gives to the keys it sees, [B, K, C, seen], summed in float32: [B, S, K, C]."""
    ends = sorted({part.shape[-1] for part in parts})
    columns = [
        sum(part[..., start:stop].astype(jnp.float32) for part in parts if part.shape[-1] >= stop).astype(dtype)
        for start, stop in itertools.pairwise([0, *ends])
    ]
    return jnp.moveaxis(jnp.concatenate(columns, axis=-1), -1, 1)


_chunked.defvjp(_chunked_forward, _chunked_backward)
