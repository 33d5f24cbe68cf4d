"""Low-rank key-value attention (LRKV, arXiv 2601.11471): one shared key and value, and a rank-R residual per head.

    k_shared = x W_shared   [C]     code_h = x U_h   [R]     k_h = k_shared + code_h B_h   [C]

and the same for values with factors of their own. The cache keeps k_shared, v_shared and the codes of K residual heads:
2·(C + K·R) values a token, and with QK-norm one float32 scale a residual head.

The paper rotates shared key and code once when caching, but rotation does not commute with B_h. Three modes, each an
exact model with a compressed cache:

    full    score = rope(q) · rope(k_shared + code_h B_h)                   what the paper trains
    shared  score = rope(q) · rope(k_shared) + (q B_hᵀ) · code_h            the residual carries no position
    latent  score = rope(q) · rope(k_shared) + rope_R(q B_hᵀ) · rope_R(code_h)

`full` decodes by the identity  rope(code B_h)_s · q = code · (M_h cs_s),  cs_s = [cos θ_m s ; sin θ_m s],
M_h = [q_a ⊙ B_a + q_b ⊙ B_b , q_b ⊙ B_a − q_a ⊙ B_b] with halves a, b: no key is ever formed.
A key bias is one more row of B_h whose code is the constant 1; it is not cached, and carries no position where the
residual carries none. A learned gain g on normed, unrotated keys makes g ⊙ k_shared of k_shared and B_h ⊙ g of B_h; the
norm is that of the key without it.

Layers may differ in rank (`ranks`). They are stored alike, U [D, K, R] and B [K, R, C] with R the largest, and layer n
reads the first ranks[n] of R: what lies beyond is no part of the model, gets no gradient and is never cached.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax.attention.base import AttentionBase, GroupedConfig, group, require
from lrkv_jax.attention.cache import Cache, to_blocks
from lrkv_jax.attention.kernels.blocked import product
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums
from lrkv_jax.layers import Projection, add_bias, apply_gain, project, rms_norm, rms_scale, rope, rope_angles


class Config(GroupedConfig):
    """Low-rank key-value attention."""

    family: Literal["lrkv"] = "lrkv"
    """The attention family."""
    rank: int = 12
    """R, rank of a head's residual; 0 is MQA."""
    ranks: tuple[int, ...] = ()
    """Ranks layer by layer, of which `rank` is the largest; empty = `rank` in all."""
    rope_mode: Literal["full", "shared", "latent"] = "full"
    """Where rotation acts (module docstring); `latent` needs an even rank."""

    def model_post_init(self, context: Any) -> None:
        """Adds the checks of rank and mode."""
        super().model_post_init(context)
        require(self.rank >= 0, f"rank = {self.rank}: must be 0 or more")
        latent_odd = self.rope_mode == "latent" and self.rank % 2
        require(not latent_odd, f"rank = {self.rank}: must be even with rope_mode = latent, which rotates pairs of it")
        if self.ranks:
            require(
                max(self.ranks) == self.rank, f"ranks = {self.ranks}: the largest must be rank, which is {self.rank}"
            )
            for index in range(len(self.ranks)):
                self.of_layer(index).model_post_init(context)

    @property
    def by_layer(self) -> bool:
        """Whether ranks are given layer by layer."""
        return bool(self.ranks)

    def of_layer(self, index: int) -> Config:
        """With the layer's own rank."""
        return self.model_copy(update={"rank": self.ranks[index], "ranks": ()}) if self.ranks else self

    def check_layers(self, count: int) -> None:
        """One rank a layer."""
        given = len(self.ranks)
        require(given in (0, count), f"attention.ranks = {self.ranks}: has {given} for model.layers = {count}")


class Attention(AttentionBase):
    """Scale 1/sqrt(C) in every mode; QK-norm takes a key's scale from the composed, unrotated key."""

    config: Config

    def __init__(self, config: Config, *, width: int, eps: float, dtype: Any, rngs: nnx.Rngs, out_std: float = 1.0):
        super().__init__(config, width=width, eps=eps, out_std=out_std, dtype=dtype, rngs=rngs)
        heads, groups, head_dim, rank = config.heads, config.groups, config.head_dim, config.rank

        def shared() -> Projection:
            return Projection("btd,dc->btc", (width, head_dim), ("embed", "head_dim"), rngs=rngs, dtype=dtype)

        def down() -> Projection | None:
            shape, axes = (width, groups, rank), ("embed", "kv_heads", "rank")
            return Projection("btd,dkr->btkr", shape, axes, rngs=rngs, dtype=dtype) if rank else None

        def up() -> Projection | None:
            shape, axes = (groups, rank, head_dim), ("kv_heads", "rank", "head_dim")
            # ‖U_h B_h‖ starts at a tenth of ‖W_shared‖
            std = 0.1 / math.sqrt(rank) if rank else None
            return Projection("btkr,krc->btkc", shape, axes, std=std, rngs=rngs, dtype=dtype) if rank else None

        self.w_q = Projection(
            "btd,dhc->bthc", (width, heads, head_dim), ("embed", "heads", "head_dim"), rngs=rngs, dtype=dtype
        )
        self.w_k_shared, self.u_k, self.b_k = shared(), down(), up()
        self.w_v_shared, self.u_v, self.b_v = shared(), down(), up()
        self.bias_q = self.bias(heads, "heads")
        self.bias_k, self.bias_v = self.bias(groups, "kv_heads"), self.bias(groups, "kv_heads")
        self.gain_q, self.gain_k = self.gain(), self.gain()

    def stacked(self) -> None:
        """Scales each layer's B as its own rank would have it drawn, and labels U and B with the ranks for Muon."""
        if not self.config.by_layer or not self.config.rank:
            return
        ranks = self.config.ranks
        for param in (self.u_k.w, self.u_v.w, self.b_k.w, self.b_v.w):
            param.set_metadata("ranks", ranks)
        scale = jnp.sqrt(self.config.rank / jnp.maximum(jnp.array(ranks, jnp.float32), 1))[:, None, None, None]
        for param in (self.b_k.w, self.b_v.w):
            param.set_value(param.get_value() * scale)

    def narrow(self, index: int) -> None:
        """The first ranks[index] of U's columns and B's rows; none of either where that is 0."""
        if not self.config.by_layer:
            return
        self.config = self.config.of_layer(index)
        for name in ("u_k", "u_v", "b_k", "b_v"):
            if self.config.rank:
                getattr(self, name).narrow("r", self.config.rank)
            else:
                setattr(self, name, None)

    def query(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H Q"]:
        """rope(q) [C] in mode full; [rope(q) ; q B_hᵀ] [C + R] in shared, its second part rotated too in latent."""
        config = self.config
        q = add_bias(self.w_q(x), self.bias_q)
        q = apply_gain(rms_norm(q, self.eps), self.gain_q) if config.qk_norm else q
        rotated = rope(q, positions, config.rotation)
        if config.rope_mode == "full" or not self._has_residual():
            return rotated
        grouped = q.reshape(*q.shape[:2], config.groups, -1, q.shape[-1])
        code = project("btkgc,krc->btkgr", grouped, self._factor()).reshape(*q.shape[:3], -1)
        if config.rope_mode == "latent":
            code = rope(code, positions, config.rotation, config.rank)
        return jnp.concatenate([rotated, code], axis=-1)

    def compress(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> dict[str, Array]:
        """rope(g ⊙ k_shared), v_shared [B, T, C], codes [B, T, K, R]; with QK-norm float32 key scales [B, T, K]."""
        config = self.config
        k_shared = self.w_k_shared(x)
        rotated = rope(apply_gain(k_shared, self.gain_k), positions, config.rotation)
        entry = {"k_shared": rotated, "v_shared": self.w_v_shared(x)}
        if self.u_k is not None:
            entry |= {"k_code": self.u_k(x), "v_code": self.u_v(x)}
        if config.qk_norm:
            entry["k_scale"] = rms_scale(k_shared[:, :, None] + self._residual(entry), self.eps)
        if config.rope_mode == "latent" and self.u_k is not None:
            entry["k_code"] = rope(entry["k_code"], positions, config.rotation)
        return entry

    def expand(self, entry: dict[str, Array], positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """Keys [B, S, K, Q] and values [B, S, K, C]; rotation is linear, so the cached rotated key needs no undoing."""
        config = self.config
        v = entry["v_shared"][:, :, None]
        v = add_bias(v + self.b_v(entry["v_code"]) if self.b_v is not None else self._broadcast(v), self.bias_v)
        k = self._broadcast(entry["k_shared"][:, :, None])
        if config.rope_mode == "full" or not self._has_residual():
            k = k + rope(apply_gain(self._residual(entry), self.gain_k), positions, config.rotation)
            if self.gain_k is None:
                # The same scale as the cached one; recomputed, so that training has no second use of the composed key.
                return (rms_norm(k, self.eps) if config.qk_norm else k), v
        else:
            k = jnp.concatenate([k, self._code(entry)], axis=-1)
        if config.qk_norm:
            k = (k.astype(jnp.float32) * entry["k_scale"][..., None]).astype(k.dtype)
        return k, v

    def head_maps(self) -> tuple[Float[Array, "D H C"], Float[Array, "D H C"]]:
        """Keys W_shared + U_h B_h, the same in every rope mode: modes differ in how scores turn with the distance."""
        config = self.config
        w_k = jnp.broadcast_to(self.w_k_shared.weight()[:, None], (self.width, config.groups, config.head_dim))
        if self.u_k is not None:
            w_k = w_k + product("dkr,krc->dkc", self.u_k.weight(), self.b_k.weight())
        w_q, w_k = apply_gain(self.w_q.weight(), self.gain_q), apply_gain(w_k, self.gain_k)
        return w_q, jnp.repeat(w_k, config.heads // config.groups, axis=1)

    def _has_residual(self) -> bool:
        return self.b_k is not None or self.bias_k is not None

    def _broadcast(self, shared: Float[Array, "B S 1 C"]) -> Float[Array, "B S K C"]:
        return jnp.broadcast_to(shared, (*shared.shape[:2], self.config.groups, shared.shape[-1]))

    def _residual(self, entry: dict[str, Array]) -> Float[Array, "B S K C"]:
        """code_h B_h of unrotated codes, with the key bias, without the gain."""
        if self.b_k is None:
            shape = (*entry["k_shared"].shape[:2], self.config.groups, self.config.head_dim)
            return add_bias(jnp.zeros(shape, self.dtype), self.bias_k)
        return add_bias(self.b_k(entry["k_code"]), self.bias_k)

    def _factor(self) -> Float[Array, "K R C"]:
        """B_h, with the key bias as its last row, times the key's gain."""
        rows = [] if self.b_k is None else [self.b_k.weight()]
        rows += [] if self.bias_k is None else [self.bias_k.get_value().astype(self.dtype)[:, None]]
        return apply_gain(jnp.concatenate(rows, axis=1), self.gain_k)

    def _code(self, entry: dict[str, Array]) -> Float[Array, "B S K R"]:
        """The cached codes, with the constant 1 that goes with the bias row."""
        ones = jnp.ones((*entry["k_shared"].shape[:2], self.config.groups, 1), self.dtype)
        if self.b_k is None:
            return ones
        return entry["k_code"] if self.bias_k is None else jnp.concatenate([entry["k_code"], ones], axis=-1)

    cache_axes: ClassVar = {
        "k_shared": ("head_dim",),
        "v_shared": ("head_dim",),
        "k_code": ("kv_heads", "rank"),
        "v_code": ("kv_heads", "rank"),
        "k_scale": ("kv_heads",),
    }

    @property
    def absorbed_queries(self) -> int:
        """M costs R·C operations per (query, head, token), as expanding does per (head, token), so mode full gains
        from expanding early; the other modes don't up to here (benchmarks/results/decode-cpu-absorb.json)."""
        return 4 if self.config.rope_mode == "full" else 64

    def tables(self, key_positions: Int[Array, "b S"], block: int) -> Float[Array, "n b C s"] | None:
        """In mode full cs_s = [cos θ_m s ; sin θ_m s] of every slot."""
        if self.config.rope_mode != "full" or not self._has_residual():
            return None
        angles = rope_angles(key_positions, self.config.head_dim, self.config.rotation)
        return to_blocks(jnp.concatenate(angles, axis=-1), block)

    def read(self, q: Float[Array, "B T H Q"], cache: Cache, tables: Array | None) -> tuple[Queries, Blocks]:
        """Splits the query by what it meets; in mode full forms M_h. The codes are read once and never expanded."""
        head_dim = self.config.head_dim
        q = group(q, self.config.groups)
        queries = Queries(shared=q[..., :head_dim])
        if self._has_residual():
            rows = q[..., head_dim:] if self.config.rope_mode != "full" else self._turned(q)
            axis = 3  # R, whose last row is the bias where there is one
            count = 0 if self.b_k is None else self.config.rank
            code, bias = jnp.split(rows, (count,), axis=axis)
            code, bias = code if count else None, bias.squeeze(axis) if self.bias_k is not None else None
            names = ("m", "m_bias") if self.config.rope_mode == "full" else ("code", "bias")
            queries = queries._replace(**dict(zip(names, (code, bias), strict=True)))
        tables = tables if self._has_residual() else None  # they may have been made for a layer that has one
        return queries, Blocks(**{name: cache.get(name) for name in self.cache_axes}, angles=tables)

    def _turned(self, q: Float[Array, "B K J C"]) -> Float[Array, "B K J R C"]:
        """M_h of every query row, in float32, a bias row included."""
        q_a, q_b = jnp.split(q.astype(jnp.float32)[..., None, :], 2, axis=-1)
        b_a, b_b = jnp.split(self._factor().astype(jnp.float32)[None, :, None], 2, axis=-1)
        return jnp.concatenate([q_a * b_a + q_b * b_b, q_b * b_a - q_a * b_b], axis=-1)

    def release(self, sums: Sums) -> Float[Array, "B K J C"]:
        """o_h = a_h V_shared + (a_h code_h) B_h, and the value bias, over which the weights sum to 1."""
        o = sums.shared
        if self.b_v is not None:
            o = o + product("bkjr,krc->bkjc", sums.code, self.b_v.weight())
        return o if self.bias_v is None else o + self.bias_v.get_value()[None, :, None]
