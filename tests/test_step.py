"""The training step: golden losses, accumulation, document masks, scanned and unrolled layers, meshes."""

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


def run(prog, mesh_config=None, steps=3):
    """Losses of some steps on a mesh (None: one device without a mesh), and the last parameters."""
    if mesh_config is None:
        state, step = prog.init_state(jax.random.key(0)), jax.jit(prog.train_step)
        return advance(state, step, steps, lambda tokens: tokens)
    mesh = sharding.make_mesh(mesh_config)
    with jax.set_mesh(mesh):
        abstract, step = compile_train_step(prog, mesh)
        state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))
        return advance(state, step, steps, lambda tokens: jax.device_put(tokens, sharding.batch_sharding(mesh)))


def advance(state, step, steps, place):
    """Losses and last parameters; each loss is fetched before the next step (fake devices deadlock otherwise)."""
    losses = []
    for seed in range(steps):
        state, metrics = step(state, place(batch(seed)))
        losses.append(float(metrics["loss"]))
    return losses, state["params"]


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
    losses, _ = run(program(family, models.MUON))
    np.testing.assert_allclose(losses, GOLDEN[family], rtol=2e-5)


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_give_the_big_batch_gradient(parts):
    """Bug: a mean of means, which differs where portions hold unequal counts of scored tokens."""
    tokens = batch(5).at[0].set(BEGIN)  # this row scores nothing
    whole, split = program(), program(train={"microbatches": parts})
    params = whole.init_state(jax.random.key(0))["params"]
    one, nats_one, count_one = jax.jit(whole.gradient)(params, tokens)
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
    plain, other = program(), program(**options)
    params = plain.init_state(jax.random.key(0))["params"]
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(params), nnx.to_pure_dict(other.init_state(jax.random.key(0))["params"])
    )
    expected, found = (jax.jit(prog.gradient)(params, batch()) for prog in (plain, other))
    chex.assert_trees_all_close(nnx.to_pure_dict(expected[0]), nnx.to_pure_dict(found[0]), atol=1e-6)
    np.testing.assert_allclose(expected[1], found[1], rtol=1e-6)


MESHES = {
    "8x1": {"data": 8},
    "2x4": {"data": 2, "tensor": 4},
    "4x2": {"fsdp": 4, "tensor": 2},
    "context": {"data": 2, "fsdp": 2, "context": 2},
}


@pytest.mark.parametrize(("family", "optimizer"), [("mqa", ADAMW), ("mla", MUON), ("lrkv", ADAMW), ("lrkv", MUON)])
def test_meshes_agree(family, optimizer, capfd):
    """Bugs: an init that depends on the mesh, a label on the wrong dimension, a gradient not summed over devices; Muon
    orthogonalising shards; an activation that is gathered whole on its way."""
    prog = program(family, optimizer)
    losses, params = run(prog, steps=5)
    fresh = nnx.to_pure_dict(jax.jit(prog.init_state)(jax.random.key(0))["params"])
    for mesh_config in MESHES.values():
        config = MeshConfig(**{"data": 1, **mesh_config})
        mesh = sharding.make_mesh(config)
        with jax.set_mesh(mesh):
            abstract = prog.abstract_state(mesh)["params"]
            init = jax.jit(lambda key: prog.init_state(key)["params"], out_shardings=sharding.shardings(abstract))
            chex.assert_trees_all_equal(fresh, jax.device_get(nnx.to_pure_dict(init(jax.random.key(0)))))
        found, moved = run(prog, config, steps=5)
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for a, b, start in zip(*(jax.tree.leaves(tree) for tree in (params, moved, fresh)), strict=True):
            a, b, start = (np.asarray(x) for x in (a, b, start))
            assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a - start)
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


def test_step_compiles_once_and_donates(monkeypatch):
    """Bugs: a retrace at every step; the old state kept beside the new one."""
    chex.clear_trace_counter()
    monkeypatch.setattr(Program, "train_step", chex.assert_max_traces(Program.train_step, n=1))
    prog = program()
    mesh = sharding.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        abstract, step = compile_train_step(prog, mesh)
        state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))
        old = jax.tree.leaves(state)
        advance(state, step, 3, lambda tokens: jax.device_put(tokens, sharding.batch_sharding(mesh)))
    assert all(leaf.is_deleted() for leaf in old if leaf.ndim)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_learns(family):
    """Bug: a parameter cut off from the loss, or one that the optimizer leaves out."""
    prog = program(family)
    before = prog.init_state(jax.random.key(0))["params"]
    _, after = run(prog)
    for (path, a), (_, b) in zip(nnx.to_flat_state(before), nnx.to_flat_state(after), strict=True):
        assert np.abs(np.asarray(a.get_value()) - np.asarray(b.get_value())).max() > 0, path


@pytest.mark.parametrize("model", [{}, {"norm_gain": True, "mlp": "swiglu", "tie_embeddings": True}])
def test_strict_promotion_in_forward_and_loss(model):
    """Bug: a silent widening of dtypes or ranks."""
    prog = program(dtype="bfloat16", tokens=Tokens(BEGIN, models.END, True), **model)
    params = prog.init_state(jax.random.key(0))["params"]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(prog.sums, params, batch())
