"""Continues a text with a trained model, from its run directory alone.

    python -m lrkv_jax.generate RUN_DIR --prompt "def main("
    python -m lrkv_jax.generate RUN_DIR --prompt-file start.py --samples 4 --seed 7
    printf 'import os' | python -m lrkv_jax.generate RUN_DIR - --temperature 0
    python -m lrkv_jax.generate RUN_DIR --chat --prompt "What is 2 + 2?"

The model reads its begin token and the prompt as it is, a last newline included; an empty prompt is the begin token
alone. What it adds goes to stdout as it is drawn, without the prompt and with a newline after it, till the model ends
the text or --max-tokens are drawn. Several samples are drawn side by side and printed one after the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from lrkv_jax import accounting, attention, sharding, trained
from lrkv_jax.config import RunConfig
from lrkv_jax.data import Form, Tokenizer
from lrkv_jax.decode import Decoder, Session
from lrkv_jax.sampling import Sampling
from lrkv_jax.settings import Parser, UserError, command

EVERY = 8  # tokens drawn between two looks at the device: few enough to read along, enough to hide the call


def main(arguments: list[str] | None = None) -> int:
    """Command line to exit status."""
    try:
        run(parse(arguments))
    except KeyboardInterrupt:
        return 130
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options. Raises UserError for what fits no run."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m lrkv_jax.generate", description=__doc__, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("run_dir", type=Path)
    add("stdin", nargs="?", metavar="-", help="read the prompt from stdin, as --prompt - and --prompt-file - do")
    add("--prompt", metavar="TEXT", help="the text to continue")
    add("--prompt-file", metavar="FILE", help="a UTF-8 file that holds it")
    add("--chat", action="store_true", help="the prompt is a user's message, to be answered (data.template)")
    add("--max-tokens", type=int, default=128, metavar="N", help="most tokens a sample (128)")
    add("--temperature", type=float, default=0.8, metavar="X", help="divides the logits; 0 takes the likeliest (0.8)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0 = all (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest that have P together (1)")
    add("--samples", type=int, default=1, metavar="N", help="continuations of the prompt (1)")
    add("--seed", type=int, default=0, help="of sample 0; sample i has seed + i (0)")
    add("--step", default="newest", help="checkpoint: newest, best, or a step's number")
    add("--slots", type=int, metavar="N", help="tokens that the cache holds (the run's data.context)")
    add("--chunk", type=int, metavar="N", help="read the prompt N tokens at a time: whole blocks of min(512, slots)")
    add("--dtype", choices=("float32", "bfloat16"), help="of weights, cache and products (the run's)")
    add("--implementation", help="reference, blocked, pallas_tpu or pallas_gpu (the fastest here)")
    add("--tensor", type=int, default=1, metavar="N", help="devices that share the heads; the rest share samples (1)")
    add("--stats", action="store_true", help="speed and cache bytes, on stderr")
    options = parser.parse_intermixed_args(arguments)  # so that - may stand last
    for name, least in (("max_tokens", 0), ("samples", 1), ("slots", 1), ("chunk", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if not 0 <= options.seed <= 2**32 - options.samples:
        raise UserError(f"--seed {options.seed}: every sample's seed must be at least 0 and below 2**32")
    return options


def run(options: argparse.Namespace) -> None:
    """Reads the prompt, loads the model, prints what it draws."""
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    text = read_prompt(options)
    config = RunConfig.load(options.run_dir)
    if options.dtype:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": options.dtype})})
    tokenizer = Tokenizer.load(options.run_dir / "tokenizer.json", config.data.begin_token, config.data.end_token)
    chat = options.chat and Form.of(config.data, tokenizer)
    prompt = chat.question(text) if chat else [tokenizer.begin_id, *tokenizer.encode(text)]
    slots = room(len(prompt), options, config)
    decoder = load(options, config, tokenizer, slots)
    # Rows that only fill up the devices are copies of sample 0, and so end when it does.
    seeds = [options.seed + (row if row < options.samples else 0) for row in range(decoder.batch)]

    def start() -> Session:
        session = decoder.start([prompt] * decoder.batch, options.chunk)
        jax.block_until_ready(session.state)
        return session

    marks = [time.perf_counter()]
    if options.stats:  # compiles all that is timed afterwards
        list(start().generate(min(1, options.max_tokens), sampling, seeds, EVERY))
    marks.append(time.perf_counter())
    session = start()
    marks.append(time.perf_counter())
    samples = [Continuation(tokenizer, prompt) for _ in range(options.samples)]
    show(samples, session.generate(options.max_tokens, sampling, seeds, EVERY), options)
    marks.append(time.perf_counter())
    if options.stats:
        tokens = len(prompt) * len(samples), sum(sample.tokens for sample in samples)
        print(
            f"{speed(*tokens, marks)}\n{cache_bytes(config, session, options.tensor, options.samples)}", file=sys.stderr
        )


def read_prompt(options: argparse.Namespace) -> str:
    """The text to continue. Raises UserError unless exactly one source is given and holds UTF-8."""
    if options.stdin not in (None, "-"):
        raise UserError(f"{options.stdin!r}: a prompt is given as --prompt TEXT, --prompt-file FILE or -")
    sources = {"--prompt": options.prompt, "--prompt-file": options.prompt_file, "-": options.stdin}
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) != 1:
        raise UserError(f"one of {', '.join(sources)} must give the prompt; given: {', '.join(given) or 'none'}")
    ((name, value),) = given.items()
    name = "stdin" if value == "-" else name if name == "--prompt" else f"{name} {value}"
    try:
        if name == "stdin":
            data = sys.stdin.buffer.read()
        else:
            # The shell's bytes, should they be no UTF-8.
            data = value.encode("utf-8", "surrogateescape") if name == "--prompt" else Path(value).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}") from None


def room(tokens: int, options: argparse.Namespace, config: RunConfig) -> int:
    """Slots of the cache. Raises UserError where a prompt of `tokens` tokens and what is asked for don't fit."""
    context = config.data.context
    slots = context if options.slots is None else options.slots
    if tokens + options.max_tokens <= slots:
        return slots
    line = f"a prompt of {tokens} tokens, begin token included, and --max-tokens {options.max_tokens} don't fit into"
    if options.slots is not None:
        raise UserError(f"{line} --slots {slots}")
    raise UserError(
        f"{line} {slots} slots (data.context: the model was never trained beyond them; "
        f"--slots {tokens + options.max_tokens} would have it try)"
    )


def load(options: argparse.Namespace, config: RunConfig, tokenizer: Tokenizer, slots: int) -> Decoder:
    """The run's model on all devices, with a row for every sample, and more where rows must divide over devices."""
    mesh = sharding.make_mesh(sharding.MeshConfig(tensor=options.tensor))
    model = trained.load(options.run_dir, config, tokenizer, mesh, options.step)
    ways = sharding.row_ways(mesh)
    rows, vocab = -(-options.samples // ways) * ways, tokenizer.vocab_size
    how = {"batch": rows, "slots": slots, "vocab": vocab, "implementation": options.implementation}
    return Decoder(model.program, model.params, mesh, **how)


class Continuation:
    """One sample's text as its tokens come: bytes that may be part of a letter wait for the rest of it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self.tokenizer = tokenizer
        self.shown, self.waiting = list(prompt), []
        self.text, self.tokens, self.ended = "", 0, False

    def add(self, ids: Iterable[int]) -> str:
        """The text that tokens add; those from the end token on are ignored, but that it was drawn is counted."""
        for number in ids:
            if self.ended:
                break
            self.tokens += 1
            self.ended = number == self.tokenizer.end_id
            self.waiting += [] if self.ended else [number]
        return self.release(whole=self.ended)

    def release(self, whole: bool = True) -> str:
        """The text of what waits; unless the `whole` is due, without tokens at the end that may be part of a letter."""
        count = len(self.waiting) - (0 if whole else self._unfinished())
        ready, self.waiting = self.waiting[:count], self.waiting[count:]
        # A tokenizer may write a token otherwise at the beginning of a text, so what was shown last is decoded along.
        before, after = (self.tokenizer.decode(ids) for ids in (self.shown, self.shown + ready))
        piece = after[len(before) :]
        self.shown = ready or self.shown
        self.text += piece
        return piece

    def _unfinished(self) -> int:
        """How many tokens to hold back: a letter has at most 4 bytes, so at most 3 tokens can wait for its end."""
        count = len(self.waiting)
        for held in range(min(3, count)):
            if not self.tokenizer.decode(self.shown + self.waiting[: count - held]).endswith("\ufffd"):
                return held
        return min(3, count)


def show(samples: list[Continuation], drawn: Iterable[np.ndarray], options: argparse.Namespace) -> None:
    """Prints one sample as it comes, several when all have ended."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that isn't UTF-8 shows ? for what it lacks
        sys.stdout.reconfigure(errors="replace")
    alone = len(samples) == 1
    for rows in drawn:
        for sample, row in zip(samples, rows, strict=False):  # beyond the samples, rows are copies
            piece = sample.add(row.tolist())
            if alone:
                print(piece, end="", flush=True)
    for index, sample in enumerate(samples):
        piece = sample.release()
        if alone and sample.text:
            print(piece, flush=True)
        elif not alone and options.max_tokens:
            print(f"--- sample {index}, seed {options.seed + index}\n{sample.text}", flush=True)


def speed(read: int, drawn: int, marks: Sequence[float]) -> str:
    """Lines on tokens per second and on compilation; `marks` are the seconds between which it warmed up, read, drew."""
    warm_up, prefill, decode = np.diff(marks)
    rate = f"{drawn:,} tokens, {drawn / decode:,.0f} tokens/s" if drawn else "0 tokens"
    return "\n".join(
        [
            f"prefill   {read:,} tokens, {read / prefill:,.0f} tokens/s",
            f"decode    {rate}",
            f"compile   {max(warm_up - prefill, 0):.1f} s, in neither of them",
        ]
    )


def cache_bytes(config: RunConfig, session: Session, tensor: int, samples: int) -> str:
    """Lines on the bytes of the live cache, beside what accounting says they should be."""
    decoder = session.decoder
    heads = {"heads": config.attention.heads, "head_dim": config.attention.head_dim}
    mha = config.with_attention(attention.families()["gqa"].Config(**heads))
    found = accounting.cache_bytes(config, tensor, decoder.implementation)
    rows, slots = decoder.batch, decoder.layout.blocks * decoder.layout.block
    here = rows // sharding.row_ways(decoder.mesh)
    whole, local = session.cache_bytes(), session.cache_bytes_per_device()
    percent = 100 * whole / (rows * slots * accounting.cache_bytes(mha, 1, decoder.implementation).padded)
    filler = f" ({rows - samples} rows only fill up the devices)" if rows > samples else ""
    padded = f", {found.logical:,} of them not padding" if found.padded != found.logical else ""
    return "\n".join(
        [
            f"cache     {whole // (rows * slots):,} bytes/token (accounting: {found.padded:,}{padded}), "
            f"{percent:.1f} % of MHA",
            f"          {local // (here * slots):,} bytes/token on a device (accounting: {found.per_device:,})",
            f"          {whole:,} bytes for {rows} x {slots:,} slots{filler}; "
            f"{local:,} on a device, {here} x {slots:,} slots",
        ]
    )


if __name__ == "__main__":
    command(main)()
