"""What the paper prints and what does not add up in it (docs/fidelity.md): the arithmetic behind each entry."""

import math

import numpy as np
import pytest

from lrkv_jax import accounting, paper
from lrkv_jax.config import load_configs

C = paper.HEAD_DIM
SCALES = {"128M": ("lrkv_128m", 46), "1.2B": ("lrkv_1_2b", 51), "2.5B": ("lrkv_2_5b", 55), "6.3B": ("lrkv_6_3b", 54)}


def config(scale, family="lrkv"):
    return load_configs(f"configs/{SCALES[scale][0]}.py:{family}")[1]


def share(heads, rank):
    """LRKV's share of MHA's cache as the paper counts it, 1/H + R/C, in percent."""
    return 100 * (1 / heads + rank / C)


def test_rotation_does_not_distribute_over_the_residual():
    """Erratum 1: RoPE(code) B is not RoPE(code B); the relative error is of the size of the thing itself."""
    rng = np.random.default_rng(0)
    rank, position = 64, 977
    code, up = rng.normal(size=rank), rng.normal(size=(rank, C))

    def rotate(x):
        half = len(x) // 2
        angles = position * 10000.0 ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])

    exact = rotate(code @ up)
    assert np.linalg.norm(rotate(code) @ up - exact) / np.linalg.norm(exact) > 0.5
    assert {rank % 2 for _, rank in SCALES.values()} == {0, 1}  # and odd ranks have no pairs to rotate


@pytest.mark.parametrize(
    ("heads", "rank", "printed", "printed_for_64"),
    [(6, 46, 52.6, 52.6), (12, 51, 48.2, None), (18, 55, 48.4, 48.4), (32, 54, 45.1, 45.1)],
)
def test_percentages_are_those_of_other_ranks_than_the_text_names(heads, rank, printed, printed_for_64):
    """Errata 2 and 3: the tables' percentages follow from R = 46 to 55; the sums printed with 64/128 do not add up."""
    assert share(heads, rank) == pytest.approx(printed, abs=0.25)
    assert printed_for_64 is None or share(heads, 64) - printed_for_64 > 7


def test_2_5b_has_36_layers():
    """Erratum 4: 18 layers, as its table says, would be 1.4B."""
    model = config("2.5B", "mha")
    assert model.model.layers == 36
    assert accounting.accounts(model).parameters == pytest.approx(2.53e9, rel=0.005)
    halved = model.model_copy(update={"model": model.model.model_copy(update={"layers": 18})})
    assert accounting.accounts(halved).parameters < 1.4e9


def test_512m_and_1_2b_are_two_models():
    """Erratum 7: the row that both share prints 24 layers; 12 are 494M, 36 are 1.17B, and 24 would be 834M."""
    small, large = load_configs("configs/lrkv_512m_8k.py:mha")[1], config("1.2B", "mha")
    sizes = {}
    for layers in (12, 24, 36):
        model = large.model.model_copy(update={"layers": layers})
        sizes[layers] = accounting.accounts(large.model_copy(update={"model": model})).parameters
    assert sizes[12] == accounting.accounts(small).parameters == pytest.approx(494e6, rel=0.002)
    assert sizes[24] == pytest.approx(834e6, rel=0.002)
    assert sizes[36] == accounting.accounts(large).parameters == pytest.approx(1.17e9, rel=0.005)


def test_648_megabytes_are_twice_that():
    """Erratum 5: keys and values of 18 layers, 18 heads of 128, bfloat16, 8,192 tokens."""
    assert 2 * 18 * 18 * C * 2 * 8192 / 2**20 == 1296


def test_mla_caches_a_rotary_key_too():
    """Erratum 6: 8.3 % is the latent alone; with the rotary key 12.5 %, and 13.3 % of bytes with key scales."""
    assert pytest.approx(8.3, abs=0.05) == 100 * 128 / (2 * 6 * C)
    assert 100 * (128 + C / 2) / (2 * 6 * C) == 12.5
    assert accounting.accounts(config("128M", "mla")).cache_percent_of_mha == pytest.approx(13.3, abs=0.05)


def test_bits_per_byte_imply_one_length_of_token():
    """Erratum 8: nats / (ln 2 · bits per byte) is 4.77 bytes a token in every row that prints both."""
    both = [model for model in paper.TABLE if model.bits_per_byte]
    assert len(both) == 10
    for model in both:
        assert model.ce / (math.log(2) * model.bits_per_byte) == pytest.approx(4.77, abs=0.02)


def test_mla_wins_at_equal_bytes_in_the_papers_own_table():
    """Erratum 9: L = 384 has a lower loss than R = 32 from fewer bytes, also with its rotary key counted."""
    by_label = {model.label: model for model in paper.TABLE if model.scale == "128M"}
    mla, lrkv = by_label["MLA L=384"], by_label["LRKV R=32"]
    assert mla.ce < lrkv.ce
    assert lrkv.cache_percent > 100 * (384 + C / 2) / (2 * 6 * C)


def test_keys_and_values_have_half_the_parameters_of_mha():
    """Erratum 10: nothing was matched; K and V of LRKV have 47 to 59 % of MHA's parameters."""
    shares = []
    for scale, (_, rank) in SCALES.items():
        attention, width = config(scale).attention, config(scale).model.width
        assert attention.rank == rank
        shares.append((2 * width * C + 2 * attention.heads * rank * (width + C)) / (2 * width * attention.heads * C))
    assert min(shares) == pytest.approx(0.47, abs=0.005)
    assert max(shares) == pytest.approx(0.59, abs=0.005)
