"""Adapters on projections and frozen parameters: what moves, what doesn't, and that all ways to read a weight agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import FAMILIES, batch, merge, program

from lrkv_jax import attention, lora, sharding
from lrkv_jax.accounting import accounts
from lrkv_jax.attention import cache
from lrkv_jax.config import load_configs
from lrkv_jax.layers import Projection
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import compile_train_step

GENTLE = OptimizerConfig(name="muon", peak_lr=1e-5)  # decays matrices: a frozen one must not feel it
SIZES = dict(zip("btdhkcrfz", (2, 3, 5, 4, 4, 6, 7, 9, 2), strict=True))
EQUATIONS = ["btd,dhc->bthc", "bthc,hcd->btd", "btd,dkr->btkr", "btkr,krc->btkc", "btd,df->btf"]


def draw(params, std=0.3):
    """The same parameters with every adapter's B drawn too: a fresh one adds nothing."""
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state(
        (
            path,
            leaf.replace(jax.random.normal(jax.random.key(i), leaf.shape) * std)
            if path[-2:] == ("lora", "b")
            else leaf,
        )
        for i, (path, leaf) in enumerate(flat)
    )


def named(params):
    """Arrays by name."""
    return {".".join(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_adapter_is_what_the_formula_says(equation):
    """Bugs: A and B over the wrong letters, heads that share what is their own, a forgotten alpha / rank, a weight()
    that callers absorb without its adapter."""
    left, right = equation.split("->")[0].split(",")
    shape = tuple(SIZES[letter] for letter in right)
    layer = Projection(equation, shape, ("width",) * len(shape), rngs=nnx.Rngs(params=0), dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), [SIZES[letter] for letter in left])
    base, w = layer(x), layer.w.get_value()
    lora.attach(nnx.Dict(p=layer), 2, 3.0, ("p",), nnx.Rngs(params=2))
    np.testing.assert_array_equal(layer(x), base)
    layer.lora.b.set_value(jax.random.normal(jax.random.key(3), layer.lora.b.shape))
    a, b = np.asarray(layer.lora.a.get_value()), np.asarray(layer.lora.b.get_value())
    delta = {  # written out: the sizes of A and B say which letters they have
        "btd,dhc->bthc": lambda: np.tensordot(a, b, 1),
        "btd,df->btf": lambda: a @ b,
        "btd,dkr->btkr": lambda: np.tensordot(a, b, 1),
        "bthc,hcd->btd": lambda: np.tensordot(a, b, 1),
        "btkr,krc->btkc": lambda: np.stack([a[k] @ b[k] for k in range(SIZES["k"])]),
    }[equation]()
    np.testing.assert_allclose(layer.weight(), w + 1.5 * delta, atol=1e-5)
    np.testing.assert_allclose(layer(x), np.einsum(equation, x, w + 1.5 * delta), atol=1e-4)


@pytest.mark.parametrize("family", ["lrkv", "mla"])
def test_decoding_sees_the_adapters(family):
    """Bug: a decoder that absorbs the base's weights, and so continues with another model than was trained."""
    config, rngs = FAMILIES[family], nnx.Rngs(params=0)
    module = attention.build(config, width=16, eps=1e-6, out_std=1.0, dtype=jnp.float32, rngs=rngs)
    lora.attach(module, 2, 4.0, ("*",), rngs)
    graph, params = nnx.split(module)
    x, places = jax.random.normal(rngs.params(), (2, 7, 16)), jnp.arange(7)[None].repeat(2, 0)

    @jax.jit
    def both(params):
        module = nnx.merge(graph, params)
        stored = cache.allocate(module.entry_shapes(), 2, cache.Layout(7, 5))
        stored = cache.write_blocks(stored, module.compress(x, places), 0)
        return module(x, places), module.out(module.attend(module.query(x, places), stored, places, places + 1))

    forward, decoded = both(draw(params))
    np.testing.assert_allclose(decoded, forward, atol=2e-5)
    assert np.abs(np.asarray(forward - both(params)[0])).max() > 0.01


def steps(prog, count=3):
    """Parameters before and after some steps on four devices, and the state of the optimizer."""
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        abstract, step = compile_train_step(prog, mesh)
        state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))
        before = named(state["params"])
        for seed in range(count):
            state, metrics = step(state, jax.device_put(batch(seed), sharding.batch_sharding(mesh)))
            jax.block_until_ready(metrics)
    return before, named(state["params"]), state


def test_adapters_alone_move():
    """Bugs: a base weight that decays or drifts, moments kept for it, an adapter that 1e-5 in bfloat16 doesn't move, or
    one that no sharding fits; merging that changes the model it is given, or adds something else."""
    prog = program("lrkv", GENTLE, dtype="bfloat16", lora_rank=2, train={"microbatches": 2})
    before, after, state = steps(prog)
    adapters = {name for name in before if ".lora." in name}
    assert len(adapters) == 2 * len(lora.projections(merge(prog, state["params"]))) == 20
    for name in before:
        assert (before[name] != after[name]).any() == (name in adapters), name
    moments = [leaf for leaf in jax.tree.leaves(state["opt"]) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(before[name].size for name in adapters)
    base = program("lrkv", dtype="bfloat16").init_params(jax.random.key(0))
    for name, value in named(base).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-6)

    params = draw(state["params"])
    merged = lora.merge(prog.graph, params)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    for name, projection in lora.projections(merge(prog, params)).items():
        assert np.abs(named(merged)[f"{name}.w"] - before[f"{name}.w"]).max() > 0.01
        adapted = before[f"{name}.w"] + projection.lora.delta()
        np.testing.assert_allclose(named(merged)[f"{name}.w"], adapted, atol=1e-6)
        np.testing.assert_array_equal(named(params)[f"{name}.w"], before[f"{name}.w"])


def test_everything_else_than_the_frozen_moves():
    """Bugs: a frozen parameter that decays, has moments or counts in the clipped norm; a leaf that full fine-tuning at
    1e-5 in bfloat16 leaves where it was."""
    optimizer = OptimizerConfig(**GENTLE.model_dump(exclude={"freeze"}), freeze=("embed", "blocks.mlp.*"))
    prog = program("lrkv", optimizer, dtype="bfloat16", norm_gain=True)
    before, after, state = steps(prog, 1)
    frozen = {"embed", "blocks.mlp.w_up.w", "blocks.mlp.w_down.w"}
    for name in before:
        assert (before[name] != after[name]).any() == (name not in frozen), name
    assert before["embed"].shape not in {leaf.shape for leaf in jax.tree.leaves(state["opt"])}
    grads, _, _ = jax.eval_shape(prog.gradient, prog.abstract_params(), batch())
    assert {".".join(path) for path, _ in nnx.to_flat_state(grads)} == set(before) - frozen


@pytest.mark.parametrize(
    ("optimizer", "model", "says"),
    [
        (
            {"freeze": ("blocks.mpl.*",)},
            {},
            "optimizer.freeze = 'blocks.mpl.*': matches no parameter of blocks.attention",
        ),
        ({"freeze": ("*",)}, {}, "optimizer.freeze = *: leaves nothing to train"),
        ({"freeze": ("*.lora.*",)}, {"lora_rank": 1}, "leaves nothing to train"),
        (
            {},
            {"lora_rank": 1, "lora_targets": ("attention.w_k",)},
            "'attention.w_k': matches no projection; there are ",
        ),
    ],
)
def test_patterns_that_match_nothing_are_refused(optimizer, model, says):
    """Bug: a misspelt pattern freezes or adapts nothing, without a word."""
    with pytest.raises(UserError) as error:
        program("lrkv", OptimizerConfig(**optimizer), **model)
    assert says in str(error.value)


def test_flops_leave_out_what_frozen_weights_need_not():
    """Bug: the cost of a gradient that is never formed."""
    _, config = load_configs("configs/debug.py")
    full = accounts(config)
    adapted = accounts(config.model_copy(update={"model": config.model.model_copy(update={"lora_rank": 1})}))
    assert full.trained_parameters == full.parameters
    assert adapted.trained_parameters == adapted.parameters - full.parameters > 0
    assert adapted.train_flops_per_token < 0.75 * full.train_flops_per_token
