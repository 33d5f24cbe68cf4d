"""The table of axes, the mesh, and the bytes that devices really hold."""

import jax
import numpy as np
import pytest
from models import FAMILIES, program

from lrkv_jax import sharding
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MeshConfig


def test_unknown_axis_is_an_error():
    """Bug: a misspelt label silently replicates."""
    with pytest.raises(ValueError, match="unknown logical axis 'hedas'"):
        sharding.spec(("hedas",))


def test_collision_is_an_error():
    """Bug: one mesh axis on two dimensions, which JAX refuses far from the cause."""
    with pytest.raises(ValueError, match="one mesh axis on two dimensions"):
        sharding.spec(("heads", "mlp"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, "needs 3 devices; there are 8"),
        ({"data": -1, "fsdp": -1}, "at most one of them -1"),
        ({"data": 0}, "positive"),
        ({"data": -1, "tensor": 3}, "needs 3 devices"),
    ],
)
def test_impossible_meshes_are_refused(sizes, message):
    """Bug: a bare assertion from JAX."""
    with pytest.raises(UserError, match=message):
        sharding.make_mesh(MeshConfig(**sizes))


def test_heads_must_divide():
    """Bug: query heads silently replicated; key/value heads that don't divide may be."""
    mesh = sharding.make_mesh(MeshConfig(data=1, tensor=8))
    with pytest.raises(UserError, match=r"heads = 4 does not divide over mesh axis tensor = 8"):
        program("mha").abstract_state(mesh)
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=4))
    assert sharding.sharding_of((16, 1, 8), ("embed", "kv_heads", "head_dim"), mesh).is_fully_replicated


@pytest.mark.parametrize(
    ("family", "scan"), [(family, True) for family in FAMILIES] + [(family, False) for family in ("mqa", "mla", "lrkv")]
)
def test_devices_hold_their_share(family, scan):
    """Bug: a spec that says sharded on an array that is whole everywhere; moments left replicated."""
    prog = program(family, scan_layers=scan)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    with jax.set_mesh(mesh):
        abstract = prog.abstract_state(mesh)
        state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))

    def check(param):
        array = param.get_value()
        ways = {"embed": 4, "vocab": 2, "heads": 2, "kv_heads": 2, "mlp": 2}
        share = int(np.prod([ways.get(axis, 1) for axis, n in zip(param.axes, array.shape, strict=True) if n > 1]))
        assert array.addressable_shards[0].data.nbytes * share == array.nbytes, param.axes
        return share

    params = [leaf for leaf in jax.tree.leaves(state, is_leaf=sharding.is_param) if sharding.is_param(leaf)]
    shares = [check(param) for param in params]
    assert len(params) > len(jax.tree.leaves(state["params"], is_leaf=sharding.is_param))  # moments among them
    assert min(shares) > 1
