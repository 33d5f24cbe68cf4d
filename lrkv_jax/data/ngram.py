"""What counting gives: unigram and interpolated bigram cross-entropy, to hold a model's against."""

from __future__ import annotations

import numpy as np

from lrkv_jax import marks
from lrkv_jax.data.split import TEST, VALIDATION
from lrkv_jax.data.store import Store

CHUNK = 2**22  # train tokens counted at once
COUNTED = 2**27  # train tokens counted at most: beyond, the sorted counts cost more than they tell


def ngram_cross_entropy(store: Store, split: str = TEST) -> tuple[float, float]:
    """(unigram, bigram) cross-entropy of a held-out split, nats per token, over the tokens `Store.windows` scores.

    Unigram: p1(b) = (count(b) + 1) / (tokens + V), from the stored train stream (its first
    COUNTED tokens), so that no token is impossible.
    Bigram: p(b|a) = w · count(a b) / count(a ·) + (1 − w) · p1(b), and p1 after an `a` never seen; one w, fitted on the
    validation split and one imaginary token more that follows nothing seen, so that w < 1.
    """
    counts = _Counts(store)
    validation = counts.probabilities(store, VALIDATION)
    weight = _fit(*validation)
    unigram, bigram, known = validation if split == VALIDATION else counts.probabilities(store, split)
    mixed = _mix(unigram, bigram, known, weight)
    return float(-np.log(unigram).mean()), float(-np.log(mixed).mean())


class _Counts:
    """Unigram counts [V], and the bigrams that occur as sorted keys a·V + b with their counts."""

    def __init__(self, store: Store) -> None:
        tokenizer = store.tokenizer
        self._vocab = tokenizer.vocab_size
        self._unigrams = np.zeros(self._vocab, np.int64)
        self._contexts = np.zeros(self._vocab, np.int64)
        self._keys, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        per_chunk = max(1, CHUNK // store.record_tokens)
        last = min(store.records, COUNTED // store.record_tokens)
        for start in range(0, last, per_chunk):
            records = np.stack([store.record(n) for n in range(start, min(start + per_chunk, last))])
            records = records.astype(np.int64)
            if store.marked:
                self._count(*marks.pairs(records))
                continue
            if start == 0:  # nothing precedes the stream: its first document begins like every other
                self._add(np.array([tokenizer.end_id]), records[0, :1], tokenizer)
            self._add(records[:, :-1].ravel(), records[:, 1:].ravel(), tokenizer)

    def _add(self, before: np.ndarray, token: np.ndarray, tokenizer) -> None:
        if tokenizer.begin_id != tokenizer.end_id:  # begin follows end, but is never scored
            scored = token != tokenizer.begin_id
            before, token = before[scored], token[scored]
        self._count(before, token)

    def _count(self, before: np.ndarray, token: np.ndarray) -> None:
        self._unigrams += np.bincount(token, minlength=self._vocab)
        self._contexts += np.bincount(before, minlength=self._vocab)
        new, counts = np.unique(before * self._vocab + token, return_counts=True)
        keys, where = np.unique(np.concatenate([self._keys, new]), return_inverse=True)
        self._counts = np.bincount(where, np.concatenate([self._counts, counts])).astype(np.int64)
        self._keys = keys

    def probabilities(self, store: Store, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each scored token: p1, relative frequency after its predecessor, whether that was ever seen; [tokens]."""
        columns = zip(*store.windows(split).pairs(), strict=True)
        before, token = (np.concatenate(column).astype(np.int64) for column in columns)
        unigram = (self._unigrams[token] + 1) / (self._unigrams.sum() + self._vocab)
        keys = before * self._vocab + token
        found = np.minimum(np.searchsorted(self._keys, keys), self._keys.size - 1)
        together = np.where(self._keys[found] == keys, self._counts[found], 0)
        return unigram, together / np.maximum(self._contexts[before], 1), self._contexts[before] > 0


def _mix(unigram: np.ndarray, bigram: np.ndarray, known: np.ndarray, weight: float) -> np.ndarray:
    return np.where(known, weight * bigram + (1 - weight) * unigram, unigram)


def _fit(unigram: np.ndarray, bigram: np.ndarray, known: np.ndarray) -> float:
    """The weight that maximises the likelihood, which is concave in it, by expectation maximisation."""
    unigram, bigram = unigram[known], bigram[known]
    weight, change = 0.5, 1.0
    while change > 1e-8:
        share = weight * bigram / (weight * bigram + (1 - weight) * unigram)
        better = float(share.sum() / (share.size + 1))
        change, weight = abs(better - weight), better
    return weight
