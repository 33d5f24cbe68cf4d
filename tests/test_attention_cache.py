"""What every attention family must do when decoding: same answer as the forward pass, from the cache it promises."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BFLOAT16_ERROR, GAIN, SCALING, SLOTS, B, T, build, call, cases, inputs
from flax import nnx

from lrkv_jax.attention import cache

PLAIN, RECIPE = cases(qk_norm=False, qkv_bias=False), cases(qk_norm=True, qkv_bias=True)
BRIEF = cases(brief=True, qk_norm=True, qkv_bias=True)
GAINED = [
    case
    for case in cases(brief=True, **GAIN, **SCALING)
    if case.values[0].name in ("gqa-gqa", "lrkv-full-grouped", "lrkv-latent-even")
]
BLOCK = 5  # of `attend`: does not divide SLOTS
ROWS = 19  # more than any case has heads or latent dimensions


def entry_shapes(case, dtype=jnp.float32):
    """Shapes and dtypes of what `compress` returns for x [B, T, D]."""
    x, positions = inputs()
    graphdef, state = build(case, dtype)
    return jax.eval_shape(lambda x: nnx.merge(graphdef, state).compress(x, positions), x.astype(dtype))


def empty_cache(case, slots, fill=0.0, block=BLOCK):
    """A cache for B rows of at least `slots` slots, full of something that must not matter."""
    return jax.tree.map(lambda leaf: leaf + fill, cache.allocate(entry_shapes(case), B, cache.Layout(slots, block)))


def step(module, stored, key_positions, x, positions, t, **how):
    """Caches the tokens x [B, n, D] at slots t, t+1, .., and lets each attend up to itself."""
    slots = jnp.broadcast_to(t + jnp.arange(x.shape[1]), x.shape[:2])
    stored = cache.write(stored, module.compress(x, positions), slots)
    key_positions = jax.lax.dynamic_update_slice_in_dim(key_positions, positions, t, axis=1)
    o = module.attend(module.query(x, positions), stored, key_positions, slots + 1, **how)
    return stored, key_positions, module.out(o)


def decode(case, x, positions, chunks):
    """The outputs [B, T, D] of decoding x in chunks of the given sizes, into a cache that starts full of garbage."""
    stored, key_positions, outputs = empty_cache(case, SLOTS, fill=30.0), jnp.full((B, SLOTS), 977, jnp.int32), []
    for end, n in zip(np.cumsum(chunks), chunks, strict=True):
        new = slice(end - n, end)
        arguments = stored, key_positions, x[:, new], positions[:, new], jnp.asarray(end - n, jnp.int32)
        stored, key_positions, y = call(case, step, *arguments)
        outputs.append(y)
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("case", PLAIN + RECIPE + GAINED)
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
    q, entry, k, v = jax.tree.map(np.array, call(case, query_compress_expand, x, positions))
    q = q[:, :3]
    lengths = jnp.array([[1, SLOTS, 6], [10, 5, 2]], jnp.int32)  # SLOTS: into the last, short block
    o = np.asarray(call(case, attend, q, entry, positions, lengths))

    scale = nnx.merge(*build(case)).scale
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*o.shape[:3]):
        seen = slice(0, lengths[b, t])
        weights = np.exp(k[b, seen, h // group] @ q[b, t, h] * scale)
        np.testing.assert_allclose(o[b, t, h], weights / weights.sum() @ v[b, seen, h // group], atol=1e-5)

    for row, longest in enumerate(lengths.max(axis=1)):
        for leaf in jax.tree.leaves(entry):
            leaf[row, longest:] = 1e4
        positions = positions.at[row, longest:].add(7)
    np.testing.assert_array_equal(o, call(case, attend, q, entry, positions, lengths))


@pytest.mark.parametrize("case", BRIEF)
def test_rows_may_outnumber_heads(case):
    """Bug: what all heads share, or rows of the same positions do, is told by a dimension that is smaller than B."""
    x, _ = inputs(ROWS, 3)
    positions = jnp.broadcast_to(jnp.arange(3), (ROWS, 3))
    forward = call(case, "__call__", x, positions)
    np.testing.assert_allclose(call(case, attend_all, x, positions, positions[:1]), forward, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", BRIEF)
def test_a_query_that_sees_nothing_is_finite(case):
    """Bug: an inactive row of a batch, length 0, divides by zero; its NaN then spreads through the next layers."""
    x, positions = inputs(length=SLOTS)
    q, entry, *_ = call(case, query_compress_expand, x, positions)
    o = np.asarray(call(case, attend, q[:, :2], entry, positions, jnp.array([[0, 3], [0, 0]], jnp.int32)))
    assert np.isfinite(o).all()


def query_compress_expand(module, x, positions):
    """Queries, cache entry, keys and values."""
    entry = module.compress(x, positions)
    return module.query(x, positions), entry, *module.expand(entry, positions)


def attend(module, q, entry, key_positions, lengths):
    """Attention from a cache of the entry, in blocks that do not divide it."""
    stored = cache.allocate(module.entry_shapes(), len(q), cache.Layout(SLOTS, BLOCK))
    return module.attend(q, cache.write_blocks(stored, entry, 0), key_positions, lengths)


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
    q, stored = jax.eval_shape(module.query, x, positions), jax.eval_shape(lambda: empty_cache(case, slots, block=29))
    slots = -(-slots // 29) * 29
    key_positions, lengths = jnp.zeros((1, slots), jnp.int32), jnp.full((B, queries), slots, jnp.int32)

    def attend(q, stored):
        return module.attend(q, stored, key_positions, lengths)

    limit = B * slots * case.config.heads * case.config.head_dim
    assert largest_intermediate(jax.make_jaxpr(attend)(q, stored).jaxpr) < limit
    assert largest_intermediate(jax.make_jaxpr(functools.partial(expand_all, module))(stored).jaxpr) >= limit


def expand_all(module, stored):
    """What decoding must not form: the keys of all heads for all slots."""
    entry = cache.restore(stored, module.entry_shapes())
    k, _ = module.expand(entry, jnp.zeros((B, next(iter(entry.values())).shape[1]), jnp.int32))
    return jnp.repeat(k, module.config.heads // k.shape[2], axis=2) + 0


@pytest.mark.parametrize("case", BRIEF)
def test_bfloat16_decoding_stays_near_float32(case):
    """Bug: decoding accumulates or rotates in bfloat16, or a product of two dtypes has no kernel on this backend."""
    x, positions = inputs()
    exact = np.asarray(call(case, "__call__", x, positions))
    rough = call(case, attend_all, x.astype(jnp.bfloat16), positions, dtype=jnp.bfloat16)
    error = np.asarray(rough, np.float32) - exact
    assert np.isfinite(error).all()
    assert np.linalg.norm(error) < BFLOAT16_ERROR * np.linalg.norm(exact)


def attend_all(module, x, positions, key_positions=None):
    """The forward pass as one chunk of decoding; one row of key positions may stand for all."""
    key_positions = positions if key_positions is None else key_positions
    lengths = jnp.broadcast_to(jnp.arange(1, x.shape[1] + 1), x.shape[:2])
    entry = module.compress(x, positions)
    return module.out(attend(module, module.query(x, positions), entry, key_positions, lengths))
