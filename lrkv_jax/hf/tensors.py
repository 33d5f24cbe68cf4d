"""Which tensor of a Llama, Qwen2 or Qwen3 is which parameter of ours.

Their linear maps are [outputs, inputs], with heads and head dimensions as one axis, and every layer has tensors of its
own; ours are [inputs, outputs] with an axis for each, and layers stacked. Both rotate halves of a head against each
other, so no dimension changes places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from flax import nnx
from jaxtyping import PyTree

from lrkv_jax.handover import by_name, filled
from lrkv_jax.hf.files import Tensors

OUTER = {"embed": "model.embed_tokens.weight", "final_norm.gain": "model.norm.weight", "unembed": "lm_head.weight"}
LAYER = {
    "attention_norm.gain": "input_layernorm.weight",
    "attention.w_q.w": "self_attn.q_proj.weight",
    "attention.w_k.w": "self_attn.k_proj.weight",
    "attention.w_v.w": "self_attn.v_proj.weight",
    "attention.w_o.w": "self_attn.o_proj.weight",
    "attention.bias_q": "self_attn.q_proj.bias",
    "attention.bias_k": "self_attn.k_proj.bias",
    "attention.bias_v": "self_attn.v_proj.bias",
    "attention.gain_q": "self_attn.q_norm.weight",
    "attention.gain_k": "self_attn.k_norm.weight",
    "mlp_norm.gain": "post_attention_layernorm.weight",
    "mlp.w_gate.w": "mlp.gate_proj.weight",
    "mlp.w_up.w": "mlp.up_proj.weight",
    "mlp.w_down.w": "mlp.down_proj.weight",
}
IGNORED = ("rotary_emb.inv_freq",)
"""Ends of names that some checkpoints have and that follow from config.json."""


def theirs(name: str, layers: int) -> list[str]:
    """Names of the tensors that make up a parameter: one, or one a layer."""
    if name in OUTER:
        return [OUTER[name]]
    inner = LAYER[name.removeprefix("blocks.")]
    return [f"model.layers.{i}.{inner}" for i in range(layers)]


def shapes(abstract: PyTree, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model, by their name."""
    found = {}
    for name, param in by_name(abstract).items():
        found |= dict.fromkeys(theirs(name, layers), _shape(name, param))
    return found


def to_params(tensors: Mapping[str, np.ndarray] | Tensors, abstract: PyTree, layers: int) -> PyTree:
    """Our parameters of their tensors, which have the right `shapes`."""
    params = by_name(abstract)

    def value(name: str) -> np.ndarray:
        stacked = np.empty(params[name].get_value().shape, np.float32)
        for piece, source in zip(_pieces(name, stacked), theirs(name, layers), strict=True):
            tensor = tensors[source]
            piece[...] = (tensor.T if _is_map(name) else tensor).reshape(piece.shape)
        return stacked

    return filled(abstract, value)


def from_params(params: PyTree, layers: int) -> dict[str, np.ndarray]:
    """Their tensors of our parameters, as views."""
    found = {}
    for name, param in by_name(params).items():
        shape = _shape(name, param)
        for piece, target in zip(_pieces(name, np.asarray(param.get_value())), theirs(name, layers), strict=True):
            found[target] = piece.reshape(shape[::-1]).T if _is_map(name) else piece.reshape(shape)
    return found


def _pieces(name: str, stacked: np.ndarray) -> np.ndarray:
    """A parameter as one array a tensor, [tensors, ...]."""
    return stacked[None] if name in OUTER else stacked


def _is_map(name: str) -> bool:
    return name == "unembed" or name.endswith(".w")


def _shape(name: str, param: nnx.Param) -> tuple[int, ...]:
    """Of each of the tensors that make up a parameter."""
    shape = param.get_value().shape if name in OUTER else param.get_value().shape[1:]
    if name == "embed":
        return shape
    if not _is_map(name):
        return (math.prod(shape),)
    inputs = 1 if name == "unembed" else len(param.reduce)
    return math.prod(shape[inputs:]), math.prod(shape[:inputs])
