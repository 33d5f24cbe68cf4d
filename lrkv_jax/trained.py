"""A trained run's model, for what reads runs and doesn't train them."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from lrkv_jax import lora
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data import Tokenizer
from lrkv_jax.fit import runnable
from lrkv_jax.step import Program, Tokens, make_program
from lrkv_jax.storage import AnyPath


class Model(NamedTuple):
    """A model as it decodes."""

    config: RunConfig
    program: Program
    params: PyTree
    step: int


def restored(run_dir: AnyPath, config: RunConfig, template: PyTree, which: int | str) -> tuple[PyTree, int]:
    """The run's parameters, placed as `template` says, and the step they are of. Raises UserError as a restore does."""
    with contextlib.closing(Checkpointer(run_dir, config.checkpoint)) as checkpoints:
        return checkpoints.restore_params(template, which)


def load(run_dir: AnyPath, config: RunConfig, tokenizer: Tokenizer, mesh: Mesh, which: int | str) -> Model:
    """The run's model on a mesh, adapters added to the weights once and not at every token.

    Raises UserError as a restore does, and where the model doesn't fit the mesh.
    """
    config = runnable(config, mesh)
    tokens = Tokens(tokenizer.begin_id, tokenizer.end_id, config.data.isolated)
    program = make_program(config.model, config.attention, config.train, config.optimizer, tokens)
    params, step = restored(run_dir, config, program.abstract_state(mesh)["params"], which)
    if config.model.lora_rank:
        params = jax.jit(lambda params: lora.merge(program.graph, params))(params)
        config = config.without_adapters()
        program = make_program(config.model, config.attention, config.train, config.optimizer, tokens)
    return Model(config, program, params, step)
