"""Scaled dot-product attention behind one argument: the plain reference, and causal blocks that skip the future."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Implementation = Literal["reference", "chunked"]

NEGATIVE = -1e30  # finite, so that a row with nothing to see gives no NaN


def dot_product_attention(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B S K C"],
    v: Float[Array, "B S K W"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation = "chunked",
) -> Float[Array, "B T H W"]:
    """Causal self-attention, T = S; query head h reads key/value head h // (H / K).

    With segment_ids a query sees its own segment only. `reference` forms all T·S scores; `chunked` forms the scores
    of a quarter of the queries at a time against the keys before them, which halves the work. Softmax in float32.
    Raises ValueError for an implementation that is not one of these.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"attention implementation {implementation!r}: have {', '.join(get_args(Implementation))}")
    if implementation == "chunked":
        return _chunked(q, k, v, segment_ids, scale)
    out = jnp.einsum("bkgts,bskw->btkgw", _weights(_scores(q, k, segment_ids, scale, 0))[0].astype(v.dtype), v)
    return out.reshape(*q.shape[:3], v.shape[-1])


def _scores(
    q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], segment_ids: Array | None, scale: float, start: int
) -> Float[Array, "B K G T S"]:
    """Scaled scores in float32 of the queries from position `start` on; what a query may not see is NEGATIVE."""
    stop = start + q.shape[1]
    mask = (jnp.arange(start, stop)[:, None] >= jnp.arange(k.shape[1])[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, start:stop, None] == segment_ids[:, None, : k.shape[1]])
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(q: Array, k: Array, v: Array, segment_ids: Array | None, scale: float) -> Array:
    """Attention whose backward pass keeps of each query one number, the log of its denominator, and forms scores anew.

    Autodiff would keep all weights, T·S a head.
    """
    return _chunked_forward(q, k, v, segment_ids, scale)[0]


def _blocks(length: int) -> list[tuple[int, int]]:
    """First and last-plus-one query of each block: quarters, but no fewer than 64."""
    size = max(-(-length // 4), 64)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _chunked_forward(q: Array, k: Array, v: Array, segment_ids: Array | None, scale: float) -> tuple[Array, tuple]:
    outputs, log_totals = [], []
    for start, stop in _blocks(q.shape[1]):
        weights, log_total = _weights(_scores(q[:, start:stop], k[:, :stop], segment_ids, scale, start))
        outputs.append(jnp.einsum("bkgts,bskw->btkgw", weights.astype(v.dtype), v[:, :stop]))
        log_totals.append(log_total)
    out = jnp.concatenate(outputs, axis=1).reshape(*q.shape[:3], v.shape[-1])
    return out, (q, k, v, segment_ids, log_totals)


def _chunked_backward(scale: float, saved: tuple, d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, segment_ids, log_totals = saved
    blocks = _blocks(q.shape[1])
    d_q, d_k, d_v = [], [], []
    for (start, stop), log_total in zip(blocks, log_totals, strict=True):
        rows, d_rows = q[:, start:stop], _group(d_out[:, start:stop], k)
        weights = jnp.exp(_scores(rows, k[:, :stop], segment_ids, scale, start) - log_total)
        d_weights = jnp.einsum("btkgw,bskw->bkgts", d_rows, v[:, :stop]).astype(jnp.float32)
        part = weights * d_weights
        d_scores = ((part - weights * jnp.sum(part, axis=-1, keepdims=True)) * scale).astype(q.dtype)
        d_q.append(jnp.einsum("bkgts,bskc->btkgc", d_scores, k[:, :stop]))
        # Keys last: XLA's CPU backend would turn the other order into a product three times as slow in bfloat16.
        d_k.append(jnp.einsum("btkgc,bkgts->bkcs", _group(rows, k), d_scores))
        d_v.append(jnp.einsum("btkgw,bkgts->bkws", d_rows, weights.astype(v.dtype)))
    return jnp.concatenate(d_q, axis=1).reshape(q.shape), _sum(d_k, blocks), _sum(d_v, blocks), None


def _sum(parts: list[Array], blocks: list[tuple[int, int]]) -> Array:
    """What each block of queries gives to the keys before its end, [B, K, C, stop], summed in float32: [B, S, K, C]."""
    columns = [
        sum(part[..., start:stop].astype(jnp.float32) for part in parts[i:]).astype(parts[0].dtype)
        for i, (start, stop) in enumerate(blocks)
    ]
    return jnp.moveaxis(jnp.concatenate(columns, axis=-1), -1, 1)


_chunked.defvjp(_chunked_forward, _chunked_backward)
