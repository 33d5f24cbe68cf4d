"""The training step and the evaluation step: pure functions of state and batch. No input or output, no logging."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from lrkv_jax import loss, marks, sharding
from lrkv_jax.attention.base import AttentionConfig
from lrkv_jax.optimizer import OptimizerConfig, frozen, learning_rate, make_optimizer
from lrkv_jax.settings import Settings, UserError
from lrkv_jax.transformer import ModelConfig, Transformer

TrainState = dict[str, Any]  # {"params": nnx.State, "opt": optax state, "step": int32}


class TrainConfig(Settings):
    """How long and in what portions to train."""

    steps: int = 512
    """Optimizer steps in all."""
    batch_size: int = 16
    """Sequences a step, over all devices and microbatches."""
    microbatches: int = 1
    """Portions of the batch whose gradients are summed before the update (gradient accumulation)."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    z_loss: float = 0.0
    """Weight of logsumexp² in the objective, which keeps the softmax's normaliser near 1."""
    distill_weight: float = 0.0
    """w in the objective (1 − w)·CE + w·KL(teacher ‖ model) of each scored token; the teacher is `--distill-from`, and
    without one w is 0."""
    loss_chunks: int = 4
    """Portions of the sequence whose logits exist at a time; must divide the context."""
    eval_every: int = 128
    """Steps between evaluations on the validation split."""
    eval_windows: int = 128
    """Windows of the validation split scored at each of them; the final test evaluation takes the whole split."""

    def model_post_init(self, _: Any) -> None:
        """Refuses portions that don't fit."""
        for name in ("steps", "batch_size", "microbatches", "loss_chunks", "eval_every", "eval_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.batch_size % self.microbatches:
            raise ValueError(f"microbatches = {self.microbatches}: must divide batch_size = {self.batch_size}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed = {self.seed}: must be at least 0 and below 2**32")
        if self.z_loss < 0:
            raise ValueError(f"z_loss = {self.z_loss}: must be 0 or more")
        if not 0 <= self.distill_weight <= 1:
            raise ValueError(f"distill_weight = {self.distill_weight}: must be between 0 (no teacher) and 1")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What the step must know of the token stream."""

    begin: int
    """Id of the token that begins a document; it may be the end token."""
    end: int
    """Id of the token that ends a document."""
    mask_documents: bool
    """Whether attention stays within documents and positions restart at each."""
    marked: bool = False
    """Whether ids say what is scored and where documents begin (marks.py)."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A run's mathematics: the model's graph, the optimizer, and the functions of one step."""

    model: ModelConfig
    train: TrainConfig
    tokens: Tokens
    graph: nnx.GraphDef
    optimizer: optax.GradientTransformation
    rate: optax.Schedule
    attention: AttentionConfig
    frozen: frozenset[tuple[str, ...]] = frozenset()
    """Paths of the parameters that don't train."""
    teacher: Program | None = None
    """That of the run that this one learns from; its parameters come with each step and never change."""

    def init_state(self, key: Array) -> TrainState:
        """Fresh parameters and optimizer state; under jit with shardings no device holds more than its part."""
        return self.start(self.init_params(key))

    def init_params(self, key: Array) -> PyTree:
        """Fresh parameters."""
        return nnx.state(Transformer(self.model, self.attention, nnx.Rngs(params=key)))

    def start(self, params: PyTree) -> TrainState:
        """The state at step 0 with these parameters."""
        return {"params": params, "opt": self.optimizer.init(self.split(params)[0]), "step": jnp.zeros((), jnp.int32)}

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters that train, and the frozen ones; `nnx.merge_state` puts them together again."""
        return nnx.split_state(params, lambda path, _: path not in self.frozen, ...)

    def abstract_params(self) -> PyTree:
        """Shapes of the parameters."""
        return jax.eval_shape(self.init_state, jax.random.key(0))["params"]

    def abstract_state(self, mesh: Mesh) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return sharding.with_shardings(jax.eval_shape(self.init_state, jax.random.key(0)), mesh)

    def sums(
        self, params: PyTree, tokens: Int[Array, "B T1"], teacher: PyTree = None
    ) -> tuple[Array, tuple[Array, ...]]:
        """The objective's sum over a batch's tokens, and beside it the sum of nats and the count of scored tokens.

        With the teacher's parameters, beside these the sum of KL(teacher ‖ model) in nats.
        """
        positions, segment_ids = self.places(tokens[:, :-1])
        ids, scored, _ = self.read(tokens)

        def final(program: Program, params: PyTree) -> tuple[Array, Array]:
            model = nnx.merge(program.graph, params)
            return model.hidden(ids[:, :-1], positions, segment_ids), model.unembedding()

        arrays = (*final(self, params), ids[:, 1:], scored[:, 1:].astype(jnp.float32))
        how = (self.model.logit_softcap, self.train.loss_chunks, self.train.z_loss, sharding.context_ways())
        if teacher is not None:
            guide = loss.Teacher(*final(self.teacher, teacher))
            how += (guide, self.train.distill_weight, self.teacher.model.logit_softcap)
        nats, objective, *divergence = loss.sum_nats(*arrays, *how)
        return objective, (nats, jnp.sum(arrays[-1]), *divergence)

    def read(self, tokens: Int[Array, "B T1"]) -> tuple[Int[Array, "B T1"], Bool[Array, "B T1"], Bool[Array, "B T1"]]:
        """The ids of a batch, which of them are scored as labels, and which begin a document."""
        if self.tokens.marked:
            return tokens & marks.IDS, (tokens & marks.SCORED) != 0, (tokens & marks.BEGINS) != 0
        begins = tokens == self.tokens.begin
        # Where begin and end differ, begin only marks a start: what precedes it can't foretell it.
        return tokens, ~begins | (self.tokens.begin == self.tokens.end), begins

    def places(self, inputs: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"] | None]:
        """Positions and document numbers: plain 0..T−1 and None, or restarting with every document."""
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :], inputs.shape)
        if not self.tokens.mask_documents:
            return positions, None
        _, _, begins = self.read(inputs)
        starts = jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)
        return positions - starts, jnp.cumsum(begins, axis=1, dtype=jnp.int32)

    def gradient(self, params: PyTree, tokens: Int[Array, "B T1"], teacher: PyTree = None) -> tuple[PyTree, ...]:
        """Gradient of the mean objective over the batch's tokens for what trains, and what `sums` has beside it.

        Microbatches add sums, and the division comes once at the end: equal to the whole batch's gradient even where
        they hold unequal counts of scored tokens.
        """
        trained, frozen = self.split(params)

        def sums(trained: PyTree, tokens: Array) -> tuple[Array, tuple[Array, ...]]:
            return self.sums(nnx.merge_state(trained, frozen), tokens, teacher)

        grad = jax.value_and_grad(sums, has_aux=True)
        parts = self.train.microbatches
        if parts == 1:
            (_, found), grads = grad(trained, tokens)
        else:
            # Row i goes to microbatch i mod parts, so that each device's rows stay on it.
            split = tokens.reshape(-1, parts, tokens.shape[1]).swapaxes(0, 1)

            def add(carry, part):
                (_, aux), new = grad(trained, sharding.constrain(part, "batch", None))
                return jax.tree.map(jnp.add, carry, (new, aux)), None

            zeros = (jnp.zeros((), jnp.float32),) * (2 if teacher is None else 3)
            (grads, found), _ = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, trained), zeros), split)
        return jax.tree.map(lambda g: g / jnp.maximum(found[1], 1), grads), *found

    def train_step(
        self, state: TrainState, tokens: Int[Array, "B T1"], teacher: PyTree = None
    ) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step; `teacher` is the parameters of `self.teacher`, where there is one.

        Metrics: loss (nats/token), global gradient norm before clipping, global norm of the new parameters (so that
        what is saved is known to be finite), rate of the matrices; with a teacher also kl (nats/token).
        """
        grads, nats, count, *divergence = self.gradient(state["params"], tokens, teacher)
        trained, frozen = self.split(state["params"])
        updates, opt = self.optimizer.update(grads, state["opt"], trained)
        params = nnx.merge_state(optax.apply_updates(trained, updates), frozen)
        metrics = {
            "loss": nats / jnp.maximum(count, 1),
            "grad_norm": optax.tree.norm(grads),
            "param_norm": optax.tree.norm(params),
            "lr": self.rate(state["step"]),
            **({"kl": divergence[0] / jnp.maximum(count, 1)} if divergence else {}),
        }
        return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics

    def eval_step(self, params: PyTree, inputs: Int[Array, "B T"], labels: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """Nats of each label, for rows that hold one document each."""
        model = nnx.merge(self.graph, params)
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :], inputs.shape)
        hidden = model.hidden(inputs, positions)
        return loss.token_nats(
            hidden,
            model.unembedding(),
            labels,
            softcap=self.model.logit_softcap,
            chunks=self.train.loss_chunks,
            ways=sharding.context_ways(),
        )


def make_program(
    model: ModelConfig, attention: AttentionConfig, train: TrainConfig, optimizer: OptimizerConfig, tokens: Tokens
) -> Program:
    """The program of a run, from its configs; nothing is allocated."""
    abstract = nnx.eval_shape(lambda: Transformer(model, attention, nnx.Rngs(params=0)))
    graph, params = nnx.split(abstract)
    rate = functools.partial(learning_rate, optimizer, train.steps)
    still = frozen(optimizer, params)
    trained, _ = nnx.split_state(params, lambda path, _: path not in still, ...)
    return Program(model, train, tokens, graph, make_optimizer(optimizer, train.steps, trained), rate, attention, still)


def compile_train_step(program: Program, mesh: Mesh) -> tuple[TrainState, Any]:
    """The abstract sharded state, and the jitted step that donates it.

    The step takes state and batch and, where the program has a teacher, the teacher's parameters. Raises UserError for
    a weight without a teacher.
    """
    taught, weight = program.teacher is not None, program.train.distill_weight
    if weight and not taught:
        raise UserError(f"train.distill_weight = {weight}: needs a teacher, which is train.py's --distill-from")
    abstract = program.abstract_state(mesh)
    placed = sharding.shardings(abstract)
    teacher = (sharding.shardings(program.teacher.abstract_state(mesh)["params"]),) if taught else ()
    step = jax.jit(
        program.train_step,
        donate_argnums=0,
        in_shardings=(placed, sharding.batch_sharding(mesh), *teacher),
        out_shardings=(placed, None),
    )
    return abstract, step
