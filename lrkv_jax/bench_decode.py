"""Decoding, measured: `python -m lrkv_jax.bench decode` times the attention step of one layer with its cache full.

A step takes x [B, 1, D] to query and entry, writes the entry into the cache, attends to all `length` tokens and
projects; its output, normed, is the next step's x. The token is always the last of the cache, so that every step does
the same work. What depends on the slots' positions alone (LRKV's angles) is made beforehand, as decode.py does.

Rows take turns in one process, round by round, and what is compared is their ratio within rounds: other work on the
machine slows them alike. A turn allocates its cache and drops it afterwards, so that only one is ever held. Beside the
step stands the rate at which the device copies a large array (bytes read and written) in the same round; a cache that
fits into a processor's own caches can be read faster than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lrkv_jax import attention, bench_shapes
from lrkv_jax.attention import cache, kernels
from lrkv_jax.attention.base import AttentionBase, AttentionConfig
from lrkv_jax.layers import rms_norm
from lrkv_jax.settings import UserError
from lrkv_jax.timing import aligned, copy_timer, factor, machine, peak_rss_mib, ratio

EPS = 1e-6
CALLS = 3
"""Timed calls of a turn, after one that is not."""
CALL_BYTES = {"cpu": 3e8, "gpu": 1e11, "tpu": 3e10}
"""Bytes that a call reads, in as many steps as it takes: tens of ms, which hides what a call costs by itself."""
MOST_STEPS = 512
"""For shapes so small that what they read isn't what their time is spent on."""


class Stepper:
    """One row of the table: a family's attention step at one length and dtype; made here, compiled when first used."""

    def __init__(self, config: AttentionConfig, width: int, length: int, batch: int, dtype: str, implementation: str):
        """Raises UserError where the cache alone is larger than the memory."""
        self.config, self.width, self.length, self.batch = config, width, length, batch
        self.dtype, self.implementation = jnp.dtype(dtype), implementation
        self.graph, abstract = nnx.split(nnx.eval_shape(self.build))
        self.module: AttentionBase = nnx.merge(self.graph, abstract)
        self.shapes = self.module.entry_shapes()
        self.layout = kernels.layout(implementation, self.shapes, self.module.cache_axes, length)
        abstract = jax.eval_shape(self.filled_cache)
        cache.check_memory(abstract, f"a cache of {length} tokens of {config.family}, batch = {batch}, in {dtype}")
        self.cache_bytes = cache.bytes_of(abstract)
        self.bytes_read = self.cache_bytes + cache.bytes_of(jax.eval_shape(self.prepared))
        self.steps = min(math.ceil(CALL_BYTES[jax.default_backend()] / self.bytes_read), MOST_STEPS)
        self.x = jax.random.normal(jax.random.key(0), (batch, 1, width), self.dtype)
        # An argument, so that nothing the position decides is computed at compile time.
        self.positions = jnp.full((batch, 1), length - 1, jnp.int32)
        self.fill = jax.jit(self.filled_cache)

    def build(self) -> AttentionBase:
        """The module, with its weights as they are at the start of training."""
        return attention.build(self.config, width=self.width, eps=EPS, dtype=self.dtype, rngs=nnx.Rngs(params=0))

    def prepared(self) -> tuple[Any, Any]:
        """What a decoder keeps beside the cache: weights as they are read, and the tables of the slots' positions."""
        weights = jax.tree.map(
            lambda param: param if param.role == "vector" else param.replace(param.get_value().astype(self.dtype)),
            nnx.state(self.build()),
            is_leaf=lambda node: isinstance(node, nnx.Param),
        )
        tables = self.module.tables(self.key_positions(), self.layout.block)
        return weights, kernels.stored_tables(tables, self.implementation, self.dtype)

    @functools.cached_property
    def others(self) -> tuple[Array, Any, Any]:
        """Positions, weights and tables: what a step takes beside x and cache."""
        return self.positions, *jax.jit(self.prepared)()

    @functools.cached_property
    def call(self) -> jax.stages.Compiled:
        """`steps` steps."""
        return self.lower(self.steps).compile()

    def key_positions(self) -> Array:
        """Slot i holds position i."""
        return jnp.arange(self.layout.blocks * self.layout.block, dtype=jnp.int32)[None]

    def filled_cache(self) -> cache.Cache:
        """A cache whose blocks all hold the same random numbers."""
        empty = jax.eval_shape(lambda: cache.allocate(self.shapes, self.batch, self.layout))
        key = jax.random.key(0)
        return {
            name: jnp.broadcast_to(jax.random.normal(key, leaf.shape[1:], leaf.dtype), leaf.shape)
            for name, leaf in empty.items()
        }

    def lower(self, steps: int) -> jax.stages.Lowered:
        """A call of `steps` steps: (x, cache, positions, weights, tables) -> (x, cache); x and cache are donated."""

        def call(x: Array, stored: cache.Cache, *others: Any) -> tuple[Array, cache.Cache]:
            return jax.lax.fori_loop(0, steps, lambda _, carry: self.step(*carry, *others), (x, stored))

        abstract = (jax.eval_shape(self.fill), self.positions, *jax.eval_shape(self.prepared))
        return jax.jit(call, donate_argnums=(0, 1)).lower(self.x, *abstract)

    def step(
        self, x: Float[Array, "B 1 D"], stored: cache.Cache, positions: Int[Array, "B 1"], weights: Any, tables: Any
    ) -> tuple[Float[Array, "B 1 D"], cache.Cache]:
        """Caches a token at its position, and attends."""
        module = nnx.merge(self.graph, weights)
        entry, how = module.compress(x, positions), {"implementation": self.implementation}
        stored = kernels.write(stored, entry, positions, module.cache_axes, **how)
        q, keys = module.query(x, positions), self.key_positions()
        o = module.attend(q, stored, keys, positions + 1, tables, **how)
        return rms_norm(x + module.out(o), EPS), stored

    def turn(self) -> list[float]:
        """Seconds of a step, from each of CALLS calls."""
        call, others = self.call, self.others
        x, stored, seconds = jnp.array(self.x), self.fill(), []
        for _ in range(1 + CALLS):
            jax.block_until_ready((x, stored, others))
            start = time.perf_counter()
            x, stored = jax.block_until_ready(call(x, stored, *others))
            seconds.append((time.perf_counter() - start) / self.steps)
        return seconds[1:]


@dataclasses.dataclass(frozen=True)
class Row:
    """What one family's step took at one length and dtype."""

    family: str
    """Its name in the table."""
    length: int
    """Tokens in the cache of each row of the batch."""
    dtype: str
    """Of weights, activations and cache."""
    step_ms: float
    """Median."""
    step_ms_quartiles: tuple[float, float]
    """A quarter of the calls were faster than the first, a quarter slower than the second."""
    tokens_per_s: float
    """Of the whole batch, at the median step; one layer."""
    cache_bytes_per_token: int
    """What `compress` returns for a token."""
    cache_bytes_per_token_padded: float
    """What is allocated, over the tokens: features padded to tiles, and a last block that isn't full."""
    bytes_read: int
    """Of a step: the allocated cache, weights, and the tables of positions."""
    of_copy: float
    """bytes_read per second over the rate of copying; the median over rounds of the ratio, as those below."""
    of_mha: float | None
    """Step time over MHA's at the same length and dtype; None without MHA."""
    of_shortest: float
    """Step time over the family's own at the shortest length."""
    of_first_dtype: float
    """Step time over the family's own in the first dtype."""
    steps: int
    """Steps of a call."""


def measure(
    configs: dict[str, AttentionConfig],
    width: int,
    lengths: Sequence[int],
    batch: int,
    dtype: str | Sequence[str],
    implementation: str | None = None,
    rounds: int = 10,
) -> dict[str, Any]:
    """Times every config's attention step at every length and dtype, in turn, `rounds` times over.

    Returns the report that `--json` writes: `copy_bytes_per_s`, `device`, `configs` and so on, and `rows`: a dict of
    `Row` for `name@length`, in dtypes after the first `name@length:dtype`. Raises UserError for an implementation that
    can't run here, a length or batch below 1, and a cache beyond the memory.
    """
    platform = jax.default_backend()
    implementation = kernels.choose(implementation, platform, absorbs=True)
    dtypes = [dtype] if isinstance(dtype, str) else list(dtype)
    for what, value in (("length", min(lengths)), ("batch", batch), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"{what} = {value}: must be at least 1")
    steppers = {
        (name, length, dtype): Stepper(config, width, length, batch, dtype, implementation)
        for length in lengths
        for dtype in dtypes
        for name, config in configs.items()
    }
    seconds, rates = take_turns(steppers, rounds)
    rows = {key: summary(key, steppers[key], seconds, rates, min(lengths), dtypes[0]) for key in steppers}
    return machine() | {
        "implementation": implementation,
        "width": width,
        "batch": batch,
        "rounds": rounds,
        "copy_bytes_per_s": statistics.median(rates),
        "peak_rss_mib": peak_rss_mib(),
        "configs": {name: config.model_dump() for name, config in configs.items()},
        "rows": {
            f"{name}@{length}" + ("" if dtype == dtypes[0] else f":{dtype}"): dataclasses.asdict(row)
            for (name, length, dtype), row in rows.items()
        },
    }


Key = tuple[str, int, str]
"""Name, length, dtype."""


def take_turns(steppers: dict[Key, Stepper], rounds: int) -> tuple[dict[Key, list[list[float]]], list[float]]:
    """Seconds of each stepper's steps by round, and the rate of copying in each round."""
    rate = copy_timer()
    seconds: dict[Key, list[list[float]]] = {key: [] for key in steppers}
    rates = []
    for _ in range(rounds):
        rates.append(rate())
        for key, stepper in steppers.items():
            seconds[key].append(stepper.turn())
    return seconds, rates


def summary(
    key: Key,
    stepper: Stepper,
    seconds: dict[Key, list[list[float]]],
    rates: list[float],
    shortest: int,
    first_dtype: str,
) -> Row:
    """A row of the table, from the seconds of each round."""
    (name, length, dtype), ours = key, seconds[key]
    low, median, high = np.percentile([second for part in ours for second in part], (25, 50, 75)).tolist()
    mha = seconds.get(("mha", length, dtype))
    return Row(
        family=name,
        length=length,
        dtype=dtype,
        step_ms=1e3 * median,
        step_ms_quartiles=(1e3 * low, 1e3 * high),
        tokens_per_s=stepper.batch / median,
        cache_bytes_per_token=cache.bytes_of(stepper.shapes),
        cache_bytes_per_token_padded=stepper.cache_bytes / (stepper.batch * length),
        bytes_read=stepper.bytes_read,
        of_copy=ratio([[stepper.bytes_read / rate] for rate in rates], ours),
        of_mha=None if mha is None else ratio(ours, mha),
        of_shortest=ratio(ours, seconds[name, shortest, dtype]),
        of_first_dtype=ratio(ours, seconds[name, length, first_dtype]),
        steps=stepper.steps,
    )


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    header = ("family", "tokens", "dtype", "step ms", "quartiles", "tokens/s", "B/token", "padded", "MB read")
    lines = [(*header, "of copy", "x MHA", "x shortest", "x 1st dtype")]
    for row in report["rows"].values():
        low, high = row["step_ms_quartiles"]
        lines.append(
            (
                row["family"],
                f"{row['length']}",
                row["dtype"],
                f"{row['step_ms']:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['cache_bytes_per_token']}",
                f"{row['cache_bytes_per_token_padded']:.0f}",
                f"{row['bytes_read'] / 1e6:.1f}",
                f"{row['of_copy']:.2f}",
                *(factor(row[name]) for name in ("of_mha", "of_shortest", "of_first_dtype")),
            )
        )
    return "\n".join(
        [
            f"{report['device']}; Python {report['python']}, jax {report['jax']}; {report['implementation']}, "
            f"width {report['width']}, batch {report['batch']}; one layer's attention, {report['rounds']} rounds",
            *aligned(lines),
            f"of copy: bytes read a second over those of copying a large array, read and written, "
            f"{report['copy_bytes_per_s'] / 1e9:,.1f} GB/s here.",
        ]
    )


def planned(options: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """What is to be measured. Raises UserError for a mistake in the flags that can be known beforehand."""
    configs, width = bench_shapes.chosen(options)
    if options.implementation is not None:
        kernels.choose(options.implementation, jax.default_backend(), absorbs=True)
    return functools.partial(
        measure,
        configs,
        width,
        options.lengths,
        options.batch,
        options.dtype,
        options.implementation,
        options.rounds,
    )
