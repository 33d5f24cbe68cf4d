"""Reads a compiled XLA program: memory of a device, collectives, FLOPs of products, traffic of its memory.

Everything but the memory comes from the HLO text of one device's program, in which a loop's body stands once: what is
in it counts as often as the loop runs. XLA's own `cost_analysis` counts it once, so a model of scanned layers would
seem to have one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from lrkv_jax.hlo import Instruction, Module, Shape

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Operations that move nothing themselves: they name, group, or call.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "after-all"}
FREE |= {"opt-barrier", "partition-id", "replica-id"}
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that write a part of their first operand in place, and which operand that part is."""
PASSING = {*KINDS, "parameter", "tuple", "get-tuple-element", "custom-call"}
"""Inside a fusion, operations by which a buffer only passes through."""


class Memory(NamedTuple):
    """Bytes that one device holds while the program runs, as XLA planned them."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that take the place of donated arguments."""
    temporaries: int
    """The heap at its largest."""
    code: int

    @property
    def peak(self) -> int:
        """All that must fit into the device's memory."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


class Collective(NamedTuple):
    """One exchange between devices."""

    kind: str
    """One of KINDS."""
    operands: tuple[str, ...]
    """What a device puts in, such as `bf16[4,128]`."""
    group: int
    """Devices that take part with each other."""
    payload: int
    """Bytes of the whole: of the array gathered, of the arrays summed (one device's), of what is permuted."""
    stored: int
    """The same with the padding that a TPU's tiles put into arrays, and that travels with them."""
    times: int
    """How often a step does it."""
    source: str
    """The JAX operation it belongs to, where XLA kept the name."""

    @property
    def sent(self) -> float:
        """Bytes a device sends for it, once, in a ring: the least that any algorithm on a ring needs."""
        return self.payload * self.share

    @property
    def carried(self) -> float:
        """The same with padding: what the links carry."""
        return self.stored * self.share

    @property
    def share(self) -> float:
        """Of the whole, what each device sends."""
        once = (self.group - 1) / self.group
        return {"all-reduce": 2 * once, "collective-permute": 1.0}.get(self.kind, once)


class Costs(NamedTuple):
    """What one run of the program costs one device."""

    collectives: list[Collective]
    flops: float
    """2·(multiplications) of its matrix products, whatever is computed twice or on several devices included."""
    traffic: float
    """Bytes read from and written to device memory (HBM) by its operations; slices count what they touch."""
    kernels: int
    """Calls of Pallas kernels, whose FLOPs are not in the text; operands and results count as touched once."""
    unknown_loops: int
    """Loops whose length the text doesn't tell; they are counted as run once."""


class Reader(Module):
    """Counts what a program's text says."""

    def costs(self) -> Costs:
        """All that is counted."""
        self.unknown_loops = 0
        collectives, flops, traffic, kernels, pieces = [], 0.0, 0.0, 0, set()
        for name, instruction, times, scheduled in self.walk():
            opcode = instruction.opcode
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                # A TPU runs some gathers in pieces, one inside each of several fusions of other work.
                channel = instruction.attribute(r"channel_id=(\d+)")
                if "async_collective_fusion_config" not in instruction.rest or channel not in pieces:
                    collectives.append(self.collective(name, kind, instruction, times))
                    if not scheduled:
                        traffic += times * self.touched(name, instruction)
                if "async_collective_fusion_config" in instruction.rest:
                    pieces.add(channel)
            elif opcode == "dot":
                flops += times * self.dot_flops(name, instruction)
            elif opcode == "convolution":
                flops += times * self.convolution_flops(name, instruction)
            elif 'custom_call_target="tpu_custom_call"' in instruction.rest:
                kernels += times
            if scheduled and opcode not in FREE and not opcode.endswith("-done"):
                traffic += times * self.touched(name, instruction)
        collectives = [c for c in collectives if c.group > 1]
        return Costs(collectives, flops, traffic, kernels, self.unknown_loops)

    def collective(self, name: str, kind: str, instruction: Instruction, times: int) -> Collective:
        """One collective; a TPU writes a reduce-scatter as a fusion of an all-reduce and a slice of it."""
        kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
        operands = self.shapes(name, instruction)
        group = 2 if kind == "collective-permute" else self.group(instruction.rest)
        whole = group if kind == "all-gather" else 1
        payload, stored = (whole * sum(sizes) for sizes in zip(*((s.bytes, s.stored) for s in operands), strict=True))
        texts = tuple(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in operands)
        return Collective(kind, texts, group, payload, stored, times, instruction.attribute(r'op_name="([^"]*)"') or "")

    def group(self, rest: str) -> int:
        """Devices in one replica group, in any of the three ways XLA writes them."""
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
            return listed.group(1).count(",") + 1
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
            return int(iota.group(2))
        if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
            sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh.group(1)))
            used = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh.group(2))
            return math.prod(int(part or sizes[axis]) for axis, part in used)
        return self.devices

    def dot_flops(self, name: str, dot: Instruction) -> int:
        """2·(size of the result)·(size of what is summed over)."""
        left = self.shapes(name, dot)[0]
        summed = [int(i) for i in (dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "").split(",") if i]
        return 2 * math.prod(dot.shapes[0].dims) * math.prod(left.dims[i] for i in summed)

    def convolution_flops(self, name: str, convolution: Instruction) -> int:
        """As a TPU writes products: batch dimensions may be dilated spatial ones, whose zeros are not multiplied."""
        left, right = self.shapes(name, convolution)[:2]
        labels = re.split(r"_|->", convolution.attribute(r"dim_labels=(\S+?)(?:,|$)"))
        dims = left.dims, right.dims, convolution.shapes[0].dims
        at = [dict(zip(*pair, strict=True)) for pair in zip(labels, dims, strict=True)]
        window = dict(re.findall(r"(\w+)=([\dx_\-]+)", convolution.attribute(r"window=\{([^}]*)\}") or ""))
        total = 2 * at[2]["b"] * at[2]["f"] * at[1]["i"]
        for i, label in enumerate(sorted(label for label in at[0] if label.isdigit())):
            part = {key: value.split("x")[i] for key, value in window.items()}
            first = int(part.get("pad", "0_0").split("_")[0])
            step, spread, gap = (int(part.get(key, 1)) for key in ("stride", "rhs_dilate", "lhs_dilate"))
            place = np.arange(at[2][label])[:, None] * step + np.arange(at[1][label])[None] * spread - first
            inside = (place >= 0) & (place <= (at[0][label] - 1) * gap) & (place % gap == 0)
            total *= int(inside.sum())
        return total

    def touched(self, name: str, instruction: Instruction) -> int:
        """Bytes of main memory that an operation reads and writes."""
        if "AllocateBuffer" in instruction.rest:
            return 0
        if instruction.opcode == "fusion":
            return self.touched_by_fusion(name, instruction)
        kind, operands = instruction.opcode.removesuffix("-start"), self.shapes(name, instruction)
        if kind in UPDATES:
            return 2 * _resident(operands[UPDATES[kind] :][:1])
        results = instruction.shapes
        if kind != instruction.opcode:  # the results of a start are its operand too, and copies name it second
            results = results[:1] if kind == "copy" else results[1:2]
        if kind in SLICES:
            return _stored(results) + _resident(results)
        if aliased := re.findall(
            r"\((\d+), \{", instruction.attribute(r"output_to_operand_aliasing=\{(.*?\))\}") or ""
        ):
            # A kernel that updates an operand in place is taken to touch no more of it than it is given to write.
            operands = [shape for i, shape in enumerate(operands) if str(i) not in aliased]
            return 2 * _resident(operands)
        return _resident(operands) + _resident(results)

    def touched_by_fusion(self, name: str, fusion: Instruction) -> int:
        """What it reads of its operands and writes of its results.

        Where it only slices an operand that is the slices; what it updates in place, the update; and what only passes
        through it, such as the buffers of a collective on its way, is not touched.
        """
        called = fusion.attribute(r"calls=%?([\w.\-]+)")
        inside, total = self.computations[called], 0
        users: dict[str, list[Instruction]] = {}
        for instruction in inside.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        parameters = {i.operands[0]: i.name for i in inside.values() if i.opcode == "parameter"}
        for index, operand in enumerate(fusion.operands):
            shapes, used = self.computations[name][operand].shapes, users.get(parameters[str(index)], [])
            if not all(user.opcode in PASSING or _in_place(user, parameters[str(index)]) for user in used):
                sliced = all(user.opcode in SLICES for user in used)
                whole = _resident(shapes)
                total += min(whole, sum(_stored(user.shapes) for user in used)) if sliced else whole
        root = inside[self.roots[called]]
        results = [inside[o] for o in root.operands] if root.opcode == "tuple" else [root]
        for shape, result in zip(fusion.shapes, results, strict=False):
            if result.opcode in UPDATES:
                total += min(_resident([shape]), _stored(inside[result.operands[UPDATES[result.opcode]]].shapes))
            elif result.opcode not in PASSING:
                total += _resident([shape])
        return total


def _stored(shapes: Iterable[Shape]) -> int:
    return sum(shape.stored for shape in shapes)


def _resident(shapes: Iterable[Shape]) -> int:
    """Bytes of those in main memory."""
    return _stored(shape for shape in shapes if shape.resident)


def _in_place(user: Instruction, operand: str) -> bool:
    """Whether an instruction takes an operand only to update a part of it."""
    return user.opcode in UPDATES and user.operands[0] == operand


def memory(compiled: Any) -> Memory:
    """Memory of one device, of a `jax.stages.Compiled`."""
    plan = compiled.memory_analysis()
    return Memory(
        arguments=plan.argument_size_in_bytes,
        outputs=plan.output_size_in_bytes,
        aliased=plan.alias_size_in_bytes,
        temporaries=plan.temp_size_in_bytes,
        code=plan.generated_code_size_in_bytes,
    )


def costs(compiled: Any) -> Costs:
    """Costs of one run on one device, of a `jax.stages.Compiled`."""
    return Reader(compiled.as_text()).costs()


def by_kind(collectives: list[Collective]) -> dict[str, dict[str, int | float]]:
    """Per kind: how many a step, bytes of their payloads, bytes that a device sends without and with padding."""
    found: dict[str, dict[str, int | float]] = {}
    for c in collectives:
        row = found.setdefault(c.kind, {"count": 0, "payload_bytes": 0, "sent_bytes": 0.0, "carried_bytes": 0.0})
        row["count"] += c.times
        row["payload_bytes"] += c.times * c.payload
        row["sent_bytes"] += c.times * c.sent
        row["carried_bytes"] += c.times * c.carried
    return dict(sorted(found.items()))
