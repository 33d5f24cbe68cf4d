"""Compiles a run's training step for a TPU topology that needn't be there, and says what it holds, sends and takes.

    python -m lrkv_jax.podcheck --config configs/lrkv_2_5b.py:lrkv --topology v5e:16x16
    python -m lrkv_jax.podcheck --config configs/lrkv_2_5b.py:lrkv --topology v5p:4x4x4 --mesh.fsdp 16 --mesh.tensor 2
    python -m lrkv_jax.podcheck --config configs/lrkv_2_5b.py:lrkv --topology v5e:2x2 --decode --length 32768 --batch 64

Flags of train.py override the config. With a --mesh flag that mesh is compiled; without, meshes and remat policies are
pruned by arithmetic (plans.py), at most four compiled, and those that fit printed, best bound first; with --most 1 the
search ends with the first that fits. --json FILE writes all of it. Exit status 0: fits; 1: doesn't fit; 2: a mistake.

A bound is the largest of three times, as if each resource ran at its published rate (chips.py) and all overlapped:
compute, the FLOPs of the products in the compiled program; HBM, the bytes that its operations read and write; ICI, the
bytes that a device sends in its collectives, tiles' padding included, over all its links. MFU is the model's FLOPs, not
the program's, over peak.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import jax

from lrkv_jax import accounting, aot, chips, compiled, decode_check, podcheck_report, sharding
from lrkv_jax.bench import writing
from lrkv_jax.config import DEFAULT_CONFIG, RunConfig, parse_command
from lrkv_jax.fit import check_fit
from lrkv_jax.plans import REMATS, Plan, Planner
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.timing import positive

MOST_COMPILED = 4
ROOM = 0.95
"""Share of the memory that an estimate may fill and still be worth compiling."""
SIZES = {
    2: ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
}
"""Slices of a 2D and a 3D torus, from small to large."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What is compiled for."""

    topology: str
    devices: list[jax.Device]
    chip: chips.Chip
    per_chip: float
    """Devices a chip in this topology."""

    @property
    def hbm(self) -> float:
        """Bytes of memory of a device."""
        return self.chip.hbm_bytes / self.per_chip

    @property
    def peak(self) -> float:
        """FLOP/s of a device."""
        return self.chip.flops / self.per_chip


def target(topology: str, slices: int) -> Target:
    """Raises UserError for a topology that libtpu doesn't know, or a chip whose rates we don't."""
    devices = aot.topology_devices(topology, slices)
    chip = chips.of_kind(devices[0].device_kind)
    if chip is None:
        raise UserError(f"--topology {topology}: no published rates of a {devices[0].device_kind} in chips.py")
    count = slices * math.prod(int(size) for size in topology.replace("_", ":").split(":")[1].split("x"))
    return Target(topology, devices, chip, len(devices) / count)


def roofline(costs: compiled.Costs, kernel_flops: float, model_flops: float, at: Target) -> dict[str, Any]:
    """Seconds that each resource needs at least, and the MFU that the largest leaves."""
    carried = sum(c.times * c.carried for c in costs.collectives)
    flops = costs.flops + (kernel_flops if costs.kernels else 0.0)
    seconds = {
        "compute": flops / at.peak,
        "HBM": costs.traffic / (at.chip.hbm_bandwidth / at.per_chip),
        "ICI": carried / (at.chip.ici_bandwidth / at.per_chip),
    }
    step = max(seconds.values())
    return {
        "seconds": seconds,
        "step_seconds": step,
        "bound_by": max(seconds, key=seconds.__getitem__),
        "mfu_bound": model_flops / len(at.devices) / at.peak / step,
        "flops_per_device": flops,
        "hbm_bytes_per_device": costs.traffic,
        "carried_bytes_per_device": carried,
    }


def kernel_flops(config: RunConfig, tokens: int) -> float:
    """FLOPs a step, over all devices, of attention kernels, whose products are not in the program's text.

    accounting counts two products of T² a head forward and four backward. A causal kernel does half of each, but forms
    scores and their gradients anew in both of its backward passes (seven products), and once more where layers are
    recomputed.
    """
    half = config.data.context // 2
    short = config.model_copy(update={"data": config.data.model_copy(update={"context": half})})
    whole = accounting.train_flops_per_token(config)
    scores = (whole - accounting.train_flops_per_token(short)) * config.data.context / (config.data.context - half)
    passes = 2 + 7 + (2 if config.model.remat == "full" else 0)
    return tokens * scores / 2 * passes / 6


def check_training(config: RunConfig, plan: Plan, at: Target) -> dict[str, Any]:
    """Compiles one plan. The result has `fits`, and where it does memory, collectives and bound.

    Raises UserError for a mesh that train.py refuses.
    """
    chosen = plan.applied(config)
    row: dict[str, Any] = {
        "mesh": plan.mesh.model_dump(),
        "remat": plan.remat,
        "parameter_bytes": plan.parameter_bytes,
        "optimizer_bytes": plan.optimizer_bytes,
        "estimated_bytes": plan.memory_bytes,
        "hbm_bytes": at.hbm,
        "fits": False,
    }
    if plan.least_bytes > at.hbm:
        return row | {"peak_bytes": plan.least_bytes, "why": "parameters, gradients and optimizer state alone take"}
    try:
        program = aot.compile_training(chosen, at.devices)
    except (aot.OutOfMemory, aot.Refused) as error:
        return row | error.report()
    memory, costs = compiled.memory(program), compiled.costs(program)
    tokens = config.train.batch_size * config.data.context
    flops = accounting.train_flops_per_token(config) * tokens
    kernels = kernel_flops(chosen, tokens) / len(at.devices) if costs.kernels else 0.0
    return row | {
        "fits": memory.peak <= at.hbm,
        "peak_bytes": memory.peak,
        "memory": memory._asdict(),
        "collectives": compiled.by_kind(costs.collectives),
        "kernels": costs.kernels,
        "unknown_loops": costs.unknown_loops,
        **roofline(costs, kernels, flops, at),
    }


def search(config: RunConfig, planner: Planner, at: Target, remats: tuple[str, ...], most: int) -> list[dict[str, Any]]:
    """Compiles the most promising plans, one policy a mesh: the one that recomputes least and should still fit.

    What a compiled plan took beside its estimate corrects the estimates of the others. A mesh that train.py refuses is
    passed over. Raises UserError where that leaves none.
    """
    plans = planner.plans(len(at.devices), remats)
    if not plans:
        raise UserError(
            f"--topology {at.topology}: no mesh of {len(at.devices)} devices divides {config.train.batch_size} rows "
            f"in {config.train.microbatches} microbatch(es), {config.data.context} positions in "
            f"{config.train.loss_chunks} chunks of the loss and {config.attention.heads} heads; try a larger "
            f"train.batch_size"
        )
    rows: list[dict[str, Any]] = []
    correction, tried, refused = 1.0, set(), None
    while plans and len(rows) < MOST_COMPILED and sum(row["fits"] for row in rows) < most:
        able = [p for p in plans if p.mesh not in tried and p.memory_bytes * correction <= ROOM * at.hbm]
        if rows and not able:
            break
        # Where nothing should fit, the smallest says by how much.
        plan = able[0] if able else min(plans, key=lambda plan: plan.memory_bytes)
        try:
            row = check_training(config, plan, at)
        except UserError as error:
            refused = error
            plans = [p for p in plans if p.mesh != plan.mesh]
            continue
        rows.append(row)
        if row["fits"] or row["peak_bytes"] is None:
            tried.add(plan.mesh)
        else:
            correction = max(correction, row["peak_bytes"] / plan.memory_bytes)
            plans.remove(plan)
    if not rows:
        raise refused
    return sorted(rows, key=lambda row: (not row["fits"], row.get("step_seconds", row["peak_bytes"] or math.inf)))


def remedies(config: RunConfig, planner: Planner, at: Target, remats: tuple[str, ...], fixed: bool) -> list[str]:
    """What would fit, by estimate: another mesh, recomputation, a larger topology of the same chips."""

    def least(devices: int, policies: tuple[str, ...]) -> Plan | None:
        fitting = [p for p in planner.plans(devices, policies) if p.memory_bytes <= ROOM * at.hbm]
        return fitting[0] if fitting else None

    found = []
    here = least(len(at.devices), REMATS)
    if here is not None and (fixed or here.remat not in remats):
        found.append(f"{flags(here, config)} on {at.topology}")
    generation, size = at.topology.split(":")
    axes = size.count("x") + 1
    for larger in SIZES[axes]:
        devices = round(config.mesh.slices * math.prod(map(int, larger.split("x"))) * at.per_chip)
        plan = least(devices, REMATS) if devices > len(at.devices) else None
        if plan is not None:
            found.append(f"--topology {generation}:{larger} with {flags(plan, config)}")
            break
    return found or ["more rows for more devices (train.batch_size), or chips with more memory"]


def flags(plan: Plan, config: RunConfig) -> str:
    """The flags that make a config this plan."""
    named = mesh_flags(plan.mesh.model_dump(), config)
    return " ".join(named + ([f"--model.remat {plan.remat}"] if plan.remat != config.model.remat else []))


def mesh_flags(sizes: dict[str, int], config: RunConfig) -> list[str]:
    """A flag for each axis that the config's own mesh gives another size; one of -1 comes to a 1 by itself."""
    return [f"--mesh.{axis} {size}" for axis, size in sizes.items() if size != max(1, getattr(config.mesh, axis))]


def parser() -> Parser:
    """The flags that are not train.py's."""
    own = Parser(prog="python -m lrkv_jax.podcheck", add_help=False, allow_abbrev=False)
    own.add_argument("--config", default=DEFAULT_CONFIG, metavar="FILE[:KEY]", help="config file, and its entry")
    own.add_argument("--topology", metavar="NAME", help="v5e:16x16, v5p:4x4x4, v6e:16x16, ...: chips along each axis")
    own.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    own.add_argument("--most", type=positive, default=4, help="look for so many plans that fit (default 4)")
    own.add_argument("--decode", action="store_true", help="check the decode step instead of the training step")
    own.add_argument("--length", type=positive, default=8192, help="with --decode: slots of the cache (default 8192)")
    own.add_argument("--batch", type=positive, default=64, help="with --decode: rows (default 64)")
    return own


@command
def main() -> int:
    """Entry point."""
    own = parser()
    options, rest = own.parse_known_args()
    rest = ["--config", options.config, *rest]
    config = parse_command(own.prog, f"{__doc__}\n{own.format_help()}", rest, trains=False).config
    if config.train.distill_weight:
        print("compiled without the teacher, whose parameters and forward pass come on top", file=sys.stderr)
        config = config.model_copy(update={"train": config.train.model_copy(update={"distill_weight": 0.0})})
    if options.topology is None:
        raise UserError("--topology is needed: v5e:4x4, v5p:4x4x4, v6e:16x16, ...")
    if options.json is not None:
        writing(options.json, "")  # before the minutes of compiling, not after
    given = [arg.split("=")[0] for arg in rest]
    aot.prepare_environment()
    at = target(options.topology, config.mesh.slices)
    fixed = any(arg.startswith("--mesh.") and arg != "--mesh.slices" for arg in given)
    report = head(config, options.config, at)
    if options.decode:
        report |= decode_check.check(config, at, options.length, options.batch, options.most, fixed=fixed)
        show = podcheck_report.decode_table
    else:
        report |= check(config, at, rest, options.most, fixed=fixed, fixed_remat="--model.remat" in given)
        show = podcheck_report.train_table
    print(show(report))
    if options.json is not None:
        writing(options.json, json.dumps(report, indent=2) + "\n")
    return 0 if any(row["fits"] for row in report["plans"]) else 1


def head(config: RunConfig, name: str, at: Target) -> dict[str, Any]:
    """What every report begins with."""
    return {
        "config": name if ":" in name else f"{name}:{config.family}",
        "topology": at.topology,
        "slices": config.mesh.slices,
        "devices": len(at.devices),
        "device_kind": at.devices[0].device_kind,
        "chip": dataclasses.asdict(at.chip),
        "jax": jax.__version__,
    }


def check(
    config: RunConfig, at: Target, args: list[str], most: int, *, fixed: bool, fixed_remat: bool
) -> dict[str, Any]:
    """The report on training: one mesh if it is fixed, else the search's."""
    state = jax.eval_shape(accounting.textless_program(config).init_state, jax.random.key(0))
    planner = Planner(config, at.chip, state, at.per_chip)
    remats = (config.model.remat,) if fixed_remat or fixed else REMATS
    if fixed:
        mesh = sharding.make_mesh(config.mesh, at.devices)
        check_fit(config, mesh)
        sharding.with_shardings(state, mesh)
        plans = planner.of_mesh(MeshConfig(**mesh.shape), len(at.devices), remats)
        rows = [check_training(config, plan, at) for plan in plans]
    else:
        rows = search(config, planner, at, remats, most)
    fits = any(row["fits"] for row in rows)
    for row in rows:
        row["command"] = train_command(args, row, config)
    return {
        "kind": "train",
        "parameters": planner.parameters // 4,
        "tokens_per_step": planner.tokens,
        "flops_per_step": planner.flops_per_token * planner.tokens,
        "considered": len(planner.plans(len(at.devices), remats)),
        "plans": rows,
        "remedies": [] if fits else remedies(config, planner, at, remats, fixed),
    }


def train_command(args: list[str], row: dict[str, Any], config: RunConfig) -> str:
    """The command that trains with a row's mesh and policy: the flags given, and those that were chosen."""
    given = {arg.split("=")[0] for arg in args}
    chosen = [flag for flag in mesh_flags(row["mesh"], config) if flag.split()[0] not in given]
    if row["remat"] != config.model.remat:
        chosen.append(f"--model.remat {row['remat']}")
    return " ".join(["python train.py", shlex.join(args), *chosen])


if __name__ == "__main__":
    main()
