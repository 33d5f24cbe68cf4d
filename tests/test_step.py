"""The training step: golden losses, accumulation, document masks, scanned and unrolled layers, meshes."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import models
import numpy as np
import pytest
from flax import nnx
from models import ADAMW, BEGIN, FAMILIES, MUON, B, T, batch, program

from lrkv_jax import sharding
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import Program, Tokens, compile_train_step


class Run(NamedTuple):
    """What came of some steps: losses, and the state's arrays before and after them, on the host."""

    losses: list[float]
    fresh: dict[str, Any]
    after: dict[str, Any]


def run(prog, mesh):
    """Five steps on a mesh; each loss is fetched before the next step, since fake devices deadlock otherwise."""
    with jax.set_mesh(mesh):
        abstract, step = compile_train_step(prog, mesh)
        state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))
        fresh, old, losses = host(state), jax.tree.leaves(state), []
        for seed in range(5):
            state, metrics = step(state, jax.device_put(batch(seed), sharding.batch_sharding(mesh)))
            losses.append(float(metrics["loss"]))
    assert all(leaf.is_deleted() for leaf in old if leaf.ndim), "not donated"
    return Run(losses, fresh, host(state))


def host(state):
    """A copy that later steps leave as it is."""
    return jax.tree.map(np.array, state)


@functools.cache
def alone(family, optimizer, **model):
    """The run that others are compared with: on one device."""
    return run(program(family, optimizer, **model), sharding.make_mesh(MeshConfig(), jax.devices()[:1]))


# Recorded on 2026-11-30 on a CPU, the same with jax 0.12.0.1 and 0.10.2; they change with the model's mathematics, init
# or optimizer.
GOLDEN = {
    "lrkv": [3.172849, 3.166504, 3.180552],
    "mha": [3.180965, 3.176663, 3.185458],
    "mla": [3.173432, 3.182278, 3.190149],
}


@pytest.mark.parametrize("family", GOLDEN)
def test_golden_losses(family):
    """Bug: anything that changes the numbers of a run without meaning to."""
    np.testing.assert_allclose(alone(family, MUON).losses[:3], GOLDEN[family], rtol=2e-5)


@functools.cache
def plain():
    """Parameters of the default program, and its compiled gradient."""
    prog = program()
    return prog.init_state(jax.random.key(0))["params"], jax.jit(prog.gradient)


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_give_the_big_batch_gradient(parts):
    """Bug: a mean of means, which differs where portions hold unequal counts of scored tokens."""
    tokens = batch(5).at[0].set(BEGIN)  # this row scores nothing
    split = program(train={"microbatches": parts})
    params, gradient = plain()
    one, nats_one, count_one = gradient(params, tokens)
    many, nats_many, count_many = jax.jit(split.gradient)(params, tokens)
    assert count_one == count_many < B * T
    np.testing.assert_allclose(nats_one, nats_many, rtol=1e-6)
    chex.assert_trees_all_close(nnx.to_pure_dict(one), nnx.to_pure_dict(many), atol=1e-6)


def test_begin_is_not_foretold_unless_it_is_the_end():
    """Bug: the label `begin` after `end` is scored, or the only separator of a one-token scheme is not."""
    tokens = batch(5)
    params = program().init_state(jax.random.key(0))["params"]
    begins = int((tokens[:, 1:] == BEGIN).sum())
    assert begins > 0
    for end, expected in ((models.END, B * T - begins), (BEGIN, B * T)):
        _, (_, count) = program(tokens=Tokens(BEGIN, end, False)).sums(params, tokens)
        assert count == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_document_mask_scores_documents_as_if_alone(family):
    """Bug: attention across a begin token, or positions that don't restart there."""
    prog = program(family, tokens=Tokens(BEGIN, models.END, True))
    params = prog.init_state(jax.random.key(0))["params"]
    model = models.merge(prog, params)
    tokens = batch(5)[:, :-1]
    places, segments = prog.places(tokens)
    logits = model(tokens, places, segments)
    for row in range(1, 3):
        start = int(np.flatnonzero(np.asarray(tokens[row]) == BEGIN)[-1])
        alone = tokens[row : row + 1, start:]
        np.testing.assert_allclose(logits[row, start:], model(alone, models.positions(alone))[0], atol=2e-5)


@pytest.mark.parametrize(
    "options", [{"scan_layers": False}, {"remat": "full"}, {"remat": "dots", "scan_layers": False}]
)
def test_how_layers_run_changes_nothing(options):
    """Bug: a scan that feeds layers another's weights; a remat that recomputes something else."""
    other, (params, gradient) = program(**options), plain()
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(params), nnx.to_pure_dict(other.init_state(jax.random.key(0))["params"])
    )
    expected, found = gradient(params, batch()), jax.jit(other.gradient)(params, batch())
    chex.assert_trees_all_close(nnx.to_pure_dict(expected[0]), nnx.to_pure_dict(found[0]), atol=1e-6)
    np.testing.assert_allclose(expected[1], found[1], rtol=1e-6)


MESHES = {
    "8x1": {"data": 8},
    "2x4": {"data": 2, "tensor": 4},
    "4x2": {"fsdp": 4, "tensor": 2},
    "context": {"data": 2, "fsdp": 2, "context": 2},
}


@pytest.mark.parametrize(
    ("family", "optimizer", "scan", "meshes"),
    [
        ("lrkv", ADAMW, False, tuple(MESHES)),
        ("lrkv", MUON, True, tuple(MESHES)),
        ("mqa", ADAMW, True, ("2x4", "4x2")),  # its one head is on all devices
        ("mla", MUON, False, ("4x2",)),
    ],
)
def test_meshes_agree(family, optimizer, scan, meshes, capfd, monkeypatch):
    """Bugs: an init that depends on the mesh, a label on the wrong dimension, a gradient not summed over devices; Muon
    orthogonalising shards; an activation that is gathered whole on its way; a retrace at every step."""
    whole = alone(family, optimizer, scan_layers=scan)
    chex.clear_trace_counter()
    monkeypatch.setattr(Program, "train_step", chex.assert_max_traces(Program.train_step, n=len(meshes)))
    for name in meshes:
        mesh = sharding.make_mesh(MeshConfig(**{"data": 1, **MESHES[name]}))
        part = run(program(family, optimizer, scan_layers=scan), mesh)
        chex.assert_trees_all_equal(part.fresh["params"], whole.fresh["params"])
        np.testing.assert_allclose(part.losses, whole.losses, rtol=1e-5)
        for a, b, start in zip(*map(parameters, (whole.after, part.after, whole.fresh)), strict=True):
            assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a - start)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


def parameters(state):
    return jax.tree.leaves(state["params"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_learns(family):
    """Bug: a parameter cut off from the loss, whose moments stay zero, or one that the optimizer leaves out."""
    moved = alone(family, MUON if family in GOLDEN else ADAMW)
    for (path, a), b in zip(nnx.to_flat_state(moved.fresh["params"]), parameters(moved.after), strict=True):
        assert np.abs(a.get_value() - b).max() > 0, path
    moments = [
        leaf for leaf in jax.tree.leaves(moved.after["opt"], is_leaf=sharding.is_param) if sharding.is_param(leaf)
    ]
    assert len(moments) >= len(parameters(moved.after))
    assert all(np.abs(moment.get_value()).max() > 0 for moment in moments)


@pytest.mark.parametrize("model", [{}, {"norm_gain": True, "mlp": "swiglu", "tie_embeddings": True}])
def test_strict_promotion_in_forward_and_loss(model):
    """Bug: a silent widening of dtypes or ranks."""
    prog = program(dtype="bfloat16", tokens=Tokens(BEGIN, models.END, True), **model)
    params = prog.init_state(jax.random.key(0))["params"]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        objective, (nats, count) = jax.eval_shape(prog.sums, params, batch())
    assert [(each.shape, each.dtype) for each in (objective, nats, count)] == [((), "float32")] * 3
