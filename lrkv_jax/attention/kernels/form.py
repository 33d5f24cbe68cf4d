"""Attention of new tokens over a compressed cache, in one form that all families share, and the ways to run it.

A family says what it reads as `Queries` and `Blocks`; for query row j of key/value head k and cached position s

    score = scale · k_scale_k(s) · [ q_shared · k_shared(s) + q_code · k_code_k(s) + (M cs(s)) · k_code_k(s)
                                     + m_bias · cs(s) + bias ]
    sums  = Σ_s softmax(score)(s) · { v_shared(s), v_code_k(s) }

Absent where None. GQA has codes only (its keys), MLA the shared part only (its latent, key and value in one),
LRKV both; M and cs(s) are its rotation matrix and the angles of position s (attention/lrkv.py). Letters as in the
package; n blocks of S positions; J = G·T query rows of a key/value head, row g·T + t being query t of group member g.

Cached positions come last, and the cache is stored block by block: a block is contiguous, its positions lie in a TPU's
lanes, and ranks below 128 are not padded to 128 there.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class Queries(NamedTuple):
    """The query side of one attention call; small, and read once."""

    shared: Float[Array, "B K J X"] | None = None
    """Meets `k_shared`."""
    code: Float[Array, "B K J R"] | None = None
    """Meets `k_code`."""
    m: Float[Array, "B K J R C"] | None = None
    """M, whose product with the angles of a position meets `k_code`; in float32."""
    m_bias: Float[Array, "B K J C"] | None = None
    """Meets the angles themselves (a rotated key bias); in float32."""
    bias: Float[Array, "B K J"] | None = None
    """The same at every position (a key bias that carries no position)."""


class Blocks(NamedTuple):
    """The cache side: arrays of n blocks of S positions each."""

    k_shared: Float[Array, "n B X S"] | None = None
    v_shared: Float[Array, "n B W S"] | None = None
    """None where `k_shared` is the value too."""
    k_code: Float[Array, "n B K R S"] | None = None
    v_code: Float[Array, "n B K V S"] | None = None
    k_scale: Float[Array, "n B K S"] | None = None
    """In float32."""
    angles: Float[Array, "n b C S"] | None = None
    """cs, [cos θ_m s ; sin θ_m s]; b is 1 where all rows' positions are the same, else B."""


class Sums(NamedTuple):
    """Softmax-weighted sums, float32."""

    shared: Float[Array, "B K J W"] | None
    code: Float[Array, "B K J V"] | None
