"""Examples for supervised fine-tuning: JSON to ids, of which those that the model is to say are scored.

    {"prompt": "2 + 2 =", "completion": " 4"}             begin, prompt, COMPLETION, END
    {"messages": [{"role": "user", "content": "..."},     begin, and for each message `data.template` with its role and
                  {"role": "assistant", ...}, ...]}       content; an assistant's CONTENT is followed by END

In capitals what is scored. The template's own text may hold special tokens, which texts can't spell. After an END the
rest of the template goes on behind its own end token, should it have one, so that ChatML is
"<|im_start|>{role}\\n{content}<|im_end|>\\n" with data.end_token = <|im_end|>. What follows the last END is left out.
Each part is tokenized by itself, so a prompt has the same ids whether an answer follows or is yet to come.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lrkv_jax.data.config import DataConfig
from lrkv_jax.data.tokenizer import Tokenizer
from lrkv_jax.marks import SCORED, mark
from lrkv_jax.settings import UserError

ROLES = ("system", "user", "assistant", "tool")
ANSWERS = "assistant"


def canonical(line: str, place: str) -> str:
    """A line of .jsonl as JSON of what is read of it. Raises UserError naming the place and what is missing."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: no JSON: {error.msg}") from None
    if not isinstance(record, dict) or not ("messages" in record or "prompt" in record):
        raise UserError(f"{place}: neither `messages` nor `prompt` and `completion`")
    if "messages" not in record:
        found: dict[str, Any] = {name: _text(record.get(name), name, place) for name in ("prompt", "completion")}
        return json.dumps(found, ensure_ascii=False)
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{place}: `messages` must be a list of objects with `role` and `content`")
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise UserError(f"{place}: messages[{number}].role = {message.get('role')!r}: one of {', '.join(ROLES)}")
        _text(message.get("content"), f"messages[{number}].content", place)
    if not any(message["role"] == ANSWERS for message in messages):
        raise UserError(f"{place}: no message of role {ANSWERS}, so there is nothing to learn")
    kept = [{name: message[name] for name in ("role", "content")} for message in messages]
    return json.dumps({"messages": kept}, ensure_ascii=False)


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: no string under {name}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: {name}: half a surrogate pair at character {error.start}") from None
    return value


class Part(NamedTuple):
    """A piece of an example."""

    text: str
    """Empty for the end token."""
    kind: str
    """`text` that is given, `markup` of the template, the `answer` to be learned, its `end`."""


class Example(NamedTuple):
    """An example as it is stored."""

    ids: np.ndarray
    """Marked ids (marks.py), begin token first; none where the example is left out."""
    bytes: int
    """Of its answers' UTF-8 text."""
    whole: bool
    """Whether it is stored as it is, neither cut nor left out."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How examples become ids."""

    tokenizer: Tokenizer
    end_token: str
    template: str
    size: int
    """Most ids of an example, T + 1."""
    cuts: bool
    """Whether a longer one is cut, for training; else it is left out."""

    @classmethod
    def of(cls, config: DataConfig, tokenizer: Tokenizer) -> Form:
        """That of a config."""
        return cls(tokenizer, config.end_token, config.template, config.context + 1, config.too_long == "truncate")

    def encode(self, texts: Sequence[str], *, training: bool) -> list[Example]:
        """Examples of canonical JSON, tokenized on all cores. Only in training is half an answer better than none."""
        examples = [list(self._parts(json.loads(text))) for text in texts]
        plain = [part.text for parts in examples for part in parts if part.kind in ("text", "answer")]
        ids = iter(self.tokenizer.encode_batch(plain))
        return [self._example(parts, ids, training) for parts in examples]

    def question(self, text: str) -> list[int]:
        """Ids of one user message and of what precedes the assistant's answer to it, begin token first."""
        asked = {"messages": [{"role": "user", "content": text}, {"role": ANSWERS, "content": ""}]}
        parts = list(self._parts(asked))[:-2]  # without the answer and its end
        ids = iter(self.tokenizer.encode_batch([part.text for part in parts if part.kind == "text"]))
        return [self.tokenizer.begin_id, *(int(number) for part in parts for number in self._ids(part, ids))]

    def _parts(self, example: dict[str, Any]) -> Iterator[Part]:
        if "messages" not in example:
            yield from (Part(example["prompt"], "text"), Part(example["completion"], "answer"), Part("", "end"))
            return
        head, tail = self.template.split("{content}")
        last = max(i for i, message in enumerate(example["messages"]) if message["role"] == ANSWERS)
        for number, message in enumerate(example["messages"][: last + 1]):
            yield Part(head.replace("{role}", message["role"]), "markup")
            if message["role"] != ANSWERS:
                yield from (Part(message["content"], "text"), Part(tail, "markup"))
                continue
            yield from (Part(message["content"], "answer"), Part("", "end"))
            if number < last:
                yield Part(tail.removeprefix(self.end_token), "markup")

    def _ids(self, part: Part, plain: Iterator[np.ndarray]) -> np.ndarray:
        if part.kind == "end":
            return np.array([self.tokenizer.end_id])
        return np.array(self.tokenizer.encode_markup(part.text) if part.kind == "markup" else next(plain), np.int64)

    def _example(self, parts: list[Part], plain: Iterator[np.ndarray], training: bool) -> Example:
        ids = [self._ids(part, plain) for part in parts]
        learned = [part.kind in ("answer", "end") for part in parts]
        marked = mark(
            np.concatenate([[self.tokenizer.begin_id], *ids]), np.repeat([False, *learned], [1, *map(len, ids)])
        )
        whole = len(marked) <= self.size
        marked = marked[: self.size if whole or (training and self.cuts) else 0]
        size = sum(len(part.text.encode()) for part in parts if part.kind == "answer")
        return Example(marked if (marked & SCORED).any() else marked[:0], size, whole)
