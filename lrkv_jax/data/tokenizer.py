"""Byte-level BPE: any text to ids and back, byte for byte (Hugging Face `tokenizers`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lrkv_jax.data.files import write_atomically
from lrkv_jax.settings import UserError
from lrkv_jax.storage import AnyPath

TRAINING_BYTES = 2**30  # of the train split, from its beginning: more text no longer changes the merges that matter


class Tokenizer:
    """Text to ids in [0, vocab_size) and back.

    Special tokens are never read out of text: a document that contains `<|endoftext|>` is encoded letter by letter.
    """

    def __init__(self, json: str, begin_token: str, end_token: str, source: str) -> None:
        """`json` is a tokenizer.json's content, `source` its name in errors. Raises UserError for a bad one."""
        try:
            self._backend = tokenizers.Tokenizer.from_str(json)
        except Exception as error:  # tokenizers raises bare Exception for whatever it cannot read
            raise UserError(f"{source} is no tokenizer.json: {error}") from None
        self._json = json
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = 1 + max(self._backend.get_vocab().values(), default=-1)
        self.begin_id = self._special(begin_token, "data.begin_token", source)
        self.end_id = self._special(end_token, "data.end_token", source)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        self.sha256 = hashlib.sha256(json.encode()).hexdigest()

    def _special(self, token: str, field: str, source: str) -> int:
        number = self._backend.token_to_id(token)
        if number is None:
            raise UserError(f"{field} = {token!r}: {source} has no such token")
        return number

    @classmethod
    def load(cls, path: AnyPath, begin_token: str, end_token: str) -> Tokenizer:
        """Reads a tokenizer.json. Raises UserError where it is missing, unreadable or lacks one of the two tokens."""
        try:
            json = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"tokenizer {path}: {getattr(error, 'strerror', None) or error}") from None
        return cls(json, begin_token, end_token, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int, begin_token: str, end_token: str) -> Tokenizer:
        """Trains a BPE of at most `vocab` tokens; the same texts give the same bytes."""
        special = list(dict.fromkeys((begin_token, end_token)))
        least = 256 + len(special)
        if vocab < least:
            raise UserError(
                f"model.vocab = {vocab}: a byte-level tokenizer needs at least {least} tokens "
                f"(256 bytes and {' '.join(special)})"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend.to_str(), begin_token, end_token, "the trained tokenizer")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without begin and end."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of text that is ours and not a document's: special tokens in it are read as such."""
        self._backend.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts, on all cores; each [ids] int32."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode([int(number) for number in ids], skip_special_tokens=False)

    def save(self, path: AnyPath) -> None:
        """Writes tokenizer.json, byte for byte as it was read or trained."""
        write_atomically(path, self._json.encode())
