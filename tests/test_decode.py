"""Decoding is the model: the same logits from the compressed cache, whoever shares the batch and however it is cut."""

import numpy as np
import pytest
from decoders import decoder, forced, forward, stepped
from models import FAMILIES

NEAR = {"atol": 1e-4, "rtol": 0}


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_equals_forward(family, qk_norm, implementation):
    """Bug: a token is cached in another slot or at another position than it is read from; the prompt's last token is
    read twice or never."""
    tokens, logits = forward(family, qk_norm, layers=1)
    decoding = decoder(family, qk_norm, layers=1, implementation=implementation, batch=len(tokens))
    np.testing.assert_allclose(stepped(decoding, None, tokens), logits, **NEAR)
    # Whole prompts are read in the same way whatever the implementation.
    for chunk in [decoding.layout.block] + ([None] if implementation == "blocked" else []):
        found = forced(decoding, tokens[:, :7], tokens[:, 7:], chunk)
        np.testing.assert_allclose(found, logits[:, 6:], **NEAR, err_msg=f"chunk {chunk}")


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_equal_forward(family, qk_norm, implementation):
    """Bug: a kernel is given another cache than `compress` filled, its padding counts, or its sums are another head's.

    Interpreted; step by step from an empty cache, since prompts are read without the kernels."""
    tokens, logits = forward(family, qk_norm, layers=1)
    decoding = decoder(family, qk_norm, layers=1, implementation=implementation, batch=len(tokens))
    np.testing.assert_allclose(stepped(decoding, None, tokens), logits, **NEAR)


def test_layers_have_caches_of_their_own():
    """Bug: a layer reads or writes the cache or the weights of another."""
    tokens, logits = forward("lrkv")
    decoding = decoder("lrkv", batch=len(tokens))
    for chunk in (None, 4):
        found = forced(decoding, tokens[:, :7], tokens[:, 7:], chunk)
        np.testing.assert_allclose(found, logits[:, 6:], **NEAR, err_msg=f"chunk {chunk}")


@pytest.mark.parametrize("family", ["mha", "mla", "lrkv"])
def test_tpu_blocks_are_joined(family):
    """Bug: the softmax of the second block of 128 doesn't know of the first, or a whole prompt fills one block only."""
    tokens, logits = forward(family, layers=1, length=131)
    decoding = decoder(family, layers=1, implementation="pallas_tpu", slots=256, batch=len(tokens))
    found = forced(decoding, tokens[:, :126], tokens[:, 126:])
    np.testing.assert_allclose(found, logits[:, 125:], **NEAR)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_as_the_model_is(family):
    """Bug: decoding rounds what the forward pass doesn't: scores, softmax weights, or sums over the blocks."""
    tokens, exact = forward(family, layers=1)
    _, rough = forward(family, layers=1, dtype="bfloat16")
    found = stepped(decoder(family, layers=1, dtype="bfloat16", batch=len(tokens)), None, tokens)
    error = np.linalg.norm(found - exact) / np.linalg.norm(rough - exact)
    assert error < 1.5, error
