"""The optimizer: one config becomes a schedule and an Optax chain.

Every parameter carries a `role` (layers.py), and the role decides who updates it:

| role      | name="muon" | name="adamw" | peak rate    | weight decay |
|-----------|-------------|--------------|--------------|--------------|
| `matrix`  | Muon        | AdamW        | `peak_lr`    | yes          |
| `embed`   | AdamW       | AdamW        | `embed_lr`   | no           |
| `unembed` | AdamW       | AdamW        | `unembed_lr` | no           |
| `vector`  | AdamW       | AdamW        | `unembed_lr` | no           |
| `adapter` | AdamW       | AdamW        | `peak_lr`    | no           |

What trains is all that `freeze` doesn't match; in a model with adapters (lora.py), the adapters alone. A frozen
parameter has no gradient, no moments and no decay, and is no part of the clipped norm.

All rates follow one schedule, and the gradient's global norm is clipped before anything else. Decay is decoupled: a
matrix loses lr * weight_decay of itself at each step. Moments have the dtype of the parameters, float32.

Muon orthogonalises matrices, so it must know what the matrix is. A parameter's `reduce` and `output` metadata name the
dimensions contracted with the input and produced by the output; each entry of the others is a matrix of its own.
Stacked layers are therefore updated as if each stood alone, and of LRKV's factors

- W_shared [layers, D, C] is one D x C matrix per layer;
- U [layers, D, K, R] is one D x (K*R) matrix per layer, over all heads, as the query projection is: the heads' codes
  are read from one input, and orthogonalised together they are pushed apart;
- B [layers, K, R, C] is one R x C matrix per head and layer: a head's code meets its own B only, so the heads' matrices
  share neither input nor output.

The update of an m x n matrix (input x output) is the orthogonalised momentum times sqrt(max(1, n / m)), a factor that
`optax.contrib.muon` applies too.
Source: lrkv.md section 5 (rates and betas of arXiv 2601.11471); Muon itself is `optax.contrib.scale_by_muon`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree
from optax import contrib
from pydantic import Field

from lrkv_jax.settings import Settings, UserError

Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """What updates the parameters, how fast, and how that changes over the run."""

    name: Literal["adamw", "muon"] = "muon"
    """Who updates the matrices; embeddings, unembedding and vectors always take AdamW."""
    peak_lr: Rate = 0.02
    """Rate of the matrices at the schedule's peak. 0.02 suits Muon; AdamW wants about 1e-3."""
    embed_lr: Rate | None = None
    """Peak rate of the embedding table; None is `peak_lr`. The paper's Muon recipe has 0.2."""
    unembed_lr: Rate | None = None
    """Peak rate of the unembedding and of gains and biases; None is `peak_lr`. The paper's Muon recipe has 0.004."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after warm-up: half a cosine, flat then linear (warm-up, stable, decay), or flat."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; the peak is reached at this step. The paper has 2000."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of all steps that `wsd` spends decaying, at the end."""
    final_fraction: Fraction = 0.0
    """Rate at the end of the run as a share of the peak, for `cosine` and `wsd`."""
    beta1: Beta = 0.9
    """AdamW's decay of the mean gradient, per step."""
    beta2: Beta = 0.95
    """AdamW's decay of the mean squared gradient, per step."""
    eps: Rate = 1e-8
    """Added to AdamW's root mean square, in the gradient's unit."""
    muon_momentum: Beta = 0.95
    """Muon's decay of the mean gradient, per step (Nesterov)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay of the matrices: share of a weight removed per step and unit of learning rate."""
    clip_norm: Rate = 1.0
    """Largest global L2 norm of the gradient of the mean loss; a longer gradient is scaled down to it."""
    freeze: tuple[str, ...] = ()
    """Glob patterns of the parameters that don't train, by name: `embed`, `blocks.mlp.*`. The layers are one array a
    parameter, so they freeze together."""


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The multiplier in [0, 1] on every group's peak rate, as a function of the step (0 for the first update).

    Warm-up runs linearly from 1/(warmup_steps + 1) at step 0, so that no update is wasted at rate zero, to 1 at step
    `warmup_steps`; the decay ends at step `steps`, one past the last update, and stays there.

    Raises:
        UserError: the warm-up and the decay do not fit into `steps`.
    """
    warmup = config.warmup_steps
    if warmup > steps:
        raise UserError(
            f"optimizer.warmup_steps = {warmup}: more than train.steps = {steps}; warm-up must end in the run"
        )
    shapes = [optax.constant_schedule(1.0)]
    boundaries = []
    if config.schedule == "cosine" and steps > warmup:
        shapes = [optax.cosine_decay_schedule(1.0, steps - warmup, alpha=config.final_fraction)]
    elif config.schedule == "wsd":
        decay = max(1, round(config.decay_fraction * steps))
        if warmup + decay > steps:
            raise UserError(
                f"optimizer.decay_fraction = {config.decay_fraction}: {decay} steps of decay and "
                f"warmup_steps = {warmup} do not fit into train.steps = {steps}"
            )
        shapes.append(optax.linear_schedule(1.0, config.final_fraction, decay))
        boundaries.append(steps - decay)
    if warmup:
        shapes.insert(0, optax.linear_schedule(1 / (warmup + 1), 1.0, warmup))
        boundaries.insert(0, warmup)
    return optax.join_schedules(shapes, boundaries)


def learning_rate(config: OptimizerConfig, steps: int, step: int | jax.Array) -> jax.Array:
    """The rate of the matrices at `step`, for logs: a float32 scalar; `step` may be traced."""
    return jnp.asarray(config.peak_lr * make_schedule(config, steps)(step), jnp.float32)


def frozen(config: OptimizerConfig, params: PyTree) -> frozenset[tuple[str, ...]]:
    """Paths of the parameters that don't train.

    Raises UserError for a pattern that matches none, with the names there are, and where none is left to train.
    """
    roles = {path: param.role for path, param in nnx.to_flat_state(params)}
    names = {path: ".".join(path) for path in roles}
    for pattern in config.freeze:
        if not fnmatch.filter(names.values(), pattern):
            raise UserError(f"optimizer.freeze = {pattern!r}: matches no parameter of {', '.join(names.values())}")
    adapted = "adapter" in roles.values()
    named = {name for pattern in config.freeze for name in fnmatch.filter(names.values(), pattern)}
    found = frozenset(path for path in names if names[path] in named or (adapted and roles[path] != "adapter"))
    if len(found) == len(names):
        raise UserError(f"optimizer.freeze = {' '.join(config.freeze)}: leaves nothing to train")
    return found


def make_optimizer(config: OptimizerConfig, steps: int, params: PyTree) -> optax.GradientTransformation:
    """The Optax chain for a run of `steps` updates.

    `params` is a State of those nnx.Param that train, concrete or abstract: only its metadata is read. In the
    optimizer's state each moment keeps the Param it mirrors, metadata included; where a group does not own a parameter,
    optax puts an empty MaskedNode.

    Raises:
        UserError: the schedule does not fit into `steps`.
        KeyError: a parameter's role is none of the five.
    """
    schedule = make_schedule(config, steps)

    def rate(peak: float | None) -> optax.Schedule:
        peak = config.peak_lr if peak is None else peak
        return lambda step: peak * schedule(step)

    def adamw(peak: float | None, weight_decay: float = 0.0) -> optax.GradientTransformation:
        return optax.adamw(rate(peak), config.beta1, config.beta2, config.eps, weight_decay=weight_decay)

    muon = optax.chain(
        contrib.scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=_dimension_numbers),
        optax.stateless(_scale_by_shape),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate(config.peak_lr)),
    )
    groups = {
        "matrix": muon if config.name == "muon" else adamw(config.peak_lr, config.weight_decay),
        "embed": adamw(config.embed_lr),
        "unembed": adamw(config.unembed_lr),
        "vector": adamw(config.unembed_lr),
        "adapter": adamw(config.peak_lr),
    }
    roles = jax.tree.map(lambda param: param.role, params, is_leaf=_is_param)
    # A group without parameters (no vectors, tied embeddings) would only add counters to the checkpoint.
    present = {role: groups[role] for role in sorted(set(jax.tree.leaves(roles)))}
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.partition(present, roles))


def _is_param(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable)


def _dimension_numbers(matrices: PyTree) -> PyTree:
    """Muon's view of each matrix: its Param, holding dimension numbers where the array was."""
    return jax.tree.map(
        lambda param: param.replace(contrib.MuonDimensionNumbers(param.reduce, param.output)),
        matrices,
        is_leaf=_is_param,
    )


def _scale_by_shape(updates: PyTree, params: PyTree = None) -> PyTree:
    """Multiplies each matrix's update by sqrt(max(1, outputs / inputs)), to keep its effect on the output in size.

    Of layers stored at the largest rank, labelled `ranks`, each by the shape of its own; rank 0 is no matrix.
    """

    def scale(param: nnx.Param) -> nnx.Param:
        def factor(shape: Sequence[int]) -> float:
            inputs, outputs = (math.prod(shape[dim] for dim in dims) for dims in (param.reduce, param.output))
            return math.sqrt(max(1.0, outputs / inputs)) if inputs else 0.0

        ranks = param.get_metadata().get("ranks")
        if ranks is None:
            by = factor(param.shape)
        else:
            at = param.axes.index("rank")
            shapes = [(*param.shape[:at], rank, *param.shape[at + 1 :]) for rank in ranks]
            by = jnp.array([factor(shape) for shape in shapes]).reshape(-1, *[1] * (len(param.shape) - 1))
        return jax.tree.map(lambda update: update * by, param)

    return jax.tree.map(scale, updates, is_leaf=_is_param)
