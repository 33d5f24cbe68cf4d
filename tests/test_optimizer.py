"""Schedules at known points, Muon against a float64 oracle, and who is updated by what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lrkv_jax.optimizer import OptimizerConfig, learning_rate, make_optimizer, make_schedule
from lrkv_jax.settings import UserError

# Layers, width, heads, head dim, rank and vocabulary, all different; the last entry of each is (reduce, output).
SHAPES = {
    "embedding": ((13, 10), ("vocab", "embed"), "embed", None),
    "head": ((10, 13), ("embed", "vocab"), "unembed", None),
    "gain": ((2, 10), ("layers", "embed"), "vector", None),
    "w_shared": ((2, 10, 7), ("layers", "embed", "head_dim"), "matrix", ((1,), (2,))),
    "u": ((2, 10, 4, 3), ("layers", "embed", "kv_heads", "rank"), "matrix", ((1,), (2, 3))),
    "b": ((2, 4, 3, 7), ("layers", "kv_heads", "rank", "head_dim"), "matrix", ((2,), (3,))),
    "w_o": ((2, 4, 7, 10), ("layers", "heads", "head_dim", "embed"), "matrix", ((1, 2), (3,))),
}
MATRICES = [name for name, (_, _, role, _) in SHAPES.items() if role == "matrix"]


def make_params(seed: int = 0, scale: float = 1.0) -> nnx.State:
    rng = np.random.default_rng(seed)
    params = {}
    for name, (shape, axes, role, dims) in SHAPES.items():
        labels = {} if dims is None else {"reduce": dims[0], "output": dims[1]}
        value = jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)
        params[name] = nnx.Param(value, axes=axes, role=role, **labels)
    return nnx.State(params)


def run(config: OptimizerConfig, params: nnx.State, grads: list[nnx.State], steps: int = 100) -> nnx.State:
    """The parameters after one jitted update for each gradient."""
    transform = make_optimizer(config, steps, jax.eval_shape(lambda: params))

    @jax.jit
    def step(params, state, grad):
        updates, state = transform.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(transform.init)(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return params


def value(tree: nnx.State, name: str) -> np.ndarray:
    return np.asarray(tree[name].get_value(), np.float64)


# ---- schedules


def test_cosine_at_known_points():
    """Fails if warm-up starts at zero, ends a step off, or the decay is stretched over the wrong steps."""
    schedule = make_schedule(OptimizerConfig(schedule="cosine", warmup_steps=10, final_fraction=0.1), 110)
    points = {0: 1 / 11, 5: 6 / 11, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}
    for step, expected in points.items():
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6, err_msg=str(step))
    assert 0.1 < schedule(109) < schedule(108) < schedule(35) < 1


def test_wsd_at_known_points():
    """Fails if the decay is not the last `decay_fraction` of the steps, or does not start from the plateau."""
    config = OptimizerConfig(schedule="wsd", warmup_steps=4, decay_fraction=0.25, final_fraction=0.2)
    schedule = make_schedule(config, 80)
    points = {0: 0.2, 3: 0.8, 4: 1.0, 40: 1.0, 60: 1.0, 70: 0.6, 79: 0.24, 80: 0.2, 200: 0.2}
    for step, expected in points.items():
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6, err_msg=str(step))


def test_constant_and_no_warmup():
    """Fails if a missing warm-up costs a step, or `constant` decays."""
    for name in ("constant", "cosine", "wsd"):
        assert make_schedule(OptimizerConfig(schedule=name), 7)(0) == 1
    schedule = make_schedule(OptimizerConfig(schedule="constant", warmup_steps=3), 7)
    np.testing.assert_allclose([schedule(step) for step in (0, 1, 2, 3, 6, 99)], [0.25, 0.5, 0.75, 1, 1, 1])


def test_warmup_as_long_as_the_run():
    """Fails if a decay of no steps divides by zero."""
    for name in ("constant", "cosine"):
        schedule = make_schedule(OptimizerConfig(schedule=name, warmup_steps=4), 4)
        assert 0 < schedule(0) < schedule(3) < 1


def test_the_logged_rate_is_the_one_used():
    """Fails if the log and the update read different steps: AdamW's first update is lr * sign(gradient)."""
    config = OptimizerConfig(name="adamw", peak_lr=1e-2, warmup_steps=4, weight_decay=0.0, clip_norm=1e9, eps=1e-20)
    grad, params = make_params(1), make_params()
    before = run(config, params, [grad] * 2)
    moved = value(before, "u") - value(run(config, params, [grad] * 3), "u")
    np.testing.assert_allclose(np.abs(moved), learning_rate(config, 100, 2), rtol=1e-3)
    np.testing.assert_allclose(learning_rate(config, 100, 2), 1e-2 * 3 / 5, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "steps", "names"),
    [
        ({"warmup_steps": 11}, 10, ["optimizer.warmup_steps = 11", "train.steps = 10"]),
        (
            {"schedule": "wsd", "warmup_steps": 9, "decay_fraction": 0.5},
            10,
            ["decay_fraction = 0.5", "warmup_steps = 9"],
        ),
    ],
)
def test_schedule_that_does_not_fit(fields, steps, names):
    """Fails if a schedule that cannot be followed is silently bent to fit."""
    with pytest.raises(UserError) as error:
        make_optimizer(OptimizerConfig(**fields), steps, make_params())
    assert all(name in str(error.value) for name in names)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"peak_lr": -1.0},
        {"peak_lr": 0.0},
        {"embed_lr": -0.1},
        {"unembed_lr": float("nan")},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"muon_momentum": 1.5},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"clip_norm": 0.0},
        {"warmup_steps": -1},
        {"decay_fraction": 0.0},
        {"final_fraction": 1.1},
        {"schedule": "linear"},
        {"name": "sgd"},
    ],
)
def test_bad_fields_are_named(fields):
    """Fails if a value that cannot train is accepted, or the error does not name its field."""
    with pytest.raises(pydantic.ValidationError) as error:
        OptimizerConfig(**fields)
    assert error.value.errors()[0]["loc"] == tuple(fields)


# ---- Muon against an oracle


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five quintic iterations in float64, on one m x n matrix."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def as_matrices(name: str, x: np.ndarray) -> list[np.ndarray]:
    """What the module's docstring says is a matrix, as views into `x`: written per name, not from the metadata."""
    layers = range(x.shape[0])
    if name == "w_shared":
        return [x[layer] for layer in layers]
    if name == "u":
        return [x[layer].reshape(10, 12) for layer in layers]
    if name == "b":
        return [x[layer, head] for layer in layers for head in range(4)]
    return [x[layer].reshape(28, 10) for layer in layers]


def test_muon_update_is_newton_schulz_of_the_nesterov_momentum():
    """Fails if heads of B are mixed, U is cut by head, a reshape is transposed, or momentum or decay is off."""
    rate, beta, decay = 0.02, 0.95, 0.1
    config = OptimizerConfig(schedule="constant", peak_lr=rate, weight_decay=decay, clip_norm=1e9)
    params, grads = make_params(), [make_params(1), make_params(2, 0.3)]
    after = run(config, params, grads)
    for name in MATRICES:
        expected = value(params, name).copy()
        momentum = np.zeros_like(expected)
        for count, grad in enumerate(grads, 1):
            g = value(grad, name)
            momentum = beta * momentum + (1 - beta) * g
            # Nesterov with both terms corrected for their start at zero.
            direction = beta * momentum / (1 - beta ** (count + 1)) + (1 - beta) * g / (1 - beta**count)
            for weight, d in zip(as_matrices(name, expected), as_matrices(name, direction), strict=True):
                scale = np.sqrt(max(1, d.shape[1] / d.shape[0]))
                weight -= rate * (scale * newton_schulz(d) + decay * weight)
        np.testing.assert_allclose(value(after, name), expected, atol=2e-6, err_msg=name)


def test_muon_of_stacked_layers_is_muon_of_each_layer():
    """Fails if the layer dimension leaks into the orthogonalised matrix or its norm."""
    config = OptimizerConfig(schedule="constant", clip_norm=1e9)
    params, grad = make_params(), make_params(1)

    def layer(tree: nnx.State, index: int) -> nnx.State:
        parts = {}
        for name in MATRICES:
            reduce, output = SHAPES[name][3]
            labels = {"reduce": tuple(d - 1 for d in reduce), "output": tuple(d - 1 for d in output)}
            parts[name] = nnx.Param(tree[name].get_value()[index], axes=SHAPES[name][1][1:], role="matrix", **labels)
        return nnx.State(parts)

    stacked = run(config, params, [grad] * 2)
    for index in range(2):
        alone = run(config, layer(params, index), [layer(grad, index)] * 2)
        for name in MATRICES:
            np.testing.assert_allclose(value(stacked, name)[index], value(alone, name), atol=1e-6, err_msg=name)


# ---- groups, decay, clipping


def test_each_group_takes_its_own_rate():
    """Fails if a role is routed to another's rate: AdamW's first update is its rate times sign(gradient)."""
    rates = {"peak_lr": 0.02, "embed_lr": 0.2, "unembed_lr": 0.004}
    config = OptimizerConfig(schedule="constant", weight_decay=0.0, eps=1e-20, **rates)
    moved = jax.tree.map(lambda a, b: abs(a - b), make_params(), run(config, make_params(), [make_params(1)]))
    for name, rate in {"embedding": 0.2, "head": 0.004, "gain": 0.004}.items():
        np.testing.assert_allclose(value(moved, name), rate, rtol=1e-3, err_msg=name)


def test_adamw_has_one_rate_unless_told():
    """Fails if the Muon recipe's embedding rates leak into a plain AdamW run."""
    config = OptimizerConfig(name="adamw", schedule="constant", peak_lr=1e-2, weight_decay=0.0, eps=1e-20)
    moved = jax.tree.map(lambda a, b: abs(a - b), make_params(), run(config, make_params(), [make_params(1)]))
    for name in SHAPES:
        np.testing.assert_allclose(value(moved, name), 1e-2, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_shrinks_matrices_only(name):
    """Fails if a gain, an embedding or the unembedding decays, or a matrix by another amount than lr * weight_decay."""
    config = OptimizerConfig(name=name, schedule="constant", peak_lr=0.05, weight_decay=0.2)
    params = make_params()
    after = run(config, params, [jax.tree.map(jnp.zeros_like, params)])
    for weight in SHAPES:
        kept = 1 - 0.05 * 0.2 if weight in MATRICES else 1.0
        np.testing.assert_allclose(value(after, weight), kept * value(params, weight), rtol=1e-6, err_msg=weight)


def test_clip_is_by_the_global_norm():
    """Fails if arrays are clipped one by one, or after AdamW has forgotten the gradient's size."""
    # With an eps far above the gradient, AdamW's first update is proportional to the clipped gradient.
    common = {"name": "adamw", "schedule": "constant", "weight_decay": 0.0, "eps": 1e3}
    params, grad = make_params(), make_params(1)
    norm = float(optax.tree.norm(grad))
    assert norm > 2

    def moved(clip: float) -> nnx.State:
        return jax.tree.map(
            lambda a, b: a - b, run(OptimizerConfig(clip_norm=clip, peak_lr=1e3, **common), params, [grad]), params
        )

    free, clipped = moved(norm * 1.01), moved(norm / 2)
    for name in SHAPES:
        np.testing.assert_allclose(value(clipped, name), value(free, name) / 2, rtol=2e-2, atol=2e-3, err_msg=name)


# ---- the state on devices


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_params_of_the_same_axes_dtype_and_sharding(name):
    """Fails if a moment loses its Param (and is replicated, so memory grows with the devices) or drops to bfloat16."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    table = {"embed": "fsdp", "kv_heads": "tensor", "heads": "tensor"}

    def is_param(node) -> bool:
        return isinstance(node, nnx.Variable)

    def place(node):
        return jax.tree.map(
            lambda _: NamedSharding(mesh, P(*map(table.get, node.axes)) if is_param(node) else P()), node
        )

    transform = make_optimizer(OptimizerConfig(name=name), 10, make_params())

    def init() -> dict:
        params = make_params()
        return {"params": params, "opt": transform.init(params)}

    abstract = jax.eval_shape(init)
    moments = [node for node in jax.tree.leaves(abstract["opt"], is_leaf=is_param) if is_param(node)]
    per_matrix = 1 if name == "muon" else 2
    assert len(moments) == per_matrix * len(MATRICES) + 2 * (len(SHAPES) - len(MATRICES))
    assert all(leaf.dtype == jnp.float32 and leaf.shape for leaf in jax.tree.leaves(moments))
    unwrapped = [node for node in jax.tree.leaves(abstract["opt"], is_leaf=is_param) if not is_param(node)]
    assert all(leaf.size <= 3 for leaf in unwrapped)  # counters and Muon's three coefficients

    shardings = jax.tree.map(place, abstract, is_leaf=is_param)
    state = jax.jit(init, out_shardings=shardings)()

    def update(state: dict) -> dict:
        updates, opt = transform.update(state["params"], state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    after = jax.jit(update, donate_argnums=0, out_shardings=shardings)(state)
    assert jax.tree.structure(after) == jax.tree.structure(abstract)
    b_moments = [
        node
        for node in jax.tree.leaves(after["opt"], is_leaf=is_param)
        if is_param(node) and node.axes == SHAPES["b"][1]
    ]
    assert len(b_moments) == per_matrix
    for moment in b_moments:
        assert moment.get_value().addressable_shards[0].data.nbytes * 2 == moment.get_value().nbytes
    # Sharded or not, one update is the same.
    alone = run(OptimizerConfig(name=name), make_params(), [make_params()], steps=10)
    for weight in SHAPES:
        np.testing.assert_allclose(value(after["params"], weight), value(alone, weight), atol=2e-6, err_msg=weight)
