"""The attention shapes that `python -m lrkv_jax.bench decode` times, and its flags."""

from __future__ import annotations

import argparse
from typing import get_args

from lrkv_jax import attention
from lrkv_jax.attention import kernels
from lrkv_jax.attention.base import AttentionConfig
from lrkv_jax.config import load_configs
from lrkv_jax.settings import UserError
from lrkv_jax.timing import positive

DTYPES = ("float32", "bfloat16")
FAMILIES = ("mha", "gqa", "mqa", "mla", "lrkv", "lrkv_shared", "lrkv_latent")
DEFAULT_FAMILIES = FAMILIES[:-1]
"""lrkv_latent costs what lrkv_shared does, and has no odd rank, as the paper's are."""
STANDARD = {"heads": 12, "head_dim": 64, "kv_heads": 4, "latent": 128, "rank": 24, "width": 768}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench decode`."""
    parser.add_argument("--config", metavar="FILE[:KEY]", help="shapes of a config file instead of the standard one")
    parser.add_argument(
        "--families", nargs="+", metavar="KEY", help=f"of {', '.join(FAMILIES)}; default: all but the last"
    )
    parser.add_argument("--lengths", type=whole_numbers, default=[1024, 8192, 32768], help="default: 1024,8192,32768")
    parser.add_argument("--batch", type=positive, default=4, help="rows (default 4)")
    parser.add_argument("--dtype", type=dtypes, default=["float32"], help="float32 (default), bfloat16 or both: a,b")
    parser.add_argument("--implementation", help=f"{', '.join(get_args(kernels.Implementation))}; default: the fastest")
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each row of the table (default 10)")
    for name, value in STANDARD.items():
        parser.add_argument(flag(name), type=positive, metavar="N", help=f"of the standard shape (default {value})")


def flag(name: str) -> str:
    """The flag that sets a number of the standard shape."""
    return f"--{name.replace('_', '-')}"


def whole_numbers(text: str) -> list[int]:
    """Different numbers from 1 up, separated by commas, sorted."""
    return sorted({positive(part) for part in text.split(",")})


def dtypes(text: str) -> list[str]:
    """Different dtypes, separated by commas."""
    names = text.split(",")
    if not set(names) <= set(DTYPES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(DTYPES)}, each at most once")
    return names


def chosen(options: argparse.Namespace) -> tuple[dict[str, AttentionConfig], int]:
    """The attention configs by name, and the model width D. Raises UserError for names and flags that don't fit."""
    given = {name: getattr(options, name) for name in STANDARD if getattr(options, name) is not None}
    if options.config is not None:
        if given:
            name, value = next(iter(given.items()))
            raise UserError(f"{flag(name)} {value}: the shapes are those of --config {options.config}")
        return of_file(options.config, options.families)
    shape = STANDARD | given
    width = shape.pop("width")
    return {name: standard(name, **shape) for name in options.families or DEFAULT_FAMILIES}, width


def standard(name: str, *, heads: int, head_dim: int, kv_heads: int, latent: int, rank: int) -> AttentionConfig:
    """A family at the standard shape or a changed one. Raises UserError for an unknown name."""
    if name not in FAMILIES:
        raise UserError(f"--families {name}: have {', '.join(FAMILIES)}")
    gqa, mla, lrkv = (attention.families()[family].Config for family in ("gqa", "mla", "lrkv"))
    if name == "mla":
        return mla(heads=heads, head_dim=head_dim, latent=latent)
    if name in ("mha", "gqa", "mqa"):
        return gqa(heads=heads, head_dim=head_dim, kv_heads={"mha": heads, "gqa": kv_heads, "mqa": 1}[name])
    return lrkv(heads=heads, head_dim=head_dim, rank=rank, rope_mode=mode(name))


def of_file(reference: str, families: list[str] | None) -> tuple[dict[str, AttentionConfig], int]:
    """The entries of a config file; `lrkv_shared` and `lrkv_latent` are its `lrkv` in that mode.

    Raises UserError for an entry it lacks, and for entries of different width.
    """
    if ":" in reference and families:
        raise UserError(f"--families {' '.join(families)}: --config {reference} already names one")
    if ":" in reference:
        run = load_configs(reference)[1]
        return {run.family: run.attention}, run.model.width
    names = families or DEFAULT_FAMILIES
    modes = {"lrkv_shared", "lrkv_latent"} & set(names)
    runs = {name: load_configs(f"{reference}:{'lrkv' if name in modes else name}")[1] for name in names}
    configs = {name: run.attention for name, run in runs.items()}
    for name in modes:
        configs[name] = type(configs[name])(**configs[name].model_dump() | {"rope_mode": mode(name)})
    widths = {run.model.width for run in runs.values()}
    if len(widths) > 1:
        raise UserError(f"--config {reference}: model.width is {sorted(widths)}; one table needs one: give --families")
    return configs, widths.pop()


def mode(name: str) -> str:
    """LRKV's rope mode in a table's name."""
    return name.partition("_")[2] or "full"
