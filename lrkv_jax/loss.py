"""Next-token cross-entropy in float32, as sums and counts, chunked over tokens: all logits never exist at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def sum_nats(
    hidden: Float[Array, "B T D"],
    unembed: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    softcap: float | None,
    chunks: int,
    z_loss: float,
    ways: int = 1,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(Σ w·nats, Σ w·nats + z_loss·Σ w·logsumexp²): what is reported, and what is minimised.

    The gradient of the second is formed in the forward pass, chunk by chunk, while the logits are at hand; the first
    is a report and passes no gradient on. The z-loss is that of PaLM (arXiv 2204.02311). Where the sequence is split
    over `ways` devices, each chunk takes its part of every device's positions; `ways` times `chunks` must divide T.
    """
    return _forward(hidden, unembed, labels, weights, softcap, chunks, z_loss, ways, gradient=False)[0]


def _forward(hidden, unembed, labels, weights, softcap, chunks, z_loss, ways=1, gradient=True):
    weight = unembed.astype(hidden.dtype)

    def chunk(carry, part):
        nats, objective, d_weight = carry
        x, label, w = part
        logits, slope = _capped(x, weight, softcap)
        losses, log_z, exponentials, total = _nats(logits, label)
        nats += jnp.sum(w * losses)
        objective += jnp.sum(w * (losses + z_loss * log_z**2))
        if not gradient:
            return (nats, objective, d_weight), None
        d_log_z = (w * (1 + 2 * z_loss * log_z) / total)[..., None]
        hit = jnp.arange(logits.shape[-1], dtype=label.dtype)[None, None, :] == label[..., None]
        d_logits = exponentials * d_log_z - jnp.where(hit, w[..., None], 0.0)
        d_logits = (d_logits if slope is None else d_logits * slope).astype(x.dtype)
        d_weight += jnp.einsum("btd,btv->dv", x, d_logits).astype(jnp.float32)
        return (nats, objective, d_weight), jnp.einsum("btv,dv->btd", d_logits, weight)

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros(unembed.shape if gradient else (), jnp.float32))
    parts = tuple(_split(x, chunks, ways) for x in (hidden, labels, weights))
    (nats, objective, d_weight), d_hidden = jax.lax.scan(chunk, start, parts, unroll=chunks == 1)
    return (nats, objective), (d_hidden if d_hidden is None else _unsplit(d_hidden, ways), d_weight)


def _backward(softcap, chunks, z_loss, ways, saved, cotangents):
    d_hidden, d_weight = saved
    scale = cotangents[1]
    return d_hidden * scale.astype(d_hidden.dtype), d_weight * scale, None, None


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
