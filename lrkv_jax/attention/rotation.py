"""The rotary embedding's fields, which every family's config has, and what they say in `layers`' terms."""

from __future__ import annotations

from typing import Any, Literal

from lrkv_jax.layers import Rotation
from lrkv_jax.settings import Settings

# The fields that say how a scaling acts.
STRENGTHS = ("rope_factor", "rope_low_turns", "rope_high_turns", "rope_original_context")
NEEDED = {None: (), "linear": STRENGTHS[:1], "llama3": STRENGTHS}


class RotaryConfig(Settings):
    """Rotary frequencies, and how they are scaled for a context longer than the original one."""

    rope_base: float = 10000.0
    """Base of the rotary frequencies θ_m = base^(−2m/dim)."""
    rope_scaling: Literal["linear", "llama3"] | None = None
    """`linear` divides all frequencies by a factor, `llama3` (Llama 3.1) the slow ones only; None = neither."""
    rope_factor: float | None = None
    """What frequencies are divided by, for either scaling; Llama 3.1 has 8."""
    rope_low_turns: float | None = None
    """llama3: frequencies with fewer turns than this in the original context are divided; Llama 3.1 has 1."""
    rope_high_turns: float | None = None
    """llama3: frequencies with more turns than this stay as they are, those in between go over; Llama 3.1 has 4."""
    rope_original_context: int | None = None
    """llama3: context before the scaling, in tokens; Llama 3.1 has 8192."""

    def model_post_init(self, _: Any) -> None:
        """Refuses a base that turns nothing and a scaling that isn't told in full."""
        if self.rope_base <= 1:
            raise ValueError(f"rope_base = {self.rope_base}: must be greater than 1")
        needed = NEEDED[self.rope_scaling]
        for name in STRENGTHS:
            value = getattr(self, name)
            if value is None and name in needed:
                raise ValueError(f"{name} = None: rope_scaling = {self.rope_scaling} needs a value")
            if value is not None and name not in needed:
                raise ValueError(f"{name} = {value}: rope_scaling = {self.rope_scaling} has no such number")
            if value is not None and value <= 0:
                raise ValueError(f"{name} = {value}: must be positive")
        if "rope_high_turns" in needed and self.rope_high_turns <= self.rope_low_turns:
            raise ValueError(
                f"rope_high_turns = {self.rope_high_turns}: must be above rope_low_turns = {self.rope_low_turns}"
            )

    @property
    def rotation(self) -> Rotation:
        """The frequencies, for `layers.rope`."""
        return Rotation(
            self.rope_base,
            self.rope_scaling,
            self.rope_factor,
            self.rope_low_turns,
            self.rope_high_turns,
            self.rope_original_context,
        )
