"""What every attention family must do when decoding: same answer as the forward pass, from the cache it promises."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BFLOAT16_ERROR, SLOTS, B, T, build, call, cases, inputs
from flax import nnx

from lrkv_jax.attention import core

PLAIN, RECIPE = cases(qk_norm=False, qkv_bias=False), cases(qk_norm=True, qkv_bias=True)
BRIEF = cases(brief=True, qk_norm=True, qkv_bias=True)
BLOCK = 5  # of `attend`: does not divide SLOTS


def entry_shapes(case, dtype=jnp.float32):
    """Shapes and dtypes of what `compress` returns for x [B, T, D]."""
    x, positions = inputs()
    graphdef, state = build(case, dtype)
    return jax.eval_shape(lambda x: nnx.merge(graphdef, state).compress(x, positions), x.astype(dtype))


def empty_cache(case, slots, fill=0.0):
    """A cache for B rows of `slots` slots, full of something that must not matter."""
    return jax.tree.map(lambda leaf: jnp.full((B, slots, *leaf.shape[2:]), fill, leaf.dtype), entry_shapes(case))


def step(module, cache, key_positions, x, positions, t):
    """Caches the tokens x [B, n, D] at slots t, t+1, .., and lets each attend up to itself."""
    write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, t, axis=1)  # noqa: E731
    cache = jax.tree.map(write, cache, module.compress(x, positions))
    key_positions = write(key_positions, positions)
    lengths = jnp.broadcast_to(t + 1 + jnp.arange(x.shape[1]), x.shape[:2])
    o = module.attend(module.query(x, positions), cache, key_positions, lengths, block=BLOCK)
    return cache, key_positions, module.out(o)


def decode(case, x, positions, chunks):
    """The outputs [B, T, D] of decoding x in chunks of the given sizes, into a cache that starts full of garbage."""
    cache, key_positions, outputs = empty_cache(case, SLOTS, fill=30.0), jnp.full((B, SLOTS), 977, jnp.int32), []
    for end, n in zip(np.cumsum(chunks), chunks, strict=True):
        new = slice(end - n, end)
        arguments = cache, key_positions, x[:, new], positions[:, new], jnp.asarray(end - n, jnp.int32)
        cache, key_positions, y = call(case, step, *arguments)
        outputs.append(y)
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("case", PLAIN + RECIPE)
def test_decoding_equals_forward(case):
    """Bug: the cache lacks something, a rotation is missing or double, a block counts twice, an index is a position."""
    x, positions = inputs()
    forward = call(case, "__call__", x, positions)
    for chunks in ([1] * T, [5] + [1] * (T - 5), [T - 1, 1], [5, 5, 1]):
        np.testing.assert_allclose(decode(case, x, positions, chunks), forward, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", RECIPE)
def test_attend_sees_its_lengths_exactly(case):
    """Bug: a length is off by one or shared between rows or queries; a later slot has influence."""
    x, positions = inputs(length=SLOTS)
    q, cache, k, v = jax.tree.map(np.array, call(case, query_compress_expand, x, positions))
    q = q[:, :3]
    lengths = jnp.array([[1, SLOTS, 6], [10, 5, 2]], jnp.int32)  # SLOTS: into the last, short block
    o = np.asarray(call(case, attend, q, cache, positions, lengths))

    scale = nnx.merge(*build(case)).scale
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*o.shape[:3]):
        seen = slice(0, lengths[b, t])
        weights = np.exp(k[b, seen, h // group] @ q[b, t, h] * scale)
        np.testing.assert_allclose(o[b, t, h], weights / weights.sum() @ v[b, seen, h // group], atol=1e-5)

    for row, longest in enumerate(lengths.max(axis=1)):
        for leaf in jax.tree.leaves(cache):
            leaf[row, longest:] = 1e4
        positions = positions.at[row, longest:].add(7)
    np.testing.assert_array_equal(o, call(case, attend, q, cache, positions, lengths))


@pytest.mark.parametrize("case", BRIEF)
def test_a_query_that_sees_nothing_is_finite(case):
    """Bug: an inactive row of a batch, length 0, divides by zero; its NaN then spreads through the next layers."""
    x, positions = inputs(length=SLOTS)
    q, cache, *_ = call(case, query_compress_expand, x, positions)
    o = np.asarray(call(case, attend, q[:, :2], cache, positions, jnp.array([[0, 3], [0, 0]], jnp.int32)))
    assert np.isfinite(o).all()


def query_compress_expand(module, x, positions):
    """Queries, cache entry, keys and values."""
    entry = module.compress(x, positions)
    return module.query(x, positions), entry, *module.expand(entry, positions)


def attend(module, q, cache, key_positions, lengths):
    """Attention from the cache, in blocks that do not divide it."""
    return module.attend(q, cache, key_positions, lengths, block=BLOCK)


def cached_values(config):
    """Values per token and layer by the table of the mathematics, and QK-norm's float32 scalars beside them."""
    heads, head_dim = config.heads, config.head_dim
    kv_heads = getattr(config, "kv_heads", None) or heads
    match config.family:
        case "gqa":
            return 2 * kv_heads * head_dim, 0
        case "mla":
            rotary = head_dim // 2 if config.rotary_dim is None else config.rotary_dim
            return config.latent + rotary, heads * config.qk_norm
        case "lrkv":
            return 2 * (head_dim + kv_heads * config.rank), kv_heads * config.qk_norm
    pytest.fail(f"no cache formula for family {config.family!r}: add it to {__file__}")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", PLAIN + RECIPE)
def test_cache_holds_what_the_table_says(case, dtype):
    """Bug: expanded keys, a copy per query head or an uncounted norm is cached; s is kept in bfloat16."""
    entry = entry_shapes(case, dtype)
    values, scalars = cached_values(case.config)
    allocated = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(entry))
    assert allocated == B * T * (values * jnp.dtype(dtype).itemsize + scalars * 4)


def largest_intermediate(jaxpr):
    """Elements of the largest array that any equation of a jaxpr makes, loops and calls included."""
    largest = 0
    for equation in jaxpr.eqns:
        largest = max([largest, *(math.prod(out.aval.shape) for out in equation.outvars)])
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                largest = max(largest, largest_intermediate(getattr(inner, "jaxpr", inner)))
    return largest


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("case", RECIPE)
def test_attend_never_expands_the_cache(case, queries):
    """Bug: decoding forms the keys or values of all heads for the whole cache, which is what it exists to avoid."""
    slots = 601
    module, (x, positions) = nnx.merge(*build(case)), inputs(length=queries)
    q, cache = jax.eval_shape(module.query, x, positions), jax.eval_shape(lambda: empty_cache(case, slots))
    key_positions, lengths = jnp.zeros((B, slots), jnp.int32), jnp.full((B, queries), slots, jnp.int32)

    def attend(q, cache):
        return module.attend(q, cache, key_positions, lengths, block=29)

    def attend_expanded(q, cache):
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) + 0 for a in module.expand(cache, key_positions))
        score = lambda entry, _: jnp.einsum("bthc,bshc->bhts", q, entry[0])  # noqa: E731
        weigh = lambda weights, entry, _: jnp.einsum("bhts,bshc->bhtc", weights, entry[1])  # noqa: E731
        return core.online_softmax(score, weigh, (k, v), key_positions, lengths, 29)

    limit = B * slots * case.config.heads * case.config.head_dim
    assert largest_intermediate(jax.make_jaxpr(attend)(q, cache).jaxpr) < limit
    assert largest_intermediate(jax.make_jaxpr(attend_expanded)(q, cache).jaxpr) >= limit


@pytest.mark.parametrize("case", BRIEF)
def test_bfloat16_decoding_stays_near_float32(case):
    """Bug: decoding accumulates or rotates in bfloat16, or a product of two dtypes has no kernel on this backend."""
    x, positions = inputs()
    exact = np.asarray(call(case, "__call__", x, positions))
    rough = call(case, attend_all, x.astype(jnp.bfloat16), positions, dtype=jnp.bfloat16)
    error = np.asarray(rough, np.float32) - exact
    assert np.isfinite(error).all()
    assert np.linalg.norm(error) < BFLOAT16_ERROR * np.linalg.norm(exact)


def attend_all(module, x, positions):
    """The forward pass as one chunk of decoding."""
    lengths = jnp.broadcast_to(jnp.arange(1, T + 1), (B, T))
    return module.out(attend(module, module.query(x, positions), module.compress(x, positions), positions, lengths))
