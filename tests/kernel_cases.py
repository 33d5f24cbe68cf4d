"""Random caches in the one form of attention/kernels/form.py, and that form's formula in float64 NumPy.

Sizes are small primes (or twice one, where angles come in pairs), so that a transposed or wrongly grouped axis is a
shape error or a wrong number. Ranks that no TPU tile divides are the rule.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.attention.kernels.form import Blocks, Queries


@dataclass(frozen=True)
class Case:
    """Which parts of the form are there, and how large: 0 is absent."""

    name: str
    groups: int = 3
    """K."""
    members: int = 1
    """J, with one query a row the query heads of a group."""
    shared: int = 0
    """X, and W unless `one_shared`."""
    rank: int = 0
    """R and V."""
    angles: int = 0
    """C."""
    one_shared: bool = False
    """The shared key is the value too."""
    code: bool = True
    """The codes meet a query; else M, which needs angles."""
    k_scale: bool = False
    bias: bool = False
    m_bias: bool = False
    angle_rows: bool = False
    """Every row has its own positions, b = B; else b = 1."""

    @property
    def scale(self):
        """Scores of order one: enough for the softmax to prefer some positions, not so much that it takes one."""
        return (self.shared + self.rank + 1) ** -0.5

    def build(self, dtype=jnp.float32, batch=5, blocks=3, block=8):
        """(Queries, Blocks, lengths [batch, 1]); with five rows the lengths are all, 1, 0, a block and 3, a block."""
        rng = np.random.default_rng([batch, blocks, block, *self.name.encode()])
        heads, cached = (batch, self.groups, self.members), (blocks, batch)

        def normal(shape, there, dtype=dtype, std=1.0):
            return jnp.asarray(rng.normal(scale=std, size=shape), dtype) if there else None

        def angles():
            offset = 7 * np.arange(batch if self.angle_rows else 1)[None, :, None, None]
            position = offset + np.arange(blocks * block).reshape(blocks, 1, 1, block)
            theta = 50.0 ** (-2 * np.arange(self.angles // 2) / self.angles)[:, None]
            return jnp.asarray(np.concatenate([np.cos(theta * position), np.sin(theta * position)], 2), jnp.float32)

        x, r, c = self.shared, self.rank, self.angles
        # The angles of a position have squared norm C/2.
        std = (2 / c) ** 0.5 if c else 0.0
        queries = Queries(
            shared=normal((*heads, x), x),
            code=normal((*heads, r), r and self.code),
            m=normal((*heads, r, c), r and not self.code, jnp.float32, std),
            m_bias=normal((*heads, c), self.m_bias, jnp.float32, std),
            bias=normal(heads, self.bias),
        )
        kv = Blocks(
            k_shared=normal((*cached, x, block), x),
            v_shared=normal((*cached, x, block), x and not self.one_shared),
            k_code=normal((*cached, self.groups, r, block), r),
            v_code=normal((*cached, self.groups, r, block), r),
            k_scale=jnp.asarray(rng.uniform(0.3, 3, (*cached, self.groups, block)), jnp.float32)
            if self.k_scale
            else None,
            angles=angles() if c else None,
        )
        lengths = np.resize([blocks * block, 1, 0, block + 3, block], batch)
        return queries, kv, jnp.asarray(np.minimum(lengths, blocks * block)[:, None], jnp.int32)


def cases():
    """A `pytest.param(Case)` for every combination of parts that some family reads."""
    full = {"shared": 10, "rank": 5, "angles": 10, "code": False, "k_scale": True}
    found = [
        Case("mha", rank=10),
        Case("gqa", groups=2, members=3, rank=10),
        Case("mqa", groups=1, members=5, rank=10),
        Case("mla", shared=11, one_shared=True),
        Case("mla-one-group", groups=1, members=5, shared=11, one_shared=True),
        Case("mla-scale-bias", shared=11, one_shared=True, k_scale=True, bias=True),
        Case("lrkv-shared", shared=10, rank=5, k_scale=True),
        Case("lrkv-shared-bias", shared=10, rank=7, k_scale=True, bias=True),
        Case("lrkv-shared-grouped", groups=2, members=3, shared=10, rank=5, k_scale=True),
        Case("lrkv-full", **full),
        Case("lrkv-full-rows", **full, angle_rows=True),
        Case("lrkv-full-bias", **full, m_bias=True),
        Case("lrkv-full-grouped", groups=2, members=3, **full, m_bias=True),
        Case("lrkv-full-no-scale", **full | {"k_scale": False}),
        Case("lrkv-rank0", shared=10),
        Case("lrkv-rank0-bias", shared=10, angles=10, k_scale=True, m_bias=True, angle_rows=True),
    ]
    return [pytest.param(case, id=case.name) for case in found]


def oracle(queries, blocks, lengths, scale):
    """form.py's formula with all positions in a line: {"shared": [B, K, J, W], "code": [B, K, J, V]}, float64 or None.

    A query that sees nothing gets zeros.
    """
    q, kv = (_float64(part) for part in (queries, blocks))
    lengths = np.asarray(lengths)
    rows, k, j = next(a for a in q if a is not None).shape[:3]
    v_shared = kv.k_shared if kv.v_shared is None else kv.v_shared
    slots = next(a.shape[0] * a.shape[-1] for a in kv if a is not None)
    scores = np.zeros((rows, k, j, slots))
    if q.shared is not None:
        scores += np.einsum("bkjx,bxs->bkjs", q.shared, _line(kv.k_shared))
    if q.code is not None:
        scores += np.einsum("bkjr,bkrs->bkjs", q.code, _line(kv.k_code))
    if kv.angles is not None:
        cs = np.broadcast_to(_line(kv.angles), (rows, *kv.angles.shape[2:3], slots))
    if q.m is not None:
        scores += np.einsum("bkjrc,bcs,bkrs->bkjs", q.m, cs, _line(kv.k_code), optimize=True)
    if q.m_bias is not None:
        scores += np.einsum("bkjc,bcs->bkjs", q.m_bias, cs)
    if q.bias is not None:
        scores += q.bias[..., None]
    scores *= scale
    if kv.k_scale is not None:
        scores *= _line(kv.k_scale)[:, :, None]
    seen = np.arange(slots) < np.tile(lengths, (1, j // lengths.shape[1]))[:, None, :, None]
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return {
        "shared": None if v_shared is None else np.einsum("bkjs,bws->bkjw", weights, _line(v_shared)),
        "code": None if kv.v_code is None else np.einsum("bkjs,bkvs->bkjv", weights, _line(kv.v_code)),
    }


def _float64(parts):
    return type(parts)(*(None if a is None else np.asarray(a, np.float64) for a in parts))


def _line(blocked):
    """[n, b, ..., S] to [b, ..., n·S]."""
    moved = np.moveaxis(blocked, 0, -2)
    return moved.reshape(*moved.shape[:-2], -1)
