"""Cross-entropy sums against float64 NumPy and against plain autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax import loss

B, T, D, V = 3, 10, 5, 13
rng = np.random.default_rng(0)
HIDDEN = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
UNEMBED = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
LABELS = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
WEIGHTS = jnp.asarray(rng.random((B, T)) < 0.7, jnp.float32)


def oracle(softcap, z_loss):
    """(Σ w·nats, objective) by loops, float64."""
    nats = objective = 0.0
    hidden, unembed, labels, weights = (np.asarray(a, np.float64) for a in (HIDDEN, UNEMBED, LABELS, WEIGHTS))
    for b in range(B):
        for t in range(T):
            logits = hidden[b, t] @ unembed
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            log_z = np.log(np.sum(np.exp(logits)))
            nats += weights[b, t] * (log_z - logits[int(labels[b, t])])
            objective += weights[b, t] * (log_z - logits[int(labels[b, t])] + z_loss * log_z**2)
    return nats, objective


def plain(hidden, unembed, softcap, z_loss):
    logits = jnp.einsum("btd,dv->btv", hidden, unembed)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nats = log_z - jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return jnp.sum(WEIGHTS * (nats + z_loss * log_z**2))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_sums_and_gradient(softcap, z_loss, chunks):
    """Bugs: a chunk lost or counted twice, the cap's slope or the z-loss left out of the gradient, weights ignored."""

    def ours(hidden, unembed):
        return loss.sum_nats(hidden, unembed, LABELS, WEIGHTS, softcap, chunks, z_loss)[::-1]

    (objective, nats), grads = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(HIDDEN, UNEMBED)
    np.testing.assert_allclose((nats, objective), oracle(softcap, z_loss), rtol=1e-5)
    expected = jax.grad(plain, argnums=(0, 1))(HIDDEN, UNEMBED, softcap, z_loss)
    for ours_, theirs in zip(grads, expected, strict=True):
        np.testing.assert_allclose(ours_, theirs, atol=1e-5)


def test_value_without_gradient_is_the_same():
    """Bug: the path taken outside of differentiation computes something else."""
    inside = jax.vjp(lambda h: loss.sum_nats(h, UNEMBED, LABELS, WEIGHTS, 15.0, 2, 0.1), HIDDEN)[0]
    outside = loss.sum_nats(HIDDEN, UNEMBED, LABELS, WEIGHTS, 15.0, 2, 0.1)
    np.testing.assert_array_equal(inside, outside)


def test_cotangent_scales_the_gradient():
    """Bug: the gradient formed in the forward pass forgets what comes back."""
    grad = jax.grad(lambda h, s: s * loss.sum_nats(h, UNEMBED, LABELS, WEIGHTS, None, 2, 0.0)[1])
    np.testing.assert_allclose(grad(HIDDEN, 3.0), 3 * grad(HIDDEN, 1.0), rtol=1e-6)


def test_token_nats_sum_to_sum_nats():
    """Bug: evaluation and training disagree on the loss, or chunks come back in another order."""
    nats = loss.token_nats(HIDDEN, UNEMBED, LABELS, softcap=15.0, chunks=5)
    one = loss.token_nats(HIDDEN, UNEMBED, LABELS, softcap=15.0, chunks=1)
    np.testing.assert_allclose(nats, one, rtol=1e-6)
    total, _ = loss.sum_nats(HIDDEN, UNEMBED, LABELS, WEIGHTS, 15.0, 1, 0.0)
    np.testing.assert_allclose(np.sum(WEIGHTS * nats), total, rtol=1e-6)


def test_bfloat16_is_summed_in_float32():
    """Bug: sums kept in bfloat16 stop growing after some hundred tokens."""
    hidden = jnp.tile(jnp.asarray(HIDDEN, jnp.bfloat16), (50, 1, 1))
    labels, weights = jnp.tile(LABELS, (50, 1)), jnp.ones((150, T), jnp.float32)
    nats, _ = loss.sum_nats(hidden, UNEMBED, labels, weights, None, 1, 0.0)
    exact, _ = loss.sum_nats(hidden.astype(jnp.float32), UNEMBED, labels, weights, None, 1, 0.0)
    np.testing.assert_allclose(nats, exact, rtol=3e-3)
