"""Which token is drawn: exactly the allowed ones, as often as they should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from lrkv_jax.sampling import Sampling, sample

# Probabilities .4 .3 .15 .1 .05, out of order; token 5 is the likeliest and forbidden.
PROBABILITIES = np.array([0.15, 0.4, 0.05, 0.3, 0.1, 0.9])
LOGITS = jnp.asarray(np.log(PROBABILITIES), jnp.float32)
ALLOWED = jnp.arange(6) < 5
DRAWS = 4096


def draw(logits=LOGITS, allowed=ALLOWED, seed=0, **sampling):
    """How often each token is drawn, of DRAWS."""
    keys = jax.random.split(jax.random.key(seed), DRAWS)
    tokens = sample(jnp.broadcast_to(logits, (DRAWS, *logits.shape)), keys, allowed, Sampling(**sampling))
    return np.bincount(tokens, minlength=len(logits))


def check(counts, weights):
    """Chi-square far below what even the hundredth of a percent of fair draws exceed; nothing beside `weights`."""
    expected = DRAWS * np.asarray(weights) / np.sum(weights)
    there = expected > 0
    assert not counts[~there].any(), counts
    assert np.sum((counts[there] - expected[there]) ** 2 / expected[there]) < 25, (counts, expected)


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        ({}, [0.15, 0.4, 0.05, 0.3, 0.1, 0]),
        ({"top_k": 0}, [0.15, 0.4, 0.05, 0.3, 0.1, 0]),
        ({"top_k": 6}, [0.15, 0.4, 0.05, 0.3, 0.1, 0]),
        ({"top_k": 99}, [0.15, 0.4, 0.05, 0.3, 0.1, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0, 0]),
        ({"top_k": 3}, [0.15, 0.4, 0, 0.3, 0, 0]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0, 0, 0]),
        ({"top_p": 0.41}, [0, 0.4, 0, 0.3, 0, 0]),
        ({"top_p": 0.84}, [0.15, 0.4, 0, 0.3, 0, 0]),
        ({"top_p": 0.999}, [0.15, 0.4, 0.05, 0.3, 0.1, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 0.4, 0, 0.3, 0, 0]),  # of the three, two have .82
        ({"temperature": 0.5}, [0.15**2, 0.4**2, 0.05**2, 0.3**2, 0.1**2, 0]),
        ({"temperature": 2.0}, [0.15**0.5, 0.4**0.5, 0.05**0.5, 0.3**0.5, 0.1**0.5, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 2, "top_p": 0.1}, [0, 1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling, weights):
    """Bug: the forbidden likeliest token is drawn or takes one of the k, or p; a cut is off by one; the order of
    temperature and cuts is another."""
    check(draw(**sampling), weights)


def test_ties_are_kept_together():
    """Bug: of equal tokens at the edge of a cut, one is dropped at random or by its number, or none is left."""
    tied = jnp.zeros(6)
    check(draw(tied, top_k=2), [1, 1, 1, 1, 1, 0])
    check(draw(tied, top_p=0.1), [1, 1, 1, 1, 1, 0])
    check(draw(jnp.asarray([3.0, 1, 1, 0, 0, 9]), top_k=2), np.exp([3, 1, 1, -np.inf, -np.inf, -np.inf]))
    assert draw(tied, temperature=0.0)[0] == DRAWS


def test_small_temperatures_and_few_tokens_stay_finite():
    """Bug: logits divided by a tiny temperature overflow to NaN, and token 0 is drawn; one allowed token is missed."""
    check(draw(temperature=1e-30), [0, 1, 0, 0, 0, 0])
    only = jnp.arange(6) == 2
    for sampling in ({}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 1, "top_p": 1e-6}, {"temperature": 0.0}):
        check(draw(allowed=only, **sampling), [0, 0, 1, 0, 0, 0])


def test_a_draw_depends_on_its_own_key_alone():
    """Bug: rows share a key, or a row's number enters."""
    keys = jax.random.split(jax.random.key(1), 64)
    logits = jnp.broadcast_to(LOGITS, (64, 6))
    tokens = sample(logits, keys, ALLOWED, Sampling(top_p=0.9))
    np.testing.assert_array_equal(tokens[::-1], sample(logits, keys[::-1], ALLOWED, Sampling(top_p=0.9)))
    np.testing.assert_array_equal(tokens[5:6], sample(logits[:1], keys[5:6], ALLOWED, Sampling(top_p=0.9)))
    assert len(set(tokens.tolist())) > 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "must be a number from 0 up"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("top_k", -1, "must be 0 .all tokens. or more"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.1, "at most 1"),
        ("top_p", float("nan"), "finite"),
    ],
)
def test_no_way_to_draw_is_refused(field, value, message):
    """Bug: a value that draws nothing or NaN is taken."""
    with pytest.raises(pydantic.ValidationError, match=message):
        Sampling(**{field: value})
