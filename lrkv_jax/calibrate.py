"""What a model's attention sees on real text: the second moments that weigh errors when it is converted.

Of each layer, over N tokens of the train split: E[x xᵀ] of the inputs x to keys and values; the same with each token
counted by the square of its keys' QK-norm scale, for keys; and E[q qᵀ] of the queries that meet a key. A score is
rope(q, t − s) · k with k unrotated, so each query is rotated by a distance, drawn evenly from those that it looks back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.kernels.blocked import product
from lrkv_jax.layers import add_bias, rms_scale
from lrkv_jax.step import Program
from lrkv_jax.transformer import Block


class Moments(NamedTuple):
    """Second moments of one layer, means over tokens."""

    values: np.ndarray
    """[D, D], of the inputs."""
    keys: np.ndarray
    """[D, D], of the inputs, weighted by the squared scale of the keys where there is QK-norm."""
    queries: np.ndarray
    """[K, C, C], of rotated, normed queries, summed over a key/value head's query heads."""


def calibrate(
    program: Program, params: Any, batch_at: Callable[[int], np.ndarray], tokens: int, seed: int = 0
) -> list[Moments]:
    """Moments of every layer over at least so many tokens, layer by layer; `batch_at(step)` gives rows [B, T + 1]."""
    outer, blocks = nnx.merge(program.graph, params).split()
    count = -(-tokens // batch_at(0)[:, :-1].size)
    embed = jax.jit(lambda tokens: outer.embedding(tokens))
    hidden = [embed(jnp.asarray(batch_at(step)[:, :-1])) for step in range(count)]
    graph = nnx.graphdef(blocks[0])
    layer = jax.jit(lambda state, x, key: _layer(nnx.merge(graph, state), x, key))
    found = []
    for index, block in enumerate(blocks):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), index), count)
        batch_moments = []
        for step in range(count):
            hidden[step], moments = layer(nnx.state(block), hidden[step], keys[step])
            batch_moments.append(moments)
        found.append(
            Moments(
                *(
                    np.mean([np.asarray(m, np.float64) for m in each], axis=0)
                    for each in zip(*batch_moments, strict=True)
                )
            )
        )
    return found


def _layer(block: Block, x: Float[Array, "B T D"], key: Array) -> tuple[Float[Array, "B T D"], Moments]:
    """The block's output, and the moments of its attention's input, of one batch."""
    attention, config = block.attention, block.attention.config
    batch, length, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    normed = block.attention_norm(x)
    queries = attention.query(normed, _distances(key, positions))
    queries = queries.reshape(batch, length, config.groups, -1, config.head_dim).astype(jnp.float32)
    normed32 = normed.astype(jnp.float32)
    weighted = normed32
    if config.qk_norm:
        scales = rms_scale(add_bias(attention.w_k(normed), attention.bias_k), attention.eps)
        weighted = normed32 * jnp.sqrt(jnp.mean(scales**2, axis=-1))[..., None]
    tokens = batch * length
    moments = Moments(
        values=product("btd,bte->de", normed32, normed32) / tokens,
        keys=product("btd,bte->de", weighted, weighted) / tokens,
        queries=product("btkjc,btkje->kce", queries, queries) / tokens,
    )
    return block(x, positions), moments


def _distances(key: Array, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """For each query, how far back the key lies that it meets: even over 0..t."""
    return jnp.floor(jax.random.uniform(key, positions.shape) * (positions + 1)).astype(jnp.int32)
