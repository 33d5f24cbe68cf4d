"""The decoder-only Transformer around any attention family; it never names one.

Defaults are the paper's recipe as far as it is told (lrkv.md section 5; it matches the public nanochat recipe of late
2025): gain-free RMSNorm, a norm after the embedding, relu² MLP of 4·D, untied embeddings, logits soft-capped at 15.
Layers are stored stacked, [N, ...] a parameter, whether they run scanned or unrolled: checkpoints are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from lrkv_jax import attention, lora, sharding
from lrkv_jax.layers import MLP, RMSNorm, parameter, rms_norm
from lrkv_jax.settings import Settings

REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class ModelConfig(Settings):
    """The model around the attention."""

    layers: int = 4
    """N, number of blocks."""
    width: int = 192
    """D, dimensions of the residual stream."""
    mlp_width: int | None = None
    """F, hidden dimensions of the MLP; None = 4·D."""
    vocab: int = 4096
    """V, rows of the embedding; a tokenizer may have fewer tokens (padding rows), never more."""
    mlp: Literal["relu2", "swiglu"] = "relu2"
    """Kind of MLP: relu² (the paper's recipe) or SwiGLU (Llama, Qwen)."""
    norm_gain: bool = False
    """Learned gains in the block and final norms (Llama, Qwen)."""
    norm_eps: float = 1e-6
    """Epsilon inside the root of every RMSNorm, QK-norm included."""
    embed_norm: bool = True
    """RMSNorm after the embedding."""
    tie_embeddings: bool = False
    """Whether the unembedding is the embedding's transpose."""
    logit_softcap: float | None = 15.0
    """Logits are cap·tanh(logits / cap); None = no cap."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters and optimizer state are float32."""
    scan_layers: bool = False
    """Run the layers as a scan (compiles once a layer) or unrolled (faster on a CPU)."""
    remat: Literal["none", "dots", "full"] = "none"
    """What is recomputed in the backward pass: nothing, all but weight products, or all of a layer."""
    lora_rank: int = 0
    """Rank of the adapters (lora.py), which then are all that trains; 0 = none."""
    lora_alpha: float = 16.0
    """An adapter's output is multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("*",)
    """Glob patterns of the projections that get one, by their name in a block: `attention.w_q`, `mlp.*`."""

    def model_post_init(self, _: Any) -> None:
        """Refuses sizes that make no model."""
        for name in ("layers", "width", "vocab"):
            attention.base.require(getattr(self, name) >= 1, f"{name} = {getattr(self, name)}: must be at least 1")
        attention.base.require(self.hidden >= 1, f"mlp_width = {self.mlp_width}: must be at least 1")
        attention.base.require(self.norm_eps > 0, f"norm_eps = {self.norm_eps}: must be positive")
        cap = self.logit_softcap
        attention.base.require(cap is None or cap > 0, f"logit_softcap = {cap}: must be positive, or None for no cap")
        attention.base.require(self.lora_rank >= 0, f"lora_rank = {self.lora_rank}: must be 0 or more")
        attention.base.require(self.lora_alpha > 0, f"lora_alpha = {self.lora_alpha}: must be positive")

    @property
    def hidden(self) -> int:
        """F with its default filled in."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, family: attention.base.AttentionConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(model.dtype)
        out_std = 1 / math.sqrt(2 * model.layers)  # so that the residual stream's variance doesn't grow with depth
        self.attention_norm = RMSNorm(model.width, model.norm_eps, model.norm_gain)
        self.attention = attention.build(
            family, width=model.width, eps=model.norm_eps, out_std=out_std, dtype=dtype, rngs=rngs
        )
        self.mlp_norm = RMSNorm(model.width, model.norm_eps, model.norm_gain)
        self.mlp = MLP(model.width, model.hidden, model.mlp, out_std, rngs=rngs, dtype=dtype)
        if model.lora_rank:  # last, so that the base is drawn as it would be alone
            lora.attach(self, model.lora_rank, model.lora_alpha, model.lora_targets, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """One layer on the residual stream."""
        return self.feed_forward(x + self.attention(self.attention_norm(x), positions, segment_ids))

    def feed_forward(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The layer's second half."""
        x = x + self.mlp(self.mlp_norm(x))
        return sharding.constrain(x, "batch", "length", "width")


class Transformer(nnx.Module):
    """Embedding, N blocks, final norm, unembedding."""

    def __init__(self, model: ModelConfig, family: attention.base.AttentionConfig, rngs: nnx.Rngs):
        self.config = model
        vocab, width = model.vocab, model.width
        # Tied, the embedding is also the unembedding, whose logits should start small.
        std = 0.02 if model.tie_embeddings else 1.0
        self.embed = parameter((vocab, width), ("vocab", "embed"), std, "embed", rngs)
        self.blocks = stack(lambda keys: Block(model, family, keys), model.layers, rngs)
        self.blocks.attention.stacked()
        self.final_norm = RMSNorm(width, model.norm_eps, model.norm_gain)
        self.unembed = (
            None
            if model.tie_embeddings
            else parameter((width, vocab), ("embed", "vocab"), 0.1 / math.sqrt(width), "unembed", rngs)
        )

    def hidden(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """The final, normed residual stream."""
        x = self.embedding(tokens)
        policy = REMAT[self.config.remat]

        def layer(graph: nnx.GraphDef) -> Callable[[Array, PyTree], tuple[Array, None]]:
            run = lambda x, state: (nnx.merge(graph, state)(x, positions, segment_ids), None)  # noqa: E731
            return run if policy is None else jax.checkpoint(run, policy=policy)

        if self.blocks.attention.config.by_layer:  # no two have the same shapes
            for graph, state in map(nnx.split, self.layers()):
                x, _ = layer(graph)(x, state)
        else:
            graph, layers = nnx.split(self.blocks)
            x, _ = jax.lax.scan(layer(graph), x, layers, unroll=1 if self.config.scan_layers else self.config.layers)
        return self.final_norm(x)

    def split(self) -> tuple[Transformer, list[Block]]:
        """The model without its blocks, and the blocks one by one: for decoding, which walks them."""
        outer = nnx.clone(self)
        outer.blocks = None
        return outer, self.layers()

    def layers(self) -> list[Block]:
        """The blocks one by one, each with as much of the stacked parameters as it uses."""
        graph, stacked = nnx.split(self.blocks)
        count = self.config.layers
        # As one split: the gradient of many slices would be a sum of as many arrays of the stack's size.
        parts = jax.tree.map(lambda leaf: [part[0] for part in jax.lax.split(leaf, [1] * count)], stacked)
        blocks = []
        for index in range(count):
            block = nnx.merge(graph, jax.tree.map(lambda _, part, i=index: part[i], stacked, parts))
            block.attention.narrow(index)
            blocks.append(block)
        return blocks

    def embedding(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The residual stream before the first layer."""
        # Whole rows: looked up in a table split along the width, the batch would have to change places with it.
        table = sharding.constrain(self.embed.get_value().astype(jnp.dtype(self.config.dtype)), "vocab", "width")
        x = table[tokens]
        x = sharding.constrain(x, "batch", "length", "width")
        return rms_norm(x, self.config.norm_eps) if self.config.embed_norm else x

    def unembedding(self) -> Float[Array, "D V"]:
        """The unembedding matrix in float32, tied or not."""
        return self.embed.get_value().T if self.unembed is None else self.unembed.get_value()

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits in float32, soft-capped."""
        return self.logits(self.hidden(tokens, positions, segment_ids))

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Of the final residual stream, in float32, soft-capped."""
        unembedding = self.unembedding().astype(hidden.dtype)
        logits = jnp.einsum("btd,dv->btv", hidden, unembedding).astype(jnp.float32)
        return softcap(logits, self.config.logit_softcap)


def softcap(logits: Float[Array, "*s V"], cap: float | None) -> Float[Array, "*s V"]:
    """cap·tanh(logits / cap), or the logits as they are (Gemma 2, arXiv 2408.00118)."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, each parameter stacked along a leading axis `layers`, its labels moved along by one."""

    def state_of(key: Array) -> PyTree:
        return nnx.state(make(nnx.Rngs(params=key)))

    def relabel(param: nnx.Param) -> nnx.Param:
        labels = {
            name: tuple(i + 1 for i in getattr(param, name))
            for name in ("reduce", "output")
            if name in param.get_metadata()
        }
        for name, value in {"axes": ("layers", *param.axes), **labels}.items():
            param.set_metadata(name, value)
        return param

    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    stacked = jax.vmap(state_of)(jax.random.split(rngs.params(), count))
    return nnx.merge(graph, jax.tree.map(relabel, stacked, is_leaf=sharding.is_param))
