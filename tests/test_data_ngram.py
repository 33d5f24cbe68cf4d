"""Unigram and bigram cross-entropy against counts made by hand and by loops."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from lrkv_jax.data import Store, Windows, ngram, ngram_cross_entropy

END = 0


class MemoryStore(Store):
    """A store in memory: documents of ids, framed and cut into records as the writer does; what is over is dropped."""

    def __init__(self, train, validation, test, vocab: int, begin: int = END, record_tokens: int = 4):
        before = [] if begin == END else [begin]
        self._stream = np.array([token for ids in train for token in [*before, *ids, END]], np.int32)
        self._held_out = {"validation": validation, "test": test}
        self.tokenizer = SimpleNamespace(vocab_size=vocab, begin_id=begin, end_id=END)
        self.record_tokens = record_tokens

    @property
    def records(self) -> int:
        return (len(self._stream) - 1) // self.record_tokens

    def record(self, number: int) -> np.ndarray:
        return self._stream[number * self.record_tokens : (number + 1) * self.record_tokens + 1]

    def windows(self, split: str) -> Windows:
        ids = [np.array(one, np.int32) for one in self._held_out[split]]
        sizes = np.array([one.size for one in ids])
        return Windows(lambda n: ids[n], sizes, sizes, 4, self.tokenizer.begin_id, END)


def by_loops(train, validation, test, vocab):
    """The same two numbers from dictionaries, the weight by ternary search."""
    pairs = [(a, b) for ids in train for a, b in zip([END, *ids], [*ids, END], strict=True)]
    unigrams, bigrams, contexts = Counter(b for _, b in pairs), Counter(pairs), Counter(a for a, _ in pairs)
    total = len(pairs)

    def loss(documents, weight):
        nats, count = 0.0, 0
        for ids in documents:
            for a, b in zip([END, *ids], [*ids, END], strict=True):
                p = (unigrams[b] + 1) / (total + vocab)
                if contexts[a]:
                    p = weight * bigrams[a, b] / contexts[a] + (1 - weight) * p
                nats, count = nats - math.log(p), count + 1
        return nats / count

    scored = sum(len(ids) + 1 for ids in validation)
    low, high = 1e-6, 1 - 1e-6
    for _ in range(60):
        third = (high - low) / 3
        left, right = (scored * loss(validation, w) - math.log(1 - w) for w in (low + third, high - third))
        low, high = (low, high - third) if left < right else (low + third, high)
    weight = low
    return loss(test, 0.0), loss(test, weight)


def test_by_hand():
    """Train 1 2 | 1 2 with ends: counts 1:2 2:2 end:2 of 6 over V = 3, so each token has probability 1/3."""
    store = MemoryStore([[1, 2], [1, 2]], [[1, 2]], [[1, 2]], vocab=3, record_tokens=5)
    unigram, bigram = ngram_cross_entropy(store)
    assert unigram == pytest.approx(math.log(3))
    # Every successor is certain. With s = 3w / (1 + 2w) the bigram's share, w = 3s / 4 gives w = 5/8: 5/8 + 3/8 / 3.
    assert bigram == pytest.approx(math.log(4 / 3), abs=1e-6)


@pytest.mark.parametrize("begin", [END, 11])
@pytest.mark.parametrize("chunk", [4, 2**22])
def test_against_loops(monkeypatch, begin, chunk):
    """Bugs: the pair over a record's edge lost or doubled, begin tokens scored, chunks merged wrongly, V too small."""
    monkeypatch.setattr(ngram, "CHUNK", chunk)
    draw = np.random.default_rng(1)
    vocab = 12

    def documents(count):
        return [np.cumsum(draw.integers(1, 3, draw.integers(0, 9))) % 9 + 1 for _ in range(count)]

    train, validation, test = ([[int(t) for t in ids] for ids in documents(n)] for n in (60, 20, 20))
    test[0] = [10, 10, 3]  # a token and a context that train never has
    length = sum(len(ids) + (1 if begin == END else 2) for ids in train)
    record_tokens = next(n for n in range(3, length) if (length - 1) % n == 0)  # nothing dropped
    store = MemoryStore(train, validation, test, vocab, begin, record_tokens)
    np.testing.assert_allclose(ngram_cross_entropy(store), by_loops(train, validation, test, vocab), atol=1e-6)


def test_bigram_beats_unigram_on_validation_too():
    """Bug: the split asked for is ignored."""
    train = [[1, 2, 3, 4] * 5] * 4
    store = MemoryStore(train, [[1, 2, 3, 4]], [[4, 3, 2, 1]], 6)
    unigram, bigram = ngram_cross_entropy(store, "validation")
    assert bigram < unigram
    assert ngram_cross_entropy(store, "test")[1] > bigram
