"""The low-rank split: known answers, weighted error against brute force, monotone in rank."""

import itertools

import numpy as np
import pytest

from lrkv_jax.lowrank import factorise, tails, water_fill

K, D, C = 3, 11, 6


def problem(seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(K, D, C))
    a, b = rng.normal(size=(40, D)) * rng.gamma(1, size=D), rng.normal(size=(K, 20, C)) * rng.gamma(1, size=(K, 1, C))
    return weights, a.T @ a / 40, b.swapaxes(1, 2) @ b / 20


def root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(values) @ vectors.T


def weighted(left, inputs, outputs):
    """Σ_k ‖Σ^½ E_k M_k^½‖², term by term."""
    return sum(np.linalg.norm(root(inputs) @ e @ root(m)) ** 2 for e, m in zip(left, outputs, strict=True))


def test_full_rank_is_exact():
    """Bug: whitening is undone on the wrong side."""
    weights, inputs, outputs = problem()
    for given in ((), (inputs,), (inputs, outputs)):
        found = factorise(weights, C, *given)
        np.testing.assert_allclose(found.shared + found.down @ found.up, weights, atol=1e-9)


def test_recovers_a_sum_of_shared_and_low_rank():
    """Bug: the alternation stops at the mean, which residuals of several heads pull away from the shared part."""
    rng = np.random.default_rng(1)
    shared = rng.normal(size=(40, 16))
    weights = shared + np.stack([rng.normal(size=(40, 1)) @ rng.normal(size=(1, 16)) for _ in range(5)])
    assert factorise(weights, 1).error < 1e-4
    assert factorise(weights, 0).error > 0.1


def test_plain_first_round_is_mean_and_truncated_svd():
    """Bug: eigenvectors are taken from the small end."""
    weights = problem()[0]
    only = factorise(weights[:1], 2)  # one matrix: its mean is itself
    np.testing.assert_allclose(only.shared, weights[0], atol=1e-9)
    pair = np.stack([weights[0], -weights[0]])  # mean 0, so each residual is the matrix's own SVD
    left, values, right = np.linalg.svd(weights[0], full_matrices=False)
    found = factorise(pair, 2)
    best = (left[:, :2] * values[:2]) @ right[:2]
    np.testing.assert_allclose((found.shared + found.down @ found.up)[0], best, atol=1e-6)


def test_weighted_beats_plain_where_it_counts_and_error_is_the_one_told():
    """Bug: Σ or M_k is used transposed, or M_k of another head."""
    weights, inputs, outputs = problem()
    plain, found = factorise(weights, 2), factorise(weights, 2, inputs, outputs)
    errors = [weighted(weights - f.shared - f.down @ f.up, inputs, outputs) for f in (plain, found)]
    assert errors[1] < 0.9 * errors[0]
    assert found.error == pytest.approx(errors[1] / weighted(weights, inputs, outputs), rel=1e-3)  # but for the ridge
    # No step of a random direction improves it: each half is at its minimum.
    rng = np.random.default_rng(2)
    for _ in range(20):
        step = 1e-4 * rng.normal(size=found.shared.shape)
        moved = weighted(weights - found.shared - step - found.down @ found.up, inputs, outputs)
        assert moved > errors[1] * (1 - 1e-4)


def test_error_falls_with_rank():
    """Bug: a larger rank starts from a worse shared part and stops early."""
    weights, inputs, outputs = problem(3)
    errors = [factorise(weights, rank, inputs, outputs).error for rank in range(C + 1)]
    assert all(b < a for a, b in itertools.pairwise(errors))
    assert errors[-1] < 1e-12


def test_tails_bound_the_error_at_every_rank():
    """Bug: another rank's error, an unweighted one, or one whose shared part is not the weighted mean."""
    weights, inputs, outputs = problem()
    for given in ((), (inputs, outputs)):
        found = tails(weights, *given)
        whole = weighted(weights, *(given or (np.eye(D), np.stack([np.eye(C)] * K))))
        reached = [factorise(weights, rank, *given).error * whole for rank in range(C + 1)]
        assert found.shape == (C + 1,)
        assert found[0] == pytest.approx(reached[0], rel=1e-4)
        assert found[C] == pytest.approx(0, abs=1e-9)
        assert all(bound >= error - 1e-4 * whole for bound, error in zip(found, reached, strict=True))
        steps = -np.diff(found)
        assert (np.diff(steps) <= 1e-12 * whole).all()
    alone = weights[0] - weights.mean(axis=0)  # two matrices and their mean leave the same residual twice
    pair = np.stack([alone, -alone])
    values = np.linalg.svd(alone, compute_uv=False) ** 2
    np.testing.assert_allclose(tails(pair)[:-1], 2 * np.cumsum(values[::-1])[::-1], rtol=1e-4)


def test_water_filling_is_the_best_of_all_ways():
    """Bug: a layer's large error counts, and not what a rank takes off it; the budget is missed by one."""
    rng = np.random.default_rng(0)
    errors = np.array([tails(rng.normal(size=(K, D, 4)) * scale) for scale in (1, 3, 0.5)])
    for budget in range(13):
        ranks = water_fill(errors, budget)
        ways = [way for way in itertools.product(range(5), repeat=3) if sum(way) == budget]
        cost = lambda way: sum(error[rank] for error, rank in zip(errors, way, strict=True))  # noqa: E731
        assert sum(ranks) == budget
        assert cost(ranks) == pytest.approx(min(map(cost, ways)))
    with pytest.raises(ValueError, match="budget = 13: must be between 0 and 12"):
        water_fill(errors, 13)
