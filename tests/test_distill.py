"""Distillation: the divergence and its gradient, the step with a teacher, and train.py --distill-from."""

import dataclasses
import functools
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import BEGIN, END, B, T, batch, program

from eval import main as score
from lrkv_jax import accounting, loss, marks, rundir, sharding
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import load_configs, parse_command
from lrkv_jax.data import open_store
from lrkv_jax.metrics import TIMINGS, read_rows
from lrkv_jax.settings import UserError
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.step import Program, Tokens, compile_train_step
from lrkv_jax.teacher import find_teacher, model_of
from train import main as train

pytestmark = pytest.mark.usefixtures("in_root")


# The loss

rng = np.random.default_rng(0)
HIDDEN, TEACHER_HIDDEN = (jnp.asarray(rng.normal(size=(3, 10, width)), jnp.float32) for width in (5, 7))
UNEMBED, TEACHER_UNEMBED = (jnp.asarray(rng.normal(size=(width, 13)), jnp.float32) for width in (5, 7))
LABELS = jnp.asarray(rng.integers(0, 13, (3, 10)), jnp.int32)
WEIGHTS = jnp.asarray(rng.random((3, 10)) < 0.7, jnp.float32)


def distribution(hidden, unembed, softcap):
    """The log-probabilities of one token, and its logsumexp, float64."""
    logits = hidden @ unembed
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    log_z = np.log(np.sum(np.exp(logits)))
    return logits - log_z, log_z


def oracle(softcap, teacher_softcap, share, z_loss):
    """(Σ w·nats, objective, Σ w·KL) token by token, float64."""
    arrays = (HIDDEN, UNEMBED, TEACHER_HIDDEN, TEACHER_UNEMBED, WEIGHTS)
    hidden, unembed, teacher_hidden, teacher_unembed, weights = (np.asarray(a, np.float64) for a in arrays)
    nats = objective = divergence = 0.0
    for place in np.ndindex(LABELS.shape):
        log_q, log_z = distribution(hidden[place], unembed, softcap)
        log_p, _ = distribution(teacher_hidden[place], teacher_unembed, teacher_softcap)
        kl = np.sum(np.exp(log_p) * (log_p - log_q))
        w, one = weights[place], -log_q[int(LABELS[place])]
        nats, divergence = nats + w * one, divergence + w * kl
        objective += w * ((1 - share) * one + share * kl + z_loss * log_z**2)
    return nats, objective, divergence


def plain(hidden, unembed, teacher_hidden, softcap, teacher_softcap, share, z_loss):
    """The objective as it is written, for autodiff."""

    def bend(logits, cap):
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    logits = bend(hidden @ unembed, softcap)
    log_p = jax.nn.log_softmax(bend(teacher_hidden @ TEACHER_UNEMBED, teacher_softcap))
    log_q = jax.nn.log_softmax(logits)
    nats = -jnp.take_along_axis(log_q, LABELS[..., None], -1)[..., 0]
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return jnp.sum(WEIGHTS * ((1 - share) * nats + share * kl + z_loss * log_z**2))


@pytest.mark.parametrize(("softcap", "teacher_softcap"), [(2.0, None), (None, 3.0)])
@pytest.mark.parametrize(("share", "z_loss", "chunks"), [(0.3, 0.1, 2), (1.0, 0.0, 1)])
def test_divergence_and_gradient(softcap, teacher_softcap, share, z_loss, chunks):
    """Bugs: KL the wrong way round, one cap for both models or its slope left out, tokens that aren't scored, a
    gradient for the teacher, a value that differs where nothing is differentiated."""

    def ours(hidden, unembed, teacher_hidden):
        teacher = loss.Teacher(teacher_hidden, TEACHER_UNEMBED)
        found = loss.sum_nats(
            hidden, unembed, LABELS, WEIGHTS, softcap, chunks, z_loss, 1, teacher, share, teacher_softcap
        )
        return found[1], found

    arrays = (HIDDEN, UNEMBED, TEACHER_HIDDEN)
    (_, found), grads = jax.value_and_grad(ours, argnums=(0, 1, 2), has_aux=True)(*arrays)
    np.testing.assert_allclose(found, oracle(softcap, teacher_softcap, share, z_loss), rtol=1e-5)
    np.testing.assert_array_equal(found, ours(*arrays)[1])
    expected = jax.grad(plain, argnums=(0, 1))(*arrays, softcap, teacher_softcap, share, z_loss)
    for one, other in zip(grads, expected, strict=False):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert not grads[2].any()


# The step


def taught(teacher, weight=0.5, **options):
    """A program that learns from another."""
    options["train"] = {"distill_weight": weight, **options.get("train", {})}
    return dataclasses.replace(program("mha", **options), teacher=teacher)


@functools.cache
def other():
    """A teacher of another family, width, depth and soft-cap, and its parameters."""
    teacher = program("mqa", width=24, layers=1, logit_softcap=None)
    return teacher, jax.jit(teacher.init_params)(jax.random.key(7))


def marked(tokens):
    """The batch with its documents' beginnings marked, and of row r the tokens r to T: what is scored, and unequal."""
    ids, (rows, length) = np.asarray(tokens), tokens.shape
    scored = np.arange(length) >= np.arange(rows)[:, None]
    return jnp.asarray(ids | np.where(ids == BEGIN, marks.BEGINS, 0) | np.where(scored, marks.SCORED, 0), jnp.int32)


def test_the_gradient_is_that_of_the_objective():
    """Bugs: a teacher that reads across documents, or at other positions; prompts that are imitated; means of means
    over microbatches."""
    teacher, teacher_params = other()
    prog = taught(teacher, tokens=Tokens(BEGIN, END, True, marked=True), train={"microbatches": 4})
    params, tokens = jax.jit(prog.init_params)(jax.random.key(0)), marked(batch(5))
    grads, nats, count, divergence = jax.jit(prog.gradient)(params, tokens, teacher_params)

    def mean(params):
        ids, scored, _ = prog.read(tokens)
        places, segments = prog.places(tokens[:, :-1])
        log_p, log_q = (
            jax.nn.log_softmax(nnx.merge(one.graph, values)(ids[:, :-1], places, segments))
            for one, values in ((teacher, teacher_params), (prog, params))
        )
        w = scored[:, 1:].astype(jnp.float32)
        nats = -jnp.sum(w * jnp.take_along_axis(log_q, ids[:, 1:, None], -1)[..., 0])
        divergence = jnp.sum(w[..., None] * jnp.exp(log_p) * (log_p - log_q))
        return (0.5 * nats + 0.5 * divergence) / w.sum(), (nats, w.sum(), divergence)

    (_, sums), expected = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    assert 0 < count < B * T
    np.testing.assert_allclose((nats, count, divergence), sums, rtol=1e-5)
    chex.assert_trees_all_close(nnx.to_pure_dict(grads), nnx.to_pure_dict(expected), atol=1e-6)


def test_nothing_is_to_be_learnt_from_oneself():
    """Bugs: two ways of computing one distribution, a CE that is still in the objective at w = 1."""
    options = {"dtype": "bfloat16", "remat": "dots", "layers": 1, "scan_layers": False}
    teacher = program("mha", **options)
    prog = taught(teacher, 1.0, **options)
    params = jax.jit(prog.init_params)(jax.random.key(0))
    grads, nats, count, divergence = jax.jit(prog.gradient)(params, batch(), params)
    assert nats / count > 3
    assert abs(divergence / count) < 1e-6
    # The two are rounded apart where XLA fuses them apart; a gradient of CE is a thousand times this.
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads)) < 5e-5


def test_sharded_equals_unsharded(monkeypatch):
    """Bugs: a teacher that lies whole on every device, is donated, baked into the program or in the state; a gradient
    or a divergence of one device's part; a run without a teacher that pays for one."""
    teacher, teacher_params = other()
    prog = taught(teacher, lora_rank=2, lora_targets=("mlp.*",))
    assert len(jax.eval_shape(program().gradient, program().abstract_params(), batch())) == 3
    monkeypatch.setattr(Program, "train_step", chex.assert_max_traces(Program.train_step, n=2))
    found = []
    for sizes in ({"data": 1}, {"data": 1, "fsdp": 2, "tensor": 2, "context": 2}):
        mesh = sharding.make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])
        with jax.set_mesh(mesh):
            abstract, step = compile_train_step(prog, mesh)
            state = jax.jit(prog.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(0))
            lesson = jax.device_put(teacher_params, sharding.shardings(teacher.abstract_state(mesh)["params"]))
            rows = []
            for seed in range(2):
                tokens = jax.device_put(batch(seed), sharding.batch_sharding(mesh))
                state, metrics = step(state, tokens, lesson)
                rows.append({name: float(value) for name, value in metrics.items()})
        assert state.keys() == {"params", "opt", "step"}
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (lesson, teacher_params)), strict=True))
        here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(lesson))
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(lesson))
        assert here <= whole / min(mesh.size, 3)
        found.append(([[row["loss"], row["kl"], row["grad_norm"]] for row in rows], jax.tree.map(np.asarray, state)))
    (alone, state), (together, part) = found
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    chex.assert_trees_all_close(nnx.to_pure_dict(part["params"]), nnx.to_pure_dict(state["params"]), atol=1e-4)
    with pytest.raises(UserError, match=r"distill_weight = 0.5: needs a teacher"):
        compile_train_step(dataclasses.replace(prog, teacher=None), mesh)


# The command


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Writes a run of configs/debug.py at step 5 into a folder; what it knows is random."""

    def write(run_dir, key="mha", seed=5):
        _, config = load_configs(f"configs/debug.py:{key}")
        run_dir.mkdir(exist_ok=True)
        rundir.found(run_dir, config, open_store(config.data, config.model.vocab, progress=False))
        checkpoints = Checkpointer(run_dir, config.checkpoint)
        params = jax.jit(accounting.textless_program(config).init_params)(jax.random.key(seed))
        checkpoints.save(5, {"params": params})
        checkpoints.close()
        return run_dir

    return write


def parsed(*args):
    """A parsed command line."""
    return parse_command("train.py", "", [str(arg) for arg in args])


def test_mistakes_are_one_line(teachers, tmp_path):
    """Bugs: a teacher without a say, a weight without a teacher, a teacher of other ids: found late, or never."""
    teacher = teachers(tmp_path / "teacher")
    student = ["--config", "configs/debug.py:lrkv", "--run-dir", tmp_path / "run"]
    half = ["--train.distill-weight", 0.5]
    for args, line in (
        (["--distill-from", teacher], f"--distill-from {teacher}: train.distill_weight = 0 gives it no say"),
        (half, "train.distill_weight = 0.5: needs a teacher, --distill-from RUN_DIR[@STEP]"),
        (["--distill-from", teacher, "--train.distill-weight", 1.1], "train.distill_weight = 1.1: must be between 0"),
        ([*half, "--distill-from", f"{teacher}@4"], "checkpoint 4 is missing"),
        ([*half, "--distill-from", f"{teacher}@last"], f"--distill-from {teacher}@last: 'last' should be a step"),
        ([*half, "--distill-from", tmp_path], f"{tmp_path} is no run directory"),
        (
            [*half, "--distill-from", teacher, "--model.vocab", 600],
            f"--distill-from {teacher}: has model.vocab = 512 and this run 600; must be the same",
        ),
    ):
        with pytest.raises(UserError) as error:
            find_teacher(parsed(*student, *args))
        assert line in str(error.value)
        assert "\n" not in str(error.value)
    odd = tmp_path / "tokenizer.json"
    odd.write_text((teacher / "tokenizer.json").read_text().replace('"<|endoftext|>"', '"<|end|>"'))
    with pytest.raises(UserError, match=r"is not .*teacher/tokenizer.json, whose ids"):
        find_teacher(parsed(*student, *half, "--distill-from", teacher, "--data.tokenizer", odd))
    assert not (tmp_path / "run").exists()


def test_flops_include_the_teacher_s_forward_pass(teachers, tmp_path):
    """Bugs: a teacher that costs nothing, or as much as one that trains."""
    teacher = teachers(tmp_path / "teacher", "gqa")
    student = ["--config", "configs/debug.py:lrkv", "--distill-from", teacher, "--train.distill-weight", 0.5]
    options = parsed(*student, "--model.dtype", "bfloat16", "--attention.implementation", "chunked")
    config = model_of(find_teacher(options), options.config)
    assert (config.family, config.attention.groups) == ("gqa", 2)
    assert (config.model.dtype, config.attention.implementation) == ("bfloat16", "chunked")
    alone, both = (accounting.train_flops_per_token(options.config, one) for one in (None, config))
    graph = accounting.textless_program(config).graph
    ids = jnp.zeros((1, config.data.context), jnp.int32)
    forward = jax.make_jaxpr(lambda params: nnx.merge(graph, params)(ids, models.positions(ids)))
    reference = config.with_attention(config.attention.model_copy(update={"implementation": "reference"}))
    graph = accounting.textless_program(reference).graph
    flops = accounting.dot_flops(forward(accounting.abstract_parameters(reference)).jaxpr) / config.data.context
    assert both - alone == pytest.approx(flops, rel=1e-9)
    assert "the forward pass of the teacher (gqa) included" in accounting.dry_run(options.config, config)


def rows(run_dir):
    """metrics.jsonl without what the machine was like."""
    found = read_rows(run_dir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in found]


def test_resumed_from_the_same_teacher(teachers, tmp_path, run):
    """Bugs: a resumed run that learns from nobody, from a teacher that has changed or from another; one that can't do
    without a teacher once it is done; a score whose FLOPs depend on who asks."""
    teacher, place = teachers(tmp_path / "teacher"), tmp_path / "run"
    begin = ["--config", "configs/debug.py:mqa", "--train.steps", 4, "--run-dir", place]
    begin += ["--distill-from", teacher, "--train.distill-weight", 0.5]
    assert "mqa, step 4" in run(train, *begin)
    whole, result = rows(place), json.loads((place / "eval.json").read_text())
    assert [row["step"] for row in whole if row.get("kl", 0) > 0] == [1, 2, 3, 4]
    run(score, place)
    assert json.loads((place / "eval.json").read_text()) == result

    def back_to_step_2():
        (place / "eval.json").unlink()
        shutil.rmtree(place / "checkpoints" / "newest" / "4")
        shutil.rmtree(place / "checkpoints" / "best")

    back_to_step_2()
    run(train, *begin)
    assert rows(place) == whole
    assert json.loads((place / "eval.json").read_text()) == result

    other = teachers(tmp_path / "other", seed=6)
    asked = f"learns from {teacher}@newest; use another --run-dir, or --distill-from {teacher}@newest"
    assert asked in run(train, *begin[:-3], other, *begin[-2:], status=2)
    assert asked in run(train, *begin[:-4], status=2)
    alone = ["--config", "configs/debug.py", "--run-dir", other, *begin[-4:]]
    assert f"{other} learns from no other run" in run(train, *alone, status=2)
    moved = shutil.move(teacher, tmp_path / "moved")
    back_to_step_2()
    run(train, *begin[:-3], moved, *begin[-2:])
    assert json.loads((place / "eval.json").read_text()) == result
    (place / "eval.json").unlink()
    run(train, *begin)  # only its score was lacking
    assert json.loads((place / "eval.json").read_text()) == result
    back_to_step_2()
    gone = run(train, *begin, status=2)
    assert f"--distill-from {teacher}@newest: checkpoint 5 is missing" in gone
    assert "a run needs its teacher until its last step" in gone
    teachers(teacher, seed=6)
    assert "is not the checkpoint that the run learns from" in run(train, *begin, status=2)
