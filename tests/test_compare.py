"""Comparisons: intervals with known answers and known coverage, what may be claimed, and refusals in one line each."""

import json
import re

import numpy as np
import pytest
from scipy import stats

from lrkv_jax import compare, rundir
from lrkv_jax.config import RunConfig
from lrkv_jax.intervals import paired, paired_bootstrap, smallest_difference, welch
from lrkv_jax.settings import UserError

rng = np.random.default_rng(5)
TOKENS = rng.integers(50, 5000, 40)
NATS = 3 * TOKENS + rng.normal(size=40) * TOKENS**0.5


def test_a_constant_difference_is_the_interval():
    """Bug: documents of the two runs drawn apart, which buries the difference under that of the texts."""
    found = paired_bootstrap(NATS + 0.25 * TOKENS, NATS, TOKENS)
    assert found == pytest.approx((0.25, 0.25, 0.25), abs=1e-12)


def test_equal_runs_differ_by_exactly_nothing():
    """Bug: two sums rounded differently, told as a difference."""
    assert paired_bootstrap(NATS, NATS.copy(), TOKENS) == (0, 0, 0)


def test_bootstrap_by_hand():
    """Bugs: a mean of document means, the wrong quantiles, fewer resamples than said, blocks that repeat one another.

    Two documents: drawn twice each with probability 1/4, once each with 1/2.
    """
    nats, tokens = np.array([3.0, 2.0]), np.array([1, 4])
    found = paired_bootstrap(nats, np.zeros(2), tokens, level=0.4)
    assert found == pytest.approx((1.0, 1.0, 1.0))
    found = paired_bootstrap(nats, np.zeros(2), tokens, level=0.6)
    assert found == pytest.approx((1.0, 0.5, 3.0))
    many = paired_bootstrap(NATS, 0 * NATS, TOKENS, resamples=200_000)
    few = paired_bootstrap(NATS, 0 * NATS, TOKENS)
    spread = few.high - few.low
    assert few == pytest.approx(many, abs=0.05 * spread)
    assert few != many


def test_bootstrap_covers():
    """Bug: an interval of half the width, or for single tokens: it would hold the truth far less often than 95 %."""
    draw, held, runs = np.random.default_rng(0), 0, 300
    for i in range(runs):
        tokens = draw.integers(20, 400, 60)
        # What two models make of a document differs by 0.02 a token, and by the document.
        difference = tokens * (0.02 + 0.1 * draw.normal(size=60))
        found = paired_bootstrap(difference, np.zeros(60), tokens, resamples=1000, seed=i)
        held += found.low <= 0.02 <= found.high
    assert 0.90 <= held / runs <= 0.98


def test_welch_covers_and_is_exact():
    """Bugs: a normal interval, too narrow by half at three seeds; a pooled variance; one side's count for both."""
    draw = np.random.default_rng(1)
    intervals = [welch(list(1 + 0.1 * draw.normal(size=3)), list(draw.normal(size=5))) for _ in range(400)]
    held = np.mean([found.low <= 1 <= found.high for found in intervals])
    assert 0.92 <= held <= 0.98
    # Equal counts and spreads: Student's interval with 4 degrees of freedom.
    found, half = welch([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]), stats.t.ppf(0.975, 4) * np.sqrt(2 / 3)
    assert found == pytest.approx((-4, -4 - half, -4 + half))
    # All spread on one side: that side's own 2 degrees of freedom.
    found, half = welch([1.0, 2.0, 3.0], [5.999, 6.0, 6.001]), stats.t.ppf(0.975, 2) * np.sqrt(1 / 3)
    assert found == pytest.approx((-4, -4 - half, -4 + half), rel=1e-4)


def test_smallest_difference_is_cohens():
    """Bugs: one-sided, a normal in place of t (at 3 seeds 2.29 instead of 3.07), sd of the mean for that of a run.

    Cohen's table: 64 a side find half a standard deviation, 26 find 0.8, 17 one whole.
    """
    for seeds, shift in ((64, 0.5), (26, 0.8), (17, 1.0)):
        assert smallest_difference(2.0, seeds) == pytest.approx(2 * shift, rel=0.02)
    difference, draw = smallest_difference(0.1, 3), np.random.default_rng(2)
    a, b = 0.1 * draw.normal(size=(2, 4000, 3))
    found = stats.ttest_ind(a + difference, b, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.025)
    difference = smallest_difference(0.1, 3, pairs=True)
    found = stats.ttest_1samp(a + difference, 0.0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.025)


def test_too_little_to_tell_is_refused():
    """Bug: an interval of no width, or nan, from a single document, a single seed, or one run copied."""
    with pytest.raises(UserError, match=r"1 document: .* at least 2"):
        paired_bootstrap(NATS[:1], NATS[:1], TOKENS[:1])
    for a, b in (([1.0], [1.0, 2.0]), ([1.0, 1.0], [2.0, 2.0])):
        with pytest.raises(UserError, match="seeds"):
            welch(a, b)
    for a, b in (([1.0], [2.0]), ([1.0, 2.0], [3.0, 4.0])):
        with pytest.raises(UserError, match="seeds"):
            paired(a, b)
    with pytest.raises(UserError, match="1 seeds a side"):
        smallest_difference(0.1, 1)


@pytest.fixture
def make(tmp_path):
    """Writes the run directory of a run that scored the documents above."""

    def write(name, shift=0.0, seed=0, *, rank=12, tokens=TOKENS, fingerprint="f", documents=True, **data):
        config = RunConfig().model_dump(mode="json")
        config["train"]["seed"], config["attention"]["rank"] = seed, rank
        config["data"] |= data
        path = tmp_path / name
        path.mkdir()
        nats = NATS + shift * TOKENS
        ce = nats.sum() / tokens.sum()
        scored = {"split": "test", "documents": len(tokens), "tokens": int(tokens.sum()), "bytes": 3 * len(tokens)}
        costs = {"parameters": 1000 * rank, "cache_bytes_per_token": 100 * rank, "cache_percent_of_mha": 4.0 * rank}
        trained = {"family": "lrkv", "step": 7, "train_tokens": 700, "train_flops": 7e9, "bits_per_byte": ce / 3}
        rundir.write_json(path / "config.json", config)
        rundir.write_json(path / "corpus.json", {"fingerprint": fingerprint})
        rundir.write_json(path / "eval.json", {**trained, **scored, **costs, "ce": ce})
        sums = {"nats": nats.tolist(), "tokens": tokens.tolist(), "bytes": [3] * len(tokens)}
        if documents:
            rundir.write_json(path / "documents.json", {"split": "test", "step": 7, **sums})
        (path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "tokens": 100, "loss": 4.0}\n')
        return str(path)

    return write


def test_two_runs(make, capsys):
    """Bugs: the wrong one called better, a claim about methods from one run a side, costs of the wrong side."""
    assert compare.main([make("low", rank=8), make("high", 0.25)]) == 0
    out = capsys.readouterr().out
    assert "A - B = -0.2500 nats/token, 95 % interval -0.2500 to -0.2500, 10,000 resamples of 40 documents" in out
    assert "A is the better of these two checkpoints" in out
    assert "not about two methods" in out
    assert "Configs differ in (A | B): attention.rank 8 | 12\n" in out
    rows = {line[:24].strip(): line[24:].split() for line in out.splitlines()}
    assert rows["parameters"] == ["8,000", "12,000", "-4,000", "(-33.3", "%)"]
    assert rows["KV cache, bytes/token"] == ["800", "1,200", "-400", "(-33.3", "%)"]


def test_equal_runs_are_not_told_apart(make, capsys):
    """Bug: 0 outside an interval that it bounds."""
    compare.main([make("a"), make("b", seed=1)])
    out = capsys.readouterr().out
    assert "A - B = +0.0000 nats/token, 95 % interval +0.0000 to +0.0000" in out
    assert "neither of these two checkpoints can be called the better one" in out
    assert "Configs differ in (A | B): train.seed 0 | 1\nThat is more than the attention" in out


def test_groups(make, capsys):
    """Bugs: seeds paired by place, an interval over documents for a claim about methods, the sign of the difference."""
    a = [make(f"a{seed}", shift, seed) for seed, shift in enumerate((0.30, 0.31, 0.32))]
    b = [make(f"b{seed}", shift, seed, rank=8, documents=False) for seed, shift in ((1, 0.01), (2, 0.02), (3, 0.0))]
    assert compare.main(["--group", *a, "--against", *b]) == 0
    told = capsys.readouterr().out
    half = stats.t.ppf(0.975, 4) * 0.01 * np.sqrt(2 / 3)
    assert (
        f"A - B = +0.3000 nats/token, 95 % interval {0.3 - half:+.4f} to {0.3 + half:+.4f}, Welch's t over 3 and"
        in told
    )
    assert "B is the better of these two methods" in told
    assert f"(sd 0.0100) 3 a side find one of {smallest_difference(0.01, 3):.4f}" in told
    assert "train.seed" not in told
    assert compare.main(["--group", *a, "--group", *b]) == 0
    assert capsys.readouterr().out == told


def test_groups_of_the_same_seeds_are_compared_seed_by_seed(make, capsys):
    """Bugs: what a seed does to both sides counted as noise; pairs by place instead of by seed."""
    shifts = {0: 0.30, 1: 0.10, 2: 0.20}
    a = [make(f"a{seed}", shift, seed) for seed, shift in shifts.items()]
    b = [make(f"b{seed}", shifts[seed] - 0.02 + 0.001 * seed, seed, rank=8) for seed in (2, 0, 1)]
    assert compare.main(["--group", *a, "--against", *b]) == 0
    told = capsys.readouterr().out
    half, apart = stats.t.ppf(0.975, 2) * 0.001 / np.sqrt(3), stats.t.ppf(0.975, 4) * 0.1 * np.sqrt(2 / 3)
    assert f"A - B = +0.0190 nats/token, 95 % interval {0.019 - half:+.4f} to {0.019 + half:+.4f}, Student's t" in told
    unpaired = re.search(r"unpaired ([+-]\d\.\d+) to ([+-]\d\.\d+)", told)
    assert [float(end) for end in unpaired.groups()] == pytest.approx([0.019 - apart, 0.019 + apart], abs=2e-3)
    assert "B is the better of these two methods" in told
    assert f"(sd 0.0010) 3 a side find one of {smallest_difference(0.001, 3, pairs=True):.4f}" in told


def test_fewer_than_three_seeds_make_no_claim(make, capsys):
    """Bug: two seeds a side called a method's result."""
    a, b = ([make(f"{side}{seed}", seed / 100, seed) for seed in range(n)] for side, n in (("a", 3), ("b", 2)))
    with pytest.raises(UserError, match=r"^3 and 2 seeds: a claim about two methods needs at least 3 a side .*$"):
        compare.main(["--group", *a, "--against", *b])
    out = capsys.readouterr().out
    assert "What may be said" in out
    assert "better" not in out


def test_a_run_may_be_the_file_that_a_study_keeps(make, tmp_path, capsys):
    """Bug: results of a study readable only by its figures."""
    runs = [make("a"), make("b", 0.1, rank=8)]
    compare.main(runs)
    told = capsys.readouterr().out
    for name in ("a", "b"):
        parts = {
            part: json.loads((tmp_path / name / f"{part}.json").read_text()) for part in ("config", "eval", "documents")
        }
        summary = {"name": name, "seed": 0, "label": "", "metrics": [], **parts}
        (tmp_path / "study").mkdir(exist_ok=True)
        (tmp_path / "study" / f"{name}-s0.json").write_text(json.dumps(summary))
    compare.main([runs[0], str(tmp_path / "study" / "b-s0.json")])
    assert capsys.readouterr().out == told


OTHER_TEXT = {
    "corpus": ({"fingerprint": "g"}, "the corpus's fingerprint: f in .*/a, g in .*/b; their numbers don't compare"),
    "dataset": ({"dataset": "lm1b"}, "data.dataset: python_stdlib in .*/a, lm1b in .*/b; .*"),
    "context": ({"context": 128}, "data.context: 256 in .*/a, 128 in .*/b; .*"),
    "tokenizer": ({"tokens": TOKENS + 1}, "eval's tokens: .*"),
    "documents": ({"tokens": TOKENS[::-1]}, ".*/a and .*/b: documents of different tokens, so .*"),
}


@pytest.mark.parametrize(("fields", "line"), OTHER_TEXT.values(), ids=OTHER_TEXT)
def test_other_text_is_refused(make, fields, line, capsys):
    """Bug: nats over other tokens subtracted from one another."""
    a, b = make("a"), make("b", seed=1, **fields)
    for arguments in ([a, b], ["--group", a, "--against", b]):
        with pytest.raises(UserError, match=f"^{line}$"):
            compare.main(arguments)
    assert capsys.readouterr().out == ""


def test_where_the_text_lies_is_no_difference(make, capsys):
    """Bug: the same corpus on another machine refused."""
    compare.main([make("a", path="/here", cache_dir="/tmp/x"), make("b", path="/there")])
    assert "Configs differ in (A | B): nothing" in capsys.readouterr().out


def test_refusals(make, tmp_path):
    """Bug: a traceback, or a number, for runs that can't be compared."""
    a, b, bare = make("a"), make("b", seed=1), make("bare", documents=False)
    other = make("other", seed=2, rank=8)
    for arguments, line in (
        ([a], "compare takes two runs, .*"),
        ([a, b, "--group", a], "compare takes two runs, .*"),
        (["--group", a, b], "compare takes two runs, .*"),
        ([a, str(tmp_path / "none")], ".*/none: no such run directory or file"),
        ([a, str(tmp_path)], ".*: holds 4 runs, where one is meant"),
        ([a, bare], r".*/bare: no sums by document; `python eval.py RUN_DIR` writes them"),
        (["--group", a, a, b, "--against", other], "group A: seeds 0, 0, 1; a run counted twice is no second seed"),
        (["--group", a, b, other, "--against", b], "group A: .* no seeds of one method, they differ in attention.rank"),
    ):
        with pytest.raises(UserError, match=f"^{line}$"):
            compare.main(arguments)
    (tmp_path / "b" / "documents.json").write_text(
        (tmp_path / "a" / "documents.json").read_text().replace("[", "[9999.0, ", 1)
    )
    with pytest.raises(UserError, match="sums by document"):
        compare.main([a, b])
    (tmp_path / "b" / "eval.json").unlink()
    with pytest.raises(UserError, match="not finished"):
        compare.main([a, b])
