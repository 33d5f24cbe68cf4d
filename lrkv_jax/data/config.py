"""DataConfig: what text a run reads and how it is cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from lrkv_jax.data.mixture import parse
from lrkv_jax.settings import Settings
from lrkv_jax.storage import AnyPath, path

DEFAULT_CACHE = "~/.cache/lrkv_jax"

Percent = Annotated[float, pydantic.Field(gt=0, lt=50)]


class DataConfig(Settings):
    """Corpus, tokenizer and context length."""

    dataset: str = pydantic.Field("python_stdlib", min_length=1)
    """`python_stdlib`, `python_stdlib/with_tests`, `text_files`, or any TFDS name with a text feature (lm1b, c4/en);
    `sft` for supervised fine-tuning on prompts and completions, or on chats (data/chat.py)."""
    path: str = ""
    """text_files: a .txt, .jsonl or .parquet file, or a folder of them. sft: a .jsonl file, or a folder of them. Other
    datasets: a folder that TFDS prepared, or the folder of files that the builder cannot download itself (TFDS calls it
    manual_dir)."""
    text_feature: str = "text"
    """The feature (TFDS), key (.jsonl) or column (.parquet) that holds a document's text."""
    validation_percent: Percent = 5.0
    """Documents held out for validation, in percent, where the dataset has no validation split."""
    test_percent: Percent = 5.0
    """Documents held out for the test, in percent, where the dataset has no test split."""
    tokenizer: str = ""
    """A tokenizer.json to use. Empty: a byte-level BPE of `model.vocab` tokens, trained on the train split."""
    begin_token: str = pydantic.Field("<|endoftext|>", min_length=1)
    """Precedes a document. The same token as `end_token` (GPT-2's habit) is written once between documents."""
    end_token: str = pydantic.Field("<|endoftext|>", min_length=1)
    """Follows a document; predicted and scored like any other token."""
    context: pydantic.PositiveInt = 256
    """T: tokens a sequence."""
    record_tokens: pydantic.PositiveInt = 8192
    """M: tokens a record of the store, so that one store serves every context length that divides it."""
    document_mask: bool = False
    """Attention stays within a document and positions restart at each; with dataset = sft they always do."""
    template: str = "<|{role}|>\n{content}\n"
    """sft: a chat's message as text, from its role (system, user, assistant, tool) and content."""
    too_long: Literal["drop", "truncate"] = "drop"
    """sft: what becomes of an example of more than `context` + 1 tokens; how many there were is told."""
    repeats: tuple[str, ...] = ()
    """sft: a mixture of files, as PATTERN=COUNT: how often the train split takes each example of the files whose names
    below `path` match the glob pattern; others, and all that is held out, are taken once."""
    cache_dir: str = DEFAULT_CACHE
    """Where datasets, tokenizers and token stores are kept; the environment's LRKV_CACHE replaces the default. With a
    bucket (gs://...) that is still the default, into which what others made is fetched from there, and put there."""

    def model_post_init(self, _: object) -> None:
        """Checks across fields."""
        if self.record_tokens % self.context and not self.marked:
            relation = "is longer than" if self.context > self.record_tokens else "must divide"
            raise ValueError(f"context = {self.context} {relation} record_tokens = {self.record_tokens}")
        if self.dataset == "text_files" and not self.path:
            raise ValueError("path is empty: dataset = text_files needs a file or folder of text")
        fields = [self.template.count(name) for name in ("{role}", "{content}")]
        if fields != [1, 1] or self.template.index("{role}") > self.template.index("{content}"):
            raise ValueError(f"template = {self.template!r}: must hold {{role}} and then {{content}}, once each")
        if self.repeats and not self.marked:
            raise ValueError(f"repeats = {' '.join(self.repeats)}: must be empty unless dataset = sft")
        for pair in self.repeats:
            parse(pair)

    @property
    def marked(self) -> bool:
        """Whether ids say what is scored and where documents begin (marks.py)."""
        return self.dataset == "sft"

    @property
    def isolated(self) -> bool:
        """Whether attention stays within documents."""
        return self.document_mask or self.marked

    def cache(self) -> Path:
        """The cache directory, resolved; it need not exist yet."""
        given = self.cache_dir if self.cache_dir != DEFAULT_CACHE and self.bucket() is None else ""
        return Path(given or os.environ.get("LRKV_CACHE") or DEFAULT_CACHE).expanduser().absolute()

    def bucket(self) -> AnyPath | None:
        """The cache that is shared through a bucket, if there is one."""
        return path(self.cache_dir) if "://" in self.cache_dir else None
