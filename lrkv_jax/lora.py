"""Low-rank adapters (LoRA, arXiv 2106.09685) on any projection: y = x W + (alpha / rank) (x A) B, with W left alone.

A reduces what the projection reduces and B produces what it produces. Letters of both, the heads in LRKV's B_h, count
separate matrices, each with an adapter of its own; a projection to all heads has one A, and a B to all of them. A is
drawn at random and B is zero, so that a model starts as its base. `Projection.weight()` has the product in it, so what
absorbs weights (decoding) sees the same model as what applies them, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from lrkv_jax.layers import Projection, narrow, parameter, project
from lrkv_jax.settings import UserError

INNER = "z"  # the letter of the adapter's rank, which no equation of ours uses


class Adapter(nnx.Module):
    """A and B of one projection, float32 parameters; applied in the projection's compute dtype."""

    def __init__(self, base: Projection, rank: int, alpha: float, *, rngs: nnx.Rngs):
        left, right, out = base.equation.replace("->", ",").split(",")
        reduce, output, shape, axes = base.w.reduce, base.w.output, base.w.get_value().shape, base.w.axes
        shared = tuple(i for i in range(len(right)) if i not in reduce + output)
        read = tuple(sorted(shared + reduce))

        def pick(dims: tuple[int, ...], values: Sequence) -> tuple:
            return tuple(values[i] for i in dims)

        inner = "".join(letter for letter in left if letter in out) + INNER
        a = "".join(pick(read, right)) + INNER
        b = "".join((*pick(shared, right), INNER, *pick(output, right)))
        self.down, self.up, self.product = f"{left},{a}->{inner}", f"{inner},{b}->{out}", f"...{a},...{b}->...{right}"
        self.scale, self.dtype = alpha / rank, base.dtype
        std = 1 / math.sqrt(math.prod(pick(reduce, shape)))
        self.a = parameter((*pick(read, shape), rank), (*pick(read, axes), "rank"), std, "adapter", rngs)
        zero = jnp.zeros((*pick(shared, shape), rank, *pick(output, shape)), jnp.float32)
        self.b = nnx.Param(zero, axes=(*pick(shared, axes), "rank", *pick(output, axes)), role="adapter")

    def __call__(self, x: Array) -> Array:
        """What the adapter adds to the projection of x."""
        a, b = (factor.get_value().astype(self.dtype) for factor in (self.a, self.b))
        return project(self.up, project(self.down, x, a), b) * self.scale

    def narrow(self, letter: str, size: int) -> None:
        """As `Projection.narrow`, of the projection adapted."""
        for factor, equation in ((self.a, self.down), (self.b, self.up)):
            narrow(factor, equation.split("->")[0].split(",")[1], letter, size)

    def delta(self) -> Array:
        """What the adapter adds to the weight, in float32; factors stacked along leading axes give stacked weights."""
        a, b = self.a.get_value(), self.b.get_value()
        return jnp.einsum(self.product, a, b, precision=jax.lax.Precision.HIGHEST) * self.scale


def projections(module: nnx.Module) -> dict[str, Projection]:
    """All projections of a module by dotted name: `attention.w_q`, `mlp.w_up`."""
    found = ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, Projection))
    return {".".join(map(str, path)): node for path, node in found}


def attach(block: nnx.Module, rank: int, alpha: float, targets: tuple[str, ...], rngs: nnx.Rngs) -> None:
    """Gives the projections that any of the glob patterns matches an adapter.

    Raises UserError for a pattern that matches none, with the names there are.
    """
    known = projections(block)
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise UserError(f"model.lora_targets = {pattern!r}: matches no projection; there are {', '.join(known)}")
    for name, projection in sorted(known.items()):
        if any(fnmatchcase(name, pattern) for pattern in targets):
            projection.lora = nnx.data(Adapter(projection, rank, alpha, rngs=rngs))


def merge(graph: nnx.GraphDef, params: PyTree) -> PyTree:
    """The parameters of the same model without adapters, each added to its weight; float32, names as of the base."""
    model = nnx.merge(graph, params)
    for projection in projections(model).values():
        if projection.lora is not None:
            # A new Param: the model shares its Params with `params`.
            projection.w = projection.w.replace(projection.w.get_value() + projection.lora.delta())
            projection.lora = None
    return nnx.state(model)
