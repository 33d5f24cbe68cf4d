"""The command that writes text: what it prints, what it counts, and what it refuses, each in one line."""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from models import FAMILIES

from lrkv_jax import accounting, generate, sharding
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.data import DataConfig, Tokenizer
from lrkv_jax.settings import UserError, command
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import Tokens, make_program
from lrkv_jax.transformer import ModelConfig

ROOT = Path(__file__).parent.parent
BEGIN, END = "<begin>", "<end>"
TEXT = "Bäume → größer, 木を見て 🙂🙃\n" * 3  # letters of one to four bytes
SHORT = ["--max-tokens", "12"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run directory of an untrained model, and no corpus anywhere."""
    path = tmp_path_factory.mktemp("run")
    tokenizer = Tokenizer.train([TEXT], 258, BEGIN, END)  # a token a byte
    tokenizer.save(path / "tokenizer.json")
    config = RunConfig(
        model=ModelConfig(layers=1, width=16, vocab=320, scan_layers=True),
        attention=FAMILIES["lrkv"],
        data=DataConfig(dataset="text_files", path="/gone", context=64, begin_token=BEGIN, end_token=END),
    )
    (path / "config.json").write_text(config.model_dump_json())
    tokens = Tokens(tokenizer.begin_id, tokenizer.end_id, False)
    program = make_program(config.model, config.attention, config.train, config.optimizer, tokens)
    checkpoints = Checkpointer(path, config.checkpoint)
    checkpoints.save(3, jax.jit(program.init_state)(jax.random.key(0)))
    checkpoints.close()
    return path


@pytest.fixture(scope="module")
def decoders():
    """Those loaded so far: what is compiled for one call serves others that differ in nothing that a decoder knows."""
    return {}


@pytest.fixture
def say(run_dir, decoders, capsys, monkeypatch):
    """Runs the command in this process, on one device; returns what it wrote to stdout, and to stderr."""
    one = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", lambda config: one)
    load = generate.load

    def loaded(options, config, tokenizer, slots):
        key = (options.samples, options.step, options.implementation, config.model.dtype, slots)
        if key not in decoders:
            decoders[key] = load(options, config, tokenizer, slots)
        return decoders[key]

    monkeypatch.setattr(generate, "load", loaded)

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        assert generate.main([str(run_dir), *map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def tokenizer(run_dir):
    """The run's own."""
    return Tokenizer.load(run_dir / "tokenizer.json", BEGIN, END)


def test_every_way_to_give_a_prompt_is_the_same(tmp_path, monkeypatch):
    """Bug: a source adds or strips a newline, decodes otherwise, or is not read; - is understood in one place only."""
    prompt = "größer → \n"
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    for source in (
        ["--prompt", prompt],
        ["--prompt-file", str(tmp_path / "prompt.txt")],
        ["-"],
        ["--temperature", "0", "-"],
        ["--prompt", "-"],
        ["--prompt-file", "-"],
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
        assert generate.read_prompt(generate.parse(["run", *source, "--seed", "1"])) == prompt, source


def test_an_empty_prompt_is_the_begin_token(say):
    """Bug: an empty prompt is refused, or nothing is read before the first draw."""
    assert say("--prompt", "", *SHORT).out == say("-", *SHORT).out != ""


def test_no_tokens_print_nothing(say):
    """Bug: a newline, a heading or a failure where nothing is asked for."""
    assert say("--prompt", "a", "--max-tokens", 0).out == ""
    assert say("--prompt", "a", "--max-tokens", 0, "--samples", 2).out == ""


def test_samples_are_those_drawn_alone(say):
    """Bug: sample i isn't what seed + i draws alone, is printed under another heading, or rows are taken for heads."""
    together = say("--prompt", "größer", *SHORT, "--samples", 7, "--seed", 5).out
    alone = [say("--prompt", "größer", *SHORT, "--seed", 5 + i).out for i in range(7)]
    assert together == "".join(f"--- sample {i}, seed {5 + i}\n{text}" for i, text in enumerate(alone))
    assert len(set(alone)) > 1


def test_only_the_tokenizers_ids_are_drawn(say, decoders, tokenizer):
    """Bug: rows that only fill up the embedding are drawn, and decode to nothing; so is the begin token."""
    say("--prompt", "a", "--max-tokens", 0)
    (allowed,) = {tuple(np.flatnonzero(decoder.allowed).tolist()) for decoder in decoders.values()}
    assert allowed == tuple(number for number in range(tokenizer.vocab_size) if number != tokenizer.begin_id)
    assert tokenizer.vocab_size == 258 < 320


def test_text_is_printed_as_it_is_drawn(tokenizer, monkeypatch):
    """Bug: one sample's text waits for the end, or in a buffer; of several, some is printed before all have ended."""
    options, shown = generate.parse(["run", "--prompt", "a"]), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="utf-8"))
    seen = []

    def drawn(count):
        for text in ("ab", "größ"):
            yield np.asarray([tokenizer.encode(text)] * count)
            seen.append(shown.getvalue().decode())

    for count in (1, 2):
        generate.show([generate.Continuation(tokenizer, []) for _ in range(count)], drawn(count), options)
    assert seen == ["ab", "abgröß", "abgröß\n", "abgröß\n"]


def test_flags_reach_what_they_are_for(say):
    """Bug: a flag isn't passed on, or changes what it shouldn't."""
    prompt = ["--prompt", "a b c", *SHORT]
    wanted = say(*prompt, "--temperature", 0).out
    assert wanted.endswith("\n")
    assert len(wanted) > 2
    same = ["--seed", 9, "--chunk", 64, "--implementation", "reference", "--step", 3]
    assert say(*prompt, "--temperature", 0, *same).out == wanted
    assert say(*prompt, "--top-k", 1, "--slots", 20).out == wanted
    assert say(*prompt, "--top-p", 1e-9).out == wanted
    assert say(*prompt).out != wanted


def test_stats_are_accountings(say, run_dir):
    """Bug: bytes are counted without padding, layers or scales; tokens that were not drawn are counted as drawn."""
    config = RunConfig.load(run_dir)
    found = say("--prompt", "a", *SHORT, "--samples", 2, "--dtype", "bfloat16", "--stats")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    costs = accounting.accounts(config)
    size = costs.cache_bytes_per_token
    line = f"cache     {size:,} bytes/token (accounting: {size:,}), {costs.cache_percent_of_mha:.1f} % of MHA"
    assert line in found.err
    assert f"{size * 2 * 64:,} bytes for 2 x 64 slots" in found.err
    assert re.search(r"prefill   4 tokens, [\d,]+ tokens/s\ndecode    \d+ tokens, [\d,]+ tokens/s\n", found.err)
    assert "tokens/s" not in found.out
    assert "decode    0 tokens\n" in say("--prompt", "a", "--max-tokens", 0, "--stats").err


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_text_comes_whole_however_it_is_cut(tokenizer, size):
    """Bug: a letter whose bytes lie in two tokens, or calls, is printed as two signs of damage, twice or never."""
    ids = tokenizer.encode(TEXT + "\ufffd")
    assert len(ids) == len((TEXT + "\ufffd").encode())
    sample = generate.Continuation(tokenizer, [tokenizer.begin_id, *tokenizer.encode("größer")])
    pieces = [sample.add(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) + sample.release() == sample.text == TEXT + "\ufffd"
    assert not any(piece.endswith("\ufffd") for piece in pieces)


def test_damage_holds_nothing_up(tokenizer):
    """Bug: bytes that are no letter's, which an untrained model draws, keep all text back till the end."""
    sample = generate.Continuation(tokenizer, [tokenizer.begin_id])
    assert sample.add(tokenizer.encode("木")[:1] * 9) == "\ufffd" * 6
    assert sample.release() == "\ufffd" * 3


def test_text_stops_at_the_end_token(tokenizer):
    """Bug: the end token or what follows it is printed; half a letter before it is lost."""
    ids = tokenizer.encode("abc木")[:-1]
    sample = generate.Continuation(tokenizer, [tokenizer.begin_id])
    assert sample.add([*ids, tokenizer.end_id, *ids]) == "abc\ufffd"
    assert sample.add(ids) == sample.release() == ""
    assert sample.text == tokenizer.decode(ids)
    assert sample.tokens == len(ids) + 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of --prompt, --prompt-file, - must give the prompt; given: none"),
        (["--prompt", "a", "-"], "given: --prompt, -"),
        (["a"], "'a': a prompt is given as --prompt TEXT"),
        (["--prompt-file", "/nowhere"], "--prompt-file /nowhere: No such file"),
        (["--prompt-file", "/"], "--prompt-file /: Is a directory"),
        (["--prompt", "a\udcff"], "not UTF-8 at byte 1"),
        (["-"], "not UTF-8 at byte 2"),
        (["--prompt", "a", "--max-tokens", "-1"], "--max-tokens -1: must be at least 0"),
        (["--prompt", "a", "--samples", "0"], "--samples 0: must be at least 1"),
        (["--prompt", "a", "--slots", "0"], "--slots 0: must be at least 1"),
        (["--prompt", "a", "--chunk", "-8"], "--chunk -8: must be at least 1"),
        (["--prompt", "a", "--seed", "-1"], "--seed -1: every sample's seed must be at least 0"),
        (["--prompt", "a", "--seed", str(2**32 - 1), "--samples", "2"], "below 2**32"),
        (["--prompt", "a", "--top-p", "0"], "top_p = 0.0: must be above 0"),
        (["--prompt", "a", "--top-k", "-1"], "top_k = -1: must be 0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature = -1.0: must be a number from 0 up"),
        (["--prompt", "a", "--max-tokens", "x"], "invalid int value: 'x'"),
        (["--prompt", "a", "--max-tokenz", "3"], "unrecognized arguments: --max-tokenz"),
        (["--prompt", "a"], "a prompt of 2 tokens, begin token included, and --max-tokens 128 don't fit into 64 slots"),
        (["--prompt", "a"], "--slots 130 would have it try"),
        (["--prompt", "a", "--slots", "129"], "don't fit into --slots 129"),
        (["--prompt", "a", *SHORT, "--tensor", "3"], "needs 3 devices; there are 8"),
        (["--prompt", "a", *SHORT, "--tensor", "0"], "every size is a positive number"),
        (["--prompt", "a", *SHORT, "--step", "7"], "checkpoint 7 is missing"),
        (["--prompt", "a", *SHORT, "--step", "last"], "should be a step, newest or best"),
        (
            ["--prompt", "a", *SHORT, "--implementation", "pallas_tpu"],
            "cannot run on cpu; these can: reference, blocked",
        ),
        (["--prompt", "a", *SHORT, "--chunk", "5"], "chunk = 5: must be a multiple of the cache's block of 64 slots"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_one_line(run_dir, capsys, monkeypatch, arguments, says):
    """Bug: a traceback, a value clamped in silence, or text before the refusal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ok\xff")))
    with pytest.raises(SystemExit) as end:
        command(lambda: generate.main([str(run_dir), *arguments]))()
    found = capsys.readouterr()
    assert end.value.code == 2
    assert found.out == ""
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1
    assert says in found.err


def test_a_directory_that_is_no_run_is_refused(tmp_path, run_dir):
    """Bug: the message is about a file that the user has never heard of."""
    with pytest.raises(UserError, match="is no run directory"):
        generate.main([str(tmp_path), "--prompt", "a"])
    (tmp_path / "config.json").write_bytes((run_dir / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"tokenizer .*tokenizer.json: No such file"):
        generate.main([str(tmp_path), "--prompt", "a"])
    (tmp_path / "tokenizer.json").write_bytes((run_dir / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="holds no checkpoint"):
        generate.main([str(tmp_path), "--prompt", "a", *SHORT])


def test_interrupts_are_quiet(run_dir, monkeypatch):
    """Bug: Ctrl-C prints where the program was."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load", interrupt)
    assert generate.main([str(run_dir), "--prompt", "a", *SHORT]) == 130


def test_heads_shared_by_devices_write_the_same(run_dir, say, capsys, monkeypatch):
    """Bug: on several devices rows that only fill up are printed, hold others up, or the bytes are not a device's."""
    arguments = ["--prompt", "a", *SHORT, "--temperature", "0", "--samples", "2"]
    wanted = say(*arguments).out
    monkeypatch.undo()  # all eight devices
    assert generate.main([str(run_dir), *arguments, "--tensor", "2", "--stats"]) == 0
    found = capsys.readouterr()
    assert found.out == wanted
    costs = accounting.cache_bytes(RunConfig.load(run_dir), tensor=2)
    assert f"{costs.per_device:,} bytes/token on a device (accounting: {costs.per_device:,})" in found.err
    assert f"{costs.per_device * 64:,} on a device, 1 x 64 slots" in found.err


def test_a_reader_that_leaves_is_no_fault(run_dir):
    """Bug: `| head` shows a traceback, or one as the interpreter ends."""
    script = [sys.executable, "-m", "lrkv_jax.generate", str(run_dir), "--prompt", "a", "--max-tokens", "60"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(
        script, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=300)) == ("", 0)


def test_the_readme_is_understood():
    """Bug: the README shows flags that are not called so."""
    commands = re.findall(r"^ +python -m lrkv_jax.generate (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands
    for words in map(shlex.split, commands):
        assert generate.read_prompt(generate.parse(words))
