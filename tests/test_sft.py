"""Supervised fine-tuning: which tokens are scored, how examples share a row, what is told of those that don't fit, how
often a file's are taken."""

import collections
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from models import batch, program

from lrkv_jax import marks, prepare, rundir
from lrkv_jax.config import RunConfig, parse_command
from lrkv_jax.data import DataConfig, Form, Tokenizer, ngram_cross_entropy, open_store, writing
from lrkv_jax.data.chat import canonical
from lrkv_jax.data.corpus import Corpus
from lrkv_jax.data.files import key_of
from lrkv_jax.data.mixture import spread
from lrkv_jax.data.store import FORMAT
from lrkv_jax.evaluate import evaluate, make_eval_step
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MeshConfig, make_mesh
from lrkv_jax.step import Tokens

ROOT = Path(__file__).parent.parent
T, VOCAB = 24, 300
CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"


@pytest.fixture(scope="module", params=["<|end|>", "<|begin|>"])
def tokenizer(request, tmp_path_factory):
    """A tokenizer whose begin token is its end token too, or another; ChatML's are special."""
    trained = Tokenizer.train(["a text of letters"] * 9, 280, request.param, "<|end|>")
    spec = json.loads(trained._json)
    for content in ("<|im_start|>", "<|im_end|>"):
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": len(spec["model"]["vocab"]), "content": content})
        spec["model"]["vocab"][content] = len(spec["model"]["vocab"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(spec))
    return Tokenizer.load(path, request.param, "<|end|>"), path, request.param


def spelled(tokenizer, marked):
    """An example as text, what is scored in [brackets]."""
    text, before = "", 0
    for number in marked:
        scored = int(number) & marks.SCORED
        text += "[" * bool(scored > before) + "]" * bool(scored < before)
        text, before = text + tokenizer.decode([int(number) & marks.IDS]), scored
    return text + "]" * bool(before)


CHAT = {
    "messages": [
        {"role": "system", "content": "Be <|end|>."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "?"},
    ]
}


def test_exactly_the_answers_are_scored(tokenizer):
    """Bugs: a mask one token early or late, a prompt that is scored, an end token that isn't, special tokens read
    out of a person's text, a turn that nothing answers."""
    tokenizer, _, begin = tokenizer
    texts = [json.dumps({"prompt": "2+2=", "completion": " 4"}), json.dumps({"prompt": "", "completion": ""})]
    form = Form(tokenizer, "<|end|>", "<|{role}|>\n{content}\n", 999, False)
    shown = [spelled(tokenizer, example.ids) for example in form.encode([*texts, json.dumps(CHAT)], training=True)]
    assert shown == [
        f"{begin}2+2=[ 4<|end|>]",
        f"{begin}[<|end|>]",
        f"{begin}<|system|>\nBe <|end|>.\n<|user|>\nHi\n<|assistant|>\n[Yo<|end|>]\n"
        "<|user|>\nBye\n<|assistant|>\n[<|end|>]",
    ]
    example = form.encode([json.dumps(CHAT)], training=True)[0]
    assert example.bytes == 2
    assert np.flatnonzero(example.ids & marks.BEGINS).tolist() == [0]
    plain = (example.ids & marks.IDS).tolist()
    assert plain.count(tokenizer.end_id) == 2 + (begin == "<|end|>")

    chatml = Form(tokenizer, "<|end|>", CHATML.replace("<|im_end|>", "<|end|>"), 999, False)
    ids = chatml.encode([json.dumps(CHAT)], training=True)[0].ids & marks.IDS
    special = tokenizer.encode_markup("<|im_start|>")
    assert len(special) == 1
    assert tokenizer.decode(ids.tolist()).endswith(
        "Yo<|end|>\n<|im_start|>user\nBye<|end|>\n<|im_start|>assistant\n<|end|>"
    )
    assert ids.tolist().count(special[0]) == 5
    asked = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]}
    whole = (chatml.encode([json.dumps(asked)], training=True)[0].ids & marks.IDS).tolist()
    assert chatml.question("Hi") == whole[:-2]


def test_packing_keeps_examples_whole():
    """Bugs: an example cut, lost, doubled or over the edge; filling that is scored or belongs to the last example; rows
    that depend on chance."""
    draw = np.random.default_rng(0)
    documents = [
        marks.mark(draw.integers(3, 99, size), np.arange(size) >= size // 2) for size in draw.integers(2, 26, 300)
    ]
    rows = marks.pack(documents, T + 1, 2)
    found = []
    for row in rows:
        starts = np.flatnonzero(row & marks.BEGINS)
        assert starts[0] == 0
        pieces = np.split(row, starts[1:])
        filled = not marks.scored(pieces[-1])
        assert not filled or set((pieces[-1] & marks.IDS).tolist()) == {2}
        found += [piece.tobytes() for piece in pieces[: len(pieces) - filled]]
    assert sorted(found) == sorted(document.tobytes() for document in documents)
    assert len(rows) <= 1.05 * sum(map(len, documents)) / (T + 1) + 1
    np.testing.assert_array_equal(rows, marks.pack(documents, T + 1, 2))


def examples(count):
    """Prompts and completions of different lengths, the last two longer than the context."""
    draw = np.random.default_rng(1)
    found = [
        {
            "prompt": f"{n}+{n}=" + "." * int(draw.integers(0, 7)),
            "completion": f" {2 * n}" + "!" * int(draw.integers(0, 7)),
        }
        for n in range(count)
    ]
    return [*found, {"prompt": "p" * 9, "completion": "c" * 99}, {"prompt": "p" * 99, "completion": "c"}]


def make(folder, path, begin, **changes):
    """A config over folder/data.jsonl."""
    lines = "".join(json.dumps(example) + "\n" for example in examples(60))
    (folder / "data.jsonl").write_text(lines)
    return DataConfig(
        dataset="sft",
        path=str(folder / "data.jsonl"),
        cache_dir=str(folder / "cache"),
        tokenizer=str(path),
        context=T,
        begin_token=begin,
        end_token="<|end|>",
        **changes,
    )


def test_store_batches_and_windows(tokenizer, tmp_path):
    """Bugs: a row that isn't a pure function of the step, an example held out and trained on, counts or bytes of what
    isn't scored, an example too long that goes without a word or is cut where it is scored for the result."""
    tokenizer, path, begin = tokenizer
    config = make(tmp_path, path, begin, test_percent=20.0)
    store = open_store(config, VOCAB, progress=False)
    known = {f"{begin}{e['prompt']}[{e['completion']}<|end|>]": e for e in examples(60)[:60]}
    trained = []
    for record in (store.record(n) for n in range(store.records)):
        assert record.shape == (T + 1,)
        pieces = np.split(record, np.flatnonzero(record & marks.BEGINS)[1:])
        trained += [spelled(tokenizer, piece) for piece in pieces if marks.scored(piece)]
    held = [
        spelled(tokenizer, store._read(split, n))
        for split in ("validation", "test")
        for n in range(len(store.windows(split)))
    ]
    assert sorted(trained + held) == sorted(known)
    assert store.counts("train").documents == len(trained)
    for split in ("validation", "test"):
        windows, counts = store.windows(split), store.counts(split)
        rows = windows.rows(0, 999)
        sequences = [known[spelled(tokenizer, store._read(split, n))] for n in range(len(windows))]
        assert counts.bytes == windows.document_bytes.sum() == sum(len(e["completion"]) for e in sequences)
        assert counts.tokens == rows.weights.sum() == windows.document_tokens.sum()
        for row, example in zip(range(len(windows)), sequences, strict=True):
            answer = rows.labels[row][rows.weights[row] == 1].tolist()
            assert tokenizer.decode(answer) == example["completion"] + "<|end|>"
            assert rows.inputs[row, : len(tokenizer.encode(example["prompt"])) + 1].tolist() == [
                tokenizer.begin_id,
                *tokenizer.encode(example["prompt"]),
            ]
    assert store.note.startswith(f"examples longer than data.context = {T}: ")
    assert sum(int(part.split()[0]) for part in store.note.split(": ")[1].split(", ")) == 2
    unigram, bigram = ngram_cross_entropy(store)
    assert 0 < bigram < unigram < np.log(VOCAB)

    again = open_store(config, VOCAB, progress=False, name=store.directory.name).batches(4, 3)
    for step in (0, 5, 40):
        np.testing.assert_array_equal(again.batch_at(step), store.batches(4, 3).batch_at(step))
    cut = open_store(config.model_copy(update={"too_long": "truncate"}), VOCAB, progress=False)
    assert cut.fingerprint != store.fingerprint
    assert cut.counts("test") == store.counts("test")


def test_a_packed_row_scores_its_examples_as_if_alone():
    """Bugs: attention across examples, positions that go on, prompts in the loss, a chat that falls apart at the end
    tokens of its turns where these also begin documents; a mean over rows instead of over what is scored."""
    begin = end = 2
    prog = program("lrkv", tokens=Tokens(begin, end, True, True))
    params = prog.init_params(jax.random.key(0))
    turns = marks.mark(np.array([2, 5, 6, 2, 7, 8, 2]), np.array([0, 0, 1, 1, 0, 1, 1], bool))
    short = marks.mark(np.array([2, 9, 2]), np.array([0, 0, 1], bool))
    long = marks.mark(np.array([2, *range(3, 15), 2]), np.array([0] * 11 + [1] * 3, bool))
    rows = marks.pack([turns, short, long, turns], 17, end)
    assert len(rows) == 2
    sums = jax.jit(prog.sums)
    _, (nats, count) = sums(params, jnp.asarray(rows.astype(np.int32)))
    alone = [
        sums(params, jnp.asarray(marks.pack([each], 17, end).astype(np.int32)))[1] for each in (turns, short, long)
    ]
    assert [int(number) for _, number in alone] == [4, 1, 3]
    assert count == 12
    np.testing.assert_allclose(nats, 2 * alone[0][0] + alone[1][0] + alone[2][0], rtol=1e-5)

    ids = jnp.asarray((turns & marks.IDS).astype(np.int32))[None]
    one_by_one = jax.jit(prog.eval_step)(params, ids[:, :-1], ids[:, 1:])[0]
    np.testing.assert_allclose(alone[0][0], sum(float(one_by_one[t]) for t in (1, 2, 4, 5)), rtol=1e-5)


def test_plain_text_is_read_as_before():
    """Bug: taking the marks off changes ids that have none."""
    prog = program("mha", tokens=Tokens(1, 2, True))
    ids, scored, begins = prog.read(batch())
    assert (ids == batch()).all()
    assert ((batch() == 1) == begins).all()
    assert (scored == ~begins).all()


@pytest.mark.parametrize("tokenizer", ["<|end|>"], indirect=True)
def test_evaluation_is_of_the_answers(tokenizer, tmp_path):
    """Bug: prompts, or the answers of another example, in the number that is reported."""
    tokenizer, path, begin = tokenizer
    store = open_store(make(tmp_path, path, begin, test_percent=20.0), VOCAB, progress=False)
    prog = program("mha", tokens=Tokens(tokenizer.begin_id, tokenizer.end_id, True, True), vocab=VOCAB)
    params, mesh = prog.init_params(jax.random.key(0)), make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        found = evaluate(make_eval_step(prog, mesh), params, store.windows("test"), 4, mesh)
        test = [store._read("test", number).astype(np.uint32) for number in range(len(store.windows("test")))]
        rows = marks.pack(test, T + 1, tokenizer.end_id).astype(np.int32)
        _, (nats, count) = jax.jit(prog.sums)(params, jnp.asarray(rows))
    np.testing.assert_allclose(found.nats.sum(), nats, rtol=1e-5)
    assert found.tokens.sum() == count
    assert found.tokens.tolist() == [marks.scored(example) for example in test]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "d.jsonl:7: no JSON"),
        ("[]", "d.jsonl:7: neither `messages` nor `prompt` and `completion`"),
        ('{"text": "x"}', "neither `messages` nor `prompt`"),
        ('{"prompt": "x"}', "d.jsonl:7: no string under completion"),
        ('{"messages": "x"}', "`messages` must be a list"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "messages[0].role = 'bot': one of system, user, assistant"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "no string under messages[0].content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of role assistant"),
        ('{"prompt": "\\ud800", "completion": "x"}', "half a surrogate pair"),
    ],
)
def test_bad_lines_are_named(line, says):
    """Bug: an example that teaches nothing, or something else, without a word."""
    with pytest.raises(UserError) as error:
        canonical(line, "d.jsonl:7")
    assert says in str(error.value)


def test_refusals(tokenizer, tmp_path):
    """Bugs: a tokenizer trained on JSON, a folder without examples, a context none fits, a template without content."""
    _, path, begin = tokenizer
    config = make(tmp_path, path, begin)
    for changes, says in (
        ({"tokenizer": ""}, "data.tokenizer is empty: dataset = sft needs the tokenizer of a model"),
        ({"path": ""}, "data.path is empty: dataset = sft needs a .jsonl file"),
        ({"path": str(path.parent)}, "no .jsonl file"),
        ({"context": 4}, "no example of at most data.context + 1 = 5 tokens"),
    ):
        with pytest.raises(UserError) as error:
            open_store(config.model_copy(update=changes), VOCAB, progress=False)
        assert says in str(error.value)
    with pytest.raises(pydantic.ValidationError, match=r"must hold \{role\} and then \{content\}, once each"):
        DataConfig(template="{content}")
    (tmp_path / "data.jsonl").write_text(json.dumps(examples(1)[0]))
    with pytest.raises(UserError, match="1 distinct documents cannot fill 3 splits; add documents"):
        open_store(config, VOCAB, progress=False)


def trained(tokenizer, store):
    """The train split's examples as text, each with how often it is there."""
    rows = [store.record(number) for number in range(store.records)]
    pieces = [piece for row in rows for piece in np.split(row, np.flatnonzero(row & marks.BEGINS)[1:])]
    return collections.Counter(spelled(tokenizer, piece) for piece in pieces if marks.scored(piece))


@pytest.mark.parametrize("tokenizer", ["<|end|>"], indirect=True)
def test_a_mixture_takes_files_as_often_as_it_says(tokenizer, tmp_path, monkeypatch, capsys):
    """Bugs: the wrong file's examples repeated, or those held out; a mixture that moves examples between splits, shares
    a store or a fingerprint with another, isn't a function of the step or isn't told; stores without one made anew."""
    tokenizer, path, begin = tokenizer
    folder = tmp_path / "mix"
    (folder / "more").mkdir(parents=True)
    for file, mark, count in (("chat.jsonl", "c", 30), ("gsm8k.jsonl", "g", 20), ("more/mmlu.jsonl", "m", 20)):
        found = [{"prompt": f"{mark}{n}=", "completion": f" {n}"} for n in range(count)]
        (folder / file).write_text("".join(json.dumps(example) + "\n" for example in found))
    plain = make(tmp_path, path, begin).model_copy(update={"path": str(folder)})
    mixed = plain.model_copy(update={"repeats": ("gsm8k.jsonl=4", "more/*=2")})
    monkeypatch.setattr(writing, "SHARD_TOKENS", 200)  # several shards
    alone, store = (open_store(config, VOCAB, progress=False) for config in (plain, mixed))

    times = {"c": 1, "g": 4, "m": 2}
    once = trained(tokenizer, alone)
    assert set(once.values()) == {1}
    assert trained(tokenizer, store) == {text: times[text.removeprefix(begin)[0]] for text in once}
    for split in ("validation", "test"):
        assert store.counts(split) == alone.counts(split)
        for number in range(len(store.windows(split))):
            np.testing.assert_array_equal(store._read(split, number), alone._read(split, number))
    texts = {of_file: [text for text in once if text.removeprefix(begin)[0] == of_file] for of_file in times}
    names = {"chat.jsonl": "c", "gsm8k.jsonl": "g", "more/mmlu.jsonl": "m"}
    assert store.mixture.keys() == alone.mixture.keys() == names.keys()
    for name, mark in names.items():
        answers = [text.split("[")[1].removesuffix("<|end|>]") for text in texts[mark]]
        tokens = sum(len(tokenizer.encode(answer)) + 1 for answer in answers)
        for n, mixture in ((times[mark], store.mixture), (1, alone.mixture)):
            assert mixture[name] == {
                "examples": len(answers),
                "tokens": tokens,
                "repeats": n,
                "examples_taken": n * len(answers),
                "tokens_taken": n * tokens,
            }
    counts = store.counts("train")
    assert counts.documents == sum(of_file["examples_taken"] for of_file in store.mixture.values())
    assert counts.tokens == sum(of_file["tokens_taken"] for of_file in store.mixture.values())
    again = open_store(mixed, VOCAB, progress=False, name=store.directory.name).batches(4, 3)
    for step in (0, 30):
        np.testing.assert_array_equal(again.batch_at(step), store.batches(4, 3).batch_at(step))

    cut = [T, plain.template, "drop"]
    key = key_of(FORMAT, Corpus(plain).key, tokenizer.sha256, tokenizer.begin_id, tokenizer.end_id, cut)
    assert alone.directory.name == f"sft-{key}"
    ones = open_store(plain.model_copy(update={"repeats": ("*=1",)}), VOCAB, progress=False)
    assert ones.directory == alone.directory != store.directory
    assert alone.fingerprint != store.fingerprint
    content = json.loads((alone.directory / "manifest.json").read_text())
    del content["fingerprint"], content["dataset"], content["splits"]["train"]["mixture"]  # as it was before mixtures
    assert writing.fingerprint_of(content) == alone.fingerprint

    rundir.found(tmp_path, RunConfig(data=mixed), store)
    assert rundir.read_json(tmp_path / "corpus.json")["mixture"] == store.mixture
    flags = [f"--data.{name.replace('_', '-')}={value}" for name, value in plain if value not in ("", False, ())]
    flags = [*flags, f"--model.vocab={VOCAB}", "--data.repeats", *mixed.repeats]
    monkeypatch.setattr(sys, "argv", ["prepare", "--config", str(ROOT / "configs" / "debug.py"), *flags])
    with pytest.raises(SystemExit):
        prepare.main()
    of_file = list(store.mixture["gsm8k.jsonl"].values())
    assert ["gsm8k.jsonl", *map(str, of_file)] in [line.split() for line in capsys.readouterr().out.splitlines()]

    for repeats, says in (
        (("gsm=2",), "data.repeats = 'gsm=2': matches no file; data.path = "),
        (("gsm*=2", "*.jsonl=3"), "data.repeats = '*.jsonl=3': gsm8k.jsonl matches 'gsm*=2' too; each file must match"),
    ):
        with pytest.raises(UserError) as error:
            open_store(plain.model_copy(update={"repeats": repeats}), VOCAB, progress=False)
        assert says in str(error.value)


def test_copies_lie_apart():
    """Bug: copies side by side, which even a large store packs into one row."""
    assert spread(np.ones(7, int)).tolist() == list(range(7))
    times = np.array([1, 1, 4, 1, 1, 1, 1, 1] * 25)
    order = spread(times)
    np.testing.assert_array_equal(np.bincount(order), times)
    places = [np.flatnonzero(order == number) for number in np.flatnonzero(times == 4)]
    assert min(np.diff(place).min() for place in places) > order.size // 4 - 4


@pytest.mark.parametrize("pair", ["gsm8k.jsonl", "=2", "a=0", "a=-1", "a=1.5", "a= 2", "a=1000", "a="])
def test_bad_repeats_are_named(pair):
    """Bug: a weight that is rounded, ignored or taken for another."""
    with pytest.raises(pydantic.ValidationError, match=r"repeats = '.*': must be PATTERN=COUNT with COUNT a whole"):
        DataConfig(dataset="sft", repeats=("b=2", pair))


def test_repeats_on_the_command_line(monkeypatch):
    """Bugs: a bad weight, or one for text, is a box of tyro's; the source's files are asked for in another dataset."""
    source = RunConfig(data=DataConfig(dataset="sft", path="/mix", repeats=("a*=2",)))
    monkeypatch.setattr(RunConfig, "load", lambda run_dir: source)

    def repeats(*flags):
        return parse_command("train.py", "", ["--init-from", "/source", *flags]).config.data.repeats

    assert repeats() == ("a*=2",)
    assert repeats("--data.dataset", "python_stdlib") == ()
    assert repeats("--data.repeats", "a=1=2", "b*=3") == ("a=1=2", "b*=3")
    assert repeats("--data.repeats") == ()
    with pytest.raises(UserError, match=r"^data\.repeats = 'a=0': must be PATTERN=COUNT with COUNT a whole number"):
        repeats("--data.repeats", "a=0")
    with pytest.raises(UserError, match=r"^data\.repeats = a=2: must be empty unless dataset = sft$"):
        repeats("--data.dataset", "python_stdlib", "--data.repeats", "a=2")
