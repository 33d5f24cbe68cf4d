"""Compute savings on curves whose answers are known."""

import pytest

from lrkv_jax.savings import Saved, first_reach, savings

BASELINE = [(100.0, 5.0), (200.0, 4.0), (400.0, 3.0)]


def test_crossing_between_evaluations_is_interpolated():
    """Fails if the crossing snaps to an evaluation, or is interpolated from the wrong end."""
    curve = [(100.0, 4.0), (200.0, 3.5), (300.0, 2.5), (400.0, 2.0)]
    assert savings(curve, BASELINE) == Saved(pytest.approx(1 - 250 / 400), at_least=False)


def test_flops_per_token_of_both_sides_count():
    """Fails if a cost is left out or taken of the other side: the curve's tokens cost twice the baseline's."""
    curve = [(100.0, 4.0), (200.0, 3.0), (400.0, 2.0)]
    assert savings(curve, BASELINE, cost=6.0, baseline_cost=3.0).share == pytest.approx(1 - 200 * 6 / (400 * 3))
    assert savings(curve, BASELINE).share == pytest.approx(0.5)


def test_more_compute_than_the_baseline_is_a_negative_saving():
    """Fails if a share is clipped at zero, which would hide that the baseline was cheaper."""
    curve = [(100.0, 5.0), (400.0, 4.0), (800.0, 3.0)]
    assert savings(curve, BASELINE).share == pytest.approx(-1.0)


def test_never_reached_is_no_number():
    """Fails if a curve that ends above the baseline is extrapolated."""
    assert savings([(100.0, 5.0), (400.0, 3.001)], BASELINE) is None


def test_reached_at_the_first_evaluation_is_marked_as_a_bound():
    """Fails if the curve is extended to the left of what was measured, or the bound passes for an estimate."""
    assert savings([(100.0, 2.9), (400.0, 2.0)], BASELINE) == Saved(0.75, at_least=True)
    assert not savings([(100.0, 3.1), (400.0, 2.0)], BASELINE).at_least


def test_the_first_of_several_crossings_counts():
    """Fails if a noisy curve's last crossing is taken."""
    assert first_reach([(100.0, 4.0), (200.0, 3.0), (300.0, 3.5), (400.0, 2.5)], 3.0) == 200


def test_no_evaluations_are_refused():
    """Fails if a run that never was evaluated reads as one that never reached."""
    with pytest.raises(ValueError, match="without evaluations"):
        savings([], BASELINE)
