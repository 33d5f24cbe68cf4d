"""A study refuses what can't be compared, matches what it says, and a sweep survives a run that fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lrkv_jax import study as studies
from lrkv_jax.attention import gqa, lrkv, mla
from lrkv_jax.config import load_configs
from lrkv_jax.settings import UserError
from lrkv_jax.study import FAMILY, Comparison, Stage, Study

ROOT = Path(__file__).parent.parent
BASE = load_configs(f"{ROOT}/configs/debug.py:mha")[1]
# Large enough that a unit of MLP width is well below a thousandth of the parameters.
WIDE = BASE.model_copy(update={"model": BASE.model.model_copy(update={"width": 48})})
HEADS = {"heads": 6, "head_dim": 8}
WIDE = WIDE.with_attention(gqa.Config(**HEADS))


def of(*runs, **comparison):
    names = {f"run{i}": run for i, run in enumerate(runs)}
    return Study(names, (Stage("all", tuple(names)),), (Comparison("all", tuple(names), **comparison),))


def test_only_the_named_fields_may_differ():
    """Bug: a learning rate that differs unnoticed between two families is taken for the families' difference."""
    other = WIDE.with_attention(lrkv.Config(**HEADS, rank=2))
    of(WIDE, other).check()
    optimizer = other.optimizer.model_copy(update={"peak_lr": 0.5})
    confounded = other.model_copy(update={"optimizer": optimizer})
    with pytest.raises(UserError, match=r"run0 and run1 differ in optimizer.peak_lr = 0.003 and 0.5"):
        of(WIDE, confounded).check()
    of(WIDE, confounded, differ=(*FAMILY, "optimizer.peak_lr")).check()
    unlike = WIDE.with_attention(gqa.Config(**HEADS, kv_heads=3, qk_norm=False))
    with pytest.raises(UserError, match=r"attention\.qk_norm = True and False"):
        of(WIDE, unlike).check()
    with pytest.raises(UserError, match=r"optimizer.peak_lr"):  # a name's beginning is no section
        of(WIDE, confounded, differ=(*FAMILY, "optimizer.peak")).check()


def test_a_run_in_no_comparison_is_refused():
    """Bug: a run that no comparison names is never checked against the others it is drawn beside."""
    with pytest.raises(UserError, match="run1: in no comparison"):
        of(WIDE, WIDE, WIDE)._replace(comparisons=(Comparison("two", ("run0", "run2")),)).check()
    with pytest.raises(UserError, match="compares 1 runs"):
        of(WIDE).check()
    with pytest.raises(UserError, match="nobody: no such run"):
        of(WIDE, WIDE)._replace(stages=(Stage("all", ("nobody",)),)).check()


@pytest.mark.parametrize("family", [lrkv.Config(**HEADS, rank=2), gqa.Config(**HEADS, kv_heads=1)])
def test_matched_parameters(family):
    """Bug: the MLP takes up the missing parameters of one layer instead of all, or counts SwiGLU's two as one."""
    mha = WIDE.with_attention(gqa.Config(**HEADS))
    matched = studies.match_parameters(WIDE.with_attention(family), mha)
    assert abs(studies.cost(matched, "parameters") / studies.cost(mha, "parameters") - 1) < 1e-3
    assert matched.model.hidden > mha.model.hidden
    of(mha, matched, differ=(*FAMILY, "model.mlp_width"), matched="parameters").check()
    with pytest.raises(UserError, match="parameters of run1 are"):
        of(mha, WIDE.with_attention(family), differ=(*FAMILY, "model.mlp_width"), matched="parameters").check()


@pytest.mark.parametrize(
    ("config", "knob"),
    [(lrkv.Config(**HEADS), "rank"), (mla.Config(**HEADS), "latent"), (gqa.Config(**HEADS), "kv_heads")],
)
def test_matched_cache(config, knob):
    """Bug: key scales are forgotten, so that the ranks found are too large."""
    reference = WIDE.with_attention(gqa.Config(**HEADS, kv_heads=3))
    matched = studies.match_cache(WIDE.with_attention(config), reference)
    target = studies.cost(reference, "cache")
    found = abs(studies.cost(matched, "cache") - target)
    for step in (-1, 1):
        value = getattr(matched.attention, knob) + step
        if knob != "kv_heads":
            other = WIDE.with_attention(matched.attention.model_copy(update={knob: value}))
            assert found <= abs(studies.cost(other, "cache") - target)
    assert found <= 0.05 * target


def test_matched_flops():
    """Bug: FLOPs per token are matched and not those of the whole training."""
    mha = WIDE.model_copy(update={"train": WIDE.train.model_copy(update={"steps": 5000})}).with_attention(
        gqa.Config(**HEADS)
    )
    matched = studies.match_flops(mha.with_attention(gqa.Config(**HEADS, kv_heads=1)), mha)
    assert matched.train.steps > mha.train.steps
    assert abs(studies.cost(matched, "flops") / studies.cost(mha, "flops") - 1) < 1e-3


STUDY = """
from pathlib import Path
from runpy import run_path
from lrkv_jax.study import Comparison, Stage, Study

mha = run_path({debug!r})["configs"]["mha"]
train = mha.train.model_copy(update={{"steps": 2, "eval_every": 2}})
mha = mha.model_copy(update={{"train": train, "data": mha.data.model_copy(update={{"path": {text!r}}})}})
bad = mha.model_copy(update={{"data": mha.data.model_copy(update={{"path": "/nowhere"}})}})
runs = {{"bad": bad, "mha": mha}}
study = Study(runs, (Stage("all", tuple(runs)),), (Comparison("all", tuple(runs), differ=("data.path",)),))
configs = study.runs
"""


def sweep(tmp_path, *flags):
    command = [sys.executable, "-m", "lrkv_jax.sweep", "study.py", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "LRKV_CACHE": str(tmp_path / "cache")}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_failed_run_does_not_stop_the_rest_and_a_finished_one_is_skipped(tmp_path):
    """Bug: the first failure ends the sweep; or a second sweep trains again what is done."""
    text = STUDY.format(debug=str(ROOT / "configs/debug.py"), text=str(ROOT / "tests/text.jsonl"))
    (tmp_path / "study.py").write_text(text)
    first = sweep(tmp_path)
    assert first.returncode == 1, first.stderr
    assert "bad-s0: exit status 2: error: data.path" in first.stdout
    assert "failed: bad-s0, exit status 2" in first.stderr
    summary = json.loads((tmp_path / "results/study/mha-s0.json").read_text())
    assert summary["eval"] == json.loads((tmp_path / "runs/study/mha-s0/eval.json").read_text())
    assert summary["shards"] == {"1": 256, "2": 128}  # 2 layers, keys and values of 2 heads of 8, float32
    assert len(summary["diversity"]) == 2

    # What eval.py writes of an unfinished run is no end.
    result = tmp_path / "runs/study/mha-s0/eval.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"step": 1}))
    assert "0 done" in sweep(tmp_path, "--dry-run").stdout.splitlines()[0]
    result.write_text(json.dumps(json.loads(result.read_text()) | {"step": 2}))

    second = sweep(tmp_path)
    assert "1 done, 0 running, 1 left" in second.stdout.splitlines()[0]
    assert "mha-s0: started" not in second.stdout

    other = text.replace('"steps": 2', '"steps": 3')
    (tmp_path / "study.py").write_text(other)
    changed = sweep(tmp_path)
    assert changed.returncode == 2
    assert "train.steps = 3 (the run has 2)" in changed.stderr

    # On another machine the summary stands for the run, and is held to the same.
    shutil.rmtree(tmp_path / "runs")
    changed = sweep(tmp_path)
    assert changed.returncode == 2
    assert "mha-s0.json is a run of another config: train.steps = 3 (the run has 2)" in changed.stderr
    (tmp_path / "study.py").write_text(text)
    assert "1 done, 0 running, 1 left" in sweep(tmp_path).stdout.splitlines()[0]
    assert json.loads((tmp_path / "results/study/mha-s0.json").read_text()) == summary
    (tmp_path / "results/study/mha-s0.json").write_text("{")
    assert "results/study/mha-s0.json: not JSON" in sweep(tmp_path, "--dry-run").stderr


def test_mistakes_end_in_one_line(tmp_path):
    """Bug: a traceback for a file that isn't there or holds no study."""
    for file, complaint in (("nothing.py", "no such file"), ("empty.py", "defines no `study")):
        (tmp_path / "empty.py").write_text("")
        with pytest.raises(UserError, match=complaint):
            studies.load_study(str(tmp_path / file))
