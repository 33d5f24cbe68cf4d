"""The run that another one learns from: `--distill-from RUN_DIR[@STEP]`, kept in teacher.json (origin.py).

Any run of ours whose tokenizer and vocabulary are the new run's: of another family, width or depth, with adapters or
without. Its model reads the same batches, with the same positions and documents, and is computed as the new run's is
(dtype, scan, attention kernel); its rotary base, norms and soft-cap are its own. The parameters go with each step and
are in no checkpoint, so a run that is resumed reads them again, and finds that they are the same.
"""

from __future__ import annotations

from jax.sharding import Mesh
from jaxtyping import PyTree

from lrkv_jax.accounting import abstract_parameters
from lrkv_jax.config import Command, RunConfig
from lrkv_jax.initial import config_of, find, look, reopened, tell
from lrkv_jax.origin import TEACHER, Origin
from lrkv_jax.settings import UserError
from lrkv_jax.step import Program


def find_teacher(options: Command) -> Origin | None:
    """The checkpoint that a command's run learns from; None where there is none.

    Nothing is allocated. Raises UserError where it knows another tokenizer or vocabulary, or no such step, or where the
    run is there already and learns from another, or from none.
    """
    return find(TEACHER, options.distill_from, options.run_dir, lambda: _named(options.config, options.distill_from))


def _named(config: RunConfig, reference: str) -> Origin:
    """The checkpoint named, checked against the config of the run that is to learn from it."""
    teacher = look(TEACHER, reference, config, lambda other, _: abstract_parameters(other))
    other = config_of(teacher)
    if other.model.vocab != config.model.vocab:
        raise UserError(
            f"{TEACHER.flag} {reference}: has model.vocab = {other.model.vocab} and this run {config.model.vocab}; "
            f"must be the same, since both give a distribution over it"
        )
    same_model = {"model": config.model, "attention": config.attention}  # where the two differ on purpose
    tell(f"teacher {teacher.run_dir}, step {teacher.step}", config, other.model_copy(update=same_model))
    return teacher


def model_of(teacher: Origin | None, config: RunConfig) -> RunConfig | None:
    """The run's config with the teacher's model in it, computed as the run's own; None without a teacher."""
    if teacher is None:
        return None
    other = config_of(teacher)
    how = config.model.model_dump(include={"dtype", "scan_layers", "remat"})
    return config.model_copy(
        update={
            "family": other.family,
            "model": other.model.model_copy(update=how),
            "attention": other.attention.model_copy(update={"implementation": config.attention.implementation}),
            "optimizer": config.optimizer.model_copy(update={"freeze": ()}),  # names parameters of the run's own
        }
    )


def read_teacher(teacher: Origin | None, program: Program, mesh: Mesh) -> tuple[PyTree, ...]:
    """What the training step takes behind state and batch: the teacher's parameters, or nothing without a teacher.

    Each device reads its own part. Raises UserError where the checkpoint is damaged, gone, or not the one that it was.
    """
    if teacher is None:
        return ()
    template = program.teacher.abstract_state(mesh)["params"]
    try:
        with reopened(teacher, TEACHER) as (checkpoints, _):
            return (checkpoints.restore_params(template, teacher.step)[0],)
    except UserError as error:
        raise UserError(f"{TEACHER.flag} {teacher}: {error}; a run needs its teacher until its last step") from None
