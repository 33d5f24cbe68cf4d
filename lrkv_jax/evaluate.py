"""Cross-entropy of a split: sums over every token of every document, and one division at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from lrkv_jax import sharding
from lrkv_jax.step import Program


class Score(NamedTuple):
    """Sums by document, in document order; float64."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    def summary(self) -> dict[str, float | int | None]:
        """ce and its standard error over documents, perplexity, bits per byte, and the counts behind them.

        None where there is no such number: the error of a single document, a perplexity beyond all floats.

        ce = Σ nats / Σ tokens is a ratio of sums, and its standard error that of a ratio estimator (Cochran, Sampling
        Techniques, section 6.4): documents are the independent units, tokens within one are not.
        """
        nats, tokens, size = self.nats.sum(), self.tokens.sum(), self.bytes.sum()
        count = len(self.nats)
        ce = nats / tokens
        residual = self.nats - ce * self.tokens
        stderr = math.sqrt(count / (count - 1) * (residual**2).sum()) / tokens if count > 1 else None
        return {
            "ce": float(ce),
            "ce_stderr": stderr,
            "perplexity": math.exp(ce) if ce < 700 else None,
            "bits_per_byte": float(nats / (math.log(2) * size)) if size else None,
            "tokens": int(tokens),
            "bytes": int(size),
            "documents": count,
        }


def make_eval_step(program: Program, mesh: Mesh) -> Callable[[Any, Any, Any], jax.Array]:
    """The jitted evaluation step; its result is whole on every device, for the host to sum."""
    rows = sharding.batch_sharding(mesh)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = sharding.shardings(program.abstract_state(mesh)["params"])
    return jax.jit(program.eval_step, in_shardings=(placed, rows, rows), out_shardings=replicated)


def evaluate(
    step: Callable[[Any, Any, Any], jax.Array],
    params: Any,
    windows: Any,
    batch_size: int,
    mesh: Mesh,
    *,
    limit: int | None = None,
    progress: str | None = None,
) -> Score:
    """Scores the windows of a split (`Store.windows`); `progress` names a bar on stderr.

    With a limit, as many whole documents as fit into so many windows, and at least one. The last batch is filled up
    with rows that weigh nothing.
    """
    total = len(windows) if limit is None else windows.whole_documents(limit)
    batch_size = -(-batch_size // sharding.row_ways(mesh)) * sharding.row_ways(mesh)
    nats = np.zeros(len(windows.document_bytes), np.float64)
    tokens = np.zeros(len(windows.document_bytes), np.int64)
    for start in tqdm(range(0, total, batch_size), desc=progress, disable=progress is None, leave=False):
        batch = windows.rows(start, min(start + batch_size, total))
        missing = batch_size - len(batch.document)
        pad = lambda a: np.pad(a, ((0, missing), (0, 0)))  # noqa: E731, B023
        # Every process reads the whole batch, which is little, and puts its part on its devices.
        held = sharding.local_rows(mesh, batch_size)
        inputs, labels = (sharding.place_rows(mesh, pad(a)[held], batch_size) for a in (batch.inputs, batch.labels))
        scored = np.asarray(step(params, inputs, labels), np.float64)[: len(batch.document)]
        np.add.at(nats, batch.document, (scored * batch.weights).sum(axis=1))
        np.add.at(tokens, batch.document, batch.weights.sum(axis=1).astype(np.int64))
    seen = tokens > 0
    return Score(nats[seen], tokens[seen], windows.document_bytes[seen])
