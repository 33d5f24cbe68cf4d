"""Whether a run fits a mesh: asked before anything is written, allocated or compiled."""

from __future__ import annotations

from jax.sharding import Mesh

from lrkv_jax import accounting, sharding
from lrkv_jax.attention import backends
from lrkv_jax.config import RunConfig
from lrkv_jax.settings import UserError


def check_fit(config: RunConfig, mesh: Mesh, teacher: RunConfig | None = None) -> None:
    """Raises UserError where rows, positions or heads don't divide over the mesh, or attention can't run there.

    `teacher` is as teacher.py has it.
    """
    train, context = config.train, config.data.context
    rows, ways = train.batch_size // train.microbatches, sharding.row_ways(mesh)
    if rows % ways:
        raise UserError(
            f"train.batch_size = {train.batch_size} in {train.microbatches} microbatch(es): {rows} rows don't divide "
            f"over mesh slices x data x fsdp = {ways}"
        )
    parts = mesh.shape["context"]
    if context % (parts * train.loss_chunks):
        raise UserError(
            f"data.context = {context}: does not divide over mesh.context = {parts} times train.loss_chunks = "
            f"{train.loss_chunks}"
        )
    accounting.textless_program(config).abstract_state(mesh)
    attention = accounting.abstract_attention(config.model, config.attention)
    backends.check(attention, rows, context, config.data.isolated, mesh)
    if teacher is not None:
        try:
            check_fit(teacher, mesh)
        except UserError as error:
            raise UserError(f"the teacher's model: {error}") from None


def runnable(config: RunConfig, mesh: Mesh) -> RunConfig:
    """A run's config for reading it where it wasn't trained: attention by another kernel where its own can't run."""
    attention = accounting.abstract_attention(config.model, config.attention)
    try:
        backends.check(attention, sharding.row_ways(mesh), config.data.context, False, mesh)
    except UserError:
        return config.with_attention(config.attention.model_copy(update={"implementation": "auto"}))
    return config
