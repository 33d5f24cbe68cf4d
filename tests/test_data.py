"""The token store: what is written is what was read, batches and windows cover it, and it is complete or not there."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pydantic
import pytest

from lrkv_jax import prepare
from lrkv_jax.data import DataConfig, Store, Tokenizer, open_store, writing
from lrkv_jax.settings import UserError

T, M = 16, 64
VOCAB = 300


def documents(count: int = 80) -> list[str]:
    """Texts of different lengths, with characters of one to four bytes, line ends of both kinds and a special token."""
    words = ["alpha", "beta", "naïve", "日本", "🙂", "<|endoftext|>", "\r\n", "\n", "x = 1", "\t", "  "]
    draw = np.random.default_rng(0)
    return [f"№{n}:" + " ".join(draw.choice(words, draw.integers(1, 60))) for n in range(count)]


def write_jsonl(path, texts) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make(folder, **changes) -> DataConfig:
    """A config over folder/docs.jsonl with its cache in folder/cache."""
    defaults = {"dataset": "text_files", "path": str(folder / "docs.jsonl"), "cache_dir": str(folder / "cache")}
    return DataConfig(**(defaults | {"context": T, "record_tokens": M} | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_jsonl(path / "docs.jsonl", documents())
    return path


@pytest.fixture(scope="module")
def store(folder) -> Store:
    return open_store(make(folder), VOCAB, progress=False)


def stream_of(store: Store) -> np.ndarray:
    records = [store.record(n) for n in range(store.records)]
    for before, after in itertools.pairwise(records):
        assert before[-1] == after[0]
    return np.concatenate([records[0][:1], *(record[1:] for record in records)])


@pytest.mark.parametrize("begin", ["<|endoftext|>", "<|begin|>"])
def test_store_holds_every_document_once(folder, begin):
    """Bugs: a document lost, doubled, cut at a record's edge, altered (line ends, special tokens), in two splits."""
    store = open_store(make(folder, begin_token=begin), VOCAB, progress=False)
    tokenizer, stream = store.tokenizer, stream_of(store)
    framed = [] if begin == "<|endoftext|>" else [tokenizer.begin_id]
    *trained, tail = np.split(stream, np.flatnonzero(stream == tokenizer.end_id) + 1)
    assert all(piece[: len(framed)].tolist() == framed for piece in trained)
    trained = [tokenizer.decode(piece[len(framed) : -1]) for piece in trained]
    held_out = [tokenizer.decode(ids[1:-1]) for s in ("validation", "test") for ids in store.windows(s).sequences()]
    assert len(trained) > 50
    assert len(held_out) == sum(store.counts(split).documents for split in ("validation", "test")) >= 2
    assert len({*trained, *held_out}) == len(trained) + len(held_out)
    left_over = [
        [*framed, *tokenizer.encode(text), tokenizer.end_id] for text in {*documents()} - {*trained, *held_out}
    ]
    assert sum(map(len, left_over)) == tail.size + store.dropped_tokens < 2 * M
    assert any(ids[: tail.size] == tail.tolist() for ids in left_over)


def test_counts_are_of_raw_text(store):
    """Bugs: bytes counted as characters or of decoded tokens; end tokens forgotten or begin tokens counted."""
    held_out = {s: list(store.windows(s).sequences()) for s in ("validation", "test")}
    sizes = {s: [len(store.tokenizer.decode(x[1:-1]).encode()) for x in held_out[s]] for s in held_out}
    for split, sequences in held_out.items():
        assert store.counts(split) == (len(sequences), sum(len(x) - 1 for x in sequences), sum(sizes[split]))
        assert store.windows(split).document_bytes.tolist() == sizes[split]
    total = sum(len(text.encode()) for text in documents())
    assert store.counts("train").bytes == total - sum(sum(of_split) for of_split in sizes.values())
    assert store.counts("train").tokens == stream_of(store).size + store.dropped_tokens


def test_special_tokens_in_text_are_text(store):
    """Bug: a document that mentions <|endoftext|> ends there, and its bytes are gone."""
    ids = store.tokenizer.encode("a<|endoftext|>b 🙂\r\n")
    assert store.tokenizer.end_id not in ids
    assert store.tokenizer.decode(ids) == "a<|endoftext|>b 🙂\r\n"


def test_ids_take_two_bytes_or_four(folder, store, monkeypatch):
    """Bug: ids above 65535 wrap around. A tokenizer with one high id is enough to see it."""
    assert store.tokenizer.dtype == np.uint16
    content = json.loads((store.directory / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 70000, "content": "<|far|>"})
    content["model"]["vocab"]["<|far|>"] = 70000
    path = folder / "far.json"
    path.write_text(json.dumps(content))
    far = open_store(make(folder, tokenizer=str(path), end_token="<|far|>"), 70001, progress=False)
    assert far.tokenizer.dtype == np.uint32
    assert np.count_nonzero(stream_of(far) == 70000) > 10


def test_batch_is_a_function_of_the_step(store):
    """Bugs: hosts read different batches than one host; the iterator drifts from batch_at; a restart shifts by one."""
    batches = store.batches(8, seed=3)
    steps = [batches.batch_at(step) for step in range(12)]
    assert steps[0].shape == (8, T + 1)
    assert steps[0].dtype == np.int32
    for step in (0, 7):
        hosts = [batches.batch_at(step, slice(0, 4)), batches.batch_at(step, slice(4, 8))]
        np.testing.assert_array_equal(np.concatenate(hosts), steps[step])
    for start, rows in ((0, slice(None)), (5, slice(2, 6))):
        with contextlib.closing(batches.iterate(start, rows)) as iterator:
            for step, batch in zip(range(start, 12), iterator, strict=False):
                np.testing.assert_array_equal(batch, steps[step][rows])
    assert not np.array_equal(steps[0], store.batches(8, seed=4).batch_at(0))
    np.testing.assert_array_equal(store.batches(4, seed=3).batch_at(3), steps[1][4:])


def test_each_epoch_covers_every_window_in_a_new_order(store):
    """Bugs: windows skipped or doubled, the same order every epoch, a batch that stops at the epoch's end."""
    count = store.records * M // T
    batches = store.batches(1, seed=0)
    assert batches.sequences_per_epoch == count
    assert count % 7
    epochs = [[batches.batch_at(epoch * count + n)[0].tobytes() for n in range(count)] for epoch in range(2)]
    stream = stream_of(store)
    windows = [stream[at : at + T + 1].astype(np.int32).tobytes() for at in range(0, count * T, T)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(windows)
    assert epochs[0] != epochs[1]
    straddling = store.batches(7, seed=0).batch_at(count // 7)
    assert [row.tobytes() for row in straddling] == (epochs[0] + epochs[1])[count // 7 * 7 :][:7]


def test_background_iterator_passes_errors_on_and_ends(store, monkeypatch):
    """Bugs: a damaged record hangs training, or its error is swallowed by the reading thread."""
    batches = store.batches(4, seed=0)

    def broken(*_):
        raise UserError("disk gone")

    monkeypatch.setattr(batches, "batch_at", broken)
    with pytest.raises(UserError, match="disk gone"), contextlib.closing(batches.iterate()) as iterator:
        next(iterator)


def bare_tokenizer(tmp_path) -> Tokenizer:
    """Bytes only: as many ids as bytes, in ASCII."""
    return Tokenizer.train([], 257, "<|endoftext|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> Store:
    """A store whose held-out documents have 0 (an empty end), 1, T-1, T, T+1 and 2T ids."""
    path = tmp_path_factory.mktemp("ragged")
    lengths = [1, T - 1, T, T + 1, 2 * T, 2 * T - 1, 3] * 3
    write_jsonl(path / "docs.jsonl", [chr(97 + n) * length for n, length in enumerate(lengths)])
    config = make(path, record_tokens=T, test_percent=40, validation_percent=10)
    return open_store(config, 257, progress=False)


def test_windows_of_a_store_score_every_token_once(ragged):
    """Bugs: the end token unscored, a token at a window's edge scored twice, the index of another document's rows."""
    windows = ragged.windows("test")
    assert ragged.counts("test").documents >= 5
    rows = windows.rows(0, len(windows))
    for number, sequence in enumerate(windows.sequences()):
        mine = rows.document == number
        scored = rows.weights[mine] > 0
        np.testing.assert_array_equal(rows.labels[mine][scored], sequence[1:])
        np.testing.assert_array_equal(rows.inputs[mine][scored], sequence[:-1])
    assert int(rows.weights.sum()) == ragged.counts("test").tokens == windows.document_tokens.sum()


@pytest.mark.parametrize("length", [0, 1, T - 2, T - 1, T, T + 1, 2 * T - 1, 2 * T, 2 * T + 1])
def test_windows_at_every_length(length):
    """Bugs: off by one in the number of windows, at a document that just fills one, at an empty document."""
    from lrkv_jax.data import Windows

    ids = [np.arange(5, 5 + length), np.arange(3)]
    windows = Windows(lambda n: ids[n], np.array([length, 3]), np.array([length, 3]), T, 1, 2)
    rows = windows.rows(0, 100)
    assert len(windows) == -(-(length + 1) // T) + 1 == len(rows.inputs)
    first = rows.document == 0
    np.testing.assert_array_equal(rows.labels[first][rows.weights[first] > 0], [*ids[0], 2])
    np.testing.assert_array_equal(rows.inputs[first][rows.weights[first] > 0], [1, *ids[0]])
    for start, stop in ((0, 1), (1, 3), (len(windows) - 1, 99), (5, 2)):
        for part, whole in zip(windows.rows(start, stop), rows, strict=True):
            np.testing.assert_array_equal(part, whole[start : max(start, stop)])


def test_fingerprint_knows_the_text_and_not_the_place(folder, store, tmp_path):
    """Bugs: a run refuses its own corpus after the folder moved, or accepts one with a changed letter."""
    texts = documents()
    write_jsonl(tmp_path / "docs.jsonl", texts)
    moved = open_store(make(tmp_path), VOCAB, progress=False)
    assert moved.fingerprint == store.fingerprint
    for file in sorted(store.directory.iterdir()):
        assert file.read_bytes() == (moved.directory / file.name).read_bytes(), file.name
    texts[17] = texts[17].replace(":", ";")
    write_jsonl(tmp_path / "docs.jsonl", texts)
    run_tokenizer = store.directory / "tokenizer.json"
    changed = open_store(make(tmp_path), VOCAB, tokenizer=run_tokenizer, progress=False)
    assert changed.tokenizer.sha256 == store.tokenizer.sha256
    assert changed.fingerprint != store.fingerprint
    other_length = open_store(make(folder, record_tokens=2 * M), VOCAB, progress=False)
    assert other_length.fingerprint != store.fingerprint


def test_run_directory_tokenizer_finds_the_same_store(folder, store, tmp_path):
    """Bug: eval.py tokenizes anew, or with another tokenizer, though the run directory has one."""
    store.tokenizer.save(tmp_path / "tokenizer.json")
    config = make(folder, tokenizer=str(folder / "missing.json"))
    assert open_store(config, VOCAB, tokenizer=tmp_path / "tokenizer.json").directory == store.directory


def test_small_shards_hold_the_same_stream(folder, store, tmp_path, monkeypatch):
    """Bugs: tokens lost or doubled between shards, documents counted in two shards."""
    monkeypatch.setattr(writing, "SHARD_TOKENS", 3 * M)
    monkeypatch.setattr(writing, "BATCH_BYTES", 100)
    many = open_store(make(folder, cache_dir=str(tmp_path)), VOCAB, progress=False)
    assert len(list(many.directory.glob("train-*.array_record"))) > 5
    np.testing.assert_array_equal(stream_of(many), stream_of(store))
    for split in ("train", "validation", "test"):
        assert many.counts(split) == store.counts(split)
    for ours, theirs in zip(many.windows("test").rows(0, 99), store.windows("test").rows(0, 99), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert many.dropped_tokens == store.dropped_tokens


def test_shards_that_end_with_a_document(tmp_path, monkeypatch):
    """Bug: a document that begins where a shard ends is counted in both, or in none."""
    write_jsonl(tmp_path / "docs.jsonl", [f"{n:0{T - 1}}" for n in range(60)])  # T ids each, with the end
    config = make(tmp_path, record_tokens=T)
    counts = open_store(config, 257, progress=False).counts("train")
    monkeypatch.setattr(writing, "SHARD_TOKENS", 2 * T)
    many = open_store(config.model_copy(update={"cache_dir": str(tmp_path / "many")}), 257, progress=False)
    assert len(list(many.directory.glob("train-*.array_record"))) > 20
    assert many.counts("train") == counts == (counts.documents, counts.documents * T, counts.documents * (T - 1))


class Killed(BaseException):
    """Stands for kill -9: nothing of ours may catch it."""


@pytest.mark.parametrize("die_at", [0, 1, 6, 14])
def test_killed_preparation_goes_on_to_the_same_bytes(folder, tmp_path, monkeypatch, die_at):
    """Bugs: a finished shard is written again (or trusted half-written), the stream resumes at the wrong token."""
    monkeypatch.setattr(writing, "SHARD_TOKENS", 4 * M)
    whole = open_store(make(folder, cache_dir=str(tmp_path / "whole")), VOCAB, progress=False)
    calls = itertools.count()
    write_records, written = writing._write_records, []

    def dying(path, payloads):
        if next(calls) == die_at:
            path.with_name(f".{path.name}.123").write_bytes(b"half")
            path.write_bytes(b"a shard whose .json was not written")
            raise Killed
        written.append(path.name)
        return write_records(path, payloads)

    monkeypatch.setattr(writing, "_write_records", dying)
    config = make(folder, cache_dir=str(tmp_path / "killed"))
    with pytest.raises(Killed):
        open_store(config, VOCAB, progress=False)
    half = tmp_path / "killed" / "stores" / whole.directory.name
    with pytest.raises(UserError, match=r"half-written.*manifest\.json.*prepare"):
        Store(half, config)
    resumed = open_store(config, VOCAB, progress=False)
    assert len(written) == len(set(written))  # no shard twice
    assert {file.name for file in half.iterdir()} == {file.name for file in whole.directory.iterdir()}
    for file in half.iterdir():
        assert file.read_bytes() == (whole.directory / file.name).read_bytes(), file.name
    assert resumed.fingerprint == whole.fingerprint


def test_two_processes_prepare_one_store(folder, tmp_path):
    """Bugs: the second run reads what the first has half-written, or writes over it; tensorflow is imported."""
    program = (
        "import sys; from lrkv_jax.data import DataConfig, open_store;"
        f"store = open_store(DataConfig.model_validate_json(sys.argv[1]), {VOCAB}, progress=False);"
        "assert 'tensorflow' not in sys.modules; print(store.fingerprint, store.batches(2, 0).batch_at(0).sum())"
    )
    argument = make(folder, cache_dir=str(tmp_path)).model_dump_json()
    both = [
        subprocess.Popen([sys.executable, "-c", program, argument], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len(list((tmp_path / "stores").iterdir())) == 1


@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "manifest", "tokenizer", "index"])
def test_damaged_store_is_named(folder, tmp_path, damage):
    """Bugs: a damaged store trains on what is left, or ends in ArrayRecord's traceback."""
    config = make(folder, cache_dir=str(tmp_path))
    directory = open_store(config, VOCAB, progress=False).directory
    shard = directory / "train-00000.array_record"
    content = bytearray(shard.read_bytes())
    match damage:
        case "missing":
            shard.unlink()
        case "short":
            shard.write_bytes(content[:-1])
        case "flipped":
            for at in range(0, len(content), 50):
                content[at] ^= 1
            shard.write_bytes(content)
        case "manifest":
            (directory / "manifest.json").write_text("{")
        case "tokenizer":
            (directory / "tokenizer.json").write_text((directory / "tokenizer.json").read_text() + " ")
        case "index":
            (directory / "test-00000.npy").unlink()
    reason = "is missing" if damage in ("missing", "index") else "bytes instead of" if damage == "short" else ""
    with pytest.raises(UserError, match=f"{directory} is damaged.*{reason}.*Delete it.*prepare"):
        open_store(config, VOCAB, progress=False).batches(64, 0).batch_at(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 24}, "context = 24 must divide record_tokens = 64"),
        ({"context": 128}, "context = 128 is longer than record_tokens = 64"),
        ({"context": 0}, "greater than 0"),
        ({"test_percent": 60}, "less than 50"),
        ({"path": ""}, "path is empty"),
        ({"end_token": ""}, "at least 1 character"),
    ],
)
def test_config_refuses(tmp_path, changes, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        make(tmp_path, **changes)


def test_cache_directory(tmp_path, monkeypatch):
    """Bug: LRKV_CACHE overrides a directory given on the command line, or is not read at all."""
    monkeypatch.setenv("LRKV_CACHE", str(tmp_path / "env"))
    assert DataConfig().cache() == tmp_path / "env"
    assert DataConfig(cache_dir=str(tmp_path)).cache() == tmp_path


def test_prepare_command(folder, store, monkeypatch, capsys):
    """Bugs: the command ignores its flags, or makes another store than training opens; a refusal is a traceback."""
    root = pathlib.Path(__file__).parents[1]
    flags = [
        f"--data.{k.replace('_', '-')}={v}" for k, v in make(folder).model_dump().items() if v not in ("", False, ())
    ]
    command = ["prepare", "--config", str(root / "configs" / "debug.py"), f"--model.vocab={VOCAB}"]
    monkeypatch.setattr(sys, "argv", [*command, *flags])
    with pytest.raises(SystemExit) as done:
        prepare.main()
    assert not done.value.code
    assert store.fingerprint in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, *flags, "--data.path=/nowhere"])
    with pytest.raises(SystemExit) as refused:
        prepare.main()
    assert refused.value.code == 2
    assert capsys.readouterr().err == "error: data.path = /nowhere: no such file or folder\n"
