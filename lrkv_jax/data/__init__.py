"""Text to batches: corpora, tokenizer, token store, loader.

    documents (TFDS) -> train / validation / test -> byte-level BPE -> token store (ArrayRecord) -> Grain

`open_store` does all that is missing and returns the store; a batch is then a pure function of the step.

| file | what |
|---|---|
| config.py | DataConfig |
| python_stdlib.py, text_files.py, sft.py | our TFDS builders |
| chat.py | examples for supervised fine-tuning: template, ids, what is scored |
| mixture.py | how often each file of examples is taken |
| datasets.py | any TFDS dataset by name, without tensorflow |
| corpus.py, split.py | its documents in three splits |
| tokenizer.py | text to ids and back |
| writing.py, files.py | the store's files: made restartably, complete or not there |
| store.py | the store, read |
| opening.py | open_store: the cache's store of a config, made where it is missing |
| mirror.py | a cache in a bucket: fetched from, published to |
| loader.py | training batches by step |
| windows.py | evaluation: every token of every document once |
| ngram.py | unigram and bigram cross-entropy to compare with |
"""

from lrkv_jax.data.chat import Form
from lrkv_jax.data.config import DataConfig
from lrkv_jax.data.loader import Batches
from lrkv_jax.data.ngram import ngram_cross_entropy
from lrkv_jax.data.opening import open_store
from lrkv_jax.data.store import Counts, Store
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.data.windows import Rows, Windows

__all__ = [
    "Batches",
    "Counts",
    "DataConfig",
    "Form",
    "Rows",
    "Store",
    "Tokenizer",
    "Windows",
    "ngram_cross_entropy",
    "open_store",
]
