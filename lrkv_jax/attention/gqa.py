"""Grouped-query attention (arXiv 2305.13245): K key/value heads, each read by H/K query heads.

MHA is K = H and MQA (arXiv 1911.02150) is K = 1: presets of one class. The cache holds the rotated, normed keys and
the values: 2·K·C values a token.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.base import AttentionBase, GroupedConfig, check_rotary, group
from lrkv_jax.attention.cache import Cache
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums
from lrkv_jax.layers import Projection, add_bias, apply_gain, rms_norm, rope


class Config(GroupedConfig):
    """Grouped-query attention; kv_heads = heads is MHA, kv_heads = 1 is MQA."""

    family: Literal["gqa"] = "gqa"
    """The attention family."""
    rotary_dim: int | None = None
    """Dimensions of a head that rotate, the first ones; None = all."""

    def model_post_init(self, context: Any) -> None:
        """Adds the check of rotary dimensions."""
        super().model_post_init(context)
        check_rotary(self.rotary, self.head_dim)

    @property
    def rotary(self) -> int:
        """Rotary dimensions with their default filled in."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


class Attention(AttentionBase):
    """q_h = x W_Q,h; k_j = x W_K,j; v_j = x W_V,j; query head h reads j = h // (H/K)."""

    config: Config

    def __init__(self, config: Config, *, width: int, eps: float, dtype: Any, rngs: nnx.Rngs, out_std: float = 1.0):
        super().__init__(config, width=width, eps=eps, out_std=out_std, dtype=dtype, rngs=rngs)
        head_dim = config.head_dim

        def heads(count: int, name: str) -> Projection:
            shape, axes = (width, count, head_dim), ("embed", name, "head_dim")
            return Projection("btd,dhc->bthc", shape, axes, rngs=rngs, dtype=dtype)

        self.w_q, self.bias_q = heads(config.heads, "heads"), self.bias(config.heads, "heads")
        self.w_k, self.bias_k = heads(config.groups, "kv_heads"), self.bias(config.groups, "kv_heads")
        self.w_v, self.bias_v = heads(config.groups, "kv_heads"), self.bias(config.groups, "kv_heads")
        self.gain_q, self.gain_k = self.gain(), self.gain()

    def query(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H C"]:
        """Rotated, normed queries."""
        return self._rotate_norm(add_bias(self.w_q(x), self.bias_q), self.gain_q, positions)

    def compress(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> dict[str, Array]:
        """Rotated, normed keys and values, [B, T, K, C] each."""
        k = self._rotate_norm(add_bias(self.w_k(x), self.bias_k), self.gain_k, positions)
        return {"k": k, "v": add_bias(self.w_v(x), self.bias_v)}

    def expand(self, entry: dict[str, Array], positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """Nothing to expand: the entry is the keys and values."""
        return entry["k"], entry["v"]

    def head_maps(self) -> tuple[Float[Array, "D H C"], Float[Array, "D H C"]]:
        """The projections; the query heads of a group have one key map."""
        group_size = self.config.heads // self.config.groups
        w_q, w_k = apply_gain(self.w_q.weight(), self.gain_q), apply_gain(self.w_k.weight(), self.gain_k)
        return w_q, jnp.repeat(w_k, group_size, axis=1)

    absorbed_queries = 64  # expanding would only transpose (benchmarks/results/decode-cpu-absorb.json)
    cache_axes: ClassVar = {"k": ("kv_heads", "head_dim"), "v": ("kv_heads", "head_dim")}

    def read(self, q: Float[Array, "B T H C"], cache: Cache, tables: None) -> tuple[Queries, Blocks]:
        """Keys and values as they lie."""
        return Queries(code=group(q, self.config.groups)), Blocks(k_code=cache["k"], v_code=cache["v"])

    def release(self, sums: Sums) -> Float[Array, "B K J C"]:
        """The summed values are the output."""
        return sums.code

    def _rotate_norm(self, x: Array, gain: nnx.Param | None, positions: Array) -> Array:
        if gain is not None:  # which doesn't commute with rotation, as the norm does
            x = apply_gain(rms_norm(x, self.eps), gain)
        x = rope(x, positions, self.config.rotation, self.config.rotary)
        return rms_norm(x, self.eps) if self.config.qk_norm and gain is None else x
