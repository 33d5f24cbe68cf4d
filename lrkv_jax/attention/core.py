"""Scaled dot-product attention behind one argument: the plain reference, and causal blocks that skip the future.

Also the online softmax over blocks of cached positions, on which every family's decoding stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
    length = q.shape[1]
    chunk = length if implementation == "reference" else max(-(-length // 4), 64)
    outputs = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        mask = (jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :])[None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop])
        outputs.append(_attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask, scale))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def _attention(q: Array, k: Array, v: Array, mask: Bool[Array, "B T S"], scale: float) -> Array:
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgc,bskc->bkgts", groups, k).astype(jnp.float32) * scale
    scores = jnp.where(mask[:, None, None], scores, NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskw->btkgw", weights, v)
    return out.reshape(*q.shape[:3], v.shape[-1])


def online_softmax(
    score: Callable[[Any, Array], Float[Array, "B H T S"]],
    weigh: Callable[[Float[Array, "B H T S"], Any, Array], Any],
    cache: Any,
    key_positions: Int[Array, "B S"],
    lengths: Int[Array, "B T"],
    block: int,
) -> Any:
    """Softmax-weighted sums over a cache that is read once, a block of positions at a time.

    `score(entries, positions)` gives the scaled scores of a block, `weigh(weights, entries, positions)` its weighted
    sums, a pytree with leading dimensions [B, H, T]. Query t of row b sees the first lengths[b, t] slots. Blocks
    beyond the longest length are not read. Arithmetic in float32.
    """
    slots = key_positions.shape[1]
    block = min(block, slots)

    def read(index: Array) -> tuple[Any, Array, Array]:
        # The last block of a cache that is no multiple of `block` starts early; what it holds twice is masked once.
        first = index * block
        start = jnp.minimum(first, slots - block)
        cut = lambda a: jax.lax.dynamic_slice_in_dim(a, start, block, axis=1)  # noqa: E731
        entries, positions = jax.tree.map(cut, (cache, key_positions))
        slot = start + jnp.arange(block, dtype=jnp.int32)
        seen = (slot >= first)[None, None, :] & (slot[None, None, :] < lengths[:, :, None])
        return entries, positions, seen[:, None]

    def step(index: Array, carry: tuple) -> tuple:
        top, total, sums = carry
        entries, positions, seen = read(index)
        scores = jnp.where(seen, score(entries, positions), NEGATIVE)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        sums = jax.tree.map(lambda old, new: old * shrink[..., None] + new, sums, weigh(weights, entries, positions))
        return new_top, total * shrink + jnp.sum(weights, axis=-1), sums

    first = jax.eval_shape(lambda: _first(score, weigh, read))
    start = (
        jnp.full(first[0].shape, NEGATIVE, jnp.float32),
        jnp.zeros(first[0].shape, jnp.float32),
        jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), first[1]),
    )
    blocks = -(-jnp.max(lengths) // block)
    _, total, sums = jax.lax.fori_loop(0, blocks, step, start)
    total = jnp.maximum(total, 1e-30)  # a query that sees nothing gets zeros
    return jax.tree.map(lambda a: a / total[..., None], sums)


def _first(score: Callable, weigh: Callable, read: Callable) -> tuple[Array, Any]:
    """Shapes of a block's maxima and sums, so that the loop's carry needs no family to declare them."""
    entries, positions, _ = read(jnp.zeros((), jnp.int32))
    scores = score(entries, positions)
    return scores[..., 0], weigh(scores, entries, positions)
