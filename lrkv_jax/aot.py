"""Programs compiled for TPUs that aren't there: libtpu compiles for a named topology on any machine.

The environment is set before libtpu is loaded, and libtpu is loaded only when a topology is asked for. Nothing runs on
the topology's devices, and the machine's own backend stays the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import jax
import jax.numpy as jnp

from lrkv_jax import sharding
from lrkv_jax.accounting import textless_program
from lrkv_jax.config import RunConfig
from lrkv_jax.fit import check_fit
from lrkv_jax.settings import UserError
from lrkv_jax.step import compile_train_step

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # On a machine without TPUs libtpu would look for a metadata server, and say at length that there is none.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_SKIP_MDS_QUERY": "1",
    # Its lock keeps two processes off the same chips; there are none, and two may compile at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfMemory(Exception):
    """The compiler found that a program doesn't fit into a device's memory."""

    def __init__(self, needed: float, available: float):
        super().__init__(f"needs {needed:.4g} of {available:.4g} bytes")
        self.needed, self.available = needed, available

    def report(self) -> dict[str, Any]:
        """What a plan's row says of it."""
        return {"peak_bytes": self.needed, "available_bytes": self.available, "why": "the compiled program takes"}


class Refused(Exception):
    """The compiler can't make this program for this topology; the message is its own, in one line."""

    def report(self) -> dict[str, Any]:
        """What a plan's row says of it."""
        return {"peak_bytes": None, "why": f"the compiler refuses this mesh: {self}"}


def prepare_environment() -> None:
    """Sets what libtpu reads when it is loaded, where the user has not. Call it before JAX makes a backend."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def topology_devices(name: str, slices: int = 1) -> list[jax.Device]:
    """The devices of a topology such as `v5e:16x16` (chips along each axis of the torus), of several slices if asked.

    Raises UserError where libtpu is missing or knows no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("--topology: libtpu, which compiles for TPUs, is not installed: pip install libtpu")
    from jax.experimental import topologies

    several = {} if slices == 1 else {"num_slices": slices}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"--topology {name}: {one_line(error)}. Right would be v5e:4x4, v5p:4x4x4, v6e:16x16 and the like"
        ) from None


def compile_training(config: RunConfig, devices: list[jax.Device]) -> jax.stages.Compiled:
    """The training step that train.py runs, donated and sharded, compiled for these devices.

    Raises UserError where model or batch don't divide over the mesh, OutOfMemory, or Refused.
    """
    mesh = sharding.make_mesh(config.mesh, devices)
    check_fit(config, mesh)
    abstract, step = compile_train_step(textless_program(config), mesh)
    shape = (config.train.batch_size, config.data.context + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        return compiled(step, abstract, tokens)


def compiled(step: Any, *arguments: Any) -> jax.stages.Compiled:
    """Lowers and compiles. Raises OutOfMemory or Refused."""
    lowered = step.lower(*arguments)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"\(?([\d.]+)([KMGT]?)\)? exceeds available HBM \(?([\d.]+)([KMGT]?)", str(error))
        if found:
            needed, unit, available, unit_of_available = found.groups()
            sizes = float(needed) * UNITS[unit], float(available) * UNITS[unit_of_available]
            raise OutOfMemory(*sizes) from None
        raise Refused(one_line(error)) from None


def one_line(error: Exception) -> str:
    """The beginning of a compiler's message, without its line breaks and advice."""
    return re.sub(r"\s+", " ", str(error)).split(" For simplicity")[0][:300].rstrip(" .")
