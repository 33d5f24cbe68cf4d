"""Turns the attention of a trained MHA, GQA or MQA model into LRKV at a cache budget, or into GQA.

    python -m lrkv_jax.convert RUN_DIR --to lrkv --rank R | --cache-percent P [--calibrate N] [--by-layer] --out DIR
    python -m lrkv_jax.convert RUN_DIR --to gqa --kv-heads K --out DIR

LRKV: lowrank.py splits the K key and value projections of each layer into one that is shared and a residual of rank R
each; with --calibrate the error is weighed by what N tokens of the train split show (calibrate.py). R = head_dim loses
nothing. With --by-layer each layer has a rank of its own, and all together no more bytes. GQA: the mean of each group's
projections (arXiv 2305.13245), the baseline that people know. Queries, output projections, norms, biases, gains and the
rotation stay as they are. DIR becomes a run directory at step 0, with its eval.json, that eval.py, generate and
train.py --init-from take as any other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from lrkv_jax import report, rundir, sharding
from lrkv_jax.accounting import cache_per_token
from lrkv_jax.attention import families
from lrkv_jax.attention.base import AttentionConfig
from lrkv_jax.calibrate import Moments, calibrate
from lrkv_jax.config import RunConfig
from lrkv_jax.data import Store
from lrkv_jax.evaluate import evaluate, make_eval_step
from lrkv_jax.handover import by_name, filled, write_run
from lrkv_jax.lowrank import factorise, tails, water_fill
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.storage import AnyPath, path
from lrkv_jax.trained import restored
from lrkv_jax.transformer import ModelConfig

PREFIX = "blocks.attention."
KEPT = {"w_q", "w_o", "bias_q", "bias_k", "bias_v", "gain_q", "gain_k"}  # what every grouped family has


def check_family(source: AttentionConfig) -> None:
    """Raises UserError for a family that doesn't convert."""
    if source.family != "gqa":
        raise UserError(f"attention.family = {source.family}: only MHA, GQA and MQA (gqa) convert")


def lrkv_config(source: AttentionConfig, *ranks: int) -> AttentionConfig:
    """LRKV with a residual for each key/value head of the source, of one rank or of one for each layer.

    Raises UserError where it can't hold the source.
    """
    rank = max(ranks)
    check_family(source)
    if source.rotary != source.head_dim:
        raise UserError(
            f"attention.rotary_dim = {source.rotary}: LRKV rotates all of head_dim = {source.head_dim}, so a partly "
            f"rotated model doesn't convert"
        )
    if not 0 <= rank <= source.head_dim:
        raise UserError(f"--rank {rank}: must be between 0 and head_dim = {source.head_dim}, where nothing is lost")
    fields = source.model_dump(exclude={"family", "rotary_dim"})
    differ = ranks if len(set(ranks)) > 1 else ()
    return families()["lrkv"].Config(**fields, rank=rank, ranks=differ, rope_mode="full")


def gqa_config(source: AttentionConfig, kv_heads: int) -> AttentionConfig:
    """The source with fewer key/value heads."""
    check_family(source)
    if not 1 <= kv_heads <= source.groups or source.groups % kv_heads:
        raise UserError(f"--kv-heads {kv_heads}: must divide the source's {source.groups} key/value heads")
    return source.model_copy(update={"kv_heads": kv_heads})


def ranks_for(model: ModelConfig, source: AttentionConfig, percent: float) -> int:
    """The largest sum of all layers' ranks whose cache has at most so many percent of the bytes of MHA's with the
    same heads. Raises UserError where the shared parts alone have more."""
    full = cache_per_token(model, source.model_copy(update={"kv_heads": source.heads}))[1]
    none, one = (cache_per_token(model, lrkv_config(source, rank))[1] for rank in (0, 1))
    if not none <= full * percent / 100 < math.inf:
        raise UserError(f"--cache-percent {percent:g}: rank 0 alone takes {100 * none / full:.1f} % of MHA's cache")
    each = (one - none) // model.layers  # bytes that one more rank in one layer adds
    return min(int((full * percent / 100 - none) // each), model.layers * source.head_dim)


class Problem(NamedTuple):
    """What is to be approximated of one layer's keys or values, as lowrank.py takes it."""

    weights: np.ndarray
    """[K, D, C]."""
    inputs: np.ndarray | None = None
    """[D, D]."""
    outputs: np.ndarray | None = None
    """[K, C, C]."""


def problems(attention: dict[str, Any], moments: list[Moments] | None = None) -> Iterator[dict[str, Problem]]:
    """Of every layer its keys `k` and values `v`; without moments all errors weigh alike."""
    for layer in range(attention["w_k"].shape[0]):
        w_k, w_v, w_o = (np.asarray(attention[name][layer], np.float64) for name in ("w_k", "w_v", "w_o"))
        weights = {"k": w_k.swapaxes(0, 1), "v": w_v.swapaxes(0, 1)}
        if moments is None:
            yield {name: Problem(each) for name, each in weights.items()}
            continue
        seen, gain = moments[layer], attention.get("gain_k")
        outputs_k = seen.queries if gain is None else seen.queries * np.multiply.outer(*[np.asarray(gain[layer])] * 2)
        outputs_v = np.einsum("kjcd,kjed->kce", *[w_o.reshape(w_k.shape[1], -1, *w_o.shape[1:])] * 2)
        weighings = {"k": (seen.keys, outputs_k), "v": (seen.values, outputs_v)}
        yield {name: Problem(each, *weighings[name]) for name, each in weights.items()}


def by_layer(attention: dict[str, Any], budget: int, moments: list[Moments] | None = None) -> tuple[int, ...]:
    """Ranks of `budget` in all such that least is lost, keys and values counted as shares of what rank 0 would lose of
    them in all layers together (not in each: docs/log.md)."""
    layers = [[tails(*layer[name]) for name in "kv"] for layer in problems(attention, moments)]
    keys, values = np.array(layers).swapaxes(0, 1)
    return water_fill(keys / keys[:, 0].sum() + values / values[:, 0].sum(), budget)


def to_lrkv(attention: dict[str, Any], ranks: tuple[int, ...], moments: list[Moments] | None = None) -> dict[str, Any]:
    """Stacked parameters of LRKV attention from those of GQA, with a rank a layer: name -> array [layers, ...].

    Without moments the plain problem is solved, mean and truncated SVD in turn. Beyond a layer's rank there are zeros.
    """
    found: dict[str, list[np.ndarray]] = {}
    for rank, layer in zip(ranks, problems(attention, moments), strict=True):
        unused = max(ranks) - rank
        for name, problem in layer.items():
            factors = factorise(problem.weights, rank, problem.inputs, problem.outputs)
            parts = {f"w_{name}_shared": factors.shared}
            if max(ranks):
                parts[f"u_{name}"] = np.pad(factors.down.swapaxes(0, 1), [(0, 0), (0, 0), (0, unused)])
                parts[f"b_{name}"] = np.pad(factors.up, [(0, 0), (0, unused), (0, 0)])
            for part, value in parts.items():
                found.setdefault(part, []).append(value)
    return {name: value for name, value in attention.items() if name in KEPT} | {
        name: np.stack(values).astype(np.float32) for name, values in found.items()
    }


def to_gqa(attention: dict[str, Any], kv_heads: int) -> dict[str, Any]:
    """Stacked parameters of attention with fewer key/value heads, the mean of each group's projections and biases."""

    def pool(name: str, value: Any) -> np.ndarray:
        axis = 1 if name.startswith("bias") else 2  # [layers, K, C] and [layers, D, K, C]
        shape = (*value.shape[:axis], kv_heads, -1, *value.shape[axis + 1 :])
        return np.asarray(value).reshape(shape).mean(axis=axis + 1)

    pooled = {name for name in attention if name in ("w_k", "w_v", "bias_k", "bias_v")}
    return {name: pool(name, value) if name in pooled else value for name, value in attention.items()}


def attention_of(params: PyTree) -> dict[str, np.ndarray]:
    """The stacked attention's parameters by short name: `w_q`, `bias_k`, ..."""
    named = {name.removeprefix(PREFIX): leaf for name, leaf in by_name(params).items() if name.startswith(PREFIX)}
    return {name.removesuffix(".w"): np.asarray(leaf.get_value()) for name, leaf in named.items()}


def with_attention(params: PyTree, target: PyTree, attention: dict[str, np.ndarray]) -> PyTree:
    """The target's parameters: its attention from `attention`, all else from the source's."""
    source = by_name(params)

    def value(name: str) -> np.ndarray:
        short = name.removeprefix(PREFIX).removesuffix(".w")
        return attention[short] if name.startswith(PREFIX) else np.asarray(source[name].get_value())

    return filled(target, value)


class Source:
    """A trained run, opened."""

    def __init__(self, run_dir: AnyPath, step: str):
        self.config = RunConfig.load(run_dir)
        if self.config.model.lora_rank:
            raise UserError(f"{run_dir}: model.lora_rank = {self.config.model.lora_rank}: merge its adapters first")
        self.mesh: Mesh = sharding.make_mesh(MeshConfig())
        self.store: Store = rundir.open_corpus(run_dir, self.config)
        abstract = self.program(self.config).abstract_state(self.mesh)["params"]
        self.params, self.step = restored(run_dir, self.config, abstract, step)

    def program(self, config: RunConfig) -> Any:
        """The program of a config on this run's corpus."""
        return rundir.make_run_program(config, self.store)

    def cross_entropy(self, config: RunConfig, params: PyTree) -> float:
        """On as much of the validation split as training looks at."""
        scanned = config.model.model_copy(update={"scan_layers": True})  # compiles in a fraction of the time
        program, rows = self.program(config.model_copy(update={"model": scanned})), self.config.train.batch_size
        with jax.set_mesh(self.mesh):
            windows, limit = self.store.windows("validation"), self.config.train.eval_windows
            step = make_eval_step(program, self.mesh)
            return evaluate(step, self.placed(program, params), windows, rows, self.mesh, limit=limit).summary()["ce"]

    def placed(self, program: Any, params: PyTree) -> PyTree:
        """Parameters on the devices that the program wants them on."""
        return jax.device_put(params, sharding.shardings(program.abstract_state(self.mesh)["params"]))

    def moments(self, tokens: int) -> list[Moments] | None:
        """What calibration finds, in float32 whatever the run computes in; None without tokens."""
        if not tokens:
            return None
        plain = self.config.model_copy(update={"model": self.config.model.model_copy(update={"dtype": "float32"})})
        batches = self.store.batches(self.config.train.batch_size, self.config.train.seed)
        return calibrate(self.program(plain), self.params, batches.batch_at, tokens)


def read_options() -> argparse.Namespace:
    """The command line, refused in one line where its flags don't go together."""
    parser = Parser(prog="lrkv_jax.convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=path, metavar="RUN_DIR")
    parser.add_argument("--to", choices=("lrkv", "gqa"), default="lrkv")
    parser.add_argument("--rank", type=int, help="LRKV's R")
    parser.add_argument("--cache-percent", type=float, help="the largest R within this share of MHA's cache bytes")
    parser.add_argument("--kv-heads", type=int, help="GQA's K")
    parser.add_argument("--calibrate", type=int, default=0, metavar="N", help="tokens that weigh the error; 0 = plain")
    parser.add_argument("--by-layer", action="store_true", help="spread the ranks over the layers as they need them")
    parser.add_argument("--ranks", type=int, nargs="*", help="also tell the CE at these; default: C/8, C/4, C/2, C")
    parser.add_argument("--step", default="newest", help="newest, best, or a step's number")
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="the new run directory")
    options = parser.parse_args()
    wanted = {"lrkv": ("rank", "cache_percent"), "gqa": ("kv_heads",)}
    for family, names in wanted.items():
        given = [name for name in names if getattr(options, name) is not None]
        if len(given) != (family == options.to):
            flags = " or ".join(f"--{name.replace('_', '-')}" for name in wanted[options.to])
            raise UserError(f"--to {options.to}: takes {flags}, one of them and nothing of another family")
    if options.calibrate < 0:
        raise UserError(f"--calibrate {options.calibrate}: must be 0 (plain) or a number of tokens")
    if options.to != "lrkv" and (options.ranks or options.calibrate or options.by_layer):
        raise UserError(f"--to {options.to}: mean pooling takes no --ranks, --calibrate or --by-layer")
    if options.out.exists():
        raise UserError(f"--out {options.out}: is there already; nothing is overwritten")
    return options


class Conversion(NamedTuple):
    """What becomes of a model's attention."""

    attention: AttentionConfig
    family: str
    """The new run's name for it."""
    parameters: Callable[[AttentionConfig], dict[str, Any]]
    """Those of this attention, or of one like it with other ranks."""


def plan(options: argparse.Namespace, source: Source) -> Conversion:
    """What the command line asks of a source. Raises UserError where it can't be done."""
    config, attention = source.config, attention_of(source.params)
    if options.to == "gqa":
        pooled = gqa_config(config.attention, options.kv_heads)
        name = f"{config.family}-to-gqa{options.kv_heads}"
        return Conversion(pooled, name, lambda wanted: to_gqa(attention, wanted.kv_heads))
    layers = config.model.layers
    if options.rank is None:
        budget = ranks_for(config.model, config.attention, options.cache_percent)
    else:
        lrkv_config(config.attention, options.rank)
        budget = layers * options.rank
    for other in options.ranks or ():
        lrkv_config(config.attention, other)  # refused before minutes of work
    moments = source.moments(options.calibrate)
    ranks = by_layer(attention, budget, moments) if options.by_layer else (budget // layers,)
    family = lrkv_config(config.attention, *ranks)

    def parameters(wanted: AttentionConfig) -> dict[str, Any]:
        return to_lrkv(attention, tuple(wanted.of_layer(index).rank for index in range(layers)), moments)

    name = f"{config.family}-to-lrkv{family.rank}{'-by-layer' if family.by_layer else ''}"
    return Conversion(family, name, parameters)


def main() -> int:
    """Command line to exit status."""
    options = read_options()
    source = Source(options.run_dir, options.step)
    config, conversion = source.config, plan(options, source)

    def converted(wanted: AttentionConfig) -> tuple[RunConfig, PyTree]:
        thawed = config.optimizer.model_copy(update={"freeze": ()})  # names parameters of the source
        made = config.with_attention(wanted).model_copy(update={"family": conversion.family, "optimizer": thawed})
        return made, with_attention(
            source.params, source.program(made).abstract_params(), conversion.parameters(wanted)
        )

    target = conversion.attention
    print(costs(config, target))
    if target.by_layer:
        print(f"ranks           {' '.join(str(target.of_layer(i).rank) for i in range(config.model.layers))}")
    print(f"validation CE   {source.cross_entropy(config, source.params):.4f} before")
    result = converted(target)
    print(f"                {source.cross_entropy(*result):.4f} after")
    if options.to == "lrkv":
        ladder = [target.head_dim // 8, target.head_dim // 4, target.head_dim // 2, target.head_dim]
        for other in sorted(set(ladder if options.ranks is None else options.ranks)):
            wanted = lrkv_config(config.attention, other)
            print(f"  R = {other:<10}{source.cross_entropy(*converted(wanted)):.4f}", flush=True)
    config, params = result
    store = rundir.read_json(options.run_dir / "corpus.json")["store"]
    program = source.program(config)
    found = report.score(config, program, source.placed(program, params), 0, source.store, source.mesh, "test")
    # Scored first: what a kill leaves is a whole run directory or none.
    write_run(options.out, config, params, options.run_dir / "tokenizer.json", store)
    found.write(options.out)
    print(report.table(found.eval))
    return 0


def costs(config: RunConfig, target: AttentionConfig) -> str:
    """Cache of source and target, in bytes and shares."""
    model, source = config.model, config.attention
    mha, own, new = (
        cache_per_token(model, one)[1] for one in (source.model_copy(update={"kv_heads": source.heads}), source, target)
    )
    beside = "" if own == mha else f", {100 * new / own:.1f} % of its own"
    return f"KV cache        {own:,} bytes/token before, {new:,} after: {100 * new / mha:.1f} % of MHA's{beside}"


if __name__ == "__main__":
    command(main)()
