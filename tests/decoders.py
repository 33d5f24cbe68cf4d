"""Small decoders of every family for tests, with weights so large that no part of the model is too faint to test."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from cases import GAIN, SCALING
from flax import nnx
from models import ADAMW, BEGIN, END, FAMILIES, V, positions

from lrkv_jax.attention import families
from lrkv_jax.attention.base import AttentionBase
from lrkv_jax.decode import Decoder
from lrkv_jax.sharding import MeshConfig, make_mesh
from lrkv_jax.step import Tokens, TrainConfig, make_program
from lrkv_jax.transformer import ModelConfig

# (slots, block) that an implementation takes, small.
LAYOUTS = {"reference": (20, 4), "blocked": (20, 4), "pallas_tpu": (128, 128), "pallas_gpu": (128, 128)}
# More than heads (4), latent dimensions (6) or ranks: where rows are taken for something else, it shows.
ROWS = 9
# What no other model here has: biases, gains, scaled frequencies, and fewer residual heads than query heads.
CONFIGS = FAMILIES | {
    "lrkv_grouped": FAMILIES["lrkv"].model_copy(update={"kv_heads": 2, **GAIN, **SCALING}),
    # Layers of different ranks, one of them of none.
    "lrkv_ranks": FAMILIES["lrkv"].model_copy(update={"rank": 3, "ranks": (3, 0, 1), "qkv_bias": True}),
    "lrkv_ranks_latent": FAMILIES["lrkv_latent"].model_copy(update={"ranks": (2, 4)}),
    "mla_biased": FAMILIES["mla"].model_copy(update={"qkv_bias": True}),
}


def absorbs(name):
    """Whether a family can read its cache as it lies, which the kernels need."""
    return families()[CONFIGS[name].family].Attention.read is not AttentionBase.read


ABSORBING = [name for name in FAMILIES if absorbs(name)]


def mesh(**sizes):
    """A mesh of the first of the eight devices: one, or as many as the sizes of axes multiply to."""
    return make_mesh(MeshConfig(**{"data": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])


@functools.cache
def program(family, qk_norm=True, layers=1, dtype="float32", end=END):
    """A small rotary base, so that every pair turns within a few positions."""
    model = ModelConfig(layers=layers, width=16, vocab=V, scan_layers=True, dtype=dtype)
    attention = CONFIGS[family].model_copy(update={"qk_norm": qk_norm, "rope_base": 50.0})
    return make_program(model, attention, TrainConfig(), ADAMW, Tokens(BEGIN, end, False))


@functools.cache
def params(family, qk_norm=True, layers=1):
    """All weights with a standard deviation of 0.35: at the usual start, residuals would be a hundredth of a key."""
    leaves, tree = jax.tree.flatten(program(family, qk_norm, layers).abstract_params())
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0, 0.35, leaf.shape), leaf.dtype) for leaf in leaves])


def decoder(
    family, qk_norm=True, layers=1, *, implementation="blocked", on=None, dtype="float32", end=END, weights=True, **how
):
    """A decoder of one row, and of the implementation's small layout, unless `how` says otherwise.

    Without weights it can't decode, but be asked for shapes and places, and is several times as fast to make."""
    slots, block = LAYOUTS.get(implementation, (20, 4))
    how = {"batch": 1, "slots": slots, "block": block, "interpret": str(implementation).startswith("pallas"), **how}
    on = mesh() if on is None else on
    made = program(family, qk_norm, layers, dtype, end)
    given = params(family, qk_norm, layers) if weights else None
    return Decoder(made, given, on, implementation=implementation, **how)


@functools.cache
def forward(family, qk_norm=True, layers=1, dtype="float32", rows=ROWS, length=11):
    """(tokens, logits) of the model itself, [rows, length] and [rows, length, V]."""
    tokens = np.random.default_rng([rows, length]).integers(3, V, (rows, length)).astype(np.int32)
    made = program(family, qk_norm, layers, dtype)
    run = jax.jit(lambda params, tokens: nnx.merge(made.graph, params)(tokens, positions(tokens)))
    return tokens, np.asarray(run(params(family, qk_norm, layers), tokens))


def forced(decoder, prompts, following, chunk=None):
    """Logits [B, 1 + n, V] after the prompts, and after each of the following tokens [B, n]."""
    state = decoder.start([list(map(int, prompt)) for prompt in prompts], chunk).state
    return np.concatenate([state["logits"][:, None], stepped(decoder, state, following)], axis=1)


def stepped(decoder, state, following):
    """Logits [B, n, V] after each of the following tokens [B, n]; None as the state is that of an empty cache."""
    if state is None:
        state = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), decoder.abstract_state())
    found = []
    for tokens in np.asarray(following).T:
        with jax.set_mesh(decoder.mesh):
            state = stepper(decoder)(decoder.weights, state, tokens)
        found.append(np.asarray(state["logits"]))
    return np.stack(found, axis=1)


@functools.lru_cache(maxsize=1)
def stepper(decoder):
    """Its step, compiled."""
    placed = jax.tree.map(lambda leaf: leaf.sharding, decoder.abstract_state())
    return jax.jit(decoder.step, donate_argnums=1, out_shardings=placed)


def drawn(session, steps, sampling, seeds, **how):
    """All new tokens, [B, n]."""
    return np.concatenate(list(session.generate(steps, sampling, seeds, **how)), axis=1)
