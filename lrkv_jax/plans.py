"""Meshes and remat policies for a number of devices, pruned and ordered by arithmetic alone.

The state's bytes are exact: those of its shards. The rest is an estimate that only decides what is worth compiling,
per device, with t tokens in a microbatch:

    memory   state + gradients + matrices gathered for a layer (and, with Muon, for its update) + activations kept
             (none, dots, full: all, the products, or the residual stream of each layer) + one layer's own + logits
    compute  FLOPs of the step, a third more if layers are recomputed, and those of Muon, which copies of the model
             (slices, data, context) all do, over the chips' peak
    ICI      parameters gathered in each pass and their gradients scattered (fsdp), gradients summed over copies
             (slices, data, context), two sums of the residual stream a layer and pass (tensor), compressed entries
             (context), and matrices gathered by Muon
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from lrkv_jax import accounting, sharding
from lrkv_jax.chips import Chip
from lrkv_jax.config import RunConfig
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MESH_AXES, MeshConfig

REMATS = ("none", "dots", "full")
PASSES = {"none": 2, "dots": 2, "full": 3}
"""Times that a layer's weights are gathered: forward, backward, and to recompute."""
MUON_GATHERS = 7.5
"""Times that Muon's five iterations send each matrix in two bytes a number: as compiled at 2.5B, fsdp 16."""
MUON_COPIES = 4
"""Matrices of two bytes a number, of the largest stack of layers, that Muon holds at once: from the same program."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh and a remat policy, with what they should take on each device."""

    mesh: MeshConfig
    remat: str
    parameter_bytes: int
    """Exact."""
    optimizer_bytes: int
    """Exact."""
    memory_bytes: float
    """Estimate of the peak, state included."""
    compute_seconds: float
    ici_seconds: float

    @property
    def least_bytes(self) -> int:
        """What the step can't do without: state and gradients, which are as large as the parameters."""
        return 2 * self.parameter_bytes + self.optimizer_bytes

    @property
    def rank(self) -> tuple[float, float]:
        """Order of estimated steps: by what bounds them, then by what the interconnect carries."""
        return max(self.compute_seconds, self.ici_seconds), self.ici_seconds

    def applied(self, config: RunConfig) -> RunConfig:
        """The config with this mesh and policy."""
        model = config.model.model_copy(update={"remat": self.remat})
        return config.model_copy(update={"mesh": self.mesh, "model": model})


class Planner:
    """Makes plans for one config on devices of one kind; what doesn't depend on the mesh is worked out once."""

    def __init__(self, config: RunConfig, chip: Chip, abstract_state: PyTree, devices_per_chip: float = 1.0):
        self.config, self.chip, self.state = config, chip, abstract_state
        self.peak, self.ici = (rate / devices_per_chip for rate in (chip.flops, chip.ici_bandwidth))
        self.flops_per_token = accounting.train_flops_per_token(config)
        self.parameters = _bytes(abstract_state["params"])
        self.optimizer_flops = _update_flops(config, abstract_state)
        matrices = jax.tree.leaves(abstract_state["params"], is_leaf=sharding.is_param)
        self.largest_matrix = max((_bytes(p) for p in matrices if p.role == "matrix"), default=0)
        self.entry_bytes = accounting.cache_per_token(config.model, config.attention)[1]

    def plans(self, devices: int, remats: tuple[str, ...] = REMATS) -> list[Plan]:
        """All plans, the best estimate first. Empty where no mesh divides batch, context and model."""
        made = [plan for mesh in self.meshes(devices) for plan in self.of_mesh(mesh, devices, remats)]
        return sorted(made, key=lambda plan: plan.rank)

    def meshes(self, devices: int) -> Iterator[MeshConfig]:
        """Meshes of all these devices whose rows and positions divide; the model is checked by `of_mesh`."""
        config, slices = self.config, self.config.mesh.slices
        rows = config.train.batch_size // config.train.microbatches
        positions = config.data.context // config.train.loss_chunks  # each chunk of the loss is split
        inner = devices // slices
        divisors = [size for size in range(1, inner + 1) if inner % size == 0]
        for fsdp, tensor, split in itertools.product(divisors, repeat=3):
            data, rest = divmod(inner, fsdp * tensor * split)
            if not rest and data and rows % (slices * data * fsdp) == 0 and positions % split == 0:
                yield MeshConfig(slices=slices, data=data, fsdp=fsdp, tensor=tensor, context=split)

    def of_mesh(self, mesh: MeshConfig, devices: int, remats: tuple[str, ...] = REMATS) -> list[Plan]:
        """One plan a policy; none where the model doesn't divide over the mesh."""
        abstract = AbstractMesh(tuple(getattr(mesh, axis) for axis in MESH_AXES), MESH_AXES)
        try:
            parameters, optimizer = (_shard_bytes(self.state[part], abstract) for part in ("params", "opt"))
        except UserError:
            return []
        found = []
        for remat in remats:
            memory = 2 * parameters + optimizer + self.working_bytes(mesh, remat)
            flops = self.flops_per_token * self.tokens * (4 / 3 if remat == "full" else 1) / devices
            flops += self.optimizer_flops / (mesh.fsdp * mesh.tensor)
            ici = self.ici_bytes(mesh, remat, parameters) / self.ici
            found.append(Plan(mesh, remat, parameters, optimizer, memory, flops / self.peak, ici))
        return found

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.config.train.batch_size * self.config.data.context

    def working_bytes(self, mesh: MeshConfig, remat: str) -> float:
        """Estimate of what a device holds beside state and gradients."""
        config, model, heads = self.config, self.config.model, self.config.attention
        size = 4 if model.dtype == "float32" else 2
        rows = config.train.batch_size / config.train.microbatches / (mesh.slices * mesh.data * mesh.fsdp)
        tokens = rows * config.data.context / mesh.context
        head_width = heads.heads * heads.head_dim / mesh.tensor
        hidden = model.hidden * (3 if model.mlp == "swiglu" else 2) / mesh.tensor
        products = 2 * model.width + 4 * head_width + hidden
        kept = {"none": 2 * products, "dots": products, "full": model.width}[remat]
        layer = self.parameters / model.layers / 4 * size / mesh.tensor
        logits = rows * config.data.context / config.train.loss_chunks * model.vocab / mesh.tensor * 4 * 3
        unembedding = model.vocab * model.width / mesh.tensor * (4 + 2 * size)
        # Keys and values of all positions, on every device, and one layer's activations with their gradients.
        entries = 4 * rows * config.data.context * head_width * size
        own = tokens * 2 * products * (size + 4) / 2
        passes = tokens * kept * model.layers * size + own + entries + max(logits + unembedding, 2 * layer)
        orthogonal = MUON_COPIES * self.largest_matrix / 2 / mesh.tensor if self.optimizer_flops else 0.0
        return max(passes, orthogonal)

    def ici_bytes(self, mesh: MeshConfig, remat: str, parameters: int) -> float:
        """Estimate of what a device sends in a step."""
        config, model = self.config, self.config.model
        size = 4 if model.dtype == "float32" else 2
        passes, parts = PASSES[remat], config.train.microbatches
        tokens = self.tokens / (mesh.slices * mesh.data * mesh.fsdp * mesh.context)
        whole = parameters * mesh.fsdp
        gathered = parts * passes * whole / 4 * size * (1 - 1 / mesh.fsdp)
        scattered = parts * whole * (1 - 1 / mesh.fsdp)
        copies = mesh.slices * mesh.data * mesh.context
        summed = 2 * parameters * (1 - 1 / copies)
        residual = 4 * passes * model.layers * tokens * model.width * size * (1 - 1 / mesh.tensor)
        entries = (passes + 1) * tokens * mesh.context * self.entry_bytes * (1 - 1 / mesh.context)
        orthogonal = MUON_GATHERS * whole / 2 * (1 - 1 / mesh.fsdp) if self.optimizer_flops else 0.0
        return gathered + scattered + summed + residual + entries + orthogonal


def _update_flops(config: RunConfig, state: PyTree) -> int:
    """FLOPs of the products in the optimizer's update, on one device: Muon's."""
    update = accounting.textless_program(config).optimizer.update
    jaxpr = jax.make_jaxpr(update)(state["params"], state["opt"], state["params"])
    return accounting.dot_flops(jaxpr.jaxpr)


def _bytes(tree: PyTree) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _shard_bytes(tree: PyTree, mesh: AbstractMesh) -> int:
    """Bytes of one device's part of a state. Raises UserError where a parameter doesn't divide over the mesh."""
    total = 0
    for node in jax.tree.leaves(tree, is_leaf=sharding.is_param):
        leaf = node.get_value() if sharding.is_param(node) else node
        axes = node.axes if sharding.is_param(node) else (None,) * leaf.ndim
        total += math.prod(sharding.sharding_of(leaf.shape, axes, mesh).shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total
