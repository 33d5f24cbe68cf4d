"""Corpora and tokenizers: splits, files of every kind, and each bad input ending in one clear line."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from lrkv_jax.data import DataConfig, open_store
from lrkv_jax.data.corpus import Corpus, cut_text
from lrkv_jax.data.datasets import foreign_errors
from lrkv_jax.data.python_stdlib import source_files
from lrkv_jax.data.split import SPLITS, assign, digest, group
from lrkv_jax.settings import UserError

SHARES = {"validation": 0.05, "test": 0.05}


def make(source, tmp_path, **changes) -> DataConfig:
    defaults = {"dataset": "text_files", "path": str(source), "cache_dir": str(tmp_path / "cache")}
    return DataConfig(**(defaults | {"context": 8, "record_tokens": 32} | changes))


def texts_by_split(config: DataConfig) -> dict[str, list[str]]:
    corpus = Corpus(config)
    corpus.prepare(progress=False)
    return {split: [text.decode() for _, text in corpus.documents(split)] for split in SPLITS}


def page(seed: int, lines: int = 12) -> list[str]:
    draw = np.random.default_rng(seed)
    return [f"line {seed} says {draw.integers(10**12)}" for _ in range(lines)]


def test_near_duplicates_form_groups():
    """Bugs: copies with an edited line are told apart; documents are glued by a common header or by short lines."""
    first, second = page(1), page(2)
    header = ["# Licensed to whom it may concern"]
    texts = [
        "\n".join(header + first),
        "\n".join(header + second + ["end"] * 3),
        "\r\n".join(f"  {line}" for line in first[:5] + page(3, 7)),  # five of twelve lines, indented
        "\n".join(page(3, 7)[:3] + page(4)),  # three lines in common: too few
        "end\nend\nelse:\n    return None",
        "\n".join(page(4, 3) + page(5)),
    ]
    assert group([text.encode() for text in texts]).tolist() == [0, 1, 0, 3, 4, 5]


def test_friends_of_friends_form_one_group():
    """Bug: groups that meet late are not merged."""
    a, b = page(1, 8), page(2, 8)
    texts = ["\n".join(a), "\n".join(b), "\n".join(a[:4] + b[:4])]
    assert group([text.encode() for text in texts]).tolist() == [0, 0, 0]


def test_formulas_do_not_group():
    """Bug: a licence in every file makes one group of the whole corpus (and quadratic work)."""
    licence = page(0, 20)
    texts = ["\n".join(licence + page(seed, 4)) for seed in range(1, 260)]
    assert len(set(group([text.encode() for text in texts]).tolist())) == 259


def test_split_keeps_groups_whole_and_near_its_shares():
    """Bugs: a group on both sides; the group's smallest hash, which is no uniform number, sends all groups to test."""
    count = 4000
    groups = np.arange(count) // 4 * 4
    digests = np.array([digest(str(n).encode()) for n in range(count)], np.uint64)
    choice = assign(digests, np.full(count, 100), groups, SHARES)
    assert (choice == choice[groups]).all()
    for split in ("validation", "test"):
        assert 0.03 < (choice == SPLITS.index(split)).mean() < 0.07
    single = assign(digests, np.full(count, 100), np.arange(count), SHARES)
    grown = assign(digests[:3000], np.full(3000, 100), np.arange(3000), SHARES)
    np.testing.assert_array_equal(single[:3000], grown)  # more documents move none
    backwards = assign(digests[::-1], np.full(count, 100), groups[::-1], SHARES)
    np.testing.assert_array_equal(backwards[::-1], choice)  # nor does their order


def test_split_gives_each_side_something():
    """Bugs: five books leave the test set empty; a group of half the corpus is held out."""
    digests = np.array([digest(bytes([n])) for n in range(5)], np.uint64)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(5)
        choice = assign(digests[order], np.array([900, 10, 30, 20, 40]), np.arange(5), SHARES)
        assert np.bincount(choice, minlength=3).tolist() == [3, 1, 1]
        assert choice[0] == SPLITS.index("train")
    with pytest.raises(ValueError, match="2 distinct documents cannot fill 3 splits"):
        assign(digests[:2], np.ones(2), np.arange(2), SHARES)


def test_stdlib_splits(tmp_path):
    """Bugs: a codec file tests what its look-alikes taught; a file of this Python missing; tests or builds included."""
    texts = texts_by_split(DataConfig(cache_dir=str(tmp_path)))
    root, files = source_files(with_tests=False)
    by_text = {path.read_bytes().decode(): path.relative_to(root).as_posix() for path in files}
    names = {split: {by_text[text] for text in texts[split]} for split in SPLITS}
    found = sum(len(of_split) for of_split in texts.values())
    empty = sum(not path.read_text(encoding="utf-8").strip() for path in files)
    assert found == len(files) - empty > 500
    sides = {split for split in SPLITS for name in names[split] if name.startswith("encodings/cp") and "_" not in name}
    assert sides == {"train"}  # cp037.py, cp1250.py, ...: more of them than is held out
    assert {"json/decoder.py", "argparse.py"} <= set().union(*names.values())
    assert not any(name.startswith(("test/", "site-packages/")) for of_split in names.values() for name in of_split)
    assert len(names["test"]) > 10 < len(names["validation"])
    assert "tensorflow" not in sys.modules


def test_stdlib_with_tests_holds_more():
    """Bug: both configurations read the same files."""
    assert len(source_files(with_tests=True)[1]) > len(source_files(with_tests=False)[1]) + 300


def test_text_files_of_every_kind(tmp_path):
    """Bugs: a kind of file skipped, line ends or a byte order mark normalised away, other suffixes read."""
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes("\ufeffwhole file\r\nof two lines\n".encode())
    (folder / "deep" / "b.txt").write_text("second")
    (folder / "c.jsonl").write_text('{"body": "line é"}\n\n{"body": "line \\u2028 two", "n": 1}\n{"body": ""}\n')
    pyarrow.parquet.write_table(pyarrow.table({"body": ["row one", "row two"]}), folder / "d.parquet")
    (folder / "e.md").write_text("not this")
    texts = texts_by_split(make(folder, tmp_path, text_feature="body"))
    expected = {"\ufeffwhole file\r\nof two lines\n", "second", "line é", "line \u2028 two", "row one", "row two"}
    assert set().union(*texts.values()) == expected
    assert sum(map(len, texts.values())) == len(expected)


def test_one_text_is_cut_in_order(tmp_path):
    """Bugs: one book cannot be trained on; a cut loses bytes, falls inside a line or inside a character."""
    text = "".join(f"line {n} é\n" for n in range(1000))
    (tmp_path / "book.txt").write_text(text)
    pieces = texts_by_split(make(tmp_path / "book.txt", tmp_path))
    assert "".join(pieces[split][0] for split in SPLITS) == text
    assert all(piece.endswith("\n") for (piece,) in pieces.values())
    assert 0.88 < len(pieces["train"][0]) / len(text) < 0.91
    solid = cut_text(("日" * 1000 + "a").encode(), SHARES)  # 5 % before its end is inside a character
    assert "".join(solid[split][0].decode() for split in SPLITS) == "日" * 1000 + "a"
    with pytest.raises(UserError, match="too short"):
        cut_text(b"abc", SHARES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "data.path = .*a.txt: no text in 1 file"),
        ("a.txt", b" \n\n", "no text"),
        ("a.txt", b"fine \xff not", r"a\.txt: not UTF-8 at byte 5 \(b'\\xff'\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y\xc3"}', r"a\.jsonl: not UTF-8 at byte 25"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl:2: no JSON"),
        ("a.jsonl", b'{"txt": "x"}', r"a\.jsonl:1: no string under 'text' \(data.text_feature\)"),
        ("a.jsonl", b"[1]", r"a\.jsonl:1: no string"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1: half a surrogate pair at character 0"),
        ("a.parquet", b"PAR1 not really", r"a\.parquet: "),
        ("a.md", b"text", r"data.path = .*: no \.txt, \.jsonl, \.parquet file"),
    ],
)
def test_bad_text_files(tmp_path, name, content, message):
    """Bug: a person's slip ends in a traceback of TFDS, or text is silently skipped or replaced."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        open_store(make(tmp_path / name, tmp_path), 300, progress=False)
    assert "\n" not in str(caught.value)


def test_parquet_without_the_column(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column 'text' \(data.text_feature\); it has body, n"):
        open_store(make(tmp_path, tmp_path), 300, progress=False)
    with pytest.raises(UserError, match="row 0 of 'n' is int, no text"):
        open_store(make(tmp_path, tmp_path, text_feature="n"), 300, progress=False)


@pytest.fixture
def good(tmp_path):
    """Forty small documents."""
    path = tmp_path / "good.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} of forty é"}) + "\n" for n in range(40)))
    return path


@pytest.mark.parametrize(
    ("changes", "vocab", "message"),
    [
        ({"dataset": "tiny_shakespear", "path": ""}, 300, "no such dataset; did you mean tiny_shakespeare"),
        ({"dataset": "qqqqqq", "path": ""}, 300, "no such dataset; take python_stdlib"),
        ({"dataset": "python_stdlib/with_test", "path": ""}, 300, "python_stdlib has without_tests, with_tests"),
        ({"path": "/nowhere/at/all"}, 300, "data.path = /nowhere/at/all: no such file or folder"),
        ({"dataset": "tiny_shakespeare", "path": "/nowhere"}, 300, "data.path = /nowhere: no such folder"),
        ({}, 256, r"model.vocab = 256: a byte-level tokenizer needs at least 257 tokens"),
        ({"begin_token": "<b>"}, 257, "model.vocab = 257: a byte-level tokenizer needs at least 258"),
        ({"tokenizer": "/nowhere.json"}, 300, "tokenizer /nowhere.json: No such file"),
        ({"record_tokens": 8192, "context": 256}, 300, "fewer than one record of data.record_tokens = 8192"),
        ({"cache_dir": "/dev/null/cache"}, 300, "data cache /dev/null/cache: .*Not a directory.*LRKV_CACHE"),
    ],
)
def test_bad_settings(good, tmp_path, changes, vocab, message):
    with pytest.raises(UserError, match=message) as caught:
        open_store(make(good, tmp_path, **changes), vocab, progress=False)
    assert "\n" not in str(caught.value)


def test_two_documents_are_too_few(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(UserError, match="2 distinct documents cannot fill 3 splits; add documents"):
        open_store(make(path, tmp_path), 300, progress=False)


def test_given_tokenizer(good, tmp_path):
    """Bugs: a tokenizer larger than the model indexes past its embeddings; one that loses text fakes bits per byte."""
    trained = open_store(make(good, tmp_path), 300, progress=False).tokenizer
    path = tmp_path / "given.json"
    trained.save(path)
    given = make(good, tmp_path, tokenizer=str(path))
    assert open_store(given, 5000, progress=False).tokenizer.sha256 == trained.sha256
    with pytest.raises(UserError, match=f"model.vocab = 280: tokenizer .*given.json has {trained.vocab_size} tokens"):
        open_store(given, 280, progress=False)
    with pytest.raises(UserError, match=r"data.end_token = '</s>': .*given\.json has no such token"):
        open_store(make(good, tmp_path, tokenizer=str(path), end_token="</s>"), 300, progress=False)
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "StripAccents"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="does not give the text back: train document 0"):
        open_store(given, 300, progress=False)
    path.write_text("no json")
    with pytest.raises(UserError, match=r"given\.json is no tokenizer\.json"):
        open_store(given, 300, progress=False)


def test_tokenizer_training_is_deterministic(good, tmp_path):
    """Bug: ties between merges are broken by hash order, so that a second machine gets another corpus."""
    stores = [open_store(make(good, tmp_path / side), 300, progress=False) for side in "ab"]
    assert stores[0].tokenizer.sha256 == stores[1].tokenizer.sha256


def test_full_disk_is_one_line(good, tmp_path, monkeypatch):
    """Bug: ENOSPC, which ArrayRecord reports as a RuntimeError, ends in a traceback."""
    from lrkv_jax.data import writing

    def full(*_):
        raise RuntimeError(f"write() failed: {os.strerror(28)}; writing x")

    monkeypatch.setattr(writing, "ArrayRecordWriter", full)
    with pytest.raises(UserError, match=r"disk .* is full"):
        open_store(make(good, tmp_path), 300, progress=False)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow"), "dataset x needs tensorflow"),
        (ModuleNotFoundError("No module named 'apache_beam'", name="apache_beam"), "dataset x needs apache_beam"),
        (ConnectionError("no route"), "dataset x needs the network, which failed: no route"),
        (ValueError("first\nsecond"), "dataset x: TFDS failed: ValueError: first$"),
    ],
)
def test_foreign_builders_fail_in_one_line(error, message):
    with pytest.raises(UserError, match=message), foreign_errors("x"):
        raise error


class OwnSplits(tfds.core.GeneratorBasedBuilder):
    """A catalogue dataset in small: train and test of its own, two texts, no validation split."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "title": tfds.features.Text(),
            "text": tfds.features.Text(),
            "label": tfds.features.Scalar(np.int64),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples("train", 200), "test": self._generate_examples("test", 3)}

    def _generate_examples(self, split, count):
        for n in range(count):
            yield n, {"title": f"{split} {n}", "text": f"text {n} of {split}", "label": n}


def test_catalogue_dataset_keeps_its_own_splits(tmp_path):
    """Bugs: the dataset's own test split ignored; validation taken off test; another text feature read."""
    config = make("", tmp_path, dataset="own_splits", text_feature="title")
    texts = texts_by_split(config)
    assert sorted(texts["test"]) == ["test 0", "test 1", "test 2"]
    assert sorted(texts["train"] + texts["validation"]) == sorted(f"train {n}" for n in range(200))
    assert 2 < len(texts["validation"]) < 25
    with pytest.raises(UserError, match=r"data.text_feature = label: dataset own_splits has title, text"):
        open_store(config.model_copy(update={"text_feature": "label"}), 300, progress=False)


def test_folder_that_tfds_prepared(tmp_path):
    """Bug: a dataset prepared elsewhere cannot be pointed at."""
    builder = OwnSplits(data_dir=str(tmp_path / "elsewhere"), file_format="array_record")
    builder.download_and_prepare()
    texts = texts_by_split(make(builder.data_dir, tmp_path, dataset="whatever"))
    assert len(texts["test"]) == 3


def test_tiny_shakespeare_from_a_folder(tmp_path, monkeypatch):
    """Bug: the catalogue's smallest corpus, whose builder opens its file through tensorflow, needs tensorflow."""
    folder = tmp_path / "manual"
    folder.mkdir()
    text = "".join(f"Speaker {n}:\nWords é.\n\n" for n in range(500))
    (folder / "input.txt").write_text(text)
    module = importlib.import_module("tensorflow_datasets.datasets.tiny_shakespeare.tiny_shakespeare_dataset_builder")
    ours = tfds.core.download.checksums.compute_url_info(folder / "input.txt")  # in place of the real file's
    monkeypatch.setattr(module.Builder, "url_infos", dict.fromkeys(module.Builder.url_infos, ours))
    pieces = texts_by_split(make(folder, tmp_path, dataset="tiny_shakespeare"))
    assert "".join(pieces[split][0] for split in SPLITS) == text
    assert "tensorflow" not in sys.modules


def test_damaged_dataset_is_named(good, tmp_path):
    """Bug: a dataset file cut short ends in ArrayRecord's traceback."""
    config = make(good, tmp_path)
    corpus = Corpus(config)
    corpus.prepare(progress=False)
    (file,) = (tmp_path / "cache" / "datasets").rglob("*.array_record-*")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"the dataset in .* is damaged .*delete it"):
        open_store(config, 300, progress=False)


def test_threads_read_one_store(good, tmp_path):
    """Bug: two threads opening the same reader get each other's bytes."""
    store = open_store(make(good, tmp_path), 300, progress=False)
    batches = store.batches(16, 0)
    expected = [batches.batch_at(step) for step in range(8)]
    fresh = open_store(make(good, tmp_path), 300, progress=False).batches(16, 0)
    results: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda step=step: results.update({step: fresh.batch_at(step)})) for step in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in range(8):
        np.testing.assert_array_equal(results[step], expected[step])
