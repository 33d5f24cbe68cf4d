"""Kernels that read a compressed cache: `form` says what they are given, `blocked` is their plain-JAX twin."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Int

from lrkv_jax.attention.kernels import blocked
from lrkv_jax.attention.kernels.form import Blocks, Queries, Sums

Implementation = Literal["reference", "blocked", "pallas_tpu", "pallas_gpu"]


def attend(
    queries: Queries,
    blocks: Blocks,
    lengths: Int[Array, "B T"],
    *,
    scale: float,
    implementation: Implementation,
    interpret: bool = False,
) -> Sums:
    """Reads the cache: query t of row b sees its first lengths[b, t] positions; blocks beyond all lengths aren't read.

    The Pallas kernels take one query a row, T = 1; with `interpret` they run anywhere, step by step in Python's JAX.
    Raises ValueError for an implementation that has no absorbed form.
    """
    if implementation == "blocked":
        return blocked.attend(queries, blocks, lengths, scale=scale)
    if implementation == "pallas_tpu":
        from lrkv_jax.attention.kernels import tpu as kernel
    elif implementation == "pallas_gpu":
        from lrkv_jax.attention.kernels import gpu as kernel
    else:
        raise ValueError(f"implementation = {implementation!r}: no kernel; have blocked, pallas_tpu, pallas_gpu")
    return kernel.attend(queries, blocks, lengths, scale=scale, interpret=interpret)
