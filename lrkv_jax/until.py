"""Continuations of many prompts, from the compressed cache: each till a stop string, its end token or its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from lrkv_jax.data import Tokenizer
from lrkv_jax.decode import Decoder
from lrkv_jax.generate import Continuation
from lrkv_jax.sampling import Sampling
from lrkv_jax.settings import UserError

NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one option


class Wanted(NamedTuple):
    """How a prompt is to be continued."""

    stops: tuple[str, ...] = ()
    """Strings that end the text, and are no part of it."""
    tokens: int = 256
    """Most tokens to draw."""
    sampling: Sampling = Sampling(temperature=0.0)


def wanted(options: Mapping[str, Any]) -> Wanted:
    """Reads a task's generation_kwargs. Raises UserError for an option that is not known, or makes no sense.

    Greedy unless `do_sample` is true or, where that isn't said, the temperature is above 0.
    """
    given = {name: value for name, value in options.items() if value is not None}
    until = given.pop("until", ())
    # All are taken out; the first by rank counts.
    tokens = ([given.pop(name) for name in NEW_TOKENS if name in given] or [Wanted().tokens])[0]
    sampled = given.pop("do_sample", given.get("temperature", 0) > 0)
    temperature = given.pop("temperature", 1.0)
    cut = {name: given.pop(name) for name in ("top_k", "top_p") if name in given}
    if given.pop("num_beams", 1) != 1 or given:
        name = next(iter(given), "num_beams")
        known = "until, max_gen_toks, do_sample, temperature, top_k, top_p"
        raise UserError(f"generation_kwargs.{name} = {options[name]}: not supported; these are: {known}")
    if tokens < 0:
        raise UserError(f"generation_kwargs.max_gen_toks = {tokens}: must be at least 0")
    stops = (until,) if isinstance(until, str) else tuple(until)
    sampling = Sampling(temperature=temperature, **cut) if sampled else Sampling(temperature=0.0)
    return Wanted(tuple(stop for stop in stops if stop), int(tokens), sampling)


class Job(NamedTuple):
    """A prompt as the decoder gets it."""

    number: int
    """Its place among the prompts."""
    ids: list[int]
    """As many of its last tokens as fit."""
    tokens: int
    """Most tokens to draw."""
    stops: tuple[str, ...]


class Writer:
    """A decoder that continues any number of prompts, as many at a time as it has rows."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, seed: int = 0):
        self.decoder, self.tokenizer, self.seed = decoder, tokenizer, seed
        self.shortened = 0
        """How many prompts so far lost their beginning, since the cache can't hold them and what is to be drawn."""
        self.limited = 0
        """How many so far could be given fewer tokens than were wanted, since half of the cache is the prompt's."""

    def write(self, prompts: Sequence[str], how: Sequence[Wanted], progress: str | None = None) -> list[str]:
        """The texts that follow the prompts, in the order given; prompt i is drawn with `seed` + i.

        No text depends on what else is written beside it. `progress` names a bar on stderr.
        """
        # A prompt beside a longer one draws all it may behind that one's end, so only equally many go together.
        alike: dict[tuple[int, Sampling], list[Job]] = {}
        for number, (prompt, want) in enumerate(zip(prompts, how, strict=True)):
            job = self._job(number, prompt, want)
            alike.setdefault((job.tokens, want.sampling), []).append(job)
        texts = [""] * len(prompts)
        with tqdm(total=len(prompts), desc=progress, disable=progress is None, leave=False) as bar:
            for (tokens, sampling), jobs in alike.items():
                # Like lengths side by side; the longest first, so that what memory can't hold shows at once.
                jobs.sort(key=lambda job: -len(job.ids))
                for at in range(0, len(jobs), self.decoder.batch):
                    part = jobs[at : at + self.decoder.batch]
                    for job, text in zip(part, self._write(part, tokens, sampling), strict=True):
                        texts[job.number] = text
                    bar.update(len(part))
        return texts

    def _job(self, number: int, prompt: str, want: Wanted) -> Job:
        slots = self.decoder.layout.slots
        tokens = min(want.tokens, slots // 2)
        ids = [self.tokenizer.begin_id, *self.tokenizer.encode(prompt)]
        kept = ids[tokens - slots :]
        self.shortened += len(kept) < len(ids)
        self.limited += tokens < want.tokens
        return Job(number, kept, tokens, want.stops)

    def _write(self, jobs: Sequence[Job], tokens: int, sampling: Sampling) -> list[str]:
        """One batch; rows that only fill it up are copies of the first, and so end when that does."""
        rows = [*jobs, *[jobs[0]] * (self.decoder.batch - len(jobs))]
        session = self.decoder.start([job.ids for job in rows])
        texts = [Continuation(self.tokenizer, job.ids) for job in jobs]
        for drawn in session.generate(tokens, sampling, [self.seed + job.number for job in rows]):
            for text, row in zip(texts, drawn, strict=False):
                text.add(row.tolist())
            if all(text.ended or end(text.text, job.stops) is not None for text, job in zip(texts, jobs, strict=True)):
                break
        for text in texts:
            text.release()
        return [text.text[: end(text.text, job.stops)] for text, job in zip(texts, jobs, strict=True)]


def end(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop strings in a text begins; None where there is none."""
    return min((text.find(stop) for stop in stops if stop in text), default=None)
