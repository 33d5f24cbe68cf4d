"""How likely a model finds given texts: nats of tokens that follow others, in batches of few shapes.

Rows are run whole through the training attention, as evaluate.py runs them, and not step by step from the cache: a
prefill is that same pass, and this one has the logits after every token where a prefill keeps the last alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree
from tqdm import tqdm

from lrkv_jax import sharding
from lrkv_jax.data import Tokenizer
from lrkv_jax.decode import drawable
from lrkv_jax.settings import UserError
from lrkv_jax.step import Program

LEAST = 32  # tokens of the shortest row that is compiled: below it a row costs what its call does


class Text(NamedTuple):
    """Tokens, of which those from `first` on are to be scored."""

    ids: list[int]
    first: int


class Scored(NamedTuple):
    """What the scored tokens of a text come to."""

    nats: float
    """Σ −log p, each token given those before it."""
    tokens: int
    greedy: bool
    """Whether each of them is the one that greedy decoding would draw."""


def document(tokenizer: Tokenizer, text: str) -> Text:
    """A whole document as evaluation takes it: begin, text and end, all scored but the begin."""
    return Text([tokenizer.begin_id, *tokenizer.encode(text), tokenizer.end_id], 1)


def continued(tokenizer: Tokenizer, context: str, continuation: str) -> Text:
    """A context, after the begin token, and a continuation that is scored; an empty one has nothing to score.

    Both are tokenized as one text and parted where the context's own tokens, less its last spaces, would end: as the
    harness does it, so that numbers compare. One token at least is the continuation's.
    """
    whole = tokenizer.encode(context + continuation)
    before = len(whole)
    if continuation:
        before = min(len(tokenizer.encode(context.rstrip())), len(whole) - 1)
    return Text([tokenizer.begin_id, *whole], 1 + before)


def windows(text: Text, context: int) -> list[tuple[int, int]]:
    """(start, stop) of the tokens that a text's windows read, at most `context` each; each foretells one further.

    All that is scored in one window, which then begins with as much of what is before as fits. Where that is too long,
    it is cut as evaluation cuts documents: into windows that each begin afresh.
    """
    read, scored = len(text.ids) - 1, len(text.ids) - text.first
    if not scored:
        return []
    start = max(read - context, 0) if scored <= context else text.first - 1
    return [(at, min(at + context, read)) for at in range(start, read, context)]


class Scorer:
    """A model that scores texts, `batch` rows at a time; a row is padded to a power of two, so few are compiled."""

    def __init__(
        self,
        program: Program,
        params: PyTree,
        mesh: Mesh,
        *,
        batch: int,
        context: int,
        vocab: int | None = None,
    ):
        """`vocab`: how many ids greedy decoding would draw from (`decode.drawable`). More rows where devices ask it."""
        if batch < 1:
            raise UserError(f"batch = {batch}: must be at least 1")
        ways = sharding.row_ways(mesh)
        self.batch, self.context, self.mesh = -(-batch // ways) * ways, context, mesh
        self.shortened = 0
        """How many texts so far lost tokens before the scored ones, since the context can't hold both."""
        self._program, self._params = program, params
        self._allowed = jnp.asarray(drawable(program, vocab))
        rows, whole = sharding.batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())
        placed = sharding.shardings(program.abstract_state(mesh)["params"])
        self._run = jax.jit(self._forward, in_shardings=(placed, rows, rows), out_shardings=whole)

    def score(self, texts: Sequence[Text], progress: str | None = None) -> list[Scored]:
        """Scores each text, in the order given; `progress` names a bar on stderr."""
        nats, greedy = np.zeros(len(texts), np.float64), np.ones(len(texts), bool)
        cuts = [(number, *window) for number, text in enumerate(texts) for window in windows(text, self.context)]
        self.shortened += len({number for number, start, _ in cuts if start > 0 and start < texts[number].first})
        # Like lengths side by side; the longest first, so that what memory can't hold shows at once.
        cuts.sort(key=lambda cut: cut[1] - cut[2])
        for at in tqdm(range(0, len(cuts), self.batch), desc=progress, disable=progress is None, leave=False):
            part = cuts[at : at + self.batch]
            size = self._size(part[0][2] - part[0][1])
            inputs, labels = np.zeros((2, self.batch, size), np.int32)
            scored = np.zeros((len(part), size), bool)
            for row, (number, start, stop) in enumerate(part):
                ids, first = texts[number]
                inputs[row, : stop - start] = ids[start:stop]
                labels[row, : stop - start] = ids[start + 1 : stop + 1]
                scored[row, : stop - start] = np.arange(start + 1, stop + 1) >= first
            with jax.set_mesh(self.mesh):
                lost, hit = (np.asarray(a)[: len(part)] for a in self._run(self._params, inputs, labels))
            numbers = np.array([number for number, _, _ in part])
            np.add.at(nats, numbers, np.sum(lost, axis=1, dtype=np.float64, where=scored))
            np.logical_and.at(greedy, numbers, (hit | ~scored).all(axis=1))
        counts = [len(text.ids) - text.first for text in texts]
        return [Scored(*values) for values in zip(nats.tolist(), counts, greedy.tolist(), strict=True)]

    def _size(self, longest: int) -> int:
        return min(max(LEAST, 1 << (longest - 1).bit_length()), self.context)

    def _forward(
        self, params: PyTree, inputs: Int[Array, "B T"], labels: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """Nats of each label, and whether it is the likeliest that may be drawn; logits exist a chunk at a time."""
        model = nnx.merge(self._program.graph, params)
        rows, length = inputs.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], inputs.shape)
        hidden = model.hidden(inputs, positions)
        chunks = math.gcd(length, self._program.train.loss_chunks)

        def chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
            logits, labels = model.logits(part[0]), part[1]
            chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
            best = jnp.argmax(jnp.where(self._allowed, logits, -jnp.inf), axis=-1)
            return jax.nn.logsumexp(logits, axis=-1) - chosen, best == labels

        parts = (hidden.reshape(rows, chunks, -1, hidden.shape[-1]), labels.reshape(rows, chunks, -1))
        nats, hit = jax.lax.map(chunk, jax.tree.map(lambda a: a.swapaxes(0, 1), parts))
        return nats.swapaxes(0, 1).reshape(rows, length), hit.swapaxes(0, 1).reshape(rows, length)
