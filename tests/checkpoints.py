"""A train state in small, and runs that saved some: what the tests of checkpoints share."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lrkv_jax.checkpoint import CheckpointConfig, Checkpointer
from lrkv_jax.optimizer import OptimizerConfig, make_optimizer


def is_param(node) -> bool:
    return isinstance(node, nnx.Variable)


@jax.jit
def init(step: int) -> dict:
    """A train state in small: an embedding, a stacked matrix and a gain, their moments, the step."""
    keys = jax.random.split(jax.random.key(step), 3)
    matrix = nnx.Param(
        jax.random.normal(keys[1], (3, 16, 7)), axes=("layers", "embed", "mlp"), role="matrix", reduce=(1,), output=(2,)
    )
    params = nnx.State(
        {
            "embedding": nnx.Param(jax.random.normal(keys[0], (11, 16)), axes=("vocab", "embed"), role="embed"),
            "block": {"w": matrix, "gain": nnx.Param(jnp.ones((3, 16)), axes=("layers", "embed"), role="vector")},
        }
    )
    transform = make_optimizer(OptimizerConfig(), 100, params)
    grads = jax.tree.map(lambda x: jnp.sin(7 * x), params)
    _, opt = transform.update(grads, transform.init(params), params)  # moments that are not zero
    return {"params": params, "opt": opt, "step": jnp.asarray(step, jnp.int32)}


def template(devices: int = 1) -> dict:
    """The abstract state, its width split over the given number of devices."""
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def place(node):
        spec = P(*("fsdp" if axis == "embed" else None for axis in node.axes)) if is_param(node) else P()
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)), node
        )

    return jax.tree.map(place, jax.eval_shape(lambda: init(0)), is_leaf=is_param)


def make_state(step: int, devices: int = 1) -> dict:
    return jax.device_put(init(step), jax.tree.map(lambda leaf: leaf.sharding, template(devices)))


def assert_same(state: dict, step: int) -> None:
    """The state is `init(step)`: same structure and metadata, same bits."""
    expected = init(step)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def open_run(run_dir: Path, keep: int = 2) -> Checkpointer:
    return Checkpointer(run_dir, CheckpointConfig(keep=keep))


def finish_run(run_dir: Path) -> Path:
    """Saves steps 10 and 20, best 10."""
    checkpointer = open_run(run_dir)
    checkpointer.save(10, make_state(10))
    checkpointer.save_best(10, make_state(10), 3.0)
    checkpointer.save(20, make_state(20))
    checkpointer.close()
    return run_dir
