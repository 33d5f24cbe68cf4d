"""train.py --init-from: whose parameters a run begins with, what may differ, and what it needs of its source later."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from lrkv_jax import rundir, sharding
from lrkv_jax.accounting import textless_program
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig, load_configs, parse_command
from lrkv_jax.data import open_store
from lrkv_jax.initial import find_origin, initial_state
from lrkv_jax.merge import main as merge
from lrkv_jax.metrics import read_rows
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MeshConfig
from train import main

MINE = ["--data.dataset", "text_files", "--train.steps", "2", "--optimizer.warmup-steps", "0", "--data.context", "64"]
pytestmark = pytest.mark.usefixtures("in_root")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of configs/debug.py with checkpoints at steps 3 and 5, the best at 3; what it knows is random."""
    run_dir = tmp_path_factory.mktemp("runs") / "so@rce"
    _, config = load_configs("configs/debug.py:lrkv")
    run_dir.mkdir()
    rundir.found(run_dir, config, open_store(config.data, config.model.vocab, progress=False))
    checkpoints = Checkpointer(run_dir, config.checkpoint)
    for step in (3, 5):
        checkpoints.save(step, {"params": params_of(config, step)})
    checkpoints.save_best(3, {"params": params_of(config, 3)}, 5.0)
    checkpoints.close()
    return run_dir


def params_of(config, seed):
    """Parameters drawn with a seed."""
    return jax.jit(textless_program(config).init_params)(jax.random.key(seed))


def arrays(params):
    """Arrays by name."""
    return {".".join(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)}


def parsed(*args):
    """A parsed command line."""
    return parse_command("train.py", "", [str(arg) for arg in args])


def text(folder):
    """A person's own text."""
    folder.mkdir()
    lines = [json.loads(line)["text"] for line in Path("tests/text.jsonl").read_text().splitlines()]
    for number in range(0, len(lines), 8):
        (folder / f"{number}.txt").write_text("\n".join(lines[number : number + 8]).upper())
    return folder


@pytest.mark.parametrize(("which", "step"), [("", 5), ("@3", 3)])
def test_parameters_are_the_source_s(source, tmp_path, which, step):
    """Bugs: fresh parameters, another step's, or a template that only fits the devices that saved; adapters that aren't
    drawn, or moments that begin elsewhere than at zero."""
    adapters = ["--model.lora-rank", 2, "--model.lora-targets", "attention.*"] if which == "@3" else []
    options = parsed("--init-from", f"{source}{which}", "--run-dir", tmp_path / "run", *adapters)
    origin = find_origin(options)
    assert (origin.step, origin.run_dir) == (step, str(source))
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    program = textless_program(options.config)
    state = initial_state(program, program.abstract_state(mesh), 1, origin)
    found, expected = arrays(state["params"]), arrays(params_of(RunConfig.load(source), step))
    for name, value in expected.items():
        np.testing.assert_array_equal(found.pop(name), value)
    assert all(name.startswith("blocks.attention.") and ".lora." in name for name in found)
    assert bool(found) == bool(adapters)
    assert all(value.any() == name.endswith("a") for name, value in found.items())
    assert state["params"]["embed"].sharding == sharding.sharding_of((512, 32), ("vocab", "embed"), mesh)
    assert not any(leaf.any() for leaf in jax.tree.leaves((state["opt"], state["step"])))


def test_the_config_begins_from_the_source_s(source, tmp_path):
    """Bugs: the defaults' model; a new dataset read from the old one's place; a text encoded by another tokenizer."""
    theirs = RunConfig.load(source)
    config = parsed("--init-from", source, "--data.dataset", "lm1b", "--attention.rope-base", "5e5").config
    assert (config.model, config.family) == (theirs.model, "lrkv")
    assert config.attention == theirs.attention.model_copy(update={"rope_base": 5e5})
    assert (config.data.context, config.data.path, config.data.tokenizer) == (32, "", f"{source}/tokenizer.json")
    assert config.optimizer != theirs.optimizer
    options = parsed("--init-from", source, "--config", "configs/debug.py:mla", "--train.steps", 9)
    assert (options.config.attention.family, options.config.train.steps) == ("mla", 9)
    assert options.config.data.tokenizer == f"{source}/tokenizer.json"
    assert parsed("--init-from", source).run_dir == Path("runs/so@rce-tuned")
    for which, step in (("newest", 5), ("best", 3), ("5", 5)):
        assert find_origin(parsed("--init-from", f"{source}@{which}", "--run-dir", tmp_path / "run")).step == step


def refusal(*args):
    """The line in which a command is refused, before anything is allocated or written."""
    with pytest.raises(UserError) as error:
        find_origin(parsed(*args))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_listed(source, tmp_path, capsys):
    """Bugs: a source of another shape, with parameters missing or left over, with another tokenizer, or none at all, is
    found out late or not at all; a change that no shape shows goes without a word."""
    run = ["--init-from", source, "--run-dir", tmp_path / "run"]
    line = refusal(*run, "--model.mlp-width", 20)
    for name, there, here in (("w_up", [2, 32, 128], [2, 32, 20]), ("w_down", [2, 128, 32], [2, 20, 32])):
        named = f"params.blocks.mlp.{name}.w is float32{there} in the checkpoint, float32{here} in this configuration"
        assert named in line
    line = refusal(*run, "--config", "configs/debug.py:mla")
    assert "params.blocks.attention.u_k.w is in the checkpoint only, float32[2, 32, 2, 3]" in line
    assert "params.blocks.attention.w_down.w is not in the checkpoint, float32[2, 32, 8] here" in line
    other = tmp_path / "tokenizer.json"
    other.write_text((source / "tokenizer.json").read_text().replace('"<|endoftext|>"', '"<|end|>"'))
    assert f"data.tokenizer = {other}: is not {source}/tokenizer.json" in refusal(*run, "--data.tokenizer", other)
    assert "checkpoint 4 is missing" in refusal("--init-from", f"{source}@4")
    assert "'last' should be a step, newest or best" in refusal("--init-from", f"{source}@last")
    assert "is no run directory" in refusal("--init-from", tmp_path)
    line = refusal(*run, "--attention.ranks", 3, 1)
    assert f"--init-from {source}: attention.ranks = (3, 1), and the source has (); must be the same" in line
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    find_origin(parsed(*run, "--attention.rope-base", "5e5", "--data.context", "64"))
    told = "step 5; attention.rope_base = 500000.0 (there 10000.0); data.context = 64 (there 32)\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.fixture
def train(run):
    """Runs train.py in this process; returns its output, or the line of its error."""
    return functools.partial(run, main)


def test_fine_tune_resume_and_merge(source, tmp_path, train):
    """Bugs: a resumed run that begins from its source again, or needs it at all; one that takes another source
    silently; a run whose adapters can't be resumed or merged; a curve without its first point."""
    copy = shutil.copytree(source, tmp_path / "source")
    place = tmp_path / "run"
    begin = [
        "--init-from",
        copy,
        *MINE,
        "--data.path",
        text(tmp_path / "notes"),
        "--run-dir",
        place,
        "--model.lora-rank",
        2,
        "--model.lora-targets",
        "mlp.*",
    ]
    assert "lrkv, step 2" in train(*begin)
    scores = [row["step"] for row in read_rows(place / "metrics.jsonl") if row["kind"] == "eval"]
    assert scores == [0, 2]
    result = json.loads((place / "eval.json").read_text())
    shutil.rmtree(copy)
    (place / "eval.json").unlink()
    train(*begin)
    assert json.loads((place / "eval.json").read_text()) == result

    asked = "use another --run-dir, or --init-from"
    other = [*begin[:1], f"{source}@best", *begin[2:]]
    assert f"{place} began from {copy}@newest; {asked} {copy}@newest" in train(*other, status=2)
    assert "began from" in train("--init-from", f"{copy}@3", *begin[2:], status=2)
    assert "no --init-from" in train("--config", "configs/debug.py", "--run-dir", place, status=2)
    assert "began from no other run" in train("--init-from", source, "--run-dir", source, status=2)

    assert merge([str(place), "--out", str(tmp_path / "merged")]) == 0
    config = RunConfig.load(tmp_path / "merged")
    assert config.model.lora_rank == 0
    with pytest.raises(UserError, match="it has no adapters to merge"):
        merge([str(tmp_path / "merged"), "--out", str(tmp_path / "twice")])
    program = textless_program(config)
    read = [
        Checkpointer(where, config.checkpoint).restore_params(template, which)[0]
        for where, which, template in (
            (tmp_path / "merged", "newest", program.abstract_params()),
            (place, 2, textless_program(RunConfig.load(place)).abstract_params()),
        )
    ]
    merged, kept = map(arrays, read)
    factors = [kept[f"blocks.mlp.w_up.lora.{name}"] for name in "ab"]
    np.testing.assert_allclose(
        merged["blocks.mlp.w_up.w"], kept["blocks.mlp.w_up.w"] + 8 * np.einsum("ndz,nzf->ndf", *factors), atol=1e-6
    )
    np.testing.assert_array_equal(merged["embed"], arrays(params_of(RunConfig.load(source), 5))["embed"])
