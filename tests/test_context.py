"""A sequence split over devices: the same training, and nothing but compressed entries on the way."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import ADAMW, FAMILIES, B, T, batch, program

from lrkv_jax import attention, compiled, sharding
from lrkv_jax.step import compile_train_step

CONTEXT, LAYERS = 4, 2


def mesh_of(context):
    """A mesh that splits the sequence and nothing else."""
    return sharding.make_mesh(sharding.MeshConfig(data=1, context=context), jax.devices()[:context])


@functools.cache
def trained(family, context):
    """Losses of three steps, the parameters after them, and the step's collectives."""
    prog, mesh = program(family, ADAMW, layers=LAYERS), mesh_of(context)
    with jax.set_mesh(mesh):
        abstract, step = compile_train_step(prog, mesh)
        state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))
        placed = sharding.batch_sharding(mesh)
        step = step.lower(state, jax.device_put(batch(), placed)).compile()
        losses = []
        for seed in range(3):
            state, metrics = step(state, jax.device_put(batch(seed), placed))
            losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, jax.tree.leaves(state["params"])), compiled.costs(step).collectives


@pytest.mark.parametrize("family", ["mha", "gqa", "mla", "lrkv"])
def test_training_is_the_same(family):
    """Fails if a query sees other keys, positions are counted from each part's start, or a gradient is lost. (Beside
    other axes, and with two parts, in test_step.py.)"""
    losses, params, _ = trained(family, CONTEXT)
    whole_losses, whole_params, _ = trained(family, 1)
    np.testing.assert_allclose(losses, whole_losses, rtol=0, atol=1e-5)
    for ours, theirs in zip(params, whole_params, strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs) + 1e-6


def entry_bytes(family):
    """Bytes of what the layers must send of a batch: its entries, but for key scales, which are formed again."""
    build = functools.partial(attention.build, FAMILIES[family], width=16, eps=1e-6, dtype=jnp.float32)
    shapes = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))).entry_shapes()
    return sum(LAYERS * 4 * B * T * leaf.size for name, leaf in shapes.items() if name != "k_scale")


@pytest.mark.parametrize("family", ["mha", "gqa", "mla", "lrkv"])
def test_entries_travel(family):
    """Fails if keys or values are expanded before they are sent, or their gradients travel expanded."""
    found = [c for c in trained(family, CONTEXT)[2] if "shard_map" in c.source and "f32" in "".join(c.operands)]
    forward = [c for c in found if c.kind == "all-gather"]
    backward = [c for c in found if c.kind == "reduce-scatter"]
    assert sum(c.times * c.payload for c in forward) == entry_bytes(family)
    assert sum(c.times * c.payload for c in backward) == entry_bytes(family)


@pytest.mark.parametrize("family", ["gqa", "mla", "lrkv"])
def test_no_expanded_key_travels(family):
    """Fails if any collective of a step carries an array as large as all heads' keys."""
    heads = FAMILIES[family]
    expanded = 4 * B * T * heads.heads * heads.head_dim
    sizes = [
        4 * math.prod(int(size) for size in operand.split("[")[1].rstrip("]").split(",") if size)
        for c in trained(family, CONTEXT)[2]
        for operand in c.operands
    ]
    assert max(sizes) < expanded


def test_each_device_scores_its_own_positions():
    """Bug: the loss's chunks are cut across the devices' parts of the sequence, and every device scores them all."""

    def flops(context):
        prog, mesh = program("mha", layers=1, vocab=2048, train={"loss_chunks": 2}), mesh_of(context)
        abstract, step = compile_train_step(prog, mesh)
        tokens = jax.ShapeDtypeStruct((B, T + 1), jnp.int32, sharding=sharding.batch_sharding(mesh))
        with jax.set_mesh(mesh):
            return compiled.costs(step.lower(abstract, tokens).compile()).flops

    # The unembedding is 9 tenths of the work here; attention's part does not fall as far, since it sees all keys.
    assert flops(1) / flops(CONTEXT) > 0.9 * CONTEXT
