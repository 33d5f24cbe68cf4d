"""Likelihoods and continuations as the harness asks for them; nothing here needs the harness."""

import itertools

import jax
import models
import numpy as np
import pytest
from models import program
from test_evaluate import windows as documents

from lrkv_jax import sharding
from lrkv_jax.data import Tokenizer
from lrkv_jax.decode import Decoder
from lrkv_jax.evaluate import evaluate, make_eval_step
from lrkv_jax.likelihood import Scorer, Text, continued, document, windows
from lrkv_jax.sampling import Sampling
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import Tokens
from lrkv_jax.until import Wanted, Writer, wanted

CONTEXT = 24


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes and a few merges, one of them of a space and what follows."""
    return Tokenizer.train(["ab ab ab cd cd"] * 9, 266, "<begin>", "<end>")


@pytest.fixture(scope="module")
def run(tokenizer):
    """(program, parameters, mesh of one device) of a model over the tokenizer's ids and some padding rows."""
    prog = program(vocab=270, tokens=Tokens(tokenizer.begin_id, tokenizer.end_id, False))
    mesh = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    params = jax.jit(prog.init_params)(jax.random.key(0))
    # As drawn, logits hardly differ; told apart, each way to read the wrong ones shows.
    return prog, jax.tree.map(lambda leaf: leaf * 1.7, params), mesh


@pytest.fixture(scope="module")
def logits(run):
    """All logits of a row of at most CONTEXT tokens, by the model itself: one compilation, padded at the end."""
    model = models.merge(*run[:2])
    full = jax.jit(lambda tokens: model(tokens, models.positions(tokens)))

    def of(ids):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(full(padded))[0, : len(ids)]

    return of


@pytest.mark.parametrize("batch", [3, 16])
def test_documents_score_as_in_evaluation(batch):
    """Bugs: a token scored twice or never, windows cut elsewhere, padding that weighs, begin scored, end left out."""
    prog, mesh, split = program(), sharding.make_mesh(MeshConfig()), documents()
    with jax.set_mesh(mesh):
        placed = sharding.shardings(prog.abstract_state(mesh)["params"])
        params = jax.jit(prog.init_params, out_shardings=placed)(jax.random.key(0))
        wanted = evaluate(make_eval_step(prog, mesh), params, split, 16, mesh)
    scorer = Scorer(prog, params, mesh, batch=batch, context=models.T)
    found = scorer.score([Text(ids.tolist(), 1) for ids in split.sequences()])
    np.testing.assert_array_equal([score.tokens for score in found], wanted.tokens)
    np.testing.assert_allclose([score.nats for score in found], wanted.nats, rtol=1e-6)
    assert scorer.shortened == 0


def test_windows_foretell_each_scored_token_once():
    """Bugs: a token lost where windows meet, more than fits, or context thrown away that had room."""
    for length, context in itertools.product(range(2, 14), range(1, 8)):
        for first in range(1, length + 1):
            cuts = windows(Text([0] * length, first), context)
            told = [at + 1 for start, stop in cuts for at in range(start, stop)]
            assert sorted(set(told)) == told
            assert set(range(first, length)) <= set(told)
            assert all(stop - start <= context for start, stop in cuts)
            if 0 < length - first <= context:
                assert cuts == [(max(length - 1 - context, 0), length - 1)]


def test_continuations_by_hand(run, logits, tokenizer):
    """Bugs: nats of the context, a wrong row's sum, greedy of another token, by ids never drawn, or of padding; what is
    cut off is the end, or isn't counted."""
    rng = np.random.default_rng(1)
    lengths = [(2, 1), (9, 3), (CONTEXT + 1, 5), (CONTEXT + 9, 4), (CONTEXT + 9, CONTEXT + 3), (5, 5), (7, 2)]
    texts = [Text(rng.integers(0, 266, length).tolist(), first) for length, first in lengths]
    texts[2] = Text(texts[2].ids, CONTEXT - 4)
    # One that greedy decoding would write, of few of the ids, and the same with something else at its end.
    can, ids = allowed(tokenizer, 100), [tokenizer.begin_id, 40, 41]
    for _ in range(4):
        ids.append(int(np.argmax(np.where(can, logits(ids)[-1], -np.inf))))
    texts += [Text(ids, 3), Text([*ids, 200], 3)]

    scorer = Scorer(*run, batch=4, context=CONTEXT, vocab=100)
    found = scorer.score(texts)
    for text, score in zip(texts, found, strict=True):
        nats, greedy = 0.0, True
        for start, stop in windows(text, CONTEXT):
            row = logits(text.ids[start:stop])
            log_p = np.asarray(jax.nn.log_softmax(row))
            for place, number in enumerate(text.ids[start + 1 : stop + 1]):
                if start + 1 + place >= text.first:
                    nats -= log_p[place, number]
                    greedy &= np.argmax(np.where(can, row[place], -np.inf)) == number
        assert score.nats == pytest.approx(nats, rel=1e-5)
        assert (score.tokens, score.greedy) == (len(text.ids) - text.first, greedy)
    assert [score.greedy for score in found[-2:]] == [True, False]
    assert found[5] == (0.0, 0, True)  # nothing to score
    assert scorer.shortened == 2  # (33, 4) is all scored; (33, 27) has lost its beginning


def allowed(tokenizer, vocab):
    """Which of the model's 270 ids may be drawn."""
    return (np.arange(270) < vocab) & (np.arange(270) != tokenizer.begin_id)


def test_a_context_and_its_continuation_are_one_text(tokenizer):
    """Bugs: no begin token, an end token, two tokenizations glued together, spaces kept back, nothing scored."""
    begin, ids = tokenizer.begin_id, tokenizer.encode
    assert continued(tokenizer, "ab", " ab") == ([begin, *ids("ab ab")], 1 + len(ids("ab")))
    assert continued(tokenizer, "ab ", "ab") == continued(tokenizer, "ab", " ab")
    assert continued(tokenizer, "", "ab") == ([begin, *ids("ab")], 1)
    assert continued(tokenizer, "ab", "") == ([begin, *ids("ab")], 1 + len(ids("ab")))
    assert len(ids("ab")) == len(ids("a")) == 1  # the border is within a token
    assert continued(tokenizer, "a", "b") == ([begin, *ids("ab")], 1)
    assert document(tokenizer, "ab\n") == ([begin, *ids("ab\n"), tokenizer.end_id], 1)


@pytest.fixture(scope="module")
def decoder(run, tokenizer):
    """Three rows of CONTEXT slots."""
    return Decoder(*run, batch=3, slots=CONTEXT, vocab=tokenizer.vocab_size)


def by_hand(logits, tokenizer, prompt, tokens):
    """Greedy ids by whole passes, up to the end token, which is left out."""
    ids = [tokenizer.begin_id, *tokenizer.encode(prompt)][-(CONTEXT - tokens) :]
    drawn = []
    for _ in range(tokens):
        drawn.append(
            int(np.argmax(np.where(allowed(tokenizer, tokenizer.vocab_size), logits([*ids, *drawn])[-1], -np.inf)))
        )
        if drawn[-1] == tokenizer.end_id:
            return drawn[:-1]
    return drawn


def test_texts_end_where_they_should(decoder, logits, tokenizer):
    """Bugs: texts in another order, a row that fills up taken for a prompt, the stop string kept, not the first of
    several, a prompt's end cut off instead of its beginning, cuts not counted, more drawn than asked for."""
    prompts = ["ab cd", "", "x", "abc" * 40 + "?!cd", "cd cd"]
    limits = [8, 8, 5, 12, 100]
    kept = [8, 8, 5, 12, 12]
    texts = [tokenizer.decode(by_hand(logits, tokenizer, prompt, n)) for prompt, n in zip(prompts, kept, strict=True)]
    assert all(len(text) > 3 for text in texts)
    stops = [(texts[0][3],), (), (texts[2][2:4], texts[2][1:3]), (), ("never",)]
    how = [Wanted(stop, limit) for stop, limit in zip(stops, limits, strict=True)]
    writer = Writer(decoder, tokenizer)
    cut = [texts[0].partition(stops[0][0])[0], texts[1], texts[2][: texts[2].find(stops[2][1])], *texts[3:]]
    assert writer.write(prompts, how) == cut
    assert (writer.shortened, writer.limited) == (1, 1)


def test_a_drawn_text_does_not_depend_on_its_neighbours(decoder, tokenizer):
    """Bug: seeds go by place in a batch, or a longer prompt beside it changes what is drawn."""
    how = Wanted(tokens=7, sampling=Sampling(temperature=1.5, top_k=40))
    together = Writer(decoder, tokenizer, seed=3).write(["ab", "", "cd" * 6, "ab"], [how] * 4)
    assert together[3] != together[0]  # the same prompt, asked twice
    assert Writer(decoder, tokenizer, seed=6).write(["ab"], [how]) == together[3:]
    assert Writer(decoder, tokenizer).write([], []) == []
    assert Writer(decoder, tokenizer).write(["ab"], [Wanted(tokens=0)]) == [""]


def test_a_tasks_options_are_read_as_the_harness_does():
    """Bugs: sampling where greedy was asked for, one string taken for its letters, an option passed over in silence."""
    greedy = Sampling(temperature=0.0)
    assert wanted({}) == Wanted((), 256, greedy)
    assert wanted({"until": "\n\n", "max_gen_toks": 9, "num_beams": 1}) == Wanted(("\n\n",), 9, greedy)
    assert wanted({"until": ["a", "", "b"], "temperature": 0.0, "max_new_tokens": 3}) == Wanted(("a", "b"), 3, greedy)
    assert wanted({"do_sample": False, "temperature": 0.7, "until": None}).sampling == greedy
    assert wanted({"temperature": 0.7, "top_p": 0.9}).sampling == Sampling(temperature=0.7, top_p=0.9)
    assert wanted({"do_sample": True, "top_k": 4}).sampling == Sampling(temperature=1.0, top_k=4)
    for bad, says in [
        ({"num_beams": 4}, "generation_kwargs.num_beams = 4: not supported"),
        ({"repetition_penalty": 1.1}, "generation_kwargs.repetition_penalty = 1.1: not supported"),
        ({"max_gen_toks": -1}, "max_gen_toks = -1: must be at least 0"),
    ]:
        with pytest.raises(UserError, match=says):
            wanted(bad)
