"""What is saved comes back bit for bit, wherever it is read, and the right steps are kept."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import assert_same, finish_run, init, make_state, open_run, template
from flax import nnx

from lrkv_jax.settings import UserError


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    """A run with steps 10 and 20, best 10."""
    return finish_run(tmp_path_factory.mktemp("finished"))


# ---- round trips


def test_round_trip_and_donation(tmp_path, monkeypatch):
    """Fails if a bit, a moment's Param or its metadata is lost, a relative path breaks, or donation is not safe."""
    monkeypatch.chdir(tmp_path)
    checkpointer = open_run(Path("run"))
    assert checkpointer.restore(template(8)) is None
    state = make_state(5, devices=8)
    checkpointer.save(5, state)
    # The step donates the state as soon as `save` returns.
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(state)
    checkpointer.wait()
    restored, step = checkpointer.restore(template(8))
    checkpointer.close()
    assert step == 5
    assert_same(restored, 5)
    assert restored["params"]["block"]["w"].reduce == (1,)
    moment = restored["opt"][1].inner_states["matrix"].inner_state[0].mu["block"]["w"]
    assert moment.axes == ("layers", "embed", "mlp")
    assert moment.get_value().addressable_shards[0].data.shape == (3, 2, 7)

    negated = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)(restored)
    assert_same(jax.tree.map(lambda x: -x, negated), 5)


@pytest.mark.parametrize(("before", "after"), [(8, 1), (1, 4)])
def test_a_run_moves_between_device_counts(tmp_path, before, after):
    """Fails if the saved sharding, or a checksum that depends on it, ties a checkpoint to its machine."""
    writer = open_run(tmp_path)
    writer.save(3, make_state(3, devices=before))
    writer.close()
    state, _ = open_run(tmp_path).restore(template(after))
    assert_same(state, 3)
    assert all(len(leaf.sharding.device_set) == after for leaf in jax.tree.leaves(state))


def test_params_alone(finished_run):
    """Fails if evaluation needs the optimizer's memory, or `best` and a step number pick another checkpoint."""
    reader = open_run(finished_run)
    wanted = template(2)["params"]
    for which, expected in (("newest", 20), ("best", 10), (10, 10), ("20", 20)):
        params, step = reader.restore_params(wanted, which)
        assert step == expected
        assert jax.tree.structure(params) == jax.tree.structure(wanted)
        np.testing.assert_array_equal(params["embedding"], init(expected)["params"]["embedding"])


def test_a_template_that_does_not_fit_is_told_before_reading(finished_run, monkeypatch):
    """Fails if Orbax pads or truncates, a new parameter goes unnoticed, or the message leaves out a name or a shape."""
    wrong = template()["params"]
    wrong["embedding"] = wrong["embedding"].replace(jax.ShapeDtypeStruct((12, 16), jnp.bfloat16))
    wrong["extra"] = nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32), axes=("embed",), role="vector")
    del wrong["block"]["gain"]
    monkeypatch.setattr(ocp.Checkpointer, "restore", lambda *_, **__: pytest.fail("arrays were read"))
    with pytest.raises(UserError) as error:
        open_run(finished_run).restore_params(wrong)
    text = str(error.value)
    assert "params.embedding is float32[11, 16] in the checkpoint, bfloat16[12, 16] in this configuration" in text
    assert "params.extra is not in the checkpoint" in text
    assert "params.block.gain is in the checkpoint only" in text
    assert "\n" not in text


# ---- what is kept


def test_keep_counts_and_existing_steps(tmp_path):
    """Fails if old checkpoints pile up, too many go, or saving an existing step is an error or overwrites it."""
    checkpointer = open_run(tmp_path, keep=3)
    for step in range(5):
        checkpointer.save(step, make_state(step))
    checkpointer.wait()
    assert checkpointer.steps() == [2, 3, 4]
    checkpointer.save(4, make_state(99))
    checkpointer.close()
    assert_same(open_run(tmp_path).restore(template())[0], 4)
    # With keep lowered, the next save removes what is too many.
    checkpointer = open_run(tmp_path, keep=1)
    checkpointer.save(5, make_state(5))
    checkpointer.close()
    assert checkpointer.steps() == [5]
    with pytest.raises(UserError, match="already holds step 5"):
        checkpointer.save(4, make_state(4))


def test_best_survives(tmp_path):
    """Fails if a worse or NaN score replaces the best, a restart forgets it, or the newest checkpoints push it out."""
    checkpointer = open_run(tmp_path, keep=1)
    assert (checkpointer.best_step(), checkpointer.best_ce()) == (None, float("inf"))
    for step, (ce, best) in enumerate([(float("nan"), None), (3.5, 1), (2.25, 2), (2.5, 2)]):
        checkpointer.save(step, make_state(step))
        checkpointer.save_best(step, make_state(step), ce)
        checkpointer.wait()
        assert checkpointer.best_step() == best
    checkpointer.close()
    checkpointer = open_run(tmp_path, keep=1)
    assert (checkpointer.steps(), checkpointer.best_step(), checkpointer.best_ce()) == ([3], 2, 2.25)
    checkpointer.save_best(4, make_state(4), 2.25)
    checkpointer.wait()
    assert checkpointer.best_step() == 2
    # A run that went back, and does better on its second way: the step is lower, yet it is the best.
    checkpointer.save_best(1, make_state(1), 2.0)
    checkpointer.close()
    assert (checkpointer.best_step(), checkpointer.best_ce()) == (1, 2.0)
    assert [entry.name for entry in (tmp_path / "checkpoints/best").iterdir()] == ["1"]
    assert_same(checkpointer.restore(template(), "best")[0], 1)


def test_the_best_is_a_place_to_resume_from(finished_run, tmp_path):
    """Fails if a run stops for want of a checkpoint while a whole state of it lies in `best`."""
    shutil.copytree(finished_run, tmp_path / "run")
    for step in (10, 20):
        (tmp_path / f"run/checkpoints/newest/{step}/commit_success.txt").unlink()
    state, step = open_run(tmp_path / "run").restore(template())
    assert step == 10
    assert_same(state, 10)
