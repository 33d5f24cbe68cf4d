"""Scaled dot-product attention behind one argument: the plain reference, and causal blocks that skip the future."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Implementation = Literal["reference", "chunked"]

Segments = tuple[Array, Array] | None  # of queries and of keys

NEGATIVE = -1e30  # finite, so that a row with nothing to see gives no NaN


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
) -> Float[Array, "B T H W"]:
    """Causal self-attention; query head h reads key/value head h // (H / K).

    The queries are those of all keys (T = S), or of T positions from `first` on, which a device holds of a longer
    sequence. With segment ids a query sees its own segment only; `key_segment_ids` default to the queries'.
    `reference` forms all T·S scores; `chunked` forms those of a block of queries at a time against the keys before
    them, which halves the work, and keeps memory linear in T. Softmax in float32.
    Raises ValueError for an implementation that is not one of these.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"attention implementation {implementation!r}: have {', '.join(get_args(Implementation))}")
    segments = None
    if segment_ids is not None:
        segments = (segment_ids, segment_ids if key_segment_ids is None else key_segment_ids)
    if implementation == "chunked":
        return _chunked(q, k, v, segments, first, scale)
    weights, _ = _weights(_scores(q, k, segments, first, 0, scale))
    out = jnp.einsum("bkgts,bskw->btkgw", weights.astype(v.dtype), v)
    return out.reshape(*q.shape[:3], v.shape[-1])


def _scores(
    q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], segments: Segments, first: Any, start: int, scale: float
) -> Float[Array, "B K G T S"]:
    """Scaled float32 scores of the queries from index `start` on; what a query may not see is NEGATIVE."""
    stop, size = start + q.shape[1], k.shape[1]
    at = jnp.arange(start, stop) if first is None else first + jnp.arange(start, stop)
    mask = (at[:, None] >= jnp.arange(size)[None, :])[None]
    if segments is not None:
        mask = mask & (segments[0][:, start:stop, None] == segments[1][:, None, :size])
    scores = jnp.einsum("btkgc,bskc->bkgts", _group(q, k), k).astype(jnp.float32) * scale
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


def _blocks(length: int, size: int, first: Array | None) -> list[tuple[int, int, int]]:
    """First and last-plus-one query of each block, and how many keys it may see: of `size`, those before its end.

    Blocks are quarters, but hold 64 to 512 queries. Where the first query's place is known at run time only, every
    block is given all keys.
    """
    step = min(max(-(-length // 4), 64), 512)
    cuts = [(start, min(start + step, length)) for start in range(0, length, step)]
    return [(start, stop, stop if first is None else size) for start, stop in cuts]


def _chunked_forward(
    q: Array, k: Array, v: Array, segments: Segments, first: Array | None, scale: float
) -> tuple[Array, tuple]:
    outputs, log_totals = [], []
    for start, stop, seen in _blocks(q.shape[1], k.shape[1], first):
        weights, log_total = _weights(_scores(q[:, start:stop], k[:, :seen], segments, first, start, scale))
        outputs.append(jnp.einsum("bkgts,bskw->btkgw", weights.astype(v.dtype), v[:, :seen]))
        log_totals.append(log_total)
    out = jnp.concatenate(outputs, axis=1).reshape(*q.shape[:3], v.shape[-1])
    return out, (q, k, v, segments, first, log_totals)


def _chunked_backward(scale: float, saved: tuple, d_out: Array) -> tuple[Array, Array, Array, None, None]:
    q, k, v, segments, first, log_totals = saved
    blocks = _blocks(q.shape[1], k.shape[1], first)
    d_q, d_k, d_v = [], [], []
    for (start, stop, seen), log_total in zip(blocks, log_totals, strict=True):
        rows, d_rows = q[:, start:stop], _group(d_out[:, start:stop], k)
        weights = jnp.exp(_scores(rows, k[:, :seen], segments, first, start, scale) - log_total)
        d_weights = jnp.einsum("btkgw,bskw->bkgts", d_rows, v[:, :seen]).astype(jnp.float32)
        part = weights * d_weights
        d_scores = ((part - weights * jnp.sum(part, axis=-1, keepdims=True)) * scale).astype(q.dtype)
        d_q.append(jnp.einsum("bkgts,bskc->btkgc", d_scores, k[:, :seen]))
        # Keys last: XLA's CPU backend would turn the other order into a product three times as slow in bfloat16.
        d_k.append(jnp.einsum("btkgc,bkgts->bkcs", _group(rows, k), d_scores))
        d_v.append(jnp.einsum("btkgw,bkgts->bkws", d_rows, weights.astype(v.dtype)))
    return jnp.concatenate(d_q, axis=1).reshape(q.shape), _sum(d_k), _sum(d_v), None, None


def _sum(parts: list[Array]) -> Array:
    """What each block of queries gives to the keys it sees, [B, K, C, seen], summed in float32: [B, S, K, C]."""
    ends = sorted({part.shape[-1] for part in parts})
    columns = [
        sum(part[..., start:stop].astype(jnp.float32) for part in parts if part.shape[-1] >= stop).astype(
            parts[0].dtype
        )
        for start, stop in itertools.pairwise([0, *ends])
    ]
    return jnp.moveaxis(jnp.concatenate(columns, axis=-1), -1, 1)


_chunked.defvjp(_chunked_forward, _chunked_backward)
