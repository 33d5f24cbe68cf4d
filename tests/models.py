"""A small run for tests of the step: two layers of any family, and batches with documents in them."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lrkv_jax.attention import families, gqa, lrkv, mla
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.step import Tokens, TrainConfig, make_program
from lrkv_jax.transformer import ModelConfig

B, T, V = 8, 16, 24
BEGIN, END = 1, 2
HEADS = {"heads": 4, "head_dim": 8}
FAMILIES = {
    "mha": gqa.Config(**HEADS),
    "gqa": gqa.Config(**HEADS, kv_heads=2),
    "mqa": gqa.Config(**HEADS, kv_heads=1),
    "mla": mla.Config(**HEADS, latent=6),
    "lrkv": lrkv.Config(**HEADS, rank=3),
    "lrkv_shared": lrkv.Config(**HEADS, rank=3, rope_mode="shared"),
    "lrkv_latent": lrkv.Config(**HEADS, rank=4, rope_mode="latent"),
}
# A family that lands in the package joins with its defaults.
FAMILIES |= {name: module.Config() for name, module in families().items() if name not in {"gqa", "mla", "lrkv"}}
ADAMW = OptimizerConfig(name="adamw", peak_lr=3e-3, warmup_steps=1)
MUON = OptimizerConfig(name="muon", peak_lr=0.02, embed_lr=0.01, unembed_lr=0.004, warmup_steps=1)


def program(family="lrkv", optimizer=ADAMW, *, train=None, tokens=None, **model):
    """The program of a small run; `family` is a name or a config, `model` and `train` override fields."""
    train = {"steps": 10, "batch_size": B, "loss_chunks": 2, **(train or {})}
    config = ModelConfig(**{"layers": 2, "width": 16, "vocab": V, "scan_layers": True, **model})
    tokens = tokens or Tokens(BEGIN, END, False)
    family = FAMILIES[family] if isinstance(family, str) else family
    return make_program(config, family, TrainConfig(**train), optimizer, tokens)


@functools.cache
def batch(seed=0, rows=B):
    """Token rows [rows, T + 1] with documents of random lengths; the first row is one unbroken document."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, V, (rows, T + 1)).astype(np.int32)
    for row in range(1, rows):
        start = int(rng.integers(1, T - 1))
        tokens[row, start : start + 2] = END, BEGIN
    return jnp.asarray(tokens)


def merge(prog, params):
    """The model of a program's parameters."""
    return nnx.merge(prog.graph, params)


def positions(tokens):
    """0..T−1 for each row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
