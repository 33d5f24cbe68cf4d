"""A model that did not train here, as a run directory like any other: what importing and converting end with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from lrkv_jax import rundir
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data import open_store
from lrkv_jax.storage import AnyPath, all_or_nothing


def write_run(out: AnyPath, config: RunConfig, params: PyTree, tokenizer: AnyPath, corpus: str = "") -> None:
    """Makes `out` the directory of a run that stands at step 0 with these parameters, and has no optimizer's state.

    `eval.py`, `generate` and `--init-from` take it; there is nothing to resume. The corpus is that of `config.data`,
    tokenized by the tokenizer.json given, or one that was prepared before, by its name (corpus.json's `store`).
    Raises UserError, and leaves nothing, where `out` exists, the corpus can't be had, the tokenizer has more tokens
    than the model, or the machine refuses.
    """
    with all_or_nothing(out) as folder:
        store = open_store(config.data, config.model.vocab, tokenizer=tokenizer, name=corpus)
        rundir.found(folder, config, store)
        with contextlib.closing(Checkpointer(folder, config.checkpoint)) as checkpoints:
            checkpoints.save(0, {"params": params})


def by_name(params: PyTree) -> dict[str, nnx.Param]:
    """Parameters, concrete or abstract, by their names as people know them: `blocks.attention.w_q.w`."""
    return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(params)}


def filled(abstract: PyTree, value: Callable[[str], np.ndarray]) -> PyTree:
    """Float32 parameters of the shapes of `abstract`, each the value of its name, held in the host's memory.

    Raises ValueError for a value of another shape.
    """

    flat = []
    for path, param in nnx.to_flat_state(abstract):
        name, shape = ".".join(map(str, path)), param.get_value().shape
        array = np.asarray(value(name), np.float32)
        if array.shape != shape:
            raise ValueError(f"{name} is {array.shape}, not {shape}")
        flat.append((path, param.replace(jax.device_put(array, host()))))
    return nnx.from_flat_state(flat)


def host() -> jax.Device:
    """The CPU, since parameters that an accelerator's memory can't hold in float32 may be meant for several."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS has left it out
        return jax.local_devices()[0]
