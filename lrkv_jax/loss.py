"""Next-token cross-entropy in float32, as sums and counts, chunked over tokens: all logits never exist at once.

Also its blend with the divergence from another model, the teacher (distillation, arXiv 1503.02531).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Teacher(NamedTuple):
    """The final residual stream of another model on the same tokens, and what makes logits of it."""

    hidden: Float[Array, "B T E"]
    unembed: Float[Array, "E V"]


def token_nats(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    *,
    softcap: float | None,
    chunks: int,
    ways: int = 1,
) -> Float[Array, "B T"]:
    """−log p(label) at each position, in nats; `chunks` and `ways` as in `sum_nats`. Not meant for gradients."""
    weight = unembed.astype(hidden.dtype)

    def chunk(part: tuple[Array, Array]) -> Array:
        return _nats(_capped(part[0], weight, softcap)[0], part[1])[0]

    return _unsplit(jax.lax.map(chunk, (_split(hidden, chunks, ways), _split(labels, chunks, ways))), ways)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 9, 10))
def sum_nats(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    softcap: float | None,
    chunks: int,
    z_loss: float,
    ways: int = 1,
    teacher: Teacher | None = None,
    share: float = 0.0,
    teacher_softcap: float | None = None,
) -> tuple[Float[Array, ""], ...]:
    """(Σ w·nats, Σ w·nats + z_loss·Σ w·logsumexp²): what is reported, and what is minimised.

    The gradient of the second is formed in the forward pass, chunk by chunk, while the logits are at hand; the others
    are reports and pass no gradient on. The z-loss is that of PaLM (arXiv 2204.02311). Where the sequence is split
    over `ways` devices, each chunk takes its part of every device's positions; `ways` times `chunks` must divide T.

    With a teacher, whose distribution over the vocabulary is p where the model's is q, nats become
    (1 − share)·nats + share·KL in the second, KL = Σ p·log(p/q), and a third result is Σ w·KL. The teacher is fixed.
    """
    settings = (softcap, chunks, z_loss, ways, teacher, share, teacher_softcap)
    return _forward(hidden, unembed, labels, weights, *settings, gradient=False)[0]


def _forward(
    hidden, unembed, labels, weights, softcap, chunks, z_loss, ways, teacher, share, teacher_softcap, gradient=True
):
    weight = unembed.astype(hidden.dtype)

    def chunk(carry, part):
        sums, d_weight = carry
        x, label, w, *seen = part
        logits, slope = _capped(x, weight, softcap)
        losses, log_z, exponentials, total = _nats(logits, label)
        sought = losses
        if teacher is not None:
            log_p = _log_softmax(*seen, teacher.unembed, teacher_softcap)
            p = jnp.exp(log_p)
            divergences = jnp.sum(p * (log_p - (logits - log_z[..., None])), axis=-1)
            sought = (1 - share) * losses + share * divergences
        found = [jnp.sum(w * losses), jnp.sum(w * (sought + z_loss * log_z**2))]
        found += [] if teacher is None else [jnp.sum(w * divergences)]
        sums = tuple(map(jnp.add, sums, found))
        if not gradient:
            return (sums, d_weight), None
        d_log_z = (w * (1 + 2 * z_loss * log_z) / total)[..., None]
        hit = jnp.arange(logits.shape[-1], dtype=label.dtype)[None, None, :] == label[..., None]
        d_logits = exponentials * d_log_z
        targets = jnp.where(hit, w[..., None], 0.0)
        if teacher is not None:  # the blend of two cross-entropies is that with the blended targets
            targets = (1 - share) * targets + share * w[..., None] * p
        d_logits -= targets
        d_logits = (d_logits if slope is None else d_logits * slope).astype(x.dtype)
        d_weight += jnp.einsum("btd,btv->dv", x, d_logits).astype(jnp.float32)
        return (sums, d_weight), jnp.einsum("btv,dv->btd", d_logits, weight)

    arrays = (hidden, labels, weights, *(() if teacher is None else (teacher.hidden,)))
    zeros = (jnp.zeros((), jnp.float32),) * (2 if teacher is None else 3)
    start = (zeros, jnp.zeros(unembed.shape if gradient else (), jnp.float32))
    parts = tuple(_split(x, chunks, ways) for x in arrays)
    (sums, d_weight), d_hidden = jax.lax.scan(chunk, start, parts, unroll=chunks == 1)
    return sums, (d_hidden if d_hidden is None else _unsplit(d_hidden, ways), d_weight)


def _backward(softcap, chunks, z_loss, ways, share, teacher_softcap, saved, cotangents):
    d_hidden, d_weight = saved
    scale = cotangents[1]
    return d_hidden * scale.astype(d_hidden.dtype), d_weight * scale, None, None, None


sum_nats.defvjp(_forward, _backward)


def _capped(x: Array, weight: Array, softcap: float | None) -> tuple[Array, Array | None]:
    """Logits of a chunk in float32, and the soft-cap's slope (None without a cap)."""
    logits = jnp.einsum("btd,dv->btv", x, weight).astype(jnp.float32)
    if softcap is None:
        return logits, None
    bent = jnp.tanh(logits / softcap)
    return softcap * bent, 1 - bent**2


def _nats(logits: Array, labels: Array) -> tuple[Array, Array, Array, Array]:
    """Per token: nats, logsumexp; and the exponentials with their sum, for the gradient."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    total = jnp.sum(exponentials, axis=-1)
    log_z = jnp.log(total) + top[..., 0]
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return log_z - chosen, log_z, exponentials, total


def _log_softmax(hidden: Array, unembed: Array, softcap: float | None) -> Array:
    """Log-probabilities of a chunk, in float32."""
    return jax.nn.log_softmax(_capped(hidden, unembed.astype(hidden.dtype), softcap)[0])


def _split(x: Array, chunks: int, ways: int) -> Array:
    """[B, T, ...] -> [chunks, B, T/chunks, ...]; batch and devices' parts of the sequence keep their sharding."""
    size = x.shape[1] // (ways * chunks)
    parts = x.reshape(x.shape[0], ways, chunks, size, *x.shape[2:])
    return jnp.moveaxis(parts, 2, 0).reshape(chunks, x.shape[0], ways * size, *x.shape[2:])


def _unsplit(x: Array, ways: int) -> Array:
    """The inverse."""
    chunks, rows, length = x.shape[:3]
    parts = x.reshape(chunks, rows, ways, length // ways, *x.shape[3:])
    return jnp.moveaxis(parts, 0, 2).reshape(rows, chunks * length, *x.shape[3:])
