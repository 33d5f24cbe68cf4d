"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one joint latent for keys and values, one rotary key.

    c = norm(x W_down)                      [L], cached
    k_rot = rope(x W_rotary)                [P], cached, shared by all heads
    k_h = [c W_up,K,h ; k_rot]              [C + P]
    v_h = c W_up,V,h                        [C]

No query compression. Decoding absorbs W_up,K into the query and W_up,V into the output, so the latent is read as it
lies: L + P values a token, and with QK-norm one float32 scale a head. The latent's RMSNorm has no gain: a gain would be
a diagonal factor of W_up.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.base import AttentionBase, AttentionConfig, check_rotary, group, require
from lrkv_jax.attention.cache import Cache
from lrkv_jax.attention.kernels.blocked import product
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums
from lrkv_jax.layers import Projection, add_bias, rms_norm, rms_scale, rope


class Config(AttentionConfig):
    """Multi-head latent attention."""

    family: Literal["mla"] = "mla"
    """The attention family."""
    latent: int = 32
    """L, dimensions of the cached latent."""
    rotary_dim: int | None = None
    """P, dimensions of the rotary key shared by all heads; None = head_dim / 2."""

    def model_post_init(self, context: Any) -> None:
        """Adds the checks of latent and rotary dimensions."""
        super().model_post_init(context)
        require(self.latent >= 1, f"latent = {self.latent}: must be at least 1")
        default = " (the default, head_dim / 2)" if self.rotary_dim is None else ""
        require(self.rotary % 2 == 0, f"rotary_dim = {self.rotary}{default}: must be even")
        check_rotary(self.rotary, self.head_dim)

    @property
    def rotary(self) -> int:
        """P with its default filled in."""
        return self.head_dim // 2 if self.rotary_dim is None else self.rotary_dim


class Attention(AttentionBase):
    """Scores are scaled by 1/sqrt(C + P); QK-norm norms the composed [nope; rotary] query and key of each head."""

    config: Config

    def __init__(self, config: Config, *, width: int, eps: float, dtype: Any, rngs: nnx.Rngs, out_std: float = 1.0):
        super().__init__(config, width=width, eps=eps, out_std=out_std, dtype=dtype, rngs=rngs)
        heads, head_dim, latent, rotary = config.heads, config.head_dim, config.latent, config.rotary
        self.scale = 1 / math.sqrt(head_dim + rotary)

        def up() -> Projection:
            shape, axes = (latent, heads, head_dim), ("latent", "heads", "head_dim")
            return Projection("btl,lhc->bthc", shape, axes, rngs=rngs, dtype=dtype)

        def down(size: int, name: str) -> Projection:
            return Projection("btd,dl->btl", (width, size), ("embed", name), rngs=rngs, dtype=dtype)

        self.w_q = Projection(
            "btd,dhc->bthc", (width, heads, head_dim + rotary), ("embed", "heads", "head_dim"), rngs=rngs, dtype=dtype
        )
        self.w_down, self.w_rotary = down(latent, "latent"), down(rotary, "rotary") if rotary else None
        self.w_up_k, self.w_up_v = up(), up()
        self.bias_q = self.bias(heads, "heads", head_dim + rotary)
        self.bias_k, self.bias_v = self.bias(heads, "heads"), self.bias(heads, "heads")

    def query(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H Q"]:
        """Queries [nope; rotary], the second part rotated, both normed together."""
        nope, rotary = jnp.split(add_bias(self.w_q(x), self.bias_q), (self.config.head_dim,), axis=-1)
        q = jnp.concatenate([nope, rope(rotary, positions, self.config.rotation)], axis=-1)
        return rms_norm(q, self.eps) if self.config.qk_norm else q

    def compress(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> dict[str, Array]:
        """Normed latent and rotated shared key as one vector [B, T, L+P]; with QK-norm float32 key scales [B, T, H]."""
        latent = rms_norm(self.w_down(x), self.eps)
        if self.w_rotary is not None:
            rotary = rope(self.w_rotary(x), positions, self.config.rotation)
            latent = jnp.concatenate([latent, rotary], axis=-1)
        scale = {"k_scale": rms_scale(self._compose(latent), self.eps)} if self.config.qk_norm else {}
        return {"latent": latent, **scale}

    def expand(self, entry: dict[str, Array], positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """Keys [B, S, H, C+P] and values [B, S, H, C]."""
        k = self._compose(entry["latent"])
        # The same scale as the cached one; recomputed, so that training has no second use of the composed key.
        k = rms_norm(k, self.eps) if self.config.qk_norm else k
        return k, add_bias(self.w_up_v(entry["latent"][..., : self.config.latent]), self.bias_v)

    def _compose(self, cached: Float[Array, "B S X"]) -> Float[Array, "B S H Q"]:
        """[nope ; rotary] keys of cached vectors [latent ; rotary]."""
        latent, rotary = jnp.split(cached, (self.config.latent,), axis=-1)
        nope = add_bias(self.w_up_k(latent), self.bias_k)
        shared = jnp.broadcast_to(rotary[:, :, None], (*nope.shape[:3], rotary.shape[-1]))
        return jnp.concatenate([nope, shared], axis=-1)

    def head_maps(self) -> tuple[Float[Array, "D H Q"], Float[Array, "D H Q"]]:
        """Keys [W_down W_up,K,h / σ ; W_rotary], in the order of the query's parts.

        The latent's norm divides by a number of each token's own, and here by σ, its value where the latent has the
        mean square that white inputs give it, ‖W_down‖²/L: as in the model, the scale of W_down then has no effect.
        """
        w_down = self.w_down.weight()
        scale = rms_scale(jnp.linalg.norm(w_down.astype(jnp.float32), axis=0), self.eps)
        w_k = product("dl,lhc->dhc", w_down, self.w_up_k.weight()) * scale
        if self.w_rotary is not None:
            rotary = self.w_rotary.weight()[:, None]
            w_k = jnp.concatenate([w_k, jnp.broadcast_to(rotary, (*w_k.shape[:2], rotary.shape[-1]))], axis=-1)
        return self.w_q.weight(), w_k

    absorbed_queries = 64  # measured up to here (benchmarks/results/decode-cpu-absorb.json)
    cache_axes: ClassVar = {"latent": ("latent",), "k_scale": ("heads",)}

    def read(self, q: Float[Array, "B T H Q"], cache: Cache, tables: None) -> tuple[Queries, Blocks]:
        """Moves W_up,K to the query side: [q_nope W_up,Kᵀ ; q_rotary] meets the cached vector, which is the value too.

        A key bias gives one number per query.
        """
        q = group(q, self.config.heads)
        nope, rotary = jnp.split(q, (self.config.head_dim,), axis=-1)
        latent = product("bhjc,lhc->bhjl", nope, self.w_up_k.weight()).astype(self.dtype)
        bias = None if self.bias_k is None else product("bhjc,hc->bhj", nope, self.bias_k.get_value())
        shared = jnp.concatenate([latent, rotary], axis=-1)
        return Queries(shared=shared, bias=bias), Blocks(k_shared=cache["latent"], k_scale=cache.get("k_scale"))

    def release(self, sums: Sums) -> Float[Array, "B H J C"]:
        """Expands the summed latent by W_up,V, once a query and not once a token; weights sum to 1 over the bias."""
        o = product("bhjl,lhc->bhjc", sums.shared[..., : self.config.latent], self.w_up_v.weight())
        return o if self.bias_v is None else o + self.bias_v.get_value()[None, :, None]
