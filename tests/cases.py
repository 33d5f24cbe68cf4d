"""Tiny configurations of every attention family, and what the attention tests do with them.

Sizes are primes (or twice a prime, where RoPE needs pairs) and differ from one another, so that a transposed or wrongly
grouped axis is a shape error or a wrong number, never luck. A family found in the package but absent from `SHAPES` is
tested at its Config's defaults; where it has none, the tests fail and say what to add.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from flax import nnx

from lrkv_jax import attention

B, T, D = 2, 11, 13
SLOTS = 17  # of a cache: more than T, so that some are never filled
EPS = 0.05  # large, so that an epsilon in the wrong place shows
BASE = 50.0  # small, so that every pair turns noticeably within a few positions

# A gain of Qwen3's kind and a scaling of Llama 3.1's under which some pairs keep their frequency, some are slowed and
# some lie between; for families that have them.
GAIN = {"qk_norm": True, "qkv_bias": True, "qk_norm_gain": "before_rope"}
SCALING = {
    "rope_scaling": "llama3",
    "rope_factor": 3.0,
    "rope_low_turns": 0.3,
    "rope_high_turns": 1.5,
    "rope_original_context": 20,
}

# Relative error (Frobenius norm) of a bfloat16 run against float32: at most
# 0.0069 measured over the cases with QK-norm and bias, twice that.
BFLOAT16_ERROR = 0.014

SHAPES = {
    "gqa": {
        "mha": {"heads": 3, "head_dim": 10},
        "gqa": {"heads": 6, "kv_heads": 2, "head_dim": 10},
        "mqa": {"heads": 5, "kv_heads": 1, "head_dim": 10},
        "partial": {"heads": 6, "kv_heads": 3, "head_dim": 10, "rotary_dim": 6},
    },
    "mla": {
        "half": {"heads": 3, "head_dim": 12, "latent": 7},
        "wide": {"heads": 5, "head_dim": 14, "latent": 3, "rotary_dim": 10},
    },
    "lrkv": {
        f"{mode}-{name}": {"rope_mode": mode, "head_dim": 10, **shape}
        for mode in ("full", "shared", "latent")
        for name, shape in {
            "odd": {"heads": 3, "rank": 5},
            "even": {"heads": 3, "rank": 6},
            "grouped": {"heads": 6, "kv_heads": 3, "rank": 2},
            "rank0": {"heads": 3, "rank": 0},
        }.items()
        if not (mode == "latent" and shape["rank"] % 2)
    },
}

# The shapes that between them run through every line of their family, for tests that are dear to compile.
BRIEF = {"gqa", "partial", "half", "full-odd", "full-grouped", "shared-odd", "latent-even"}


@dataclass(frozen=True)
class Case:
    """One configuration of one family; `config` is None where the family is unknown here and has no default."""

    family: str
    config: pydantic.BaseModel | None
    name: str


def cases(brief=False, **options):
    """A Case per family and shape, with those `options` set that the family has; for `pytest.mark.parametrize`."""
    found = []
    for family, module in attention.families().items():
        known = {name: value for name, value in options.items() if name in module.Config.model_fields}
        if family in SHAPES:
            for shape, fields in SHAPES[family].items():
                if brief and shape not in BRIEF:
                    continue
                config = module.Config(**fields, rope_base=BASE, **known)
                found.append(Case(family, config, f"{family}-{shape}"))
        else:
            try:
                found.append(Case(family, module.Config(**known), f"{family}-default"))
            except pydantic.ValidationError:
                found.append(Case(family, None, f"{family}-unknown"))
    marks = "".join(f"-{name}" for name, value in options.items() if isinstance(value, bool | str) and value)
    return [pytest.param(case, id=case.name + marks) for case in found]


def random(*shape, seed=0, std=1.0):
    """Normal float32 numbers of a shape."""
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(scale=std, size=shape), jnp.float32)


def build(case, dtype=jnp.float32):
    """(graphdef, state) of the case's Attention, every parameter drawn at random, biases included."""
    if case.config is None:
        pytest.fail(
            f"attention family {case.family!r} has no case and its Config has no default: add SHAPES[{case.family!r}] "
            f"to {__file__}"
        )
    return _build(case.family, case.config, jnp.dtype(dtype).name)


@functools.cache
def _build(family, config, dtype):
    attention_class = attention.families()[family].Attention
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: attention_class(config, width=D, eps=EPS, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    )
    leaves, tree = jax.tree.flatten(state)
    # 0.35 is about 1/sqrt(D): activations, logits and outputs stay of order one.
    leaves = [random(*leaf.shape, seed=i + 1, std=0.35) for i, leaf in enumerate(leaves)]
    return graphdef, jax.tree.unflatten(tree, leaves)


def named(state):
    """The path in the state of every parameter by the name the mathematics uses: the array at `w_q.w` is w_q."""
    return {[part for part in path if part != "w"][-1]: path for path, _ in nnx.to_flat_state(state)}


def weights(state):
    """The parameters by name, float64 NumPy arrays as the oracle takes them."""
    flat = dict(nnx.to_flat_state(state))
    return {name: np.asarray(flat[path][...], np.float64) for name, path in named(state).items()}


def inputs(batch=B, length=T):
    """x [batch, length, D], and positions that start elsewhere in every row: an index is not a position."""
    positions = jnp.arange(length)[None] + 3 * jnp.arange(batch)[:, None]
    return random(batch, length, D), positions


def call(case, method, *args, dtype=jnp.float32):
    """Runs `method` of the case's module, a name or a function of the module, compiled once per case and shapes."""
    graphdef, state = build(case, dtype)
    return _compiled(graphdef, method)(state, *args)


@functools.cache
def _compiled(graphdef, method):
    def run(state, *args):
        module = nnx.merge(graphdef, state)
        return method(module, *args) if callable(method) else getattr(module, method)(*args)

    return jax.jit(run)
