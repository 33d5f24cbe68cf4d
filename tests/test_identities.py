"""Where two families, or two settings of one, must be the same model; lengths, weights and positions are arbitrary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BASE, Case, build, inputs, named, weights
from flax import nnx

from lrkv_jax import attention

C, H = 10, 3


def case(family, **fields):
    """An unlisted configuration of a family."""
    config = attention.families()[family].Config(head_dim=C, rope_base=BASE, qkv_bias=True, **fields)
    return Case(family, config, family)


def parameters(case):
    """The random parameters of a case by name."""
    return weights(build(case)[1])


def run(case, parameters):
    """Outputs of the case's module on `inputs()`, with exactly these parameters."""
    graphdef, state = build(case)
    flat, paths = dict(nnx.to_flat_state(state)), named(state)
    assert set(paths) == set(parameters)
    for name, path in paths.items():
        assert flat[path].shape == parameters[name].shape, name
        flat[path] = flat[path].replace(jnp.asarray(parameters[name], jnp.float32))
    return np.asarray(jax.jit(nnx.merge(graphdef, nnx.from_flat_state(flat)))(*inputs()))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("mode", ["full", "shared", "latent"])
def test_rank_zero_is_mqa(mode, qk_norm):
    """Bug: something of the residual is left at rank 0, or the shared key is not MQA's."""
    mqa = case("gqa", heads=H, kv_heads=1, qk_norm=qk_norm)
    lrkv = case("lrkv", heads=H, kv_heads=1, rank=0, rope_mode=mode, qk_norm=qk_norm)
    theirs = parameters(mqa)
    if mode != "full":  # there a key bias carries no position, which MQA has no way to say
        theirs["bias_k"] *= 0
    ours = {name: theirs[name] for name in ("w_q", "w_o", "bias_q", "bias_k", "bias_v")}
    ours |= {"w_k_shared": theirs["w_k"][:, 0], "w_v_shared": theirs["w_v"][:, 0]}
    np.testing.assert_allclose(run(lrkv, ours), run(mqa, theirs), atol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_full_rank_holds_any_mha(qk_norm):
    """Bug: `full` is no reparametrisation of full-rank keys and values: rotation, norm or bias sits elsewhere."""
    check_full_rank_holds(case("gqa", heads=H, qk_norm=qk_norm), case("lrkv", heads=H, rank=C, qk_norm=qk_norm))


@pytest.mark.parametrize("gain", [None, "before_rope"])
def test_full_rank_with_fewer_residuals_holds_any_gqa(gain):
    """Bug: the residual of a group is read by the query heads of another, or a key's gain is taken into its norm, which
    would break converting a GQA model (a Qwen3 model)."""
    groups = {"heads": 6, "kv_heads": 2, "qk_norm_gain": gain}
    check_full_rank_holds(case("gqa", **groups), case("lrkv", rank=C, **groups))


def check_full_rank_holds(gqa, lrkv):
    theirs, ours = parameters(gqa), parameters(lrkv)
    for name in ("k", "v"):
        ours[f"u_{name}"] = theirs[f"w_{name}"] - ours[f"w_{name}_shared"][:, None]
        ours[f"b_{name}"] = np.broadcast_to(np.eye(C), ours[f"b_{name}"].shape)
    ours |= {name: value for name, value in theirs.items() if name not in ("w_k", "w_v")}
    np.testing.assert_allclose(run(lrkv, ours), run(gqa, theirs), atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gqa_is_mha_whose_groups_share_their_keys(kv_heads):
    """Bug: K = 1 is not MQA, K = H not MHA, or a query head reads another group's key."""
    gqa, mha = case("gqa", heads=6, kv_heads=kv_heads), case("gqa", heads=6, kv_heads=6)
    theirs = parameters(gqa)
    repeated = {name: np.repeat(theirs[name], 6 // kv_heads, axis=1) for name in ("w_k", "w_v")}
    repeated |= {name: np.repeat(theirs[name], 6 // kv_heads, axis=0) for name in ("bias_k", "bias_v")}
    np.testing.assert_allclose(run(gqa, theirs), run(mha, theirs | repeated), atol=1e-5)


def test_kv_heads_default_to_heads():
    """Bug: leaving K out makes another model than saying K = H."""
    default, said = case("gqa", heads=H), case("gqa", heads=H, kv_heads=H)
    np.testing.assert_array_equal(run(default, parameters(said)), run(said, parameters(said)))
