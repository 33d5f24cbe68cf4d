"""open_store: finds the token store of a config in the cache, or makes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from lrkv_jax import storage
from lrkv_jax.data.chat import Form
from lrkv_jax.data.config import DataConfig
from lrkv_jax.data.files import key_of, machine_refusals, only_process
from lrkv_jax.data.mirror import fetch, publish
from lrkv_jax.data.split import TRAIN
from lrkv_jax.data.store import FORMAT, MANIFEST, Store
from lrkv_jax.data.tokenizer import TRAINING_BYTES, Tokenizer
from lrkv_jax.settings import UserError
from lrkv_jax.storage import AnyPath

if TYPE_CHECKING:
    from lrkv_jax.data.corpus import Corpus


def open_store(
    config: DataConfig, vocab: int, *, tokenizer: AnyPath | None = None, name: str = "", progress: bool = True
) -> Store:
    """The token store of a config, made first where the cache has none: dataset, tokenizer, tokens.

    A store known by `name` (`Store.directory.name`) is opened as it is, though its source be gone.

    `vocab` is the model's vocabulary, which the tokenizer must fit; `tokenizer` a run directory's own tokenizer.json,
    which goes before `config.tokenizer` and training. Finished parts are kept, so a killed call goes on where it was,
    and of two processes one waits. Progress goes to stderr.

    Raises UserError for whatever is missing, damaged, malformed or refused by the machine.
    """
    from lrkv_jax.data.corpus import Corpus  # TFDS takes half a second to import, which --help need not wait for

    cache, bucket = config.cache(), config.bucket()
    with machine_refusals(cache):
        if bucket and name:
            fetch(bucket, cache, f"stores/{name}", MANIFEST)
        if name and (cache / "stores" / name / MANIFEST).exists():
            return Store(cache / "stores" / name, config)
        corpus = Corpus(config)
        trained = str(_trained_path(config, vocab, corpus).relative_to(cache))
        if bucket:
            fetch(bucket, cache, trained)
        ready = _tokenizer(config, vocab, tokenizer, corpus)
        directory = ready and _directory(config, corpus, ready)
        if bucket and directory:
            fetch(bucket, cache, f"stores/{directory.name}", MANIFEST)
        if directory and (directory / MANIFEST).exists():
            return Store(directory, config)  # needs no lock and no write: the cache may be read-only
        lock = cache / "locks" / config.dataset.replace("/", "-").replace(":", "-")
        with only_process(lock, f"{config.dataset} in {cache}"):
            store = _prepare(config, vocab, tokenizer, corpus, progress)
        if bucket:
            if (cache / trained).exists():
                publish(bucket, cache, trained)
            publish(bucket, cache, f"stores/{store.directory.name}", MANIFEST)
        return store


def _prepare(config: DataConfig, vocab: int, given: AnyPath | None, corpus: Corpus, progress: bool) -> Store:
    from lrkv_jax.data.writing import write_store

    corpus.prepare(progress)
    tokenizer = _tokenizer(config, vocab, given, corpus)
    if tokenizer is None and config.marked:
        raise UserError(
            f"data.tokenizer is empty: dataset = {config.dataset} needs the tokenizer of a model; --init-from RUN_DIR "
            f"brings it along"
        )
    if tokenizer is None:
        tokenizer = Tokenizer.train(_training_texts(corpus, progress), vocab, config.begin_token, config.end_token)
        tokenizer.save(_trained_path(config, vocab, corpus))
    directory = _directory(config, corpus, tokenizer)
    if not (directory / MANIFEST).exists():
        form = Form.of(config, tokenizer) if config.marked else None
        write_store(directory, corpus, tokenizer, config.context if form else config.record_tokens, form, progress)
    return Store(directory, config)


def _tokenizer(config: DataConfig, vocab: int, given: AnyPath | None, corpus: Corpus) -> Tokenizer | None:
    """The tokenizer to use if it exists: the run's, the config's, or the one trained before."""
    path = given or (storage.path(config.tokenizer) if config.tokenizer else _trained_path(config, vocab, corpus))
    if not path.exists() and not given and not config.tokenizer:
        return None
    tokenizer = Tokenizer.load(path, config.begin_token, config.end_token)
    if tokenizer.vocab_size > vocab:
        raise UserError(f"model.vocab = {vocab}: tokenizer {path} has {tokenizer.vocab_size} tokens")
    return tokenizer


def _trained_path(config: DataConfig, vocab: int, corpus: Corpus) -> Path:
    key = key_of(corpus.key, vocab, config.begin_token, config.end_token)
    return config.cache() / "tokenizers" / f"{key}.json"


def _directory(config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> Path:
    cut = [config.context, config.template, config.too_long] if config.marked else config.record_tokens
    if repeated := {file: times for file, times in corpus.times.items() if times > 1}:
        cut = [*cut, repeated]  # else stores keep the names they had before there were repeats
    key = key_of(FORMAT, corpus.key, tokenizer.sha256, tokenizer.begin_id, tokenizer.end_id, cut)
    return config.cache() / "stores" / f"{config.dataset.replace('/', '-').replace(':', '-')}-{key}"


def _training_texts(corpus: Corpus, progress: bool) -> Iterator[str]:
    size = 0
    texts = corpus.documents(TRAIN)
    for _, text in tqdm(
        texts, "training the tokenizer", corpus.count(TRAIN), disable=not progress, unit=" documents", file=sys.stderr
    ):
        yield text.decode()
        size += len(text)
        if size >= TRAINING_BYTES:
            return
