"""How far a difference between runs can be trusted: over documents, over seeds, and what seeds can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import optimize, stats

from lrkv_jax.settings import UserError

LEVEL = 0.95
RESAMPLES = 10_000
BLOCK = 1 << 22  # numbers drawn at a time


class Interval(NamedTuple):
    """An estimate and its confidence interval, in the estimate's unit."""

    estimate: float
    low: float
    high: float

    def excludes_zero(self) -> bool:
        """Whether 0 lies outside."""
        return self.low > 0 or self.high < 0


def paired_bootstrap(
    nats_a: Float[np.ndarray, "N"],
    nats_b: Float[np.ndarray, "N"],
    tokens: Int[np.ndarray, "N"],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """(Σ nats_a − Σ nats_b) / Σ tokens, nats/token, for two models that scored the same N documents.

    Documents are drawn with replacement, each with what both models made of it, and the ratio of sums is taken anew
    (percentile bootstrap; Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13). With fewer than some
    thirty documents it covers a little less often than `level` says. Raises UserError below two documents.
    """
    count = len(tokens)
    if count < 2:
        raise UserError(f"{count} document: an interval over documents needs at least 2")
    difference = nats_a - nats_b
    rng, ratios = np.random.default_rng(seed), []
    for start in range(0, resamples, per_block := max(1, BLOCK // count)):
        # How often each document is drawn says all that matters of a resample.
        times = rng.multinomial(count, np.full(count, 1 / count), size=min(per_block, resamples - start))
        ratios.append((times @ difference) / (times @ tokens))
    low, high = np.quantile(np.concatenate(ratios), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(difference.sum() / tokens.sum()), float(low), float(high))


def welch(a: Sequence[float], b: Sequence[float], level: float = LEVEL) -> Interval:
    """mean(a) − mean(b) with Welch's t interval, which supposes neither equal variances nor equal counts.

    Raises UserError where a side has fewer than two values, or neither has any spread.
    """
    if min(len(a), len(b)) < 2:
        raise UserError(f"{len(a)} and {len(b)} seeds: a spread over seeds needs at least 2 a side")
    if np.ptp(a) == np.ptp(b) == 0:
        raise UserError("all seeds of a side ended at the same number: they are copies of one run, not seeds")
    found = stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)
    return Interval(float(np.mean(a) - np.mean(b)), float(found.low), float(found.high))


def paired(a: Sequence[float], b: Sequence[float], level: float = LEVEL) -> Interval:
    """mean(a − b) with Student's t interval over the differences, for pairs that share what else moves them.

    Raises UserError below two pairs, or where all differences are the same.
    """
    difference = np.subtract(a, b)
    if difference.size < 2:
        raise UserError(f"{difference.size} pairs of seeds: a spread over seeds needs at least 2")
    if np.ptp(difference) == 0:
        raise UserError("all seeds differ by the same number: they are copies of one run, not seeds")
    found = stats.ttest_1samp(difference, 0.0).confidence_interval(level)
    return Interval(float(difference.mean()), float(found.low), float(found.high))


def smallest_difference(
    sd: float, seeds: int, level: float = LEVEL, power: float = 0.8, *, pairs: bool = False
) -> float:
    """The difference of two means that `seeds` runs a side tell from 0 with probability `power`, in the unit of `sd`.

    A two-sided two-sample t test at 1 − level, both sides with standard deviation `sd` over seeds: the shift at which
    a noncentral t passes the critical value with that probability (Cohen, Statistical Power Analysis, chapter 2; the
    other tail adds less than 1e-6). With `pairs`, of `seeds` differences with standard deviation `sd`. Raises
    UserError below two seeds a side.
    """
    if seeds < 2:
        raise UserError(f"{seeds} seeds a side: a spread over seeds needs at least 2")
    freedom = seeds - 1 if pairs else 2 * seeds - 2
    critical = stats.t.ppf((1 + level) / 2, freedom)
    shift = optimize.brentq(lambda shift: stats.nct.sf(critical, freedom, shift) - power, 0, 20 * critical)
    return float(shift * sd * np.sqrt((1 if pairs else 2) / seeds))
