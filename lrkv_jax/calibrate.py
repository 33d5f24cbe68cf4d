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
    """[K, C, C], of rotated, normed queries, summed over a key/value head's query heads; with QK-norm counted by the
    mean square of the head's scale."""


def calibrate(
    program: Program, params: Any, batch_at: Callable[[int], np.ndarray], tokens: int, seed: int = 0
) -> list[Moments]:
    """Moments of every layer over at least so many tokens, layer by layer; `batch_at(step)` gives rows [B, T + 1]."""
    outer, blocks = nnx.merge(program.graph, params).split()
    batches = [jnp.asarray(batch_at(0)[:, :-1])]
    batches += [jnp.asarray(batch_at(step)[:, :-1]) for step in range(1, -(-tokens // batches[0].size))]
    embed = jax.jit(lambda batch: outer.embedding(program.read(batch)[0]))
    hidden, places = [embed(batch) for batch in batches], [program.places(batch) for batch in batches]
    graph = nnx.graphdef(blocks[0])
    layer = jax.jit(lambda state, *given: _layer(nnx.merge(graph, state), *given))
    found = []
    for index, block in enumerate(blocks):
        each = []
        for step, (positions, segment_ids) in enumerate(places):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), step)
            hidden[step], moments = layer(nnx.state(block), hidden[step], positions, segment_ids, key)
            each.append(jax.tree.map(lambda moment: np.asarray(moment, np.float64), moments))
        found.append(jax.tree.map(lambda *moments: np.mean(moments, axis=0), *each))
    return found


def _layer(
    block: Block,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    key: Array,
) -> tuple[Float[Array, "B T D"], Moments]:
    """The block's output, and the moments of its attention's input, of one batch."""
    attention, config = block.attention, block.attention.config
    normed = block.attention_norm(x)
    queries = attention.query(normed, _distances(key, positions))
    queries = queries.reshape(*x.shape[:2], config.groups, -1, config.head_dim).astype(jnp.float32)
    inputs = keyed = normed.astype(jnp.float32)
    counts = jnp.ones(config.groups)
    if config.qk_norm:
        # A key is divided by its own length: what a head's W_k is multiplied by has no effect, and must have none here.
        squares = rms_scale(add_bias(attention.w_k(normed), attention.bias_k), attention.eps) ** 2
        keyed = inputs * jnp.sqrt(jnp.mean(squares, axis=-1))[..., None]
        counts = jnp.mean(squares, axis=(0, 1)) / jnp.mean(squares)
    tokens = positions.size
    moments = Moments(
        values=product("btd,bte->de", inputs, inputs) / tokens,
        keys=product("btd,bte->de", keyed, keyed) / tokens,
        queries=product("btkjc,btkje->kce", queries, queries) * counts[:, None, None] / tokens,
    )
    return block(x, positions, segment_ids), moments


def _distances(key: Array, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """For each query, how far back the key lies that it meets: even over 0..t."""
    return jnp.floor(jax.random.uniform(key, positions.shape) * (positions + 1)).astype(jnp.int32)
