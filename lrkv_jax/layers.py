"""The parts every model shares: parameters with their labels, the projection, RMSNorm, rotary embedding, the MLP."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax import sharding

Role = Literal["embed", "unembed", "matrix", "vector", "adapter"]


def parameter(
    shape: tuple[int, ...], axes: tuple[str, ...], std: float, role: Role, rngs: nnx.Rngs, **labels
) -> nnx.Param:
    """A float32 parameter, normal with the given std, labelled with its logical axes and its role for the optimizer."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, axes=axes, role=role, **labels)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A gain or a bias: a float32 vector that starts at a constant and is never decayed."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes, role="vector")


def add_bias(x: Float[Array, "B T H C"], bias: nnx.Param | None) -> Float[Array, "B T H C"]:
    """x + bias [H, C], in x's dtype; no bias, no sum."""
    return x if bias is None else x + bias.get_value().astype(x.dtype)[None, None]


def apply_gain(x: Float[Array, "*s C"], gain: nnx.Param | None) -> Float[Array, "*s C"]:
    """x ⊙ gain [C], in x's dtype; no gain, no product."""
    return x if gain is None else x * gain.get_value().astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(equation: str, x: Array, w: Array) -> Array:
    """einsum(equation, x, w) whose gradients are einsums over the same letters.

    XLA's CPU backend runs them three times as fast in bfloat16 as the transposed products that autodiff writes; on
    other backends they are the same operations.
    """
    return _product(equation, x, w)


def _project_forward(equation: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return project(equation, x, w), (x, w)


def _project_backward(equation: str, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    left, right, out = _letters(equation)
    return _product(f"{out},{right}->{left}", dy, w), _product(f"{left},{out}->{right}", x, dy)


project.defvjp(_project_forward, _project_backward)


def _letters(equation: str) -> list[str]:
    """Letters of the two operands and of the result."""
    return equation.replace("->", ",").split(",")


def _product(equation: str, x: Array, y: Array) -> Array:
    """einsum(equation, x, y), formed with the letters of both first, then x's, then y's, and transposed at the end.

    einsum itself would swap operands to save that transpose, which costs the CPU backend its fast product (LRKV's B).
    """
    left, right, out = _letters(equation)
    formed = "".join(sorted(out, key=lambda letter: (letter not in left) - (letter in left and letter in right)))
    product = jnp.einsum(f"{left},{right}->{formed}", x, y)
    return product.transpose([formed.index(letter) for letter in out])


def narrow(param: nnx.Param, letters: str, letter: str, size: int) -> None:
    """Keeps the first `size` along the dimension of a parameter that a letter names; no such letter, all of it."""
    kept = tuple(slice(size if each == letter else None) for each in letters)
    param.set_value(param.get_value()[kept])


class Projection(nnx.Module):
    """A linear map declared in one breath: einsum equation, weight shape, logical axes, initial std.

    The equation also tells Muon what is a matrix: letters shared with the input alone are reduced, letters of the
    output alone are produced, and letters of both (heads in LRKV's B) count separate matrices.
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        rngs: nnx.Rngs,
        dtype: Any,
        std: float | None = None,
    ):
        operands, out = equation.split("->")
        left, right = operands.split(",")
        reduce = tuple(i for i, letter in enumerate(right) if letter in left and letter not in out)
        output = tuple(i for i, letter in enumerate(right) if letter in out and letter not in left)
        std = 1 / math.sqrt(math.prod(shape[i] for i in reduce)) if std is None else std
        self.equation, self.dtype = equation, dtype
        self.w = parameter(shape, axes, std, "matrix", rngs, reduce=reduce, output=output)
        self.lora: Any = None
        """A low-rank adapter, where lora.py has put one."""

    def __call__(self, x: Array) -> Array:
        """Applies the map in the compute dtype."""
        y = project(self.equation, x, self.w.get_value().astype(self.dtype))
        return y if self.lora is None else y + self.lora(x)

    def narrow(self, letter: str, size: int) -> None:
        """Keeps the first `size` along one dimension of the weight, named by its letter in the equation."""
        narrow(self.w, self.equation.split("->")[0].split(",")[1], letter, size)
        if self.lora is not None:
            self.lora.narrow(letter, size)

    def weight(self) -> Array:
        """The weight in the compute dtype, for callers that absorb it instead of applying it."""
        w = self.w.get_value()
        return (w if self.lora is None else w + self.lora.delta()).astype(self.dtype)


def rms_scale(x: Float[Array, "*s C"], eps: float) -> Float[Array, "*s"]:
    """rsqrt(mean(x²) + eps) over the last dimension, in float32: RMSNorm's scalar."""
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)


@functools.partial(jax.checkpoint, static_argnums=(1,))
def rms_norm(x: Float[Array, "*s C"], eps: float) -> Float[Array, "*s C"]:
    """RMSNorm without gain, computed in float32, returned in x's dtype.

    The backward pass starts from x again: left to itself, XLA keeps float32 copies of x for it.
    """
    return (x.astype(jnp.float32) * rms_scale(x, eps)[..., None]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm over the model width, with a learned gain if asked for (the paper's recipe has none)."""

    def __init__(self, width: int, eps: float, gain: bool):
        self.eps = eps
        self.gain = constant(1.0, (width,), ("embed",)) if gain else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Norms each position."""
        return apply_gain(rms_norm(x, self.eps), self.gain)


class Rotation(NamedTuple):
    """The frequencies of a rotary embedding, θ_m = base^(−2m/dim), as a scaling for longer contexts changes them."""

    base: float
    scaling: Literal["linear", "llama3"] | None = None
    factor: float | None = None
    """What all frequencies are divided by (`linear`), or those too slow for the original context (`llama3`)."""
    low: float | None = None
    """llama3: what turns less often than this within the original context is divided by the factor."""
    high: float | None = None
    """llama3: what turns more often stays as it is; in between the two are mixed."""
    context: int | None = None
    """llama3: the original context, in tokens."""

    def frequencies(self, dim: int) -> Float[Array, "M"]:
        """θ_m in radians a position, m < dim/2, in float32."""
        plain = jnp.asarray(self.base, jnp.float32) ** (-jnp.arange(dim // 2, dtype=jnp.float32) * (2.0 / dim))
        if self.scaling is None:
            return plain
        if self.scaling == "linear":
            return plain / self.factor
        turns = plain * (self.context / (2 * math.pi))
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return plain * (kept + (1 - kept) / self.factor)


def rope_angles(
    positions: Int[Array, "B T"], dim: int, rotation: Rotation
) -> tuple[Float[Array, "B T M"], Float[Array, "B T M"]]:
    """cos and sin of position · θ_m, m < dim/2, in float32 whatever the compute dtype."""
    angles = positions[..., None].astype(jnp.float32) * rotation.frequencies(dim)[None, None, :]
    # Without the barrier XLA computes them anew in every kernel that rotates, once for each head.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rope(
    x: Float[Array, "B T *h C"], positions: Int[Array, "B T"], rotation: Rotation, dim: int | None = None
) -> Array:
    """Rotary embedding (RoFormer, arXiv 2104.09864) of the first `dim` of C dimensions, in halves, in float32."""
    dim = x.shape[-1] if dim is None else dim
    if dim == 0:
        return x
    cos, sin = rope_angles(positions, dim, rotation)
    middle = (1,) * (x.ndim - 3)
    cos, sin = (t.reshape(*t.shape[:2], *middle, t.shape[-1]) for t in (cos, sin))
    a, b, rest = jnp.split(x.astype(jnp.float32), (dim // 2, dim), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


@jax.checkpoint  # here and below: nothing but the arguments is kept for the backward pass
def relu2(x: Float[Array, "*s F"]) -> Float[Array, "*s F"]:
    """relu(x)²."""
    return jnp.square(jax.nn.relu(x))


@jax.checkpoint
def swiglu(x: Float[Array, "*s F"], gate: Float[Array, "*s F"]) -> Float[Array, "*s F"]:
    """x · silu(gate)."""
    return x * jax.nn.silu(gate)


class MLP(nnx.Module):
    """The feed-forward part: relu(x W)² W' (arXiv 2109.08668), or SwiGLU (arXiv 2002.05202)."""

    def __init__(self, width: int, mlp_width: int, kind: str, out_std: float, *, rngs: nnx.Rngs, dtype: Any):
        up = functools.partial(Projection, "btd,df->btf", (width, mlp_width), ("embed", "mlp"), rngs=rngs, dtype=dtype)
        self.w_up = up()
        self.w_gate = up() if kind == "swiglu" else None
        self.w_down = Projection(
            "btf,fd->btd",
            (mlp_width, width),
            ("mlp", "embed"),
            std=out_std / math.sqrt(mlp_width),
            rngs=rngs,
            dtype=dtype,
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """[B, T, D] -> [B, T, D], hidden width F."""
        hidden = sharding.constrain(self.w_up(x), "batch", "length", "mlp")
        return self.w_down(relu2(hidden) if self.w_gate is None else swiglu(hidden, self.w_gate(x)))
