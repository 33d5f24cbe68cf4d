"""LRKV whose layers differ in rank: stored alike, each layer reading its part and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from decoders import CONFIGS, decoder, forced, forward, program
from flax import nnx
from models import HEADS, MUON, batch, merge, positions
from models import program as small

from lrkv_jax import accounting, lora
from lrkv_jax.attention import lrkv
from lrkv_jax.config import RunConfig, load_configs

RANKS = (3, 0, 1)
BY_LAYER = lrkv.Config(**HEADS, rank=3, ranks=RANKS)


def unused(name, leaf):
    """Which of a stacked factor's numbers are beyond their layer's rank; None for other parameters."""
    if not name.endswith(("u_k.w", "u_v.w", "b_k.w", "b_v.w")):
        return None
    beyond = np.arange(3) >= np.array(RANKS)[:, None]
    return np.broadcast_to(beyond[:, None, None, :] if ".u_" in name else beyond[:, None, :, None], leaf.shape)


def named(params):
    return {".".join(map(str, path)): np.asarray(param.get_value()) for path, param in nnx.to_flat_state(params)}


def zeroed(tree):
    """The parameters with zeros in place of what no layer uses."""
    flat = []
    for path, param in nnx.to_flat_state(tree):
        beyond, value = unused(".".join(map(str, path)), param.get_value()), param.get_value()
        flat.append((path, param if beyond is None else param.replace(jnp.where(beyond, 0, value))))
    return nnx.from_flat_state(flat)


def logits(prog, params):
    tokens = batch()[:, :-1]
    return jax.jit(lambda params: merge(prog, params)(tokens, positions(tokens)))(params)


@pytest.mark.parametrize("mode", ["full", "shared"])
def test_a_layer_is_that_of_its_rank(mode):
    """Bug: a layer uses more or less than its own rank, or that of another layer."""
    family = BY_LAYER.model_copy(update={"rope_mode": mode})
    by_layer = small(family, layers=3)
    uniform = small(family.model_copy(update={"ranks": ()}), layers=3)
    params = by_layer.init_params(jax.random.key(0))
    # B as large as it gets in training, so that what is beyond would show.
    params = jax.tree.map(lambda leaf: 10 * leaf if leaf.ndim == 4 else leaf, params)
    found, kept, all_of_it = logits(by_layer, params), logits(uniform, zeroed(params)), logits(uniform, params)
    np.testing.assert_allclose(found, kept, atol=1e-5)
    assert np.abs(np.asarray(found - all_of_it)).max() > 1e-2


def test_what_is_unused_does_not_train():
    """Bug: gradients reach beyond a layer's rank, or stop short of it; remat computes another model."""
    prog = small(BY_LAYER, MUON, layers=3)
    params = prog.init_params(jax.random.key(0))
    grads = jax.jit(small(BY_LAYER, MUON, layers=3, remat="full").gradient)(params, batch())[0]
    for name, grad in named(grads).items():
        beyond = unused(name, grad)
        if beyond is not None:
            assert (grad[beyond] == 0).all()
            assert (grad[~beyond] != 0).mean() > 0.99
    state, metrics = jax.jit(prog.train_step)(prog.start(params), batch())
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in named(state["params"]).values())


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("lrkv_ranks", "blocked"), ("lrkv_ranks", "pallas_tpu"), ("lrkv_ranks_latent", "blocked")],
)
def test_decoding_equals_the_forward_pass(family, implementation):
    """Bug: a cache of the largest rank everywhere, or a layer without a residual reading another's angles."""
    layers = len(CONFIGS[family].ranks)
    tokens, logits = forward(family, layers=layers)
    made = decoder(family, layers=layers, implementation=implementation, batch=len(tokens))
    found = forced(made, tokens[:, :5], tokens[:, 5:])
    np.testing.assert_allclose(found, logits[:, 4:], atol=2e-4)
    features = [leaf.shape[3] for cache in made.abstract_state()["caches"] for leaf in [cache.get("k_code")] if leaf]
    used = [rank for rank in CONFIGS[family].ranks if rank]
    assert features == [size if implementation == "blocked" else -(-size // 8) * 8 for size in used]


def test_accounts_are_of_what_is_used():
    """Bug: padding counted as parameters, or cache bytes of the largest rank in every layer."""
    _, config = load_configs("configs/debug.py:lrkv")
    model = config.model.model_copy(update={"layers": 3})

    def accounts(**fields):
        family = config.attention.model_copy(update=fields)
        return accounting.accounts(config.model_copy(update={"model": model, "attention": family}))

    alone = {rank: accounts(rank=rank, ranks=()) for rank in (0, 1, 3)}
    found = accounts(rank=3, ranks=RANKS)
    for name in ("parameters", "cache_bytes_per_token", "cache_percent_of_mha", "train_flops_per_token"):
        values = {rank: getattr(each, name) for rank, each in alone.items()}
        assert getattr(found, name) == pytest.approx(sum(values[rank] for rank in RANKS) / 3, rel=1e-6), name
    assert found.trained_parameters == found.parameters
    made = program("lrkv_ranks", layers=3)
    live = decoder("lrkv_ranks", layers=3, batch=2, slots=8, block=4).start([[5], [6]])
    assert live.cache_bytes() == 2 * 8 * accounting.cache_per_token(made.model, made.attention)[1]


def test_a_layer_starts_and_moves_as_one_of_its_rank():
    """Bugs: B drawn, or U and B moved by Muon, as the largest rank would have it, in a layer of a lower one."""
    ranks, muon = (12, 0, 2), MUON.model_copy(update={"weight_decay": 0.0})
    drawn = np.random.default_rng(0).normal(size=(2, 3, 16, 4, 12)).astype(np.float32)

    def moved(family, used):
        prog = small(family, muon, layers=3)
        params = prog.init_params(jax.random.key(0))
        grads = jax.tree.map(jnp.zeros_like, params)
        down, up = (grads["blocks"]["attention"][name]["w"] for name in ("u_k", "b_k"))
        down.set_value(jnp.array(drawn[0, ..., : family.rank] * used[..., : family.rank]))
        up.set_value(jnp.array((drawn[1, :, :8, :, : family.rank] * used[..., : family.rank]).transpose(0, 2, 3, 1)))
        updates, _ = prog.optimizer.update(grads, prog.optimizer.init(params), params)
        return named(params), named(updates)

    beyond = np.arange(12) < np.array(ranks)[:, None, None, None]
    params, updates = moved(lrkv.Config(**HEADS, rank=12, ranks=ranks), beyond)
    for layer, rank in ((0, 12), (2, 2)):
        _, alone = moved(lrkv.Config(**HEADS, rank=rank), np.ones_like(beyond))
        for name in ("u_k", "b_k"):
            found, expected = (each[f"blocks.attention.{name}.w"][layer] for each in (updates, alone))
            found = found[..., :rank] if name == "u_k" else found[:, :rank]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
            assert np.abs(expected).max() > 1e-3
        both = np.stack([params[f"blocks.attention.{name}.w"][layer][:, :rank] for name in ("b_k", "b_v")])
        assert both.std() == pytest.approx(0.1 / rank**0.5, rel=0.2)


def test_adapters_go_with_it():
    """Bug: an adapter of U or B has another rank than its projection, or adds to what is unused."""
    prog = small(BY_LAYER, layers=3, lora_rank=2)
    params = jax.tree.map(lambda leaf: leaf + 0.1, prog.init_params(jax.random.key(0)))
    merged = logits(small(BY_LAYER, layers=3), lora.merge(prog.graph, params))
    np.testing.assert_allclose(logits(prog, params), merged, atol=1e-4)


def test_mistakes():
    """Bug: a config of other layers than it has ranks, or whose largest rank isn't the stored one, is taken."""
    _, config = load_configs("configs/debug.py:lrkv")
    for fields, complaint in (
        ({"rank": 3, "ranks": (3, 1, 1)}, r"attention.ranks = \(3, 1, 1\): has 3 for model.layers = 2"),
        ({"rank": 3, "ranks": (2, 1)}, r"ranks = \(2, 1\): the largest must be rank, which is 3"),
        ({"rank": 3, "ranks": (3, -1)}, "rank = -1: must be 0 or more"),
        ({"rank": 4, "ranks": (4, 1), "rope_mode": "latent"}, "rank = 1: must be even"),
    ):
        with pytest.raises(pydantic.ValidationError, match=complaint):
            RunConfig.model_validate(config.model_dump() | {"attention": config.attention.model_dump() | fields})
