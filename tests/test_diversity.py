"""Head diversity: answers known in advance, what must not change it, and that a family's head maps are its scores."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BASE, Case, D, build, call, cases, named, random, weights
from flax import nnx
from models import FAMILIES

from lrkv_jax import attention, diversity
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig
from lrkv_jax.diversity import centre, effective_rank, similarities
from lrkv_jax.settings import UserError
from lrkv_jax.transformer import Block, ModelConfig, Transformer

H, C = 5, 3


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def ranks(w_q, w_k):
    gram = similarities(w_q, w_k)
    return effective_rank(gram), effective_rank(centre(gram))


def test_identical_heads_count_once():
    """Bug: 0/0 of the centred shares told as nan, 0 or H; rounding taken for a spectrum."""
    w_q, w_k = (np.repeat(draw(11, 1, C, seed=i), H, axis=1) for i in (0, 1))
    # Another length, and another basis, of the same form.
    w_q = w_q * np.linspace(1, 3, H)[:, None]
    assert ranks(w_q, w_k) == (pytest.approx(1, abs=1e-9), 1)


def test_orthogonal_heads_count_all():
    """Bug: entropy of singular values, a trace not divided out, centring that takes away more than one dimension."""
    # Heads that read different coordinates of the residual stream, through one key map.
    w_q = np.eye(H * C).reshape(H * C, H, C)
    w_k = np.repeat(draw(H * C, 1, C), H, axis=1)
    assert ranks(w_q, w_k) == (pytest.approx(H, rel=1e-12), pytest.approx(H - 1, rel=1e-12))


def test_opposite_heads_count_once_and_lie_apart():
    """Bug: the sign of a similarity lost, which would make a head and its negative the same."""
    w_q, w_k = draw(11, 1, C), draw(11, 1, C, seed=1)
    gram = similarities(np.concatenate([w_q, -w_q], axis=1), np.repeat(w_k, 2, axis=1))
    np.testing.assert_allclose(gram, [[1, -1], [-1, 1]], rtol=1e-12)


def test_equals_brute_force():
    """Bug: a transpose in the trace of four factors, or heads of the wrong pair, which the known answers forgive."""
    w_q, w_k = draw(7, H, C), draw(7, H, C, seed=1)
    forms = [(w_q[:, h] @ w_k[:, h].T).ravel() for h in range(H)]
    forms = np.array([form / np.linalg.norm(form) for form in forms])
    gram = similarities(w_q, w_k)
    np.testing.assert_allclose(gram, forms @ forms.T, atol=1e-12)
    centred = forms - forms.mean(axis=0)
    shares = np.linalg.svd(centred)[1] ** 2
    shares = shares[: H - 1] / shares.sum()
    assert effective_rank(centre(gram)) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-10)


def test_blind_to_the_gauge():
    """Bug: a similarity of weights, which changes when a head is written in another basis and computes the same."""
    w_q, w_k = draw(11, H, C), draw(11, H, C, seed=1)
    rotations = np.stack([np.linalg.qr(draw(C, C, seed=h))[0] for h in range(H)])
    turned = [np.einsum("dhc,hce->dhe", w, rotations) for w in (w_q, w_k)]
    assert np.abs(turned[0] - w_q).max() > 0.1
    np.testing.assert_allclose(similarities(*turned), similarities(w_q, w_k), atol=1e-6)
    assert ranks(*turned) == pytest.approx(ranks(w_q, w_k), rel=1e-6)
    # Any invertible matrix is as free as a rotation.
    mixing = draw(H, C, C, seed=2)
    other = np.einsum("dhc,hec->dhe", w_k, np.linalg.inv(mixing))
    gram = similarities(np.einsum("dhc,hce->dhe", w_q, mixing), other)
    np.testing.assert_allclose(gram, similarities(w_q, w_k), atol=1e-6)


def test_nothing_of_width_by_width():
    """Bug: A_h formed, 128 MiB a head at the width of a 6B model."""
    w_q, w_k = draw(2000, 2, 3), draw(2000, 2, 3, seed=1)
    tracemalloc.start()
    similarities(w_q, w_k)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * w_q.nbytes < 2000 * 2000 * 8 / 10


def test_a_head_that_scores_nothing_is_refused():
    """Bug: nan in the figures."""
    w_q = draw(7, H, C)
    w_q[:, 2] = 0
    with pytest.raises(UserError, match="head 2 scores all tokens 0"):
        similarities(w_q, draw(7, H, C))


@pytest.mark.parametrize("case", cases(brief=True, qk_norm=False) + cases(brief=True, qk_norm_gain="before_rope"))
def test_head_maps_are_the_scores_at_one_position(case):
    """Bugs: a head's map of another group or part, a factor or gain forgotten: similarities of another model.

    QK-norm divides a score by a number of the query's and one of the key's: those are taken out.
    """
    try:
        w_q, w_k = call(case, "head_maps")
    except UserError:
        pytest.skip(f"{case.family} has no head_maps")
    x, y = random(3, 1, D), random(3, 1, D, seed=1)
    if "w_down" in weights(build(case)[1]):  # tokens whose latents have the size that the map supposes
        w_down = weights(build(case)[1])["w_down"]
        y = y * np.sqrt((w_down**2).sum() / ((np.asarray(y) @ w_down) ** 2).sum(axis=-1, keepdims=True))

    def score(module, x, y):
        position = jnp.full((3, 1), 5)
        q, (k, _) = module.query(x, position), module.expand(module.compress(y, position), position)
        return jnp.einsum("xthq,ythq->hxy", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2))

    theirs = np.asarray(call(case, score, x, jnp.asarray(y, jnp.float32)))
    q, k = (np.einsum("btd,dhq->hbq", tokens, w) for tokens, w in ((x, w_q), (y, w_k)))
    ours = np.einsum("hxq,hyq->hxy", q, k)
    if case.config.qk_norm:
        lone = theirs / ours
        ours = ours * lone[:, :, :1] * lone[:, :1] / lone[:, :1, :1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def maps(family, parameters, **fields):
    """The head maps of a family with these parameters; the rest are drawn."""
    case = Case(family, attention.families()[family].Config(head_dim=10, rope_base=BASE, **fields), family)
    graphdef, state = build(case)
    flat, paths = dict(nnx.to_flat_state(state)), named(state)
    for name, value in parameters.items():
        assert flat[paths[name]].shape == value.shape, name
        flat[paths[name]] = flat[paths[name]].replace(jnp.asarray(value, jnp.float32))
    return [np.asarray(w, np.float64) for w in nnx.merge(graphdef, nnx.from_flat_state(flat)).head_maps()]


def test_families_that_are_the_same_model_are_as_diverse():
    """Bug: rank 0 is not MQA, K = H not MHA, or a shared key hides that heads still differ by their queries."""
    heads = 4
    w_q, w_k = draw(D, heads, 10), draw(D, heads, 10, seed=1)
    mqa = maps("gqa", {"w_q": w_q, "w_k": w_k[:, :1]}, heads=heads, kv_heads=1)
    rank0 = maps("lrkv", {"w_q": w_q, "w_k_shared": w_k[:, 0]}, heads=heads, rank=0)
    np.testing.assert_array_equal(similarities(*mqa), similarities(*rank0))
    repeated = w_k[:, [0, 0, 2, 2]]
    gqa = maps("gqa", {"w_q": w_q, "w_k": w_k[:, [0, 2]]}, heads=heads, kv_heads=2)
    mha = maps("gqa", {"w_q": w_q, "w_k": repeated}, heads=heads)
    np.testing.assert_array_equal(similarities(*gqa), similarities(*mha))
    full = {"w_q": w_q, "u_k": repeated - w_k[:, :1], "w_k_shared": w_k[:, 0], "b_k": np.tile(np.eye(10), (4, 1, 1))}
    lrkv = maps("lrkv", full, heads=heads, rank=10)
    np.testing.assert_allclose(similarities(*lrkv), similarities(*mha), atol=1e-6)
    # Random heads: one key map for all makes them more alike, and one query map too makes them equal.
    assert ranks(*mqa)[0] < ranks(*gqa)[0] < ranks(*maps("gqa", {"w_q": w_q, "w_k": w_k}, heads=heads))[0]
    same = maps("gqa", {"w_q": np.repeat(w_q[:, :1], heads, axis=1), "w_k": w_k[:, :1]}, heads=heads, kv_heads=1)
    assert ranks(*same) == (pytest.approx(1), 1)


def test_scale_of_the_latent_has_no_effect():
    """Bug: the latent's norm left out, so that a W_down that grew in training drowns the rotary key."""
    w_down = draw(D, 7)
    fields = {"heads": 3, "latent": 7, "rotary_dim": 4}
    # So large that epsilon is nothing beside it.
    small, large = (maps("mla", {"w_down": factor * w_down}, **fields) for factor in (100, 700))
    np.testing.assert_allclose(small[1], large[1], rtol=1e-4, atol=1e-6)


def test_a_family_without_maps_is_refused_in_one_line():
    """Bug: NotImplementedError's traceback for whoever adds a family."""
    module = Block(ModelConfig(width=16), FAMILIES["mha"], nnx.Rngs(0)).attention
    with pytest.raises(UserError, match=r"^attention family 'gqa' has no head_maps, .*$"):
        attention.base.AttentionBase.head_maps(module)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory of an untrained model with gains, and the model."""
    path = tmp_path_factory.mktemp("run")
    config = RunConfig(model=ModelConfig(layers=3, width=16, vocab=24, norm_gain=True), attention=FAMILIES["lrkv"])
    (path / "config.json").write_text(config.model_dump_json())
    model = Transformer(config.model, config.attention, nnx.Rngs(0))
    gain = model.blocks.attention_norm.gain
    gain.set_value(jnp.exp(random(*gain.get_value().shape)))
    checkpoints = Checkpointer(path, config.checkpoint)
    for step in (3, 7):
        checkpoints.save(step, {"params": jax.tree.map(lambda leaf, s=step: leaf + (s == 7), nnx.state(model))})
    checkpoints.close()
    return path, model


def test_command_reads_a_run(run, capsys):
    """Bugs: the wrong step or layer, gains left out, a file of another step written over the newest one's."""
    path, model = run
    assert diversity.main([str(path), "--step", "3"]) == 0
    assert (path / "diversity-3" / "similarity.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((path / "diversity-3" / "diversity.json").read_text())
    blocks = model.split()[1]
    assert [(row["layer"], row["heads"]) for row in rows] == [(0, 4), (1, 4), (2, 4)]
    for row, block in zip(rows, blocks, strict=True):
        gain = np.asarray(block.attention_norm.gain.get_value(), np.float64)[:, None, None]
        assert (row["uncentred"], row["centred"]) == pytest.approx(
            ranks(*(gain * np.asarray(w, np.float64) for w in block.attention.head_maps()))
        )
    mean = sum(row["uncentred"] for row in rows) / 3
    assert f"mean   {mean:.3f} ({100 * mean / 4:.1f} %)" in capsys.readouterr().out
    assert diversity.main([str(path), "--out", str(path / "elsewhere")]) == 0
    assert json.loads((path / "elsewhere" / "diversity.json").read_text()) != rows
    assert not (path / "diversity").exists()


def test_refusals(run):
    """Bug: a traceback for a step that isn't there, or a place that can't be written."""
    path, _ = run
    with pytest.raises(UserError, match=r"^checkpoint 5 is missing"):
        diversity.main([str(path), "--step", "5"])
    with pytest.raises(UserError, match=r"config.json: cannot be written \(File exists\)$"):
        diversity.main([str(path), "--out", str(path / "config.json")])
