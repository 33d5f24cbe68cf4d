"""Attention families behind one contract.

Letters, in every einsum and shape of the project:

    B batch   T query position   S key position   D model width     F MLP width   V vocabulary   N layers
    H query heads   K key/value heads   G query heads per key/value head, H = K·G   C head dim
    R residual rank of LRKV   L latent of MLA   P rotary dims of MLA's shared key   Q width of a composed key

The contract (`base.AttentionBase`): `query` and `compress` turn hidden states into queries and into what a decoder must
keep; `expand` turns that into keys and values; the forward pass is their composition with `core`'s attention and `out`.
`attend` reads the compressed cache directly. To add a family, put one file here that defines `Config` and `Attention`;
configs, command line, accounting and the contract test find it by walking this package.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import Any


@functools.cache
def families() -> dict[str, ModuleType]:
    """The modules of this package that define a `Config` and an `Attention`, by name."""
    modules = {info.name: importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)}
    return {
        name: module for name, module in modules.items() if hasattr(module, "Config") and hasattr(module, "Attention")
    }


def build(config: Any, **arguments: Any) -> Any:
    """The attention module of a family's config; arguments as `base.AttentionBase` takes them."""
    return families()[config.family].Attention(config, **arguments)
