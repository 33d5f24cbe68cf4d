"""Parameters, FLOPs and cache bytes, read off abstract shapes: nothing is allocated and no formula is kept here.

Cache bytes are those of the arrays that a decoder keeps, key scales included. FLOPs are those of every
dot product in the traced forward and backward pass, with all T² scores (as is customary) and without recomputation,
so that two runs compare by what their mathematics costs, not by how it was run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core as jex
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from lrkv_jax import attention
from lrkv_jax.attention import cache, kernels
from lrkv_jax.attention.base import AttentionBase, AttentionConfig
from lrkv_jax.config import RunConfig
from lrkv_jax.layers import Role
from lrkv_jax.sharding import MESH_AXES, sharding_of
from lrkv_jax.step import Program, Tokens, make_program
from lrkv_jax.transformer import ModelConfig


class Accounts(NamedTuple):
    """What a model costs."""

    parameters: int
    """All parameters, embeddings included."""
    embedding_parameters: int
    """Those of embedding and unembedding."""
    trained_parameters: int
    """Those that are not frozen."""
    cache_values_per_token_per_layer: float
    """Numbers kept of each token in one layer; the mean where layers differ."""
    cache_bytes_per_token: int
    """Bytes kept of each token in all layers."""
    cache_percent_of_mha: float
    """Bytes over the bytes of MHA with the same heads, head dim and dtype."""
    train_flops_per_token: float
    """Forward and backward, per input token; with a teacher, its forward pass too."""


def accounts(config: RunConfig, teacher: RunConfig | None = None) -> Accounts:
    """The accounts of a run's model; `teacher` is as teacher.py has it."""
    program = textless_program(config)
    sizes, trained = dict.fromkeys(get_args(Role), 0), 0
    for path, param in _parameters(program):
        count = math.prod(param.get_value().shape)
        sizes[param.role] += count
        trained += 0 if path in program.frozen else count
    values, size = cache_per_token(config.model, config.attention)
    per_layer = values / config.model.layers
    heads, head_dim = config.attention.heads, config.attention.head_dim
    mha = attention.families()["gqa"].Config(heads=heads, head_dim=head_dim)
    return Accounts(
        parameters=sum(sizes.values()),
        embedding_parameters=sizes["embed"] + sizes["unembed"],
        trained_parameters=trained,
        cache_values_per_token_per_layer=int(per_layer) if per_layer.is_integer() else per_layer,
        cache_bytes_per_token=size,
        cache_percent_of_mha=100 * size / cache_per_token(config.model, mha)[1],
        train_flops_per_token=train_flops_per_token(config, teacher),
    )


def _parameters(program: Program) -> Iterator[tuple[tuple, nnx.Param]]:
    """Every parameter that the model uses, layer by layer, by its path in the program's parameters."""
    outer, layers = nnx.eval_shape(lambda params: nnx.merge(program.graph, params).split(), program.abstract_params())
    yield from nnx.to_flat_state(nnx.state(outer))
    for layer in layers:
        for path, param in nnx.to_flat_state(nnx.state(layer)):
            yield ("blocks", *path), param


def abstract_parameters(config: RunConfig) -> PyTree:
    """Shapes of all parameters, labels included."""
    return textless_program(config).abstract_params()


class CacheBytes(NamedTuple):
    """Bytes that a decoder keeps of each token in all layers."""

    logical: int
    """What `compress` returns."""
    padded: int
    """What is allocated, where an implementation pads features to a device's tiles. Not counted: on a TPU with heads
    split, key scales (4 bytes a head) of heads that aren't a multiple of 8, which the device itself pads."""
    per_device: int
    """Of `padded`, on each device of a mesh whose `tensor` axis splits heads; what heads share lies on all of them."""


def cache_bytes(config: RunConfig, tensor: int = 1, implementation: kernels.Implementation = "blocked") -> CacheBytes:
    """Cache bytes per token by implementation and ways of tensor parallelism.

    Raises UserError where query heads don't divide over them.
    """
    mesh = AbstractMesh(tuple(tensor if axis == "tensor" else 1 for axis in MESH_AXES), MESH_AXES)

    @functools.cache
    def of_layer(family: AttentionConfig) -> list[int]:
        module = abstract_attention(config.model, family)
        shapes = module.entry_shapes()
        layout = kernels.layout(implementation, shapes, module.cache_axes, slots=1, tensor=tensor)._replace(block=1)
        padded = jax.eval_shape(lambda: cache.allocate(shapes, 1, layout))
        axes = cache.axes(module.cache_axes, padded)
        local = {
            name: jax.ShapeDtypeStruct(sharding_of(leaf.shape, axes[name], mesh).shard_shape(leaf.shape), leaf.dtype)
            for name, leaf in padded.items()
        }
        return [cache.bytes_of(tree) for tree in (shapes, padded, local)]

    layers = [of_layer(config.attention.of_layer(index)) for index in range(config.model.layers)]
    return CacheBytes(*map(sum, zip(*layers, strict=True)))


def cache_per_token(model: ModelConfig, family: AttentionConfig) -> tuple[int, int]:
    """(values, bytes) that all layers together keep of each token, in the model's compute dtype."""

    @functools.cache
    def of_layer(family: AttentionConfig) -> tuple[int, int]:
        shapes = abstract_attention(model, family).entry_shapes()
        return sum(leaf.size for leaf in shapes.values()), cache.bytes_of(shapes)

    layers = [of_layer(family.of_layer(index)) for index in range(model.layers)]
    values, size = map(sum, zip(*layers, strict=True))
    return values, size


def abstract_attention(model: ModelConfig, family: AttentionConfig) -> AttentionBase:
    """One layer's attention, of shapes alone."""
    dtype = jnp.dtype(model.dtype)
    return nnx.eval_shape(
        lambda: attention.build(family, width=model.width, eps=model.norm_eps, dtype=dtype, rngs=nnx.Rngs(params=0))
    )


def train_flops_per_token(config: RunConfig, teacher: RunConfig | None = None) -> float:
    """FLOPs of the products in one sequence's loss and gradient, and in a teacher's forward pass, over its T tokens."""
    tokens = jax.ShapeDtypeStruct((1, config.data.context + 1), jnp.int32)
    program = textless_program(_plain(config), teacher and _plain(teacher))
    guide = () if program.teacher is None else (program.teacher.abstract_params(),)
    jaxpr = jax.make_jaxpr(program.gradient)(program.abstract_params(), tokens, *guide).jaxpr
    # Autodiff also writes the gradients of frozen weights, which nothing reads and no compiler keeps.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return dot_flops(jaxpr) / config.data.context


def _plain(config: RunConfig) -> RunConfig:
    """The same mathematics of one sequence, without anything done to run it well."""
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"remat": "none", "scan_layers": True}),
            "attention": config.attention.model_copy(update={"implementation": "reference"}),
            "train": config.train.model_copy(update={"loss_chunks": 1, "microbatches": 1, "batch_size": 1}),
        }
    )


def dot_flops(jaxpr: jex.Jaxpr) -> int:
    """2·(multiplications) of every dot_general in a jaxpr; a scan's body counts once an iteration.

    Raises ValueError for a loop whose length the jaxpr doesn't tell.
    """
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
            continue
        inner = sum(dot_flops(sub) for sub in subjaxprs(equation.params))
        if name == "while" and inner:
            raise ValueError("a while loop holds a dot product: its count of iterations is unknown")
        total += inner * (equation.params["length"] if name == "scan" else 1)
    return total


def subjaxprs(params: Any) -> Iterator[jex.Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for leaf in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, jex.Jaxpr | jex.ClosedJaxpr)):
        if isinstance(leaf, jex.ClosedJaxpr):
            yield leaf.jaxpr
        elif isinstance(leaf, jex.Jaxpr):
            yield leaf


def textless_program(config: RunConfig, teacher: RunConfig | None = None) -> Program:
    """The program of a config without a corpus, for shapes, costs and speed: which ids begin and end documents does not
    change what is compiled."""
    tokens = Tokens(begin=0, end=0, mask_documents=config.data.isolated)
    program = make_program(config.model, config.attention, config.train, config.optimizer, tokens)
    return program if teacher is None else dataclasses.replace(program, teacher=textless_program(teacher))


def dry_run(config: RunConfig, teacher: RunConfig | None = None) -> str:
    """What `train.py --dry-run` prints; `teacher` is as teacher.py has it."""
    found = accounts(config, teacher)
    tokens = config.train.steps * config.train.batch_size * config.data.context
    tensor = config.mesh.tensor
    per_device = {}
    if tensor > 1:
        each = cache_bytes(config, tensor).per_device
        per_device["KV per device"] = f"{each:,} bytes/token at mesh.tensor = {tensor}"
    rows = {
        "attention": f"{config.family} ({config.attention.family})",
        "parameters": f"{found.parameters:,} ({found.parameters - found.embedding_parameters:,} without embeddings)",
        **({"trained": f"{found.trained_parameters:,} of them"} if found.trained_parameters < found.parameters else {}),
        "KV cache": f"{found.cache_values_per_token_per_layer:,.6g} values/token/layer, "
        f"{found.cache_bytes_per_token:,} bytes/token ({config.model.dtype}), "
        f"{found.cache_percent_of_mha:.1f} % of MHA",
        **per_device,
        "training tokens": f"{tokens:,}",
        "training FLOPs": f"{found.train_flops_per_token:.4g} per token, "
        f"{found.train_flops_per_token * tokens:.4g} in all"
        + (f", the forward pass of the teacher ({teacher.family}) included" if teacher else ""),
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())
