"""The plain-JAX twin of the kernels: an online softmax over the cache's blocks, each read once and upcast to float32.

On a CPU a block at a time is also the fast way: XLA's bfloat16 matrix-vector product there is slow, and what a block
needs stays in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.core import NEGATIVE
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums


def attend(queries: Queries, blocks: Blocks, lengths: Int[Array, "B T"], *, scale: float) -> Sums:
    """`kernels.attend` by `online_softmax`."""
    return online_softmax(
        lambda block: score(queries, block) * scale, lambda weights, block: weigh(weights, block), blocks, lengths
    )


def score(queries: Queries, block: Blocks) -> Float[Array, "B K J S"]:
    """Unscaled scores against one block, its leaves without the leading n."""
    scores: Any = 0.0
    if queries.shared is not None:
        scores += product("bkjx,bxs->bkjs", queries.shared, block.k_shared)
    if queries.code is not None:
        scores += product("bkjr,bkrs->bkjs", queries.code, block.k_code)
    if queries.m is not None:
        w = _turned("bkjrc,bcs->bkjrs", queries.m, block.angles)
        scores += jnp.sum(w * block.k_code.astype(jnp.float32)[:, :, None], axis=3)
    if queries.m_bias is not None:
        scores += _turned("bkjc,bcs->bkjs", queries.m_bias, block.angles)
    if queries.bias is not None:
        scores += queries.bias.astype(jnp.float32)[..., None]
    return scores if block.k_scale is None else scores * block.k_scale[:, :, None]


def weigh(weights: Float[Array, "B K J S"], block: Blocks) -> Sums:
    """Weighted sums of one block's values."""
    v_shared = block.k_shared if block.v_shared is None else block.v_shared
    return Sums(
        shared=None if v_shared is None else product("bkjs,bws->bkjw", weights, v_shared),
        code=None if block.v_code is None else product("bkjs,bkvs->bkjv", weights, block.v_code),
    )


def product(equation: str, x: Array, y: Array) -> Array:
    """An einsum in float32."""
    # Float32 operands are multiplied as such; else a TPU or GPU may take the one pass that bfloat16 needs.
    exact = x.dtype == y.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else None
    return jnp.einsum(equation, x.astype(jnp.float32), y.astype(jnp.float32), precision=precision)


def _turned(equation: str, x: Array, angles: Float[Array, "b C S"]) -> Array:
    """The product of x [B, ...] and the angles; rows of the same positions (b = 1) share one operand."""
    if angles.shape[0] == x.shape[0]:
        return product(equation, x, angles)
    return product(equation.replace(",b", ","), x, angles[0])


def online_softmax(
    score: Callable[[Any], Float[Array, "B K J S"]],
    weigh: Callable[[Float[Array, "B K J S"], Any], Any],
    blocks: Any,
    lengths: Int[Array, "B T"],
) -> Any:
    """Softmax-weighted sums over blocks of S positions, each read once, those beyond the longest length not at all.

    `score(block)` gives the scaled float32 scores, `weigh(weights, block)` weighted sums, a pytree with leading
    dimensions [B, K, J]; a query that sees nothing gets zeros.
    """
    cut = lambda index: jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, False), blocks)  # noqa: E731
    shapes = jax.eval_shape(lambda: _shapes(score, weigh, cut(0)))
    rows, size = shapes[0].shape[:-1], shapes[0].shape[-1]
    seen_lengths = jnp.tile(lengths, (1, rows[2] // lengths.shape[1]))[:, None, :, None]

    slot = jnp.arange(size, dtype=jnp.int32)

    def step(index: Array, carry: tuple) -> tuple:
        top, total, sums = carry
        block = cut(index)
        seen = (index * size + slot)[None, None, None, :] < seen_lengths
        scores = jnp.where(seen, score(block), NEGATIVE)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        sums = jax.tree.map(lambda old, new: old * shrink[..., None] + new, sums, weigh(weights, block))
        return new_top, total * shrink + jnp.sum(weights, axis=-1), sums

    start = (
        jnp.full(rows, NEGATIVE, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), shapes[1]),
    )
    _, total, sums = jax.lax.fori_loop(0, -(-jnp.max(lengths) // size), step, start)
    total = jnp.maximum(total, 1e-30)
    return jax.tree.map(lambda a: a / total[..., None], sums)


def _shapes(score: Callable, weigh: Callable, block: Any) -> tuple[Array, Any]:
    """Of scores and sums, so that the loop's carry needs no family to declare them."""
    scores = score(block)
    return scores, weigh(scores, block)
