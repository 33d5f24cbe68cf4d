"""The oracle's own arithmetic, against known values and identities: a wrong oracle would bless a wrong module."""

from types import SimpleNamespace

import numpy as np
import oracle
import pytest

C, R, BASE = 10, 5, 10000.0


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def test_rope_turns_each_pair_by_its_own_angle():
    """Bug: interleaved instead of half-split pairs, a flipped sign, an exponent off by a factor."""
    np.testing.assert_allclose(oracle.rope(np.array([1.0, 0.0]), 1, BASE), [np.cos(1), np.sin(1)])
    np.testing.assert_allclose(oracle.rope(np.array([0.0, 1.0]), 1, BASE), [-np.sin(1), np.cos(1)])
    # The second of two pairs turns by 100^(-2/4) = 0.1 of the position: ten steps are one radian.
    np.testing.assert_allclose(oracle.rope(np.array([0.0, 1.0, 0.0, 0.0]), 10, 100.0), [0, np.cos(1), 0, np.sin(1)])


def test_rope_scores_depend_on_the_distance_only():
    """Bug: the angle is not linear in the position."""
    q, k = random(C, seed=1), random(C, seed=2)

    def score(t, s):
        return oracle.rope(q, t, BASE) @ oracle.rope(k, s, BASE)

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert abs(score(7, 3) - score(3, 7)) > 0.1


@pytest.mark.parametrize("rank", [1, 2, 5, C])
def test_absorbed_rope_identity(rank):
    """Bug: a sign or a half swapped in M_h, by which `full` decoding scores a code without forming its key."""
    for position in (0, 1, 17, 4099):
        q, code, b = random(C, seed=3), random(rank, seed=4), random(rank, C, seed=5)
        (q_a, q_b), (b_a, b_b) = np.split(q, 2), np.split(b, 2, axis=1)
        m_h = np.concatenate([q_a * b_a + q_b * b_b, q_b * b_a - q_a * b_b], axis=1)
        angles = position * BASE ** (-2 * np.arange(C // 2) / C)
        w = m_h @ np.concatenate([np.cos(angles), np.sin(angles)])
        assert code @ w == pytest.approx(oracle.rope(code @ b, position, BASE) @ q, abs=1e-12)


def test_the_papers_shortcut_is_another_model():
    """Bug: believing that rotation passes through B: rotating the code instead is off by the size of the key."""
    code, b = random(6, seed=6), random(6, C, seed=7)
    exact, shortcut = oracle.rope(code @ b, 9, BASE), oracle.rope(code, 9, BASE) @ b
    assert np.linalg.norm(exact - shortcut) > 0.5 * np.linalg.norm(exact)


def test_norm_commutes_with_rope():
    """Bug: a norm taken of the wrong vector: QK-norm's scalar may be cached because rotation keeps lengths."""
    k = random(C, seed=8)
    s = oracle.inverse_rms(k, 1e-6)
    np.testing.assert_allclose(oracle.rms_norm(oracle.rope(k, 5, BASE), 1e-6), s * oracle.rope(k, 5, BASE), atol=1e-12)


def test_attention_of_two_tokens_by_hand():
    """Bug: the mask lets the future in or the own token out, or the segments are ignored."""
    x, one = np.zeros((1, 2, 1)), np.ones((1, 1, 1))
    values = {0: np.array([4.0]), 1: np.array([8.0])}

    def run(segments):
        # Equal scores but for log 3 on the newer key: the weights of token 1 are 1/4 and 3/4.
        score = lambda b, h, t, s: np.log(3) * s  # noqa: E731
        return oracle.causal_attention(x, 1, segments, score, lambda b, h, s: values[s], one)[0, :, 0]

    np.testing.assert_allclose(run(None), [4.0, 7.0])
    np.testing.assert_allclose(run(np.array([[1, 2]])), [4.0, 8.0])


def test_grouped_heads_are_consecutive():
    """Bug: query heads dealt to key/value heads in turns (h mod K) instead of in runs (h // G)."""
    d, heads, kv_heads = 3, 4, 2
    weights = {"w_q": random(d, heads, C, seed=1), "w_k": random(d, kv_heads, C, seed=2)}
    weights |= {"w_v": random(d, kv_heads, C, seed=3), "w_o": random(heads, C, d, seed=4)}
    fields = {"heads": heads, "head_dim": C, "rotary_dim": None, "rope_base": BASE, "qk_norm": False}
    x, positions = random(1, 3, d, seed=5), np.arange(3)[None]
    grouped = oracle.gqa(SimpleNamespace(kv_heads=kv_heads, **fields), weights, x, positions, None, 1e-6)
    repeated = weights | {name: weights[name][:, [0, 0, 1, 1]] for name in ("w_k", "w_v")}
    full = oracle.gqa(SimpleNamespace(kv_heads=None, **fields), repeated, x, positions, None, 1e-6)
    np.testing.assert_allclose(grouped, full, atol=1e-12)


@pytest.mark.parametrize("mode", ["full", "shared", "latent"])
def test_modes_differ_only_by_position(mode):
    """Bug: a mode computes another product: at position 0 nothing is rotated and the three are one model."""
    d, heads, rank = 3, 2, 6
    shapes = {"w_q": (d, heads, C), "w_o": (heads, C, d), "bias_k": (heads, C)}
    for name in ("k", "v"):
        shapes |= {f"w_{name}_shared": (d, C), f"u_{name}": (d, heads, rank), f"b_{name}": (heads, rank, C)}
    weights = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    fields = {"heads": heads, "kv_heads": None, "head_dim": C, "rank": rank, "rope_base": BASE, "qk_norm": True}
    x = random(1, 4, d, seed=20)

    def run(mode, positions):
        return oracle.lrkv(SimpleNamespace(rope_mode=mode, **fields), weights, x, positions, None, 1e-6)

    still, moving = np.zeros((1, 4)), np.arange(4)[None]
    np.testing.assert_allclose(run(mode, still), run("full", still), atol=1e-12)
    if mode != "full":
        assert np.abs(run(mode, moving) - run("full", moving)).max() > 1e-3
