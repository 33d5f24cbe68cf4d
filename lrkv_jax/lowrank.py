"""Many matrices as one that they share and a residual of low rank each: the mathematics of conversion to LRKV.

    W_k ≈ W_shared + U_k B_k        W_k, W_shared [D, C], U_k [D, R], B_k [R, C]

minimising Σ_k ‖Σ^½ (W_k − W_shared − U_k B_k) M_k^½‖². Σ [D, D] are second moments of the inputs x: the error of x W_k
on what the model really sees. M_k [C, C] weighs the C outputs of head k: by second moments of the queries that meet a
key, or by how the output projection passes a value on. With Σ = 1 and M_k = 1 it is the plain problem: mean and
truncated SVD.

The two halves are solved in turn, each exactly, so the error never rises: the residuals, with E_k = W_k − W_shared, by
the R leading eigenvectors Q of M_k^½ E_kᵀ Σ E_k M_k^½, U_k = E_k M_k^½ Q and B_k = Qᵀ M_k^−½ (a truncated SVD in the
whitened space that needs no inverse of Σ); the shared part by a mean of W_k − U_k B_k that is weighted by M_k.
R = C is exact. Everything is float64 and C x C beyond one product with Σ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RIDGE = 1e-6  # share of the mean eigenvalue added to weights, which may be singular
PATIENCE = 1e-5  # relative gain in error below which the alternation has stopped improving
MOST_ROUNDS = 100


class Factors(NamedTuple):
    """The approximation of K matrices."""

    shared: np.ndarray
    """W_shared [D, C]."""
    down: np.ndarray
    """U [K, D, R], columns of length 1, as they are initialised in training."""
    up: np.ndarray
    """B [K, R, C]."""
    error: float
    """The weighted squared error over that of W_k = 0."""
    rounds: int
    """Alternations."""


def factorise(
    weights: np.ndarray, rank: int, inputs: np.ndarray | None = None, outputs: np.ndarray | None = None
) -> Factors:
    """Factors of weights [K, D, C], for second moments of the inputs [D, D] and weights of the outputs [K, C, C].

    None of either weighs all alike. Raises ValueError for a rank beyond C.
    """
    count, _, size = weights.shape
    if not 0 <= rank <= size:
        raise ValueError(f"rank = {rank}: must be between 0 and head_dim = {size}")
    weights = weights.astype(np.float64)
    outputs = np.broadcast_to(np.eye(size), (count, size, size)) if outputs is None else _regular(outputs)
    half, half_inverse = _roots(outputs)
    scale = _error(weights, inputs, half)
    shared = _mean(weights, outputs)
    before, rounds = np.inf, 0
    while True:
        down, up = _residuals(weights - shared, rank, inputs, half, half_inverse)
        rounds += 1
        error = _error(weights - shared - down @ up, inputs, half) / scale
        if not error < before * (1 - PATIENCE) or rounds == MOST_ROUNDS or rank == size or count == 1:
            break
        before, shared = error, _mean(weights - down @ up, outputs)
    length = np.linalg.norm(down, axis=1, keepdims=True)
    length = np.where(length > 0, length, 1)
    return Factors(shared, down / length, up * length.swapaxes(1, 2), error, rounds)


def tails(weights: np.ndarray, inputs: np.ndarray | None = None, outputs: np.ndarray | None = None) -> np.ndarray:
    """The weighted squared error at every rank 0..C, [C + 1], not over anything; arguments as `factorise` takes them.

    With the shared part that is best without residuals: an upper bound, from one decomposition, of what `factorise`
    reaches by moving it.
    """
    weights = weights.astype(np.float64)
    count, _, size = weights.shape
    outputs = np.broadcast_to(np.eye(size), (count, size, size)) if outputs is None else outputs.astype(np.float64)
    half, _ = _roots(outputs + RIDGE * _mean_eigenvalue(outputs) * np.eye(size))
    values = np.linalg.eigvalsh(_gram((weights - _mean(weights, _regular(outputs))) @ half, inputs)).sum(
        axis=0
    )  # ascending
    return np.concatenate([[0.0], np.cumsum(np.maximum(values, 0))])[::-1]


def water_fill(errors: np.ndarray, budget: int) -> tuple[int, ...]:
    """Ranks [N] of `budget` in all at which the sum of errors [N, C + 1] is least.

    Each unit of rank goes where it takes most away; exact, since an error's steps shrink with the rank.
    Raises ValueError for a budget beyond N·C.
    """
    layers, largest = len(errors), errors.shape[1] - 1
    if not 0 <= budget <= layers * largest:
        raise ValueError(f"budget = {budget}: must be between 0 and {layers * largest}")
    gains = errors[:, :-1] - errors[:, 1:]
    order = np.argsort(-gains, axis=None, kind="stable")[:budget]  # a layer's own steps are in order already
    return tuple(int(count) for count in np.bincount(order // largest, minlength=layers))


def _residuals(
    left: np.ndarray, rank: int, inputs: np.ndarray | None, half: np.ndarray, half_inverse: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """U [K, D, R] and B [K, R, C] of what is left [K, D, C] once the shared part is taken off."""
    whitened = left @ half
    _, vectors = np.linalg.eigh(_gram(whitened, inputs))  # ascending
    leading = vectors[..., ::-1][..., :rank]
    return whitened @ leading, leading.swapaxes(1, 2) @ half_inverse


def _mean(weights: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """The shared [D, C] nearest to all [K, D, C]: (Σ_k W_k M_k) (Σ_k M_k)⁻¹; the inputs' moments cancel."""
    return np.linalg.solve(outputs.sum(axis=0), (weights @ outputs).sum(axis=0).T).T


def _error(left: np.ndarray, inputs: np.ndarray | None, half: np.ndarray) -> float:
    """Σ_k of the weighted squared norms."""
    return float(np.trace(_gram(left @ half, inputs), axis1=1, axis2=2).sum())


def _gram(left: np.ndarray, inputs: np.ndarray | None) -> np.ndarray:
    """leftᵀ Σ left, [K, C, C]."""
    return left.swapaxes(1, 2) @ (left if inputs is None else inputs @ left)


def _regular(outputs: np.ndarray) -> np.ndarray:
    """Weights made safely invertible, and of one mean size over all heads together."""
    outputs = outputs.astype(np.float64)
    return outputs / _mean_eigenvalue(outputs) + RIDGE * np.eye(outputs.shape[-1])


def _mean_eigenvalue(outputs: np.ndarray) -> float:
    return float(np.trace(outputs, axis1=1, axis2=2).mean()) / outputs.shape[-1]


def _roots(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """M^½ and M^−½ of symmetric positive matrices."""
    values, vectors = np.linalg.eigh(outputs)
    root = np.sqrt(np.maximum(values, np.finfo(float).tiny))[:, None]
    return (vectors * root) @ vectors.swapaxes(1, 2), (vectors / root) @ vectors.swapaxes(1, 2)
