"""Tensors in safetensors files: one, or shards with an index that says which holds what."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lrkv_jax.rundir import read_json
from lrkv_jax.settings import UserError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""What is written."""
READABLE = ("F32", "BF16", "F16")
"""What is read, as safetensors calls it: whatever a float32 holds exactly, which a quantised checkpoint isn't."""


class Tensors:
    """The tensors of a folder by name, none of them read yet."""

    def __init__(self, folder: Path):
        """Raises UserError where a file is missing, cut short or none of safetensors', or lacks what the index says."""
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        listed = _listed(index) if index.exists() else {}
        if not index.exists() and not (folder / WHOLE).exists():
            raise UserError(f"{folder}: has neither {WHOLE} nor {INDEX} (pickled .bin files aren't read)")
        for path in [folder / name for name in dict.fromkeys(listed.values())] or [folder / WHOLE]:
            file = _open(path)
            self._files |= dict.fromkeys(file.keys(), (path, file))
        for name, shard in listed.items():
            if name not in self._files:
                raise UserError(f"{folder / shard}: lacks {name}, which {INDEX} says it holds")

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
        """Raises UserError naming the first tensors that are missing, of another shape or dtype, or not expected.

        An unexpected tensor is a part of a model that we would leave out; `ignored` are ends of names that aren't.
        """
        missing = [name for name in expected if name not in self._files]
        ours = lambda name: name in expected or name.endswith(tuple(ignored))  # noqa: E731
        strange = [name for name in self._files if not ours(name)]
        faults = [f"no tensor {missing[0]}{_more(missing)}"] if missing else []
        faults += [f"tensor {strange[0]}{_more(strange)} has no place in this architecture"] if strange else []
        for name, shape in expected.items():
            if name in self._files:
                path, file = self._files[name]
                found = file.get_slice(name)
                if tuple(found.get_shape()) != shape:
                    faults.append(f"{name} in {path.name} is {found.get_shape()}, config.json says {list(shape)}")
                elif found.get_dtype() not in READABLE:
                    faults.append(f"{name} in {path.name} is {found.get_dtype()}, should be {', '.join(READABLE)}")
        if faults:
            raise UserError(f"{faults[0]}{_more(faults)}")

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor in float32."""
        return self._files[name][1].get_tensor(name).astype(np.float32)


def _listed(index: Path) -> dict[str, str]:
    """File by tensor, as an index has it."""
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()) or not found:
        raise UserError(f"{index}: has no weight_map of tensors to files")
    return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cut short, or no safetensors ({error})"
        raise UserError(f"{path}: {reason}") from None


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def write(folder: Path, tensors: Mapping[str, np.ndarray], dtype: str, most: int) -> None:
    """Writes tensors, cast to `dtype`, as files of at most `most` bytes each (but one tensor at least)."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = tensor.size * DTYPES[dtype].itemsize
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    files = (
        [WHOLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for file, names in zip(files, shards, strict=True):
        # save_file takes an array's memory as it lies, strides unseen.
        content = {name: np.ascontiguousarray(tensors[name], DTYPES[dtype]) for name in names}
        path = folder / file
        path.touch()
        mode = path.stat().st_mode
        save_file(content, path, metadata={"format": "pt"})  # transformers refuses a file without
        path.chmod(mode)  # safetensors 0.8 leaves files that only their owner may read (its issue 782)
    if len(shards) > 1:
        total = sum(math.prod(tensor.shape) for tensor in tensors.values()) * DTYPES[dtype].itemsize
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
