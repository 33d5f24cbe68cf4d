"""The numbers that the paper prints (arXiv 2601.11471 v3), for a layer of its own in our figures.

Another corpus (FineWeb-Edu), tokenizer and scale: only differences between its own models compare with ours. One seed
each. Cache percentages as the paper counts them, without QK-norm scales and without MLA's rotary key.
"""

from __future__ import annotations

from typing import NamedTuple

HEAD_DIM = 128


class Printed(NamedTuple):
    """One model of the paper."""

    scale: str
    """128M (trained on 100B tokens) or 2.5B (50B)."""
    kind: str
    """lrkv, mla, mha, gqa or mqa."""
    label: str
    """As we write it."""
    size: int | None
    """R of LRKV, L of MLA."""
    cache_percent: float
    """Of MHA's."""
    ce: float
    """Final test cross-entropy, nats per token."""
    bits_per_byte: float | None
    """Final, on the test split; not printed for the rank sweep."""


TABLE = (
    Printed("128M", "mha", "MHA", None, 100.0, 2.903, 0.878),
    Printed("128M", "gqa", "GQA-3", None, 50.0, 2.918, 0.883),
    Printed("128M", "mqa", "MQA", None, 17.0, 2.929, 0.886),
    Printed("128M", "mla", "MLA L=128", 128, 8.3, 2.901, 0.876),
    Printed("128M", "mla", "MLA L=192", 192, 12.5, 2.898, None),
    Printed("128M", "mla", "MLA L=384", 384, 25.0, 2.894, None),
    Printed("128M", "lrkv", "LRKV R=8", 8, 22.9, 2.908, None),
    Printed("128M", "lrkv", "LRKV R=16", 16, 29.2, 2.905, None),
    Printed("128M", "lrkv", "LRKV R=32", 32, 41.7, 2.896, None),
    Printed("128M", "lrkv", "LRKV R=46", 46, 53.0, 2.893, 0.872),
    Printed("128M", "lrkv", "LRKV R=64", 64, 66.7, 2.888, None),
    Printed("128M", "lrkv", "LRKV R=128", 128, 116.7, 2.877, None),
    Printed("2.5B", "mha", "MHA", None, 100.0, 2.389, 0.723),
    Printed("2.5B", "gqa", "GQA-6", None, 33.0, 2.397, 0.725),
    Printed("2.5B", "mqa", "MQA", None, 6.0, 2.408, 0.729),
    Printed("2.5B", "mla", "MLA L=384", 384, 8.3, 2.392, 0.724),
    Printed("2.5B", "lrkv", "LRKV R=55", 55, 48.0, 2.376, 0.719),
)

# Compute that LRKV needs less to reach each baseline's end, percent of the baseline's; 2.5B.
SAVINGS = {"mqa": 29.7, "gqa": 24.5, "mla": 21.4, "mha": 18.7}

# Effective rank of the heads, percent of H: uncentred, centred; 2.5B.
DIVERSITY = {"mha": (98.9, 94.0), "lrkv": (98.3, 93.5), "gqa": (95.4, 91.7), "mla": (92.7, 91.6), "mqa": (86.2, 91.0)}


def mha(scale: str) -> Printed:
    """MHA of one scale, which the others are measured against."""
    return next(model for model in TABLE if (model.scale, model.kind) == (scale, "mha"))
