"""Inference from the compressed cache: prefill, one compiled decode step, batches of prompts of different lengths.

A `Decoder` holds a model's weights as decoding wants them and the compiled functions; `Decoder.start` reads prompts
into a fresh cache, and the `Session` it returns yields tokens. What is on the device is donated from call to call: the
cache exists once, and nothing is compiled anew as sequences grow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Int, PyTree

from lrkv_jax import sharding
from lrkv_jax.attention import cache, kernels
from lrkv_jax.attention.base import AttentionBase
from lrkv_jax.sampling import Sampling, sample
from lrkv_jax.settings import UserError
from lrkv_jax.step import Program

State = dict[str, Any]
"""caches (one per layer), lengths [B] (tokens cached), logits [B, V] (of the next token), done [B] (ended)."""

Mix = Callable[[AttentionBase, Array, cache.Cache], tuple[Array, cache.Cache]]
"""(attention, normed x, cache) -> (what attention adds to x, the cache with x's tokens in it)."""


class Decoder:
    """Inference for `batch` rows of up to `slots` tokens. Pure functions of (weights, state), compiled once each."""

    def __init__(
        self,
        program: Program,
        params: PyTree | None,
        mesh: Mesh,
        *,
        batch: int,
        slots: int,
        vocab: int | None = None,
        implementation: str | None = None,
        block: int | None = None,
        interpret: bool = False,
    ):
        """Prepares the weights. `vocab`: how many ids may be drawn, all by default; `block`: S of the cache's blocks.

        With params None there are no weights but `abstract_weights`, for compiling where the mesh's devices are not.
        Raises UserError where the implementation can't run on the mesh, rows don't divide over its devices, it splits
        the sequence, or its devices have no room for the cache.
        """
        if batch < 1 or batch % sharding.row_ways(mesh):
            raise UserError(f"batch = {batch}: rows must divide over slices x data x fsdp = {sharding.row_ways(mesh)}")
        if mesh.shape["context"] > 1:
            raise UserError(f"mesh.context = {mesh.shape['context']}: decoding splits rows and heads only; must be 1")
        if slots < 1:
            raise UserError(f"slots = {slots}: a cache needs at least 1")
        self.program, self.mesh, self.batch, self.interpret = program, mesh, batch, interpret
        abstract = program.abstract_params()
        outer, layers = nnx.eval_shape(lambda params: nnx.merge(program.graph, params).split(), abstract)
        self.graphs = nnx.graphdef(outer), [nnx.graphdef(layer) for layer in layers]
        self.attention = layers[0].attention
        self.shapes = [layer.attention.entry_shapes() for layer in layers]
        absorbs, platform = self.attention.absorbed_queries > 0, mesh.devices.flat[0].platform
        self.implementation = kernels.choose(implementation, platform, absorbs, interpret)

        def layout(shapes: dict[str, jax.ShapeDtypeStruct], block: int | None) -> cache.Layout:
            return kernels.layout(
                self.implementation, shapes, self.attention.cache_axes, slots, block, tensor=mesh.shape["tensor"]
            )

        # One size of block for all layers, chosen for the one that caches most.
        self.layout = layout(max(self.shapes, key=cache.bytes_of), block)
        self.layouts = [layout(shapes, self.layout.block) for shapes in self.shapes]
        self.allowed = jnp.asarray(drawable(program, vocab))
        state = self.abstract_state()
        placed = jax.tree.map(lambda leaf: leaf.sharding, state)
        if params is not None:
            cache.check_memory(state["caches"], f"slots = {slots}: a cache of {batch} rows")
        with jax.set_mesh(mesh):
            self.weights = None if params is None else jax.jit(self._prepare)(params)
        compiled = functools.partial(jax.jit, donate_argnums=1)
        self._empty_state = jax.jit(self.empty_state, out_shardings=placed)
        self._prefill = compiled(self.prefill, out_shardings=placed)
        self._prefill_chunk = compiled(self.prefill_chunk, out_shardings=placed)
        rows = NamedSharding(mesh, sharding.spec(("batch", None)))
        self._generate = compiled(self.generate, static_argnames=("count", "sampling"), out_shardings=(rows, placed))

    def start(self, prompts: Sequence[Sequence[int]], chunk: int | None = None) -> Session:
        """Reads one prompt a row, whole or `chunk` tokens at a time, into a fresh cache.

        Raises UserError for an empty prompt, one longer than the cache, an id the model doesn't have, or a chunk that
        isn't whole blocks.
        """
        vocab = self.program.model.vocab
        strange = [number for prompt in prompts for number in prompt if not 0 <= number < vocab]
        if strange:
            raise UserError(f"prompt token {strange[0]}: ids are from 0 to {vocab - 1}")
        lengths = [len(prompt) for prompt in prompts]
        if len(prompts) != self.batch or min(lengths) < 1:
            raise UserError(f"prompts of {lengths} tokens: needed are {self.batch}, each of at least 1 token")
        slots, block = self.layout.slots, self.layout.block
        if max(lengths) > slots:
            raise UserError(f"a prompt of {max(lengths)} tokens is longer than the cache of {slots} slots")
        if chunk is not None and (chunk < 1 or chunk % block):
            raise UserError(f"chunk = {chunk}: must be a multiple of the cache's block of {block} slots")
        # Whole prefills are padded to a power of two, the last chunk to whole blocks, so that few lengths are compiled.
        size = min(1 << (max(lengths) - 1).bit_length(), slots) if chunk is None else -(-max(lengths) // block) * block
        tokens = np.zeros((self.batch, size), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        with jax.set_mesh(self.mesh):
            state = self._empty_state(jnp.asarray(lengths, jnp.int32))
            if chunk is None:
                state = self._prefill(self.weights, state, tokens)
            else:
                for start in range(0, size, chunk):
                    part = tokens[:, start : start + chunk]
                    state = self._prefill_chunk(self.weights, state, part, jnp.asarray(start, jnp.int32))
        return Session(self, state, max(lengths))

    def empty_state(self, lengths: Int[Array, "B"]) -> State:
        """A state whose cache is empty, for prompts of these lengths."""
        layers = zip(self.shapes, self.layouts, strict=True)
        return {
            "caches": [cache.allocate(shapes, self.batch, layout) for shapes, layout in layers],
            "lengths": lengths,
            "logits": jnp.zeros((self.batch, self.program.model.vocab), jnp.float32),
            "done": jnp.zeros((self.batch,), bool),
        }

    def abstract_state(self) -> State:
        """Shapes and shardings of the state: caches over rows and heads; what heads share lies on each device."""
        abstract = jax.eval_shape(self.empty_state, jax.ShapeDtypeStruct((self.batch,), jnp.int32))

        def place(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
            placed = sharding.sharding_of(leaf.shape, axes, self.mesh)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

        caches = [
            jax.tree.map(place, layer, cache.axes(self.attention.cache_axes, layer)) for layer in abstract.pop("caches")
        ]
        return {"caches": caches, **{n: place(leaf, ("batch", None)[: leaf.ndim]) for n, leaf in abstract.items()}}

    def abstract_weights(self) -> PyTree:
        """Shapes and shardings of the weights: parameters by their axes, what depends on positions on each device."""
        abstract = jax.eval_shape(self._prepare, self.program.abstract_params())

        def unstacked(node: Any) -> Any:
            if not sharding.is_param(node):
                return node
            # A layer's parameters are slices of stacked ones, and keep their labels.
            node.set_metadata("axes", node.axes[len(node.axes) - len(node.get_value().shape) :])
            return node

        return sharding.with_shardings(jax.tree.map(unstacked, abstract, is_leaf=sharding.is_param), self.mesh)

    def _prepare(self, params: PyTree) -> dict[str, Any]:
        """Weights in the compute dtype, one tree for each layer, and what depends on the slots' positions alone."""
        dtype = jnp.dtype(self.program.model.dtype)

        def cast(param: nnx.Param) -> nnx.Param:
            return param if param.role == "vector" else param.replace(param.get_value().astype(dtype))

        model = nnx.merge(self.program.graph, jax.tree.map(cast, params, is_leaf=sharding.is_param))
        outer, layers = model.split()
        tables = model.blocks.attention.tables(self.key_positions(), self.layout.block)
        return {
            "outer": nnx.state(outer),
            "layers": [nnx.state(layer) for layer in layers],
            "tables": kernels.stored_tables(tables, self.implementation, dtype),
        }

    def key_positions(self) -> Int[Array, "1 S"]:
        """Slot i of every row holds position i."""
        return jnp.arange(self.layout.blocks * self.layout.block, dtype=jnp.int32)[None]

    def prefill(self, weights: PyTree, state: State, tokens: Int[Array, "B T"]) -> State:
        """Reads whole prompts with the training attention, and caches them."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)

        def mix(attention: AttentionBase, x: Array, stored: cache.Cache) -> tuple[Array, cache.Cache]:
            return attention(x, positions), cache.write_blocks(stored, attention.compress(x, positions), 0)

        return self._layers(weights, state, tokens, state["lengths"] - 1, mix)

    def prefill_chunk(self, weights: PyTree, state: State, tokens: Int[Array, "B T"], start: Int[Array, ""]) -> State:
        """Reads the prompts' tokens from `start` on, which is the first slot of a block, against the cache."""
        chunk = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to((start + chunk)[None], tokens.shape)
        # The kernels take one query a row.
        implementation = "reference" if self.implementation == "reference" else "blocked"

        def mix(attention: AttentionBase, x: Array, stored: cache.Cache) -> tuple[Array, cache.Cache]:
            stored = cache.write_blocks(stored, attention.compress(x, positions), start // self.layout.block)
            q, keys = attention.query(x, positions), self.key_positions()
            o = attention.attend(q, stored, keys, positions + 1, weights["tables"], implementation=implementation)
            return attention.out(o), stored

        return self._layers(weights, state, tokens, state["lengths"] - 1 - start, mix)

    def step(self, weights: PyTree, state: State, tokens: Int[Array, "B"]) -> State:
        """Caches one more token of each row and computes the logits of the next; rows that are done stand still."""
        positions = state["lengths"][:, None]
        implementation = {"implementation": self.implementation, "interpret": self.interpret}

        def mix(attention: AttentionBase, x: Array, stored: cache.Cache) -> tuple[Array, cache.Cache]:
            stored = kernels.write(
                stored, attention.compress(x, positions), positions, attention.cache_axes, **implementation
            )
            o = attention.attend(
                attention.query(x, positions),
                stored,
                self.key_positions(),
                positions + 1,
                weights["tables"],
                **implementation,
            )
            return attention.out(o), stored

        state = self._layers(weights, state, tokens[:, None], jnp.zeros_like(tokens), mix)
        return state | {"lengths": state["lengths"] + jnp.where(state["done"], 0, 1)}

    def generate(
        self, weights: PyTree, state: State, keys: Array, steps: Int[Array, ""], *, count: int, sampling: Sampling
    ) -> tuple[Int[Array, "B count"], State]:
        """Draws `steps` <= count tokens a row, fewer where all rows end; a row that ended is filled with end tokens."""
        end = self.program.tokens.end

        def more(carry: tuple) -> Bool[Array, ""]:
            index, state, _ = carry
            return (index < steps) & ~jnp.all(state["done"])

        def draw(carry: tuple) -> tuple:
            index, state, drawn = carry
            # A draw depends on its row's seed and position, so not on the other rows or on how calls are cut.
            draws = jax.vmap(jax.random.fold_in)(keys, state["lengths"])
            tokens = jnp.where(state["done"], end, sample(state["logits"], draws, self.allowed, sampling))
            state = state | {"done": state["done"] | (tokens == end)}
            return index + 1, self.step(weights, state, tokens), drawn.at[:, index].set(tokens)

        drawn = jnp.full((self.batch, count), end, jnp.int32)
        _, state, drawn = jax.lax.while_loop(more, draw, (jnp.zeros((), jnp.int32), state, drawn))
        return drawn, state

    def _layers(
        self, weights: PyTree, state: State, tokens: Int[Array, "B T"], last: Int[Array, "B"], mix: Mix
    ) -> State:
        """All layers; the logits become those after token last[b] of each row whose token that is."""
        outer = nnx.merge(self.graphs[0], weights["outer"])
        x = outer.embedding(tokens)
        caches = []
        for graph, layer, stored in zip(self.graphs[1], weights["layers"], state["caches"], strict=True):
            block = nnx.merge(graph, layer)
            mixed, stored = mix(block.attention, block.attention_norm(x), stored)
            x = block.feed_forward(x + mixed)
            caches.append(stored)
        inside = (last >= 0) & (last < tokens.shape[1])
        x = jnp.take_along_axis(x, jnp.where(inside, last, 0)[:, None, None], axis=1)
        logits = jnp.where(inside[:, None], outer.logits(outer.final_norm(x))[:, 0], state["logits"])
        return state | {"caches": caches, "logits": logits}


class Session:
    """Rows being continued: the state on the device, and how many slots the longest row has filled."""

    def __init__(self, decoder: Decoder, state: State, filled: int):
        self.decoder, self.state, self.filled = decoder, state, filled

    def generate(
        self, steps: int, sampling: Sampling, seeds: Sequence[int], every: int = 16
    ) -> Iterator[Int[np.ndarray, "B count"]]:
        """Yields [B, n] new tokens, n <= `every`, `steps` in all or till every row has drawn its end token.

        What follows a row's first end token is filled with end tokens. Each `sampling` and `every` is compiled once.
        Raises UserError, before anything is drawn, where the cache is too short for `steps` more, or there isn't one
        seed, 0 or more and below 2**32, for every row.
        """
        slots, rows = self.decoder.layout.slots, self.decoder.batch
        if len(seeds) != rows or not all(0 <= seed < 2**32 for seed in seeds):
            raise UserError(f"seeds = {list(seeds)}: needed is one for each of {rows} rows, from 0 to 2**32 - 1")
        if every < 1:
            raise UserError(f"every = {every}: must be at least 1")
        if steps < 0 or self.filled + steps > slots:
            raise UserError(f"{self.filled} tokens and {steps} new ones don't fit into a cache of {slots} slots")
        return self._generate(steps, sampling, jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32)), every)

    def _generate(self, steps: int, sampling: Sampling, keys: Array, every: int) -> Iterator[np.ndarray]:
        decoder = self.decoder
        while steps > 0 and not np.asarray(self.state["done"]).all():
            now = min(every, steps)
            with jax.set_mesh(decoder.mesh):
                count = jnp.asarray(now, jnp.int32)
                drawn, self.state = decoder._generate(
                    decoder.weights, self.state, keys, count, count=every, sampling=sampling
                )
            steps, self.filled = steps - now, self.filled + now
            yield np.asarray(drawn)[:, :now]

    def cache_bytes(self) -> int:
        """Bytes of the live cache, over all devices, shared parts counted once."""
        return cache.bytes_of(self.state["caches"])

    def cache_bytes_per_device(self) -> int:
        """Bytes of the live cache on the first device."""
        first = self.decoder.mesh.devices.flat[0]
        shards = [shard for leaf in jax.tree.leaves(self.state["caches"]) for shard in leaf.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == first)


def drawable(program: Program, vocab: int | None) -> np.ndarray:
    """Which of the V ids may be drawn: those of the tokenizer, and a begin token only where it is the end token too.

    Raises UserError for a vocabulary larger than the model's.
    """
    if vocab is not None and not 1 <= vocab <= program.model.vocab:
        raise UserError(f"vocab = {vocab}: must be from 1 to model.vocab = {program.model.vocab}")
    allowed = np.arange(program.model.vocab) < (program.model.vocab if vocab is None else vocab)
    if program.tokens.begin != program.tokens.end:
        allowed[program.tokens.begin] = False  # it marks a start and is never predicted
    return allowed
