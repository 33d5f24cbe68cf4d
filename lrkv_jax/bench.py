"""Speed, measured: `python -m lrkv_jax.bench train` times training steps of the families, turn by turn in one process.

`bench decode` is in bench_decode.py.

Other work on the machine slows every family alike, so a round runs each of them for a few steps, and what is compared
is their ratio within rounds. Achieved FLOP/s (accounting's count, all T² scores) stand beside the rate of a square
matrix product of the same dtype in the same run. Tokens are random: the time does not depend on them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax import accounting, attention, bench_decode, bench_shapes, sharding
from lrkv_jax.config import RunConfig, load_configs
from lrkv_jax.data import DataConfig
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.step import TrainConfig, compile_train_step
from lrkv_jax.timing import MIB, aligned, factor, machine, peak_rss_mib, positive, ratio
from lrkv_jax.transformer import ModelConfig

DTYPES = ("float32", "bfloat16")


def standard() -> dict[str, RunConfig]:
    """The shape all speed figures of this project refer to, for each family: 6.8M parameters as MHA."""
    gqa, mla, lrkv = (attention.families()[name].Config for name in ("gqa", "mla", "lrkv"))
    heads: dict[str, Any] = {"heads": 4, "head_dim": 64}
    families = {
        "mha": gqa(**heads),
        "gqa": gqa(**heads, kv_heads=2),
        "mqa": gqa(**heads, kv_heads=1),
        "mla": mla(**heads, latent=64),
        "lrkv": lrkv(**heads, rank=24),
    }
    return {
        name: RunConfig(
            family=name,
            model=ModelConfig(layers=6, width=256, vocab=4096, dtype="bfloat16"),
            attention=family,
            data=DataConfig(context=256),
            optimizer=OptimizerConfig(name="adamw", peak_lr=3e-4, schedule="wsd"),
            train=TrainConfig(batch_size=16),
        )
        for name, family in families.items()
    }


class Stepper:
    """A run's compiled training step with its state and one batch of random tokens, ready to be timed."""

    def __init__(self, config: RunConfig, mesh: jax.sharding.Mesh):
        program = accounting.textless_program(config)
        shape = (config.train.batch_size, config.data.context + 1)
        batch = np.random.default_rng(0).integers(0, config.model.vocab, shape, np.int32)
        with jax.set_mesh(mesh):
            self.batch = jax.device_put(batch, sharding.batch_sharding(mesh))
            abstract, step = compile_train_step(program, mesh)
            start = time.perf_counter()
            self.step = step.lower(abstract, self.batch).compile()
            self.compile_seconds = time.perf_counter() - start
            make = jax.jit(program.init_state, out_shardings=sharding.shardings(abstract))
            self.state = make(jax.random.key(config.train.seed))
        self.tokens_per_step = config.train.batch_size * config.data.context
        self.losses: list[float] = []

    def run(self, steps: int) -> list[float]:
        """Seconds of each of the next `steps` steps, each waited for."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.state, metrics = self.step(self.state, self.batch)
            loss = float(metrics["loss"])
            seconds.append(time.perf_counter() - start)
            self.losses.append(loss)
        return seconds

    def memory_bytes(self) -> int:
        """What XLA plans to hold on a device at most: state, batch and temporaries."""
        plan = self.step.memory_analysis()
        return (
            plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        )


def product_timer(dtype: str) -> Callable[[], float]:
    """Returns a function that times one square matrix product of `dtype` and gives its FLOP/s."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()

    def rate() -> float:
        start = time.perf_counter()
        product(x, x).block_until_ready()
        return 2 * size**3 / (time.perf_counter() - start)

    return rate


@dataclasses.dataclass(frozen=True)
class Row:
    """What one family's steps took."""

    step_ms: float
    """Median step."""
    step_ms_quartiles: tuple[float, float]
    """A quarter of the steps took less than the first, a quarter more than the second."""
    tokens_per_s: float
    """At the median step."""
    flops: float
    """FLOP/s at the median step."""
    flops_of_product: float
    """Share of the square product's rate, 0 to 1."""
    step_of_mha: float | None
    """Step time over MHA's, the median over rounds; None without MHA."""
    compile_seconds: float
    """Lowering and compiling the step."""
    memory_mib: float
    """State, batch and temporaries, as XLA plans them."""
    parameters: int
    """All of them, embeddings included."""


def measure(configs: dict[str, RunConfig], rounds: int, steps: int) -> dict[str, Any]:
    """Times every config's step, `steps` at a time in turn, `rounds` times over; all share one dtype.

    Returns the report that `--json` writes: `product_flops`, `peak_rss_mib`, `device`, `jax` and so on, and `rows`
    with a dict of `Row` for each name.
    """
    first = next(iter(configs.values()))
    steppers = {name: Stepper(config, sharding.make_mesh(config.mesh)) for name, config in configs.items()}
    rate = product_timer(first.model.dtype)
    for stepper in steppers.values():
        stepper.run(1)  # the first call pays for what compiling leaves to it
    rates: list[float] = []
    seconds: dict[str, list[list[float]]] = {name: [] for name in configs}
    for _ in range(rounds):
        for name, stepper in steppers.items():
            rates.append(rate())
            seconds[name].append(stepper.run(steps))
    product = max(rates)
    rows = {
        name: dataclasses.asdict(summary(configs[name], steppers[name], seconds[name], seconds.get("mha"), product))
        for name in configs
    }
    return machine() | {
        "dtype": first.model.dtype,
        "layers": first.model.layers,
        "width": first.model.width,
        "batch_size": first.train.batch_size,
        "context": first.data.context,
        "rounds": rounds,
        "steps": steps,
        "product_flops": product,
        "peak_rss_mib": peak_rss_mib(),
        "rows": rows,
    }


def summary(
    config: RunConfig, stepper: Stepper, seconds: list[list[float]], baseline: list[list[float]] | None, product: float
) -> Row:
    """A row of the table, from the seconds of each round."""
    every = [second for part in seconds for second in part]
    low, median, high = np.percentile(every, (25, 50, 75)).tolist()
    tokens_per_s = stepper.tokens_per_step / median
    flops = accounting.train_flops_per_token(config) * tokens_per_s
    return Row(
        step_ms=1e3 * median,
        step_ms_quartiles=(1e3 * low, 1e3 * high),
        tokens_per_s=tokens_per_s,
        flops=flops,
        flops_of_product=flops / product,
        step_of_mha=None if baseline is None else ratio(seconds, baseline),
        compile_seconds=stepper.compile_seconds,
        memory_mib=stepper.memory_bytes() / MIB,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(stepper.state["params"])),
    )


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    header = ("family", "step ms", "quartiles", "tokens/s", "GFLOP/s", "of product", "x MHA", "compile s", "MiB")
    lines = [header]
    for name, row in report["rows"].items():
        low, high = row["step_ms_quartiles"]
        lines.append(
            (
                name,
                f"{row['step_ms']:.1f}",
                f"{low:.1f}-{high:.1f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['flops'] / 1e9:,.0f}",
                f"{row['flops_of_product']:.2f}",
                factor(row["step_of_mha"]),
                f"{row['compile_seconds']:.1f}",
                f"{row['memory_mib']:,.0f}",
            )
        )
    return "\n".join(
        [
            f"{report['device']}; Python {report['python']}, jax {report['jax']}; {report['dtype']}, "
            f"{report['layers']} layers, width {report['width']}, {report['batch_size']} x {report['context']} tokens "
            f"a step; {report['rounds']} rounds of {report['steps']} steps",
            *aligned(lines),
            f"product: a square matrix product in {report['dtype']}, {report['product_flops'] / 1e9:,.0f} GFLOP/s "
            f"at its best here. MiB: state, batch and temporaries as XLA plans them; this process held "
            f"{report['peak_rss_mib']:,.0f} MiB at most.",
        ]
    )


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="python -m lrkv_jax.bench", description=__doc__, allow_abbrev=False)
    what = top.add_subparsers(dest="what", required=True, metavar="train|decode", parser_class=Parser)
    train = what.add_parser("train", help="time training steps", allow_abbrev=False)
    train.add_argument("--config", metavar="FILE[:KEY]", help="a config file's entries instead of the standard shape")
    train.add_argument("--families", nargs="+", metavar="KEY", help="which of them, in turn; default: all five")
    train.add_argument("--rounds", type=positive, default=5, help="turns of each family (default 5)")
    train.add_argument("--steps", type=positive, default=3, help="steps in a turn (default 3)")
    train.add_argument("--dtype", choices=DTYPES, help="compute dtype instead of the config's (standard: bfloat16)")
    decode = what.add_parser("decode", help="time one layer's attention on a full cache", allow_abbrev=False)
    bench_shapes.add_arguments(decode)
    for each in (train, decode):
        each.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    return top


def chosen(reference: str | None, families: list[str] | None, dtype: str | None) -> dict[str, RunConfig]:
    """The configs to time, by name. Raises UserError where a name is none of them, or compute dtypes differ."""
    known = standard()
    if reference is None:
        unknown = [name for name in families or () if name not in known]
        if unknown:
            raise UserError(f"--families {unknown[0]}: have {', '.join(known)}")
        configs = {name: known[name] for name in families or known}
    elif ":" in reference:
        if families:
            raise UserError(f"--families {' '.join(families)}: --config {reference} already names one")
        config = load_configs(reference)[1]
        configs = {config.family: config}
    else:
        configs = {name: load_configs(f"{reference}:{name}")[1] for name in families or known}
    if dtype is not None:
        update = {"dtype": dtype}
        configs = {n: c.model_copy(update={"model": c.model.model_copy(update=update)}) for n, c in configs.items()}
    if len({config.model.dtype for config in configs.values()}) > 1:
        raise UserError(f"{reference} mixes compute dtypes, which can't be compared: give --dtype")
    return configs


@command
def main() -> None:
    """Entry point."""
    options = parser().parse_args()
    if options.what == "train":
        configs = chosen(options.config, options.families, options.dtype)
        run, show = functools.partial(measure, configs, options.rounds, options.steps), table
    else:
        run, show = bench_decode.planned(options), bench_decode.table
    if options.json is not None:
        writing(options.json, "")  # before the minutes of measuring, not after
    report = run()
    print(show(report))
    if options.json is not None:
        writing(options.json, json.dumps(report, indent=2) + "\n")


def writing(path: Path, text: str) -> None:
    """Writes a file. Raises UserError where the machine refuses."""
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from None


if __name__ == "__main__":
    main()
