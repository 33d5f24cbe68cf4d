"""Configs: round trip, refusals in one line, every field read somewhere, headers of the files true."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

from lrkv_jax import accounting
from lrkv_jax.config import RunConfig, flatten, load_configs, parse_command
from lrkv_jax.settings import UserError
from lrkv_jax.study import load_study

ROOT = Path(__file__).parent.parent
STUDIES = sorted((ROOT / "configs").glob("study*.py"))  # many runs of one size
FILES = sorted(set((ROOT / "configs").glob("*.py")) - set(STUDIES))
FAMILIES = ("lrkv", "mha", "gqa", "mqa", "mla")
FROM_SCRATCH = [path for path in FILES if path.stem != "uptrain"]  # which continues conversions, of two families


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", FROM_SCRATCH, ids=lambda path: path.stem)
def test_config_files_hold_the_five_families(path):
    """Bugs: a file lacks a baseline, or its configs don't survive JSON."""
    for family in FAMILIES:
        name, config = load_configs(f"{path}:{family}")
        assert name == f"{path.stem}-{family}"
        assert config.family == family
        assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_studies_compare_what_can_be_compared(path):
    """Bugs: a study that its own check refuses; a run that `train.py --config FILE:name` does not know."""
    text = path.read_text()
    assert load_study(str(path)).order()
    assert f"python -m lrkv_jax.sweep configs/{path.name}" in ast.get_docstring(ast.parse(text))
    assert "\nconfigs = study.runs\n" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_headers_tell_what_dry_run_prints(path):
    """Bug: a header that was true of another config."""
    header = ast.get_docstring(ast.parse(path.read_text()))
    assert f"python train.py --config configs/{path.name}" in header
    for family, config in runpy.run_path(str(path))["configs"].items():
        found = accounting.accounts(config)
        tokens = config.train.steps * config.train.batch_size * config.data.context
        row = re.search(rf"^ *{family} +([\d,]+) +([\d,]+) +([\d.]+) +(\S+)", header, re.MULTILINE)
        assert row, f"no row for {family}"
        assert row.groups() == (
            f"{found.parameters:,}",
            f"{found.cache_bytes_per_token:,}",
            f"{found.cache_percent_of_mha:.1f}",
            f"{found.train_flops_per_token * tokens:.4g}",
        )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--model.wdth 3", "--model.wdth: no such flag; did you mean --model.width"),
        ("--attention.latent 3", "--attention.latent: no such flag"),
        ("--model.width abc", "--model.width: invalid literal for int() with base 10: 'abc'"),
        ("--model.width", "--model.width"),
        ("stray", "Unrecognized options: stray"),
        ("--attention.rank -1", "attention.rank = -1: must be 0 or more"),
        ("--attention.head-dim 31", "attention.head_dim = 31: must be even"),
        ("--attention.rope-mode latent --attention.rank 5", "attention.rank = 5: must be even with rope_mode = latent"),
        ("--attention.rope-mode half", "invalid choice 'half'"),
        ("--attention.rope-scaling linear", "attention.rope_factor = None: rope_scaling = linear needs a value"),
        ("--attention.rope-factor 2", "attention.rope_factor = 2.0: rope_scaling = None has no such number"),
        ("--attention.qk-norm-gain before_rope --attention.no-qk-norm", "qk_norm_gain = before_rope: needs qk_norm"),
        ("--config configs/tiny.py:gqa --attention.kv-heads 4", "attention.kv_heads = 4: must divide heads = 6"),
        ("--config configs/tiny.py:gqa --attention.rotary-dim 5", "attention.rotary_dim = 5: must be even"),
        ("--config configs/tiny.py:gqa --attention.rotary-dim 64", "between 0 and head_dim = 32"),
        (
            "--config configs/tiny.py:mla --attention.head-dim 6",
            "rotary_dim = 3 (the default, head_dim / 2): must be even",
        ),
        ("--train.batch-size 10 --train.microbatches 3", "train.microbatches = 3: must divide batch_size = 10"),
        ("--train.loss-chunks 7", "train.loss_chunks = 7: must divide data.context = 256"),
        ("--train.steps 0", "train.steps = 0: must be at least 1"),
        ("--data.context 100 --train.loss-chunks 1", "data.context = 100"),
        ("--optimizer.peak-lr nan", "optimizer.peak_lr = nan"),
        ("--optimizer.warmup-steps -4", "optimizer.warmup_steps = -4"),
        ("--model.dtype float16", "invalid choice 'float16'"),
        ("--family mla", "--family: the family is chosen by --config FILE:KEY"),
        ("--optimizer.warmup-steps 600", "optimizer.warmup_steps = 600: more than train.steps = 520"),
        ("--train.seed -1", "train.seed = -1"),
        ("--config nowhere.py", "no file nowhere.py"),
        ("--config configs/tiny.py:llama", "has lrkv, mha, gqa, mqa, mla, not 'llama'"),
        ("--config", "--config: expected one argument"),
    ],
)
def test_refusals_are_one_line(args, says):
    """Bug: a traceback, a box of tyro's, a page of pydantic's, or silence."""
    with pytest.raises(UserError) as error:
        parse_command("train.py", "", args.split())
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_flags_override_fields():
    """Bugs: a flag that doesn't reach its field, `None` or a switch not understood."""
    args = (
        "--model.logit-softcap None --model.scan-layers --attention.rank 3 --data.context=512 --optimizer.peak-lr 1e-3"
    )
    config = parse_command("train.py", "", args.split()).config
    assert config.model.logit_softcap is None
    assert config.model.scan_layers
    assert (config.attention.rank, config.data.context, config.optimizer.peak_lr) == (3, 512, 1e-3)


def test_saved_config_of_another_version_is_refused(tmp_path):
    """Bug: an unknown key in config.json is dropped without a word."""
    values = json.loads(RunConfig().model_dump_json())
    values["model"]["depth"] = 3
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"config.json: model.depth = 3: extra inputs are not permitted"):
        RunConfig.load(tmp_path)


def test_every_field_is_read():
    """Bug: a knob that turns nothing. A field counts as read where it is taken of its section, or of a config."""
    sources = [*(ROOT / "lrkv_jax").rglob("*.py"), ROOT / "train.py", ROOT / "eval.py"]
    read = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            read.add((owner, node.attr))
    for family in FAMILIES:
        for key in flatten(load_configs(f"configs/tiny.py:{family}")[1].model_dump()):
            section, _, field = key.rpartition(".")
            if section != "mesh":  # read axis by axis, through their names, in make_mesh
                assert any((owner, field) in read for owner in (section, "config", "self")), key
