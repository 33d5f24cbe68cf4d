"""Rows of a batch: whatever lengths, seeds and ends the others have, a row's tokens are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import decoder, drawn, mesh
from models import BEGIN, END, V

from lrkv_jax.attention import kernels
from lrkv_jax.decode import Decoder, drawable
from lrkv_jax.sampling import Sampling, sample
from lrkv_jax.settings import UserError

GREEDY, FREE = Sampling(temperature=0.0), Sampling()
PROMPTS = [[1, 5, 9, 4, 17, 3], [1], [1, 20, 8, 8, 8, 3, 4, 11, 7], [1, 6, 13]]
NEVER = 0  # stands for an end token where none should be drawn


@pytest.fixture(scope="module")
def four():
    """A decoder of four rows."""
    return decoder("lrkv", batch=4)


@pytest.mark.parametrize("family", ["mla", "lrkv"])
def test_ragged_batch_equals_each_prompt_alone(family):
    """Bug: padding is attended to, or a row's position, slot or last token is that of the longest row."""
    together = decoder(family, end=NEVER, batch=4).start(PROMPTS, chunk=4)
    alone = decoder(family, end=NEVER)
    tokens = drawn(together, 10, GREEDY, [0] * 4)
    for row, prompt in enumerate(PROMPTS):
        single = alone.start([prompt], chunk=4)
        np.testing.assert_array_equal(drawn(single, 10, GREEDY, [0])[0], tokens[row])
        np.testing.assert_allclose(single.state["logits"][0], together.state["logits"][row], atol=1e-4)


def test_a_row_that_ends_disturbs_no_other(four):
    """Bug: a row that ended goes on, or its mates' draws, positions or caches change when it ends."""
    session = four.start(PROMPTS, chunk=4)
    tokens = drawn(session, 11, FREE, [20, 5, 2, 3])
    ends = [row.tolist().index(END) if END in row else None for row in tokens]
    assert len(set(ends)) > 2, "choose other seeds: these rows end together"
    for row, (prompt, end, seed) in enumerate(zip(PROMPTS, ends, (20, 5, 2, 3), strict=True)):
        assert end is None or np.all(tokens[row, end:] == END)
        assert session.state["lengths"][row] == len(prompt) + (11 if end is None else end)
        same = drawn(four.start([prompt] * 4, chunk=4), 11, FREE, [seed] * 4)
        np.testing.assert_array_equal(same, [tokens[row, : same.shape[1]]] * 4)
        assert same.shape[1] == 11 or np.all(tokens[row, same.shape[1] :] == END)


def test_seeds_decide(four):
    """Bug: samples of one prompt are one sample, or a draw depends on how many are drawn in a call."""
    prompts, seeds = [PROMPTS[0]] * 4, [0, 1, 0, 2]
    tokens = drawn(four.start(prompts, chunk=4), 11, FREE, seeds)
    assert len({tuple(row) for row in tokens}) == 3
    np.testing.assert_array_equal(tokens[0], tokens[2])
    again = drawn(four.start(prompts, chunk=4), 11, FREE, seeds, every=3)
    length = min(again.shape[1], tokens.shape[1])
    np.testing.assert_array_equal(again[:, :length], tokens[:, :length])


def test_nothing_is_compiled_twice(four):
    """Bug: a length, a number of steps or another sharding of the state makes a new program."""
    session = four.start(PROMPTS, chunk=4)
    drawn(session, 3, GREEDY, [0] * 4, every=5)
    before = four._generate._cache_size()
    drawn(session, 8, GREEDY, [1] * 4, every=5)  # into the fifth block of four slots
    drawn(four.start([[1]] * 4, chunk=4), 19, GREEDY, [2] * 4, every=5)
    assert four._generate._cache_size() == before


def test_the_state_is_donated(four):
    """Bug: two caches exist while tokens are drawn."""
    session = four.start(PROMPTS, chunk=4)
    before = jax.tree.leaves(session.state)
    next(session.generate(2, GREEDY, [0] * 4))
    assert all(leaf.is_deleted() for leaf in before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(session.state))


def test_what_does_not_fit_is_refused(four):
    """Bug: slots beyond the cache are left out in silence; a mistake shows only once tokens are drawn."""
    with pytest.raises(UserError, match="a prompt of 21 tokens is longer than the cache of 20 slots"):
        four.start([[1] * 21] * 4)
    with pytest.raises(UserError, match="chunk = 6: must be a multiple of the cache's block of 4 slots"):
        four.start(PROMPTS, chunk=6)
    for wrong in (PROMPTS[:3], [*PROMPTS[:3], []]):
        with pytest.raises(UserError, match="needed are 4, each of at least 1 token"):
            four.start(wrong)
    for strange in (-1, V):
        with pytest.raises(UserError, match=f"prompt token {strange}: ids are from 0 to {V - 1}"):
            four.start([*PROMPTS[:3], [1, strange]])
    session = four.start(PROMPTS, chunk=4)
    with pytest.raises(UserError, match="9 tokens and 12 new ones don't fit into a cache of 20 slots"):
        session.generate(12, GREEDY, [0] * 4)
    for seeds in ([0] * 3, [0] * 5, [0, 0, 0, -1], [2**32, 0, 0, 0]):
        with pytest.raises(UserError, match=r"seeds = .*: needed is one for each of 4 rows, from 0 to 2\*\*32 - 1"):
            session.generate(1, GREEDY, seeds)
    with pytest.raises(UserError, match="every = 0: must be at least 1"):
        session.generate(1, GREEDY, [0] * 4, every=0)
    assert list(session.generate(0, GREEDY, [0] * 4)) == []
    assert drawn(session, 11, GREEDY, [0, 1, 2, 2**32 - 1]).shape[1] <= 11
    full = four.start([[1] * 20] * 4, chunk=4)
    assert list(full.generate(0, GREEDY, [0] * 4)) == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch": 0}, "batch = 0: rows must divide"),
        ({"slots": 0}, "slots = 0"),
        ({"vocab": 0}, f"vocab = 0: must be from 1 to model.vocab = {V}"),
        ({"vocab": V + 1}, f"vocab = {V + 1}: must be from 1 to"),
        ({"block": 0}, "block = 0: must be"),
        ({"block": -4}, "block = -4: must be"),
        ({"implementation": "pallas_tpu", "block": 192}, "block = 192: must be a multiple of 128 slots for pallas_tpu"),
        ({"implementation": "pallas_gpu", "block": 64}, "block = 64: must be a multiple of 128 slots for pallas_gpu"),
        ({"implementation": "pallas_tpu", "interpret": False}, "cannot run on cpu; these can: reference, blocked"),
        ({"implementation": "pallas_gpu", "interpret": False}, "cannot run on cpu; these can: reference, blocked"),
        ({"on": {"context": 2}}, r"mesh.context = 2: .* must be 1"),
    ],
)
def test_decoders_that_cannot_be_are_refused(how, message):
    """Bug: a message of XLA's, or another implementation in silence."""
    on = mesh(**how.get("on", {}))
    with pytest.raises(UserError, match=message):
        decoder("lrkv", **{**how, "on": on})


def test_a_cache_beyond_the_memory_is_refused(monkeypatch):
    """Bug: the kernel ends the process, without a word: for the cache, or for what depends on its slots alone."""
    monkeypatch.setattr(Decoder, "_prepare", lambda *_: pytest.fail("tables of all slots were made before the check"))
    # 176 bytes a token, on one of the eight devices that there are.
    line = r"slots = 1000000000: a cache of 3 rows needs 491\.7 GiB; there are \d+\.\d GiB of memory"
    with pytest.raises(UserError, match=line):
        decoder("lrkv", batch=3, slots=10**9)


def test_an_implementation_that_there_is_not_is_refused():
    """Bug: it is said to be one that can't run here, as if it could elsewhere."""
    with pytest.raises(UserError, match="implementation = fast: unknown; there are reference, blocked, pallas_tpu"):
        kernels.choose("fast", "cpu", absorbs=True)


def test_the_begin_token_may_be_the_end_token():
    """Bug: rows are over before they start, as a prompt begins with it; it is never drawn; nothing stops at it."""
    session = decoder("gqa", end=BEGIN, batch=4).start([[BEGIN]] * 4, chunk=4)
    assert not np.any(session.state["done"])
    tokens = drawn(session, 19, FREE, [0, 1, 2, 3])
    ended = np.any(tokens == BEGIN, axis=1)
    assert ended.any(), "choose other seeds: none of these rows ends"
    np.testing.assert_array_equal(session.state["done"], ended)
    first = np.argmax(tokens == BEGIN, axis=1)
    for row in np.flatnonzero(ended):
        assert np.all(tokens[row, first[row] :] == BEGIN)
        assert session.state["lengths"][row] == 1 + first[row]


@pytest.mark.parametrize("temperature", [1e-39, 2e-38])
def test_a_temperature_next_to_nothing_is_greedy(temperature):
    """Bug: logits divided by what float32 holds as 0, or by what makes them infinite, tie or are NaN."""
    logits = jnp.asarray([[-15.0, 9.0, 12.0, 15.0], [-15.0, -12.0, -9.0, 15.0]])
    keys, allowed = jax.random.split(jax.random.key(0), 2), jnp.asarray([True, True, True, False])
    for cuts in ({}, {"top_k": 2}, {"top_p": 0.9}):
        assert sample(logits, keys, allowed, Sampling(temperature=temperature, **cuts)).tolist() == [2, 2]


def test_only_real_tokens_may_be_drawn(four):
    """Bug: rows that only fill up the embedding, or the begin token, are drawn."""
    allowed = drawable(four.program, 20)
    assert allowed.tolist() == [number < 20 and number != BEGIN for number in range(V)]
    assert drawable(four.program, None).sum() == V - 1
