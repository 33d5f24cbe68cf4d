"""How much less compute one run needs to reach where another ended, from their held-out curves alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

Curve = Sequence[tuple[float, float]]
"""(tokens, cross-entropy) of each evaluation, oldest first."""


class Saved(NamedTuple):
    """A share of the baseline's compute."""

    share: float
    """1 is all of it; negative where reaching the baseline took more than the baseline had."""
    at_least: bool
    """Whether the first evaluation was there already: the crossing lies somewhere before it, so the compute it is
    charged is the most that it can have been, and `share` the least."""


def savings(curve: Curve, baseline: Curve, cost: float = 1.0, baseline_cost: float = 1.0) -> Saved | None:
    """1 − (compute at which `curve` first reaches the baseline's final loss) / (the baseline's total compute).

    Costs are FLOPs per token of either run; left alone, compute is counted in tokens. Between evaluations the loss is
    taken as a straight line. None where the curve never gets there. Both curves must be of one split and its same
    windows. The curve is not annealed where it crosses and the baseline's end is, so the share is rather too small.
    Raises ValueError for a curve without evaluations.
    """
    if not curve or not baseline:
        raise ValueError("a curve without evaluations says nothing about savings")
    total, target = baseline[-1]
    tokens = first_reach(curve, target)
    if tokens is None:
        return None
    return Saved(1 - tokens * cost / (total * baseline_cost), at_least=curve[0][1] <= target)


def first_reach(curve: Curve, target: float) -> float | None:
    """The tokens at which a curve first is at `target` or below, or None; never before its first evaluation."""
    if curve[0][1] <= target:
        return curve[0][0]
    for (start, above), (end, below) in itertools.pairwise(curve):
        if below <= target:
            return start + (end - start) * (above - target) / (above - below)
    return None
