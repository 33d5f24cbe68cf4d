"""The contract every attention family fills, and what it gets for doing so."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax import sharding
from lrkv_jax.attention import core
from lrkv_jax.layers import Projection, constant
from lrkv_jax.settings import Settings


class AttentionConfig(Settings):
    """Knobs that every family has. A family's `Config` adds its own and `family: Literal["<name>"]`."""

    heads: int = 6
    """H, query heads."""
    head_dim: int = 32
    """C, dimensions of a head's query, key and value; even, for rotation in pairs."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies θ_m = base^(−2m/dim)."""
    qk_norm: bool = True
    """RMSNorm without gain on every head's query and key (the paper's recipe)."""
    qkv_bias: bool = False
    """A learned bias on queries, keys and values, as in Qwen2."""
    implementation: core.Implementation = "chunked"
    """Training attention: `reference` forms all T² scores, `chunked` skips the future."""

    def model_post_init(self, _: Any) -> None:
        """Refuses what no family can build."""
        require(self.heads >= 1, f"heads = {self.heads}: must be at least 1")
        require(self.head_dim >= 2 and self.head_dim % 2 == 0, f"head_dim = {self.head_dim}: must be even and positive")
        require(self.rope_base > 1, f"rope_base = {self.rope_base}: must be greater than 1")


class GroupedConfig(AttentionConfig):
    """Adds key/value heads (LRKV: residual heads) that groups of query heads share."""

    kv_heads: int | None = None
    """K, key/value heads, each read by H/K query heads; None = heads."""

    def model_post_init(self, context: Any) -> None:
        """Adds the check of groups."""
        super().model_post_init(context)
        require(self.groups >= 1, f"kv_heads = {self.kv_heads}: must be at least 1")
        require(self.heads % self.groups == 0, f"kv_heads = {self.kv_heads}: must divide heads = {self.heads}")

    @property
    def groups(self) -> int:
        """K with its default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads


def require(condition: bool, message: str) -> None:
    """Raises ValueError, which pydantic turns into a validation error and the command line into one line."""
    if not condition:
        raise ValueError(message)


def check_rotary(rotary_dim: int, head_dim: int) -> None:
    """Rotary dimensions come in pairs and lie within the head."""
    require(
        rotary_dim % 2 == 0 and 0 <= rotary_dim <= head_dim,
        f"rotary_dim = {rotary_dim}: must be even and between 0 and head_dim = {head_dim}",
    )


class AttentionBase(nnx.Module):
    """Causal self-attention whose cache is what `compress` returns.

    A family defines `query`, `compress` and `expand`, sets `scale` and `w_o`, and inherits the forward pass and a
    decoder that expands one block of the cache at a time. Where it can read the cache without expanding it, it
    overrides `absorb`, `score`, `weigh` and `release`.
    """

    scale: float
    w_o: Projection

    def __init__(self, config: AttentionConfig, *, width: int, eps: float, out_std: float, dtype: Any, rngs: nnx.Rngs):
        self.config, self.eps, self.dtype = config, eps, dtype
        heads, head_dim = config.heads, config.head_dim
        self.scale = 1 / math.sqrt(head_dim)
        self.w_o = Projection(
            "bthc,hcd->btd",
            (heads, head_dim, width),
            ("heads", "head_dim", "embed"),
            std=out_std / math.sqrt(heads * head_dim),
            rngs=rngs,
            dtype=dtype,
        )

    def bias(self, heads: int, axis: str, size: int | None = None) -> nnx.Param | None:
        """A bias [heads, size], size C by default, where the config asks for biases."""
        shape = (heads, self.config.head_dim if size is None else size)
        return constant(0.0, shape, (axis, "head_dim")) if self.config.qkv_bias else None

    def query(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H Q"]:
        """Queries as `expand`'s keys meet them: rotated, normed, of the key width Q."""
        raise NotImplementedError

    def compress(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> dict[str, Array]:
        """What a decoder keeps of each token, leaves [B, T, ...]: a function of that token and its position alone."""
        raise NotImplementedError

    def expand(self, entry: dict[str, Array], positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """Keys [B, S, K, Q], rotated and normed, and values [B, S, K, C] of compressed entries."""
        raise NotImplementedError

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """The training forward pass: out(core(query, *expand(compress)))."""
        q = sharding.constrain(self.query(x, positions), "batch", "length", "heads", None)
        k, v = self.expand(self.compress(x, positions), positions)
        k = sharding.constrain(k, "batch", "length", "kv_heads", None)
        v = sharding.constrain(v, "batch", "length", "kv_heads", None)
        implementation = self.config.implementation
        o = core.dot_product_attention(
            q, k, v, scale=self.scale, segment_ids=segment_ids, implementation=implementation
        )
        return self.out(sharding.constrain(o, "batch", "length", "heads", None))

    def out(self, o: Float[Array, "B T H C"]) -> Float[Array, "B T D"]:
        """The output projection."""
        return self.w_o(o)

    def attend(
        self,
        q: Float[Array, "B T H Q"],
        cache: dict[str, Array],
        key_positions: Int[Array, "B S"],
        lengths: Int[Array, "B T"],
        block: int = 512,
    ) -> Float[Array, "B T H C"]:
        """Attention straight from a cache of S slots; query t of row b sees the first lengths[b, t] of them.

        What lies in later slots has no influence. Expanded keys or values exist for `block` positions at most.
        """
        absorbed = self.absorb(q)
        sums = core.online_softmax(
            lambda entry, positions: self.score(absorbed, entry, positions) * self.scale,
            lambda weights, entry, positions: self.weigh(weights, entry, positions),
            cache,
            key_positions,
            lengths,
            block,
        )
        return self.release(sums).astype(self.dtype).transpose(0, 2, 1, 3)

    def absorb(self, q: Float[Array, "B T H Q"]) -> Any:
        """What is computed of the queries once, before the cache is read."""
        return q

    def score(self, q: Any, entry: dict[str, Array], positions: Int[Array, "B S"]) -> Float[Array, "B H T S"]:
        """Unscaled float32 scores against a block of entries."""
        k, _ = self.expand(entry, positions)
        grouped = self.group(q, k.shape[2])
        return self.ungroup(product("btkgc,bskc->bkgts", grouped, k))

    def weigh(self, weights: Float[Array, "B H T S"], entry: dict[str, Array], positions: Int[Array, "B S"]) -> Any:
        """Weighted sums of a block's values, in float32, leaves [B, H, T, ...]."""
        _, v = self.expand(entry, positions)
        grouped = weights.reshape(weights.shape[0], v.shape[2], -1, *weights.shape[2:])
        return self.ungroup(product("bkgts,bskc->bkgtc", grouped, v))

    def release(self, sums: Any) -> Float[Array, "B H T C"]:
        """Turns the normalised sums into head outputs."""
        return sums

    @staticmethod
    def group(q: Float[Array, "B T H Q"], kv_heads: int) -> Float[Array, "B T K G Q"]:
        """Query heads by the key/value head they read."""
        return q.reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])

    @staticmethod
    def ungroup(x: Float[Array, "B K G T X"]) -> Float[Array, "B H T X"]:
        """The inverse, on the decoder's layout."""
        return x.reshape(x.shape[0], -1, *x.shape[3:])


def product(equation: str, *operands: Array) -> Array:
    """An einsum in float32. Blocks are upcast first: XLA's CPU backend has no fast bfloat16 matrix-vector product."""
    return jnp.einsum(equation, *(operand.astype(jnp.float32) for operand in operands))


def empty_cache(attention: AttentionBase, width: int, batch: int, slots: int) -> dict[str, Array]:
    """A zeroed cache of [batch, slots, ...] leaves, with the shapes and dtypes that `compress` returns."""
    x = jax.ShapeDtypeStruct((batch, slots, width), attention.dtype)
    positions = jax.ShapeDtypeStruct((batch, slots), jnp.int32)
    entry = nnx.eval_shape(lambda module, x, positions: module.compress(x, positions), attention, x, positions)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), entry)
