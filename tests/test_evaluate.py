"""Evaluation: sums over every token, one division, whatever the batch size or the number of devices."""

import math

import jax
import models
import numpy as np
import pytest
from models import program

from lrkv_jax import sharding
from lrkv_jax.data import Windows
from lrkv_jax.evaluate import Score, evaluate, make_eval_step
from lrkv_jax.sharding import MeshConfig

# Thirteen documents: empty, short of a window, just full, and long.
LENGTHS = (0, 1, 3, 15, 16, 17, 31, 32, 40, 5, 2, 63, 8)


def windows():
    rng = np.random.default_rng(3)
    documents = [rng.integers(3, models.V, n) for n in LENGTHS]
    sizes = np.array([3 * n + 1 for n in LENGTHS])
    return Windows(documents.__getitem__, np.array(LENGTHS), sizes, models.T, models.BEGIN, models.END)


def score(batch_size, mesh_config):
    prog = program()
    mesh = sharding.make_mesh(mesh_config)
    with jax.set_mesh(mesh):
        placed = sharding.shardings(prog.abstract_state(mesh)["params"])
        params = jax.jit(lambda key: prog.init_state(key)["params"], out_shardings=placed)(jax.random.key(0))
        return evaluate(make_eval_step(prog, mesh), params, windows(), batch_size, mesh)


@pytest.fixture(scope="module")
def by_hand():
    """Nats of each document, its windows scored one at a time through the model's logits."""
    prog = program()
    model = models.merge(prog, prog.init_state(jax.random.key(0))["params"])
    forward = jax.jit(lambda inputs: jax.nn.log_softmax(model(inputs, models.positions(inputs))[0]))
    nats = []
    for sequence in windows().sequences():
        total = 0.0
        for start in range(0, len(sequence) - 1, models.T):
            part = sequence[start : start + models.T + 1]
            inputs = np.zeros((1, models.T), np.int32)  # what is beyond the part can't be seen from inside
            inputs[0, : len(part) - 1] = part[:-1]
            log_p = forward(inputs)
            total -= float(log_p[np.arange(len(part) - 1), part[1:]].sum())
        nats.append(total)
    return np.array(nats)


@pytest.mark.parametrize(
    ("batch_size", "mesh"), [(16, {"data": 8}), (8, {"data": 1, "fsdp": 4, "tensor": 2})], ids=["8x1", "4x2"]
)
def test_every_token_counts_once(batch_size, mesh, by_hand):
    """Bugs: a ragged last batch, padding that weighs, a window's first token lost, a mean of means."""
    found = score(batch_size, MeshConfig(**mesh))
    np.testing.assert_array_equal(found.tokens, np.array(LENGTHS) + 1)
    np.testing.assert_array_equal(found.bytes, 3 * np.array(LENGTHS) + 1)
    np.testing.assert_allclose(found.nats, by_hand, rtol=1e-5)


def test_summary_by_hand():
    """Bugs: bits per byte by tokens, a standard error over tokens, a mean of document means."""
    found = Score(np.array([2.0, 9.0]), np.array([1, 3]), np.array([4, 6])).summary()
    assert found["ce"] == 11 / 4
    assert found["bits_per_byte"] == pytest.approx(11 / math.log(2) / 10)
    assert found["perplexity"] == pytest.approx(math.exp(11 / 4))
    # residuals 2 − 2.75 and 9 − 8.25, n/(n−1) = 2
    assert found["ce_stderr"] == pytest.approx(math.sqrt(2 * (0.75**2 + 0.75**2)) / 4)
    assert (found["tokens"], found["bytes"], found["documents"]) == (4, 10, 2)


def test_limit_takes_whole_documents():
    """Bug: a document cut short, whose bytes then don't belong to its nats."""
    prog = program()
    mesh = sharding.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        params = prog.init_state(jax.random.key(0))["params"]
        # Rows by document: 1 1 1 1 2 2 2 3 3 ...: ten rows end inside the seventh's second, so six documents fit.
        found = evaluate(make_eval_step(prog, mesh), params, windows(), 8, mesh, limit=9)
    np.testing.assert_array_equal(found.tokens, np.array(LENGTHS[:6]) + 1)
