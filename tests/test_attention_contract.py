"""What every attention family must do in a forward pass, whatever it computes; families are found, not listed."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BFLOAT16_ERROR, EPS, GAIN, SCALING, B, D, T, build, call, cases, inputs, random, weights
from flax import nnx

from lrkv_jax import attention
from lrkv_jax.attention import cache, core

PLAIN, RECIPE = cases(qk_norm=False, qkv_bias=False), cases(qk_norm=True, qkv_bias=True)
BRIEF = cases(brief=True, qk_norm=True, qkv_bias=True)
GAINED = cases(brief=True, **GAIN, **SCALING)
MIXED = cases(qk_norm=True, qkv_bias=False) + cases(qk_norm=False, qkv_bias=True)

# Documents of each row, and the ids and restarting positions that describe them.
DOCUMENTS = ((4, 7), (6, 3, 2))
SEGMENTS = jnp.array([np.repeat(np.arange(len(row)), row) for row in DOCUMENTS], jnp.int32)
RESTARTED = jnp.array([np.concatenate([np.arange(n) for n in row]) for row in DOCUMENTS], jnp.int32)


def expected(case, x, positions, segments):
    """The oracle's answer at the module's own weights."""
    reference = getattr(oracle, case.family, None)
    if reference is None:
        pytest.fail(f"family {case.family!r} has no oracle: write {case.family}() in {oracle.__file__}")
    x, positions = np.asarray(x, np.float64), np.asarray(positions)
    segments = None if segments is None else np.asarray(segments)
    return reference(case.config, weights(build(case)[1]), x, positions, segments, EPS)


def test_families_are_found_and_known_by_their_name():
    """Bug: a family's file is not walked, or its config answers to another name."""
    families = attention.families()
    assert {"gqa", "mla", "lrkv"} <= set(families)
    for name, module in families.items():
        assert module.__name__ == f"lrkv_jax.attention.{name}"
        assert module.Config.model_fields["family"].default == name


@pytest.mark.parametrize("case", PLAIN + MIXED + RECIPE + GAINED)
def test_forward_equals_oracle(case):
    """Bug: any slip of mathematics: a sign in RoPE, a missing scalar, a swapped head, a bias added after rotation."""
    x, positions = inputs()
    np.testing.assert_allclose(call(case, "__call__", x, positions), expected(case, x, positions, None), atol=2e-5)


@pytest.mark.parametrize("case", BRIEF)
def test_documents_are_apart(case):
    """Bug: attention crosses documents, or the positions inside one are not its own."""
    x, _ = inputs()
    y = np.asarray(call(case, "__call__", x, RESTARTED, SEGMENTS))
    first = DOCUMENTS[0][0]
    alone = call(case, "__call__", x[:1, first:], RESTARTED[:1, first:])
    np.testing.assert_allclose(y[:1, first:], alone, atol=1e-5)
    np.testing.assert_allclose(y, expected(case, x, RESTARTED, SEGMENTS), atol=2e-5)


@pytest.mark.parametrize("case", BRIEF)
def test_causal_by_gradient(case):
    """Bug: a query sees a later token, or misses its own or an earlier one."""
    x, positions = inputs()
    for t in (0, 5, T - 1):
        reach = np.asarray(call(case, influence_on_output, x, positions, jnp.asarray(t)))
        assert (reach[:, : t + 1] > 1e-6).all()
        assert (reach[:, t + 1 :] == 0).all()


def influence_on_output(module, x, positions, t):
    """The largest gradient of the outputs at index t in the coordinates of each token, [B, T]."""
    probe = random(B, T, D, seed=1)
    return jnp.abs(jax.grad(lambda x: jnp.sum((module(x, positions) * probe)[:, t]))(x)).max(-1)


@pytest.mark.parametrize("case", RECIPE)
def test_rows_do_not_meet(case):
    """Bug: a sum or a reshape mixes the rows of a batch."""
    x, positions = inputs()
    y = call(case, "__call__", x, positions)
    other = call(case, "__call__", x.at[1].mul(-2), positions.at[1].add(7))
    np.testing.assert_array_equal(y[0], other[0])
    assert (np.abs(y[1] - other[1]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("case", RECIPE)
def test_compress_and_expand_are_token_local(case):
    """Bug: a cache entry depends on its neighbours, on its index, or on more than its token and position."""
    x, positions = inputs()
    order = np.random.default_rng(0).permutation(T)
    whole = call(case, compress_and_expand, x, positions)
    shuffled = call(case, compress_and_expand, x[:, order], positions[:, order])
    for leaf, moved in zip(*map(jax.tree.leaves, (whole, shuffled)), strict=True):
        assert leaf.shape[:2] == (B, T)
        np.testing.assert_allclose(np.asarray(leaf)[:, order], moved, atol=1e-6)

    reach = np.asarray(call(case, influence_on_entry, x, positions))
    assert (reach[:, 5] > 0).all()
    assert (np.delete(reach, 5, axis=1) == 0).all()


def compress_and_expand(module, x, positions):
    """The cache entry and the keys and values it stands for."""
    entry = module.compress(x, positions)
    return entry, module.expand(entry, positions)


def influence_on_entry(module, x, positions):
    """The largest gradient of the cache entry of token 5 in the coordinates of each token, [B, T]."""
    entry = lambda x: jax.tree.leaves(module.compress(x, positions))  # noqa: E731
    return jnp.abs(jax.grad(lambda x: sum(jnp.sum(leaf[:, 5]) for leaf in entry(x)))(x)).max(-1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", RECIPE + GAINED)
def test_strict_about_dtypes_and_ranks(case, dtype):
    """Bug: silent promotion (a float32 constant doubles bfloat16's traffic) or a rank broadcast by luck."""
    x, positions = inputs()
    graphdef, state = build(case, dtype)

    def loss(state, x):
        return jnp.mean(jnp.square(nnx.merge(graphdef, state)(x, positions, SEGMENTS).astype(jnp.float32)))

    def decode(state, x):
        module = nnx.merge(graphdef, state)
        lengths = jnp.broadcast_to(jnp.arange(1, T + 1), (B, T))
        stored = cache.write_blocks(
            cache.allocate(module.entry_shapes(), B, cache.Layout(T, block=5)), module.compress(x, positions), 0
        )
        return module.out(module.attend(module.query(x, positions), stored, positions, lengths))

    x = x.astype(dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), state, x)
        decoded = jax.eval_shape(decode, state, x)
    assert gradients[1].dtype == decoded.dtype == dtype
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients[0]))


@pytest.mark.parametrize("case", BRIEF)
def test_bfloat16_stays_near_float32(case):
    """Bug: a softmax, a norm or an angle computed in bfloat16."""
    x, positions = inputs()
    positions = positions + 1000  # where an angle in bfloat16 would be off by whole turns
    exact = np.asarray(call(case, "__call__", x, positions))
    rough = call(case, "__call__", x.astype(jnp.bfloat16), positions, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.bfloat16
    error = np.asarray(rough, np.float32) - exact
    assert np.isfinite(error).all()
    assert np.linalg.norm(error) < BFLOAT16_ERROR * np.linalg.norm(exact)


@pytest.mark.parametrize("segmented", [False, True])
def test_chunked_core_equals_reference(segmented):
    """Bug: a chunk of queries sees past itself, or loses a document's start that lies in an earlier chunk."""
    length, width = 137, 7  # three chunks, the last one ragged; values narrower than keys
    q, k, v = random(B, length, 6, 10), random(B, length, 2, 10, seed=1), random(B, length, 2, width)
    probe = random(B, length, 6, width, seed=2)
    segments = jnp.stack([jnp.arange(length) // 61, jnp.arange(length) // 100]) if segmented else None

    def run(implementation):
        def outputs(q, k, v):
            o = core.dot_product_attention(q, k, v, scale=0.3, segment_ids=segments, implementation=implementation)
            return jnp.sum(o * probe), o

        return jax.jit(jax.grad(outputs, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    for chunked, reference in zip(*map(jax.tree.leaves, (run("chunked"), run("reference"))), strict=True):
        np.testing.assert_allclose(chunked, reference, atol=1e-5)


def test_core_refuses_an_unknown_implementation():
    """Bug: a misspelt implementation silently falls back to another (unwrapped: jaxtyping would refuse it first)."""
    q = jnp.zeros((1, 2, 1, 2))
    with pytest.raises(ValueError, match="flash"):
        inspect.unwrap(core.dot_product_attention)(q, q, q, scale=1.0, implementation="flash")
