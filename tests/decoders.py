"""Small decoders of every family for tests, with weights so large that no part of the model is too faint to test."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from models import ADAMW, BEGIN, END, FAMILIES, V, positions

from lrkv_jax.decode import Decoder
from lrkv_jax.sharding import MeshConfig, make_mesh
from lrkv_jax.step import Tokens, TrainConfig, make_program
from lrkv_jax.transformer import ModelConfig

# (slots, block) that an implementation takes, small.
LAYOUTS = {"reference": (20, 4), "blocked": (20, 4), "pallas_tpu": (128, 128), "pallas_gpu": (32, 16)}


def mesh(**sizes):
    """A mesh of the first of the eight devices: one, or as many as the sizes of axes multiply to."""
    return make_mesh(MeshConfig(**{"data": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])


@functools.cache
def program(family, qk_norm=True, layers=2, dtype="float32", end=END):
    """A small rotary base, so that every pair turns within a few positions."""
    model = ModelConfig(layers=layers, width=16, vocab=V, scan_layers=True, dtype=dtype)
    attention = FAMILIES[family].model_copy(update={"qk_norm": qk_norm, "rope_base": 50.0})
    return make_program(model, attention, TrainConfig(), ADAMW, Tokens(BEGIN, end, False))


@functools.cache
def params(family, qk_norm=True, layers=2):
    """All weights with a standard deviation of 0.35: at the usual start, residuals would be a hundredth of a key."""
    leaves, tree = jax.tree.flatten(program(family, qk_norm, layers).abstract_params())
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0, 0.35, leaf.shape), leaf.dtype) for leaf in leaves])


def decoder(family, qk_norm=True, layers=2, *, implementation="blocked", on=None, dtype="float32", end=END, **how):
    """A decoder of one row, and of the implementation's small layout, unless `how` says otherwise."""
    slots, block = LAYOUTS[implementation]
    how = {"batch": 1, "slots": slots, "block": block, "interpret": implementation.startswith("pallas"), **how}
    on = mesh() if on is None else on
    made = program(family, qk_norm, layers, dtype, end)
    return Decoder(made, params(family, qk_norm, layers), on, implementation=implementation, **how)


@functools.cache
def forward(family, qk_norm=True, layers=2, dtype="float32", rows=2, length=11):
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
    state = decoder._empty_state(jnp.zeros(decoder.batch, jnp.int32)) if state is None else state
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
