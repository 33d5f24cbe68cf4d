"""The contract every attention family fills, and what it gets for doing so."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from lrkv_jax import sharding
from lrkv_jax.attention import core, kernels
from lrkv_jax.attention.cache import Cache, restore, to_blocks
from lrkv_jax.attention.kernels.blocked import online_softmax, product
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums
from lrkv_jax.attention.rotation import RotaryConfig
from lrkv_jax.layers import Projection, constant
from lrkv_jax.settings import UserError


class AttentionConfig(RotaryConfig):
    """Knobs that every family has. A family's `Config` adds its own and `family: Literal["<name>"]`."""

    heads: int = 6
    """H, query heads."""
    head_dim: int = 32
    """C, dimensions of a head's query, key and value; even, for rotation in pairs."""
    qk_norm: bool = True
    """RMSNorm without gain on every head's query and key (the paper's recipe)."""
    qkv_bias: bool = False
    """A learned bias on queries, keys and values, as in Qwen2."""
    implementation: core.Implementation = "auto"
    """Training attention: `reference` forms all T² scores, `chunked` skips the future, `splash` is a kernel for TPU and
    `cudnn` one for GPU; `auto` takes the kernel that can run where the program runs, else `chunked`."""

    def model_post_init(self, _: Any) -> None:
        """Refuses what no family can build."""
        super().model_post_init(_)
        require(self.heads >= 1, f"heads = {self.heads}: must be at least 1")
        require(self.head_dim >= 2 and self.head_dim % 2 == 0, f"head_dim = {self.head_dim}: must be even and positive")

    @property
    def by_layer(self) -> bool:
        """Whether layers differ. They are stored in one shape all the same, of which each uses its part."""
        return False

    def of_layer(self, index: int) -> AttentionConfig:
        """What layer `index` is by itself."""
        return self

    def check_layers(self, count: int) -> None:
        """Raises ValueError unless this can be the attention of so many layers."""


class GroupedConfig(AttentionConfig):
    """Adds key/value heads (LRKV: residual heads) that groups of query heads share."""

    kv_heads: int | None = None
    """K, key/value heads, each read by H/K query heads; None = heads."""
    qk_norm_gain: Literal["before_rope"] | None = None
    """Learned gains [C] on normed queries and on normed keys, before they are rotated (Qwen3); None = no gains."""

    def model_post_init(self, context: Any) -> None:
        """Adds the check of groups."""
        super().model_post_init(context)
        require(self.groups >= 1, f"kv_heads = {self.kv_heads}: must be at least 1")
        require(self.heads % self.groups == 0, f"kv_heads = {self.kv_heads}: must divide heads = {self.heads}")
        gained = self.qk_norm_gain is not None
        require(self.qk_norm or not gained, f"qk_norm_gain = {self.qk_norm_gain}: needs qk_norm, which is off")

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
    overrides `read` and `release`, which put it into the one form that all kernels take (kernels/form.py).
    """

    scale: float
    w_o: Projection

    def __init__(self, config: AttentionConfig, *, width: int, eps: float, out_std: float, dtype: Any, rngs: nnx.Rngs):
        self.config, self.width, self.eps, self.dtype = config, width, eps, dtype
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

    def gain(self) -> nnx.Param | None:
        """A gain [C] on normed queries or keys, where the config asks for gains."""
        return constant(1.0, (self.config.head_dim,), ("head_dim",)) if self.config.qk_norm_gain else None

    def stacked(self) -> None:
        """Fits what was drawn alike for all layers, and stacked, to what each uses of it (`narrow`)."""

    def narrow(self, index: int) -> None:
        """Leaves of the stored shape what layer `index` uses; for families whose layers differ (`config.by_layer`)."""

    def query(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H Q"]:
        """Queries as `expand`'s keys meet them: rotated, normed, of the key width Q."""
        raise NotImplementedError

    def compress(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> dict[str, Array]:
        """What a decoder keeps of each token, leaves [B, T, ...]: a function of that token and its position alone."""
        raise NotImplementedError

    def expand(self, entry: dict[str, Array], positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """Keys [B, S, K, Q], rotated and normed, and values [B, S, K, C] of compressed entries."""
        raise NotImplementedError

    def head_maps(self) -> tuple[Float[Array, "D H Q"], Float[Array, "D H Q"]]:
        """W_Q,h and W_K,h of every query head: two tokens x and y at one position score (x W_Q,h) · (y W_K,h).

        QK-norm's gains are factors of the maps, what it divides by and biases are left out. For looking at a model:
        nothing that runs one needs them.
        """
        raise UserError(f"attention family {self.config.family!r} has no head_maps, so its heads can't be compared")

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """The training forward pass: out(core(query, *expand(compress)))."""
        q = sharding.constrain(self.query(x, positions), "batch", "length", "heads", None)
        entry = self.compress(x, positions)
        o = sharding.over_context(functools.partial(self._mix, nnx.graphdef(self)))(
            nnx.state(self), q, entry, positions, segment_ids
        )
        return self.out(sharding.constrain(o, "batch", "length", "heads", None))

    @staticmethod
    def _mix(
        graph: nnx.GraphDef,
        state: PyTree,
        q: Float[Array, "B T H Q"],
        entry: dict[str, Array],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T H C"]:
        """Attention of a device's queries to all keys; where the sequence is split, compressed entries travel."""
        module = nnx.merge(graph, state)
        entry, positions, key_segment_ids = sharding.gather_context((entry, positions, segment_ids))
        k, v = module.expand(entry, positions)
        return core.dot_product_attention(
            q,
            sharding.constrain(k, "batch", None, "kv_heads", None),
            sharding.constrain(v, "batch", None, "kv_heads", None),
            scale=module.scale,
            segment_ids=segment_ids,
            key_segment_ids=key_segment_ids,
            first=sharding.first_of_context(q.shape[1]),
            implementation=module.config.implementation,
        )

    def out(self, o: Float[Array, "B T H C"]) -> Float[Array, "B T D"]:
        """The output projection."""
        return self.w_o(o)

    def attend(
        self,
        q: Float[Array, "B T H Q"],
        cache: Cache,
        key_positions: Int[Array, "b S"],
        lengths: Int[Array, "B T"],
        tables: Any = None,
        *,
        implementation: kernels.Implementation = "blocked",
        interpret: bool = False,
    ) -> Float[Array, "B T H C"]:
        """Attention straight from a cache of S slots; query t of row b sees the first lengths[b, t] of them.

        What lies in later slots has no influence. One row of key positions (b = 1) holds for all. `tables` are
        `self.tables(key_positions, S of a block)`, for callers that read many times at the same positions.

        `reference` expands the whole cache. `blocked` reads a block at a time: compressed for few queries a row,
        expanded for many. The Pallas kernels (`kernels.attend`) read it compressed, and take one query a row.
        Raises ValueError where a family or a number of queries has no such implementation.
        """
        if implementation == "reference":
            o = self._attend_reference(q, cache, key_positions, lengths)
        elif implementation == "blocked" and q.shape[1] > self.absorbed_queries:
            o = self._attend_expanded(q, cache, key_positions, lengths)
        else:
            block = next(iter(cache.values())).shape[-1]
            tables = self.tables(key_positions, block) if tables is None else tables
            queries, blocks = self.read(q, cache, tables)
            sums = kernels.attend(
                queries, blocks, lengths, scale=self.scale, implementation=implementation, interpret=interpret
            )
            o = self.release(sums)
        return ungroup(o, q.shape[1]).astype(self.dtype)

    absorbed_queries = 0
    """Most queries a row for which `read` beats expanding; a family without `read` leaves it at 0."""
    cache_axes: ClassVar[dict[str, tuple[str | None, ...]]] = {}
    """Logical axes of the features of each leaf of an entry; a leaf that isn't named is replicated over heads."""

    def tables(self, key_positions: Int[Array, "b S"], block: int) -> Any:
        """What `read` needs of the key positions alone, in blocks: made once, for all layers and steps."""
        return None

    def read(self, q: Float[Array, "B T H Q"], cache: Cache, tables: Any) -> tuple[Queries, Blocks]:
        """The absorbed form: what the kernels read instead of keys and values."""
        raise ValueError(f"attention family {self.config.family!r} reads its cache expanded only: use blocked")

    def release(self, sums: Sums) -> Float[Array, "B K J C"]:
        """Turns the kernels' sums into head outputs."""
        raise NotImplementedError

    def entry_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the entry of one token, [1, 1, *f]."""
        x = jax.ShapeDtypeStruct((1, 1, self.width), self.dtype)
        positions = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        return nnx.eval_shape(lambda module, x, positions: module.compress(x, positions), self, x, positions)

    def _attend_expanded(self, q: Array, cache: Cache, key_positions: Array, lengths: Array) -> Array:
        """Keys and values of one block exist at a time."""
        shapes, block = self.entry_shapes(), next(iter(cache.values())).shape[-1]
        positions = to_blocks(key_positions, block)

        def expand(block: tuple[Cache, Array]) -> tuple[Array, Array]:
            cached, positions = block
            return self.expand(restore(cached, shapes), jnp.broadcast_to(positions, (q.shape[0], positions.shape[-1])))

        def score(block: tuple[Cache, Array]) -> Array:
            k, _ = expand(block)
            return product("bkjq,bskq->bkjs", group(q, k.shape[2]), k) * self.scale

        def weigh(weights: Array, block: tuple[Cache, Array]) -> Array:
            return product("bkjs,bskc->bkjc", weights, expand(block)[1])

        return online_softmax(score, weigh, (cache, positions), lengths)

    def _attend_reference(self, q: Array, cache: Cache, key_positions: Array, lengths: Array) -> Array:
        """All keys, all scores, one softmax."""
        entry = restore(cache, self.entry_shapes())
        size = next(iter(entry.values())).shape[1]
        k, v = self.expand(entry, jnp.broadcast_to(key_positions[:, :size], (q.shape[0], size)))
        queries = group(q, k.shape[2])
        scores = product("bkjq,bskq->bkjs", queries, k) * self.scale
        lengths = jnp.tile(lengths, (1, queries.shape[2] // lengths.shape[1]))
        seen = (jnp.arange(size)[None, None, :] < lengths[:, :, None])[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, core.NEGATIVE), axis=-1)
        return product("bkjs,bskc->bkjc", jnp.where(seen, weights, 0.0), v)


def group(q: Float[Array, "B T H Q"], kv_heads: int) -> Float[Array, "B K J Q"]:
    """The queries of each key/value head: row g·T + t is query t of the g-th head that reads it."""
    batch, length, heads, size = q.shape
    split = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, size)


def ungroup(o: Float[Array, "B K J C"], length: int) -> Float[Array, "B T H C"]:
    """The inverse."""
    batch, kv_heads, rows, size = o.shape
    split = o.reshape(batch, kv_heads, rows // length, length, size)
    return split.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, size)
