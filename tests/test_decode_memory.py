"""What decoding holds and moves: the bytes it promises on every device, once, and nothing of all heads' keys' size."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import decoder, forced, forward, mesh, program, stepped
from models import FAMILIES
from test_attention_cache import is_jaxpr

from lrkv_jax import accounting, decode
from lrkv_jax.settings import UserError

# Values on each device of two that share the heads, per token and layer, QK-norm's scales included: H = 4, C = 8.
HALVED = {
    "mha": 2 * 2 * 8,
    "gqa": 2 * 1 * 8,
    "mqa": 2 * 8,  # one key/value head for all: on both devices
    "mla": 6 + 4 + 2,  # the latent and the rotary key on both
    "lrkv": 2 * (8 + 2 * 3) + 2,  # the shared key and value on both
    "lrkv_shared": 2 * (8 + 2 * 3) + 2,
    "lrkv_latent": 2 * (8 + 2 * 4) + 2,
}


def live(family, **how):
    """A session of one token a row, two layers deep."""
    decoding = decoder(family, layers=2, weights=False, **how)
    return decode.Session(decoding, decoding._empty_state(jnp.ones(decoding.batch, jnp.int32)), 1)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*[(family, "float32") for family in FAMILIES], ("mla", "bfloat16"), ("lrkv", "bfloat16")],
)
def test_live_bytes_are_those_of_accounting(family, dtype):
    """Bug: a layer's cache exists twice, holds expanded keys, or grows by more than a token a slot."""
    made = program(family, layers=2, dtype=dtype)
    _, size = accounting.cache_per_token(made.model, made.attention)
    for slots in (8, 12):
        session = live(family, dtype=dtype, batch=3, slots=slots, block=4)
        assert session.cache_bytes() == session.cache_bytes_per_device() == 3 * slots * size


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_share_the_cache_of_two_devices(family):
    """Bug: codes or heads are on every device, or what they share is split and gathered at every step."""
    session = live(family, on=mesh(data=2, tensor=2), batch=4, slots=8, block=4)
    default = HALVED.get(family)
    assert default is not None, f"add {family} to HALVED"
    assert session.cache_bytes_per_device() == 2 * 2 * 8 * 4 * default


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *[("mqa", "blocked"), ("mla", "blocked"), ("lrkv", "blocked"), ("lrkv_shared", "reference")],
        *[("gqa", "pallas_tpu"), ("mla", "pallas_tpu"), ("lrkv", "pallas_tpu"), ("lrkv", "pallas_gpu")],
    ],
)
def test_sharded_decoding_is_unsharded_decoding(family, implementation):
    """Bug: a device reads another's heads or rows, or adds up what isn't its own."""
    tokens, logits = forward(family, rows=4)
    on = mesh(data=2, tensor=2)
    decoding = decoder(family, on=on, implementation=implementation, batch=4)
    if implementation.startswith("pallas"):  # the kernels read no prompts
        np.testing.assert_allclose(stepped(decoding, None, tokens), logits, atol=1e-4)
    else:
        found = forced(decoding, tokens[:, :7], tokens[:, 7:], decoding.layout.block)
        np.testing.assert_allclose(found, logits[:, 6:], atol=1e-4)


@pytest.mark.parametrize("family", ["gqa", "mla", "lrkv", "lrkv_shared"])
def test_devices_do_not_send_their_cache(family):
    """Bug: a sharding that doesn't fit makes XLA gather the cache at every step, which no result shows."""
    slots = 4096
    decoding = decoder(family, on=mesh(data=2, tensor=2), batch=4, slots=slots, block=512, weights=False)
    state = decoding.abstract_state()
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(decoding.step, donate_argnums=1, out_shardings=placed)
    with jax.set_mesh(decoding.mesh):
        text = step.lower(decoding.abstract_weights(), state, jax.ShapeDtypeStruct((4,), jnp.int32)).compile().as_text()
    sent = [(size(shapes), line) for line, shapes in collectives(text)]
    assert sent, "two devices share every head's output: something must be sent"
    assert max(sent)[0] < slots, max(sent)[1]


def collectives(text):
    """(line, shapes of the results) of each operation between devices in a compiled program."""
    for line in text.splitlines():
        found = re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)", line)
        if found:
            yield line, found[1]


def size(shapes):
    """Elements of the largest array in `(f32[4,2]{1,0}, s32[])`."""
    return max(math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", shapes))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_forms_nothing_of_all_heads_keys(family):
    """Bug: somewhere between the token and the logits the whole cache is expanded, upcast or copied."""
    config, slots = FAMILIES[family], 512
    limit = slots * config.heads * config.head_dim

    def largest(implementation):
        decoding = decoder(family, implementation=implementation, slots=slots, weights=False)
        arguments = decoding.abstract_weights(), decoding.abstract_state(), jax.ShapeDtypeStruct((1,), jnp.int32)
        return largest_but_updates(jax.make_jaxpr(decoding.step)(*arguments).jaxpr)

    assert largest("blocked") < limit
    if config.family != "gqa":  # whose cache needs no expanding
        assert largest("reference") >= limit


def largest_but_updates(jaxpr):
    """Elements of the largest array that a jaxpr makes, without the cache itself with new tokens in it."""
    largest = 0
    for equation in jaxpr.eqns:
        inner = [leaf for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr) if is_jaxpr(leaf)]
        if inner:
            largest = max(largest, *(largest_but_updates(getattr(leaf, "jaxpr", leaf)) for leaf in inner))
        # An inner jaxpr's results are counted where it makes them.
        elif equation.primitive.name not in ("scatter", "dynamic_update_slice"):
            largest = max([largest, *(math.prod(out.aval.shape) for out in equation.outvars)])
    return largest


def test_heads_must_divide():
    """Bug: a message of XLA's about an array that the user doesn't know."""
    with pytest.raises(UserError, match="batch = 3: rows must divide over slices x data x fsdp = 2"):
        decoder("lrkv", on=mesh(data=2), batch=3)
