"""Decoding is the model: the same logits from the compressed cache, whoever shares the batch and however it is cut."""

import itertools
from typing import get_args

import numpy as np
import pytest
from decoders import ABSORBING, ROWS, decoder, forced, forward, stepped
from models import FAMILIES

from lrkv_jax.attention import gqa, kernels
from lrkv_jax.attention.base import AttentionBase
from lrkv_jax.settings import UserError

NEAR = {"atol": 1e-4, "rtol": 0}
KERNELS = ["pallas_tpu", "pallas_gpu"]
PROMPTED = ["mla", "lrkv"]  # the families whose kernels are checked with prompts before the steps


def matrix():
    """(family, qk_norm, implementation), without those that run through the same lines as another."""
    cases = itertools.product(FAMILIES, (True, False), get_args(kernels.Implementation))
    return [
        pytest.param(*case, id=f"{case[0]}-{'norm' if case[1] else 'plain'}-{case[2]}")
        for case in cases
        if not repeats(*case)
    ]


def repeats(family, qk_norm, implementation):
    """Whether other cases, or those of several devices (test_decode_memory.py), leave nothing for this one to find."""
    if implementation == "blocked":
        return family == "mqa" or (family == "mha" and not qk_norm)
    if implementation in KERNELS and (family not in ABSORBING or (family in PROMPTED and qk_norm)):
        return True
    # MHA and MQA are GQA with other numbers of heads; its keys are cached as they are, normed or not; and the codes of
    # `latent` are read as those of `shared`.
    return family in ("mha", "mqa") or (not qk_norm and family in ("gqa", "lrkv_latent"))


@pytest.mark.parametrize(("family", "qk_norm", "implementation"), matrix())
def test_decoding_equals_forward(family, qk_norm, implementation):
    """Bug: a token is cached in another slot or at another position than it is read from; the prompt's last token is
    read twice or never; rows are taken for heads or latent dimensions where there are more of them; a layer reads the
    cache or weights of another; a kernel's padding counts, or its sums are another head's."""
    layers = 2 if family == "mha" else 1
    tokens, logits = forward(family, qk_norm, layers)
    decoding = decoder(family, qk_norm, layers, implementation=implementation, batch=ROWS)
    np.testing.assert_allclose(stepped(decoding, None, tokens), logits, **NEAR)
    # Prompts are read without the kernels, and whole ones in the same way whatever the implementation.
    chunks = {"blocked": [4, None], "reference": [4] if family in PROMPTED else []}.get(implementation, [])
    for chunk in chunks if qk_norm else []:
        found = forced(decoding, tokens[:, :7], tokens[:, 7:], chunk)
        np.testing.assert_allclose(found, logits[:, 6:], **NEAR, err_msg=f"chunk {chunk}")


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("family", PROMPTED)
def test_kernels_continue_prompts(family, implementation):
    """Bug: the softmax of the second block of 128 doesn't know of the first; a prompt fills one block only, or in
    another layout than the kernel reads. A step from an empty cache sees what isn't there."""
    tokens, logits = forward(family, rows=2, length=133)
    decoding = decoder(family, implementation=implementation, slots=256, batch=2)
    for read, chunk in ((126, None), (130, 128)):
        found = forced(decoding, tokens[:, :read], tokens[:, read:], chunk)
        np.testing.assert_allclose(found, logits[:, read - 1 :], **NEAR, err_msg=f"chunk {chunk}")
    np.testing.assert_allclose(stepped(decoding, None, tokens[:, :5]), logits[:, :5], **NEAR)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("lrkv_grouped", "pallas_tpu"), ("lrkv_grouped", "pallas_gpu"), ("mla_biased", "pallas_tpu")],
)
def test_kernels_take_biases_and_groups(family, implementation):
    """Bug: a key bias meets no query in a kernel, or another head's; a key's gain is lost there, or the angles are of
    other frequencies; query heads that share a residual share it with the wrong ones."""
    tokens, logits = forward(family)
    found = stepped(decoder(family, implementation=implementation, batch=ROWS), None, tokens)
    np.testing.assert_allclose(found, logits, **NEAR)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("lrkv", "blocked"), ("lrkv", "pallas_tpu"), ("mla", "pallas_gpu")],
)
def test_bfloat16_is_as_near_as_the_model_is(family, implementation):
    """Bug: decoding rounds what the forward pass doesn't: scores, softmax weights, or sums over the blocks."""
    tokens, exact = forward(family)
    _, rough = forward(family, dtype="bfloat16")
    decoding = decoder(family, dtype="bfloat16", implementation=implementation, batch=ROWS)
    error = np.linalg.norm(stepped(decoding, None, tokens) - exact) / np.linalg.norm(rough - exact)
    assert error < 1.5, error


@pytest.fixture
def plain_family(monkeypatch):
    """GQA as a family would be that can only expand its cache."""
    monkeypatch.setattr(gqa.Attention, "read", AttentionBase.read)
    monkeypatch.setattr(gqa.Attention, "absorbed_queries", AttentionBase.absorbed_queries)
    return "gqa"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_family_without_read_is_decoded_everywhere(plain_family, platform, monkeypatch):
    """Bug: on a GPU or TPU the default is a kernel, which such a family can't feed; an explicit one fails as it is
    compiled, with a traceback."""
    choose = kernels.choose

    def elsewhere(name, _, *arguments, **named):
        return choose(name, platform, *arguments, **named)

    monkeypatch.setattr(kernels, "choose", elsewhere)
    decoding = decoder(plain_family, implementation=None, batch=ROWS, weights=platform == "tpu")
    assert decoding.implementation == "blocked"
    if decoding.weights is not None:
        tokens, logits = forward(plain_family)
        np.testing.assert_allclose(stepped(decoding, None, tokens), logits, **NEAR)
    for name in KERNELS:
        with pytest.raises(UserError, match=rf"implementation = {name}: .* no `read`; these can: reference, blocked$"):
            decoder(plain_family, implementation=name)


def test_a_family_with_read_says_so():
    """Bug: a family overrides `read` but not `absorbed_queries`, or the other way round: no kernel is ever used, or
    one is that can't be."""
    for name, config in FAMILIES.items():
        attend = decoder(name, weights=False).attention
        assert (attend.absorbed_queries > 0) == (name in ABSORBING), config.family


def test_where_nothing_is_asked_for_the_kernel_of_the_platform_is_taken():
    """Bug: the kernels are there, and nobody gets them."""
    found = [kernels.choose(None, platform, absorbs=True) for platform in ("cpu", "tpu")]
    assert found == ["blocked", "pallas_tpu"]
