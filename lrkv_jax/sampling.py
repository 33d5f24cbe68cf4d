"""Which token comes next: greedy, temperature, top-k, top-p; a draw depends on its row's key alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from lrkv_jax.settings import Settings

TINY = float(jnp.finfo(jnp.float32).tiny)


class Sampling(Settings):
    """How a token is drawn from the logits; in this order: temperature, top-k, top-p."""

    temperature: float = 1.0
    """Divides the logits; 0, or what float32 can't tell from it, takes the likeliest token (greedy)."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens that together have this probability (arXiv 1904.09751); 1 = all."""

    def model_post_init(self, _: object) -> None:
        """Refuses what is no way to draw."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: must be a number from 0 up (0 = greedy)")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1 (all tokens)")


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, "B"], allowed: Bool[Array, "V"], sampling: Sampling
) -> Int[Array, "B"]:
    """One token a row; a token that isn't allowed is never drawn."""
    logits = jnp.where(allowed[None], logits.astype(jnp.float32), -jnp.inf)
    if sampling.temperature < TINY:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Relative to the likeliest, so that dividing by a tiny temperature can't overflow it.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p < 1:
        falling = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # the likeliest token has 0 before it: always kept
        least = jnp.min(jnp.where(before < sampling.top_p, falling, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
