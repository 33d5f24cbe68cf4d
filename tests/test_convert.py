"""Conversion to LRKV and GQA: exact where it can be, better the more it may keep, refused where it makes no sense."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import V, batch, merge, positions, program

from lrkv_jax import accounting, convert
from lrkv_jax.attention import gqa, lrkv
from lrkv_jax.calibrate import Moments, calibrate
from lrkv_jax.config import RunConfig, load_configs
from lrkv_jax.optimizer import OptimizerConfig
from lrkv_jax.rundir import make_run_program
from lrkv_jax.settings import UserError

HEADS = {"heads": 4, "head_dim": 8}
QWEN2 = {"qkv_bias": True, "qk_norm": False}
QWEN3 = {"qk_norm_gain": "before_rope"}


def perturbed(params, seed=0):
    """Parameters with gains and biases that are not those of the start, and projections that differ by head."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params)


def rows(seed=0):
    """A batch on the default device, wherever other tests have put theirs."""
    return jnp.asarray(np.asarray(batch(seed)))


def logits(prog, params):
    tokens = rows()[:, :-1]
    return merge(prog, params)(tokens, positions(tokens))


def converted(source, params, family, moments=None):
    target = program(family)
    parts = convert.attention_of(params)
    parts = (
        convert.to_lrkv(parts, (family.rank,) * 2, moments)
        if family.family == "lrkv"
        else convert.to_gqa(parts, family.groups)
    )
    return target, convert.with_attention(params, target.abstract_params(), parts)


@pytest.mark.parametrize(
    ("kv_heads", "extra"), [(4, {}), (2, QWEN2), (2, QWEN3), (1, QWEN2)], ids=["mha", "bias", "gain", "mqa"]
)
def test_full_rank_loses_nothing(kv_heads, extra):
    """Bug: a bias or gain is dropped or counted twice, factors of two heads change places, keys for values."""
    source = program(gqa.Config(**HEADS, kv_heads=kv_heads, **extra))
    params = perturbed(source.init_params(jax.random.key(0)))
    family = convert.lrkv_config(source.attention, HEADS["head_dim"])
    target, found = converted(source, params, family)
    np.testing.assert_allclose(logits(target, found), logits(source, params), atol=1e-4)
    if kv_heads == 1:  # one head is its own mean
        target, found = converted(source, params, convert.lrkv_config(source.attention, 0))
        np.testing.assert_allclose(logits(target, found), logits(source, params), atol=1e-4)


@pytest.mark.parametrize("extra", [QWEN2, QWEN3], ids=["bias", "gain"])
def test_weights_are_of_the_error_that_the_model_sees(extra):
    """Bug: keys are weighed without the gain, or by the queries of another group."""
    source = program(gqa.Config(**HEADS, kv_heads=2, **extra))
    params = perturbed(source.init_params(jax.random.key(1)), 1)
    if "qk_norm_gain" in extra:  # gains that differ by a hundred: what is small in a key may be left out
        gain = params["blocks"]["attention"]["gain_k"]
        gain.set_value(jnp.broadcast_to(jnp.geomspace(0.1, 10, HEADS["head_dim"]), gain.get_value().shape))
    moments = moments_of(source, params)
    assert [m.queries.shape for m in moments] == [(2, 8, 8)] * 2
    exact = keys_scores(source, params)
    errors = {}
    for name, given in (("plain", None), ("weighted", moments)):
        target, found = converted(source, params, convert.lrkv_config(source.attention, 3), given)
        errors[name] = float(np.mean((keys_scores(target, found) - exact) ** 2))
    assert errors["weighted"] < (0.5 if "qk_norm_gain" in extra else 1.0) * errors["plain"]


def keys_scores(prog, params):
    """Scores of the first layer's attention on its real inputs."""
    outer, blocks = merge(prog, params).split()
    tokens = rows()[:, :-1]
    x, places = blocks[0].attention_norm(outer.embedding(tokens)), positions(tokens)
    attention = blocks[0].attention
    q, (k, _) = attention.query(x, places), attention.expand(attention.compress(x, places), places)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkjc,bskc->bkjts", grouped, k)
    return np.asarray(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, 0))


def moments_of(source, params):
    return calibrate(source, params, lambda step: np.asarray(batch(step)), 4 * batch()[:, :-1].size)


def test_moments_are_second_moments():
    """Bug: sums instead of means; the residual stream instead of what attention reads."""
    source = program(gqa.Config(**HEADS, qk_norm=False))
    params = source.init_params(jax.random.key(0))
    first: Moments = moments_of(source, params)[0]
    assert np.trace(first.values) == pytest.approx(16, rel=1e-3)  # RMSNorm: mean square 1 in each of D = 16
    np.testing.assert_allclose(first.keys, first.values)
    w_q = np.asarray(params["blocks"]["attention"]["w_q"]["w"].get_value()[0], np.float64)
    unrotated = np.einsum("dhc,de,heb->hcb", w_q, first.values, w_q.swapaxes(0, 1))
    traces = np.trace(unrotated, axis1=1, axis2=2)  # rotation keeps lengths
    np.testing.assert_allclose(np.trace(first.queries, axis1=1, axis2=2), traces, rtol=1e-4)


def test_queries_are_rotated_by_how_far_they_look_back():
    """Bug: queries as they stand, which meet a key only at distance 0."""
    source = program(gqa.Config(**HEADS, qk_norm=False))
    params = source.init_params(jax.random.key(0))
    same = np.full_like(np.asarray(batch()), 5)  # one token everywhere: one query, at many distances
    found = calibrate(source, params, lambda step: same, 400 * same.size // 17)[0].queries[0]
    length = same.shape[1] - 1
    shares = np.array([sum(1 / (t + 1) for t in range(d, length)) / length for d in range(length)])  # of distance d
    outer, blocks = merge(source, params).split()
    x = blocks[0].attention_norm(outer.embedding(jnp.full((1, length), 5)))
    q = np.asarray(blocks[0].attention.query(x, jnp.arange(length, dtype=jnp.int32)[None]))[0, :, 0]
    expected = np.einsum("t,tc,te->ce", shares, q, q)
    np.testing.assert_allclose(found, expected, atol=0.05 * np.trace(expected))
    assert np.abs(np.outer(q[0], q[0]) - expected).max() > 0.15 * np.trace(expected)


def test_a_heads_scale_does_not_weigh_where_keys_are_normed():
    """Bug: a head whose W_k is ten times as large, which QK-norm undoes, takes the shared part for itself."""
    source = program(gqa.Config(**HEADS))
    params = source.init_params(jax.random.key(0))
    scaled = jax.tree.map(lambda leaf: leaf, params)
    w_k = scaled["blocks"]["attention"]["w_k"]["w"]
    w_k.set_value(w_k.get_value() * jnp.array([10.0, 1, 1, 1])[:, None])
    counts = [np.trace(moments_of(source, p)[0].queries, axis1=1, axis2=2) for p in (params, scaled)]
    np.testing.assert_allclose((counts[1] / counts[0])[0] / (counts[1] / counts[0])[1], 1e-2, rtol=1e-2)


def test_ranks_by_layer():
    """Bug: ranks that don't go where they are needed, padding that counts, or bytes beyond those of one rank."""
    source = program(gqa.Config(**HEADS))
    params = perturbed(source.init_params(jax.random.key(0)))
    w_k, w_v = (params["blocks"]["attention"][name]["w"] for name in ("w_k", "w_v"))
    for w in (w_k, w_v):  # heads of the first layer that hardly differ
        w.set_value(w.get_value().at[0].set(w.get_value()[0, :, :1] + 1e-3 * w.get_value()[0]))
    parts = convert.attention_of(params)
    ranks = convert.by_layer(parts, 8)
    assert sum(ranks) == 8
    assert ranks[0] < 2 < ranks[1]
    family = convert.lrkv_config(source.attention, *ranks)
    assert (family.rank, family.ranks) == (max(ranks), ranks)
    exact, far = logits(source, params), {}
    for name, wanted in (("by layer", ranks), ("uniform", (4, 4))):
        target = program(convert.lrkv_config(source.attention, *wanted))
        found = convert.with_attention(params, target.abstract_params(), convert.to_lrkv(parts, wanted))
        far[name] = float(np.square(logits(target, found) - exact).mean())
    assert far["by layer"] < 0.5 * far["uniform"]
    sizes = [accounting.cache_per_token(source.model, convert.lrkv_config(source.attention, *r)) for r in (ranks, (4,))]
    assert sizes[0] == sizes[1]


def test_mean_pooling():
    """Bug: strided groups instead of neighbours; biases not pooled."""
    source = program(gqa.Config(**HEADS, **QWEN2))
    params = perturbed(source.init_params(jax.random.key(0)))
    parts = convert.attention_of(params)
    pooled = convert.to_gqa(parts, 2)
    np.testing.assert_allclose(pooled["w_k"][:, :, 1], parts["w_k"][:, :, 2:].mean(axis=2), rtol=1e-6)
    np.testing.assert_allclose(pooled["bias_v"][:, 0], parts["bias_v"][:, :2].mean(axis=1), rtol=1e-6)
    target, found = converted(source, params, convert.gqa_config(source.attention, 2))
    assert logits(target, found).shape == (*batch()[:, :-1].shape, V)


def test_ranks_for_a_share_of_the_cache():
    """Bug: the share is of the source's own cache, or key scales are not counted."""
    model = load_configs("configs/tiny.py:mha")[1].model
    mha = gqa.Config(heads=6, head_dim=32)
    layers = model.layers
    assert convert.ranks_for(model, mha, 55.8) == layers * 12  # 55.7 %, as results/tiny has it
    assert layers * 11 <= convert.ranks_for(model, mha, 55.7) < layers * 12
    of_gqa = convert.ranks_for(model, mha.model_copy(update={"kv_heads": 3}), 30.0)
    assert of_gqa // layers == 8  # 2·(32 + 3·8) + 3 = 115 of 384 values
    with pytest.raises(UserError, match="--cache-percent 5: rank 0 alone takes"):
        convert.ranks_for(model, mha, 5.0)


def test_what_does_not_convert_is_refused():
    """Bug: a partly rotated or an LRKV model is converted into another model without a word."""
    for config, complaint in (
        (lrkv.Config(**HEADS), "attention.family = lrkv"),
        (gqa.Config(**HEADS, rotary_dim=4), "attention.rotary_dim = 4"),
    ):
        with pytest.raises(UserError, match=complaint):
            convert.lrkv_config(config, 3)
    with pytest.raises(UserError, match="--rank 9: must be between 0 and head_dim = 8"):
        convert.lrkv_config(gqa.Config(**HEADS), 9)
    with pytest.raises(UserError, match="--kv-heads 3"):
        convert.gqa_config(gqa.Config(**HEADS), 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of MHA that has learnt something, made by the functions that train.py calls."""
    import train

    folder = tmp_path_factory.mktemp("source")
    config = load_configs("configs/debug.py:mha")[1]
    data = config.data.model_copy(
        update={"cache_dir": str(folder / "cache"), "path": str(convert.path("tests/text.jsonl").resolve())}
    )
    steps = config.train.model_copy(update={"steps": 150, "eval_every": 150, "batch_size": 16})
    optimizer = OptimizerConfig(name="muon", peak_lr=0.02, embed_lr=0.02, unembed_lr=0.004, warmup_steps=10)
    checkpoints = config.checkpoint.model_copy(update={"every_steps": 150})
    config = RunConfig.model_validate(
        config.model_dump()
        | {"data": data.model_dump(), "train": steps.model_dump(), "optimizer": optimizer.model_dump()}
        | {"checkpoint": checkpoints.model_dump(), "family": "mha"}
    )
    (folder / "config.py").write_text(
        "from lrkv_jax.config import RunConfig\n"
        f"configs = {{'mha': RunConfig.model_validate_json({config.model_dump_json()!r})}}\n"
    )
    arguments = ["--config", f"{folder}/config.py:mha", "--run-dir", f"{folder}/run", "--compile-cache", "off"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *arguments])
        assert train.main() == 0
    return folder / "run"


def test_cross_entropy_falls_with_rank_and_weights_help(trained):
    """Bug: conversion is right for random parameters only, or calibration weighs the wrong text."""
    source = convert.Source(trained, "newest")
    before = source.cross_entropy(source.config, source.params)
    attention, moments = convert.attention_of(source.params), source.moments(2048)

    def ce(rank, weights):
        config = source.config.with_attention(convert.lrkv_config(source.config.attention, rank))
        parts = convert.to_lrkv(attention, (rank,) * 2, weights)
        target = make_run_program(config, source.store).abstract_params()
        return source.cross_entropy(config, convert.with_attention(source.params, target, parts))

    weighted = [ce(rank, moments) for rank in (0, 1, 2)]
    assert all(lower < higher for higher, lower in itertools.pairwise(weighted)), weighted
    assert ce(4, moments) == pytest.approx(before, abs=1e-4)  # two heads of 8 that share a mean differ by rank 8
    assert weighted[2] < ce(2, None)
    assert before + 0.01 < weighted[0]


def test_command(trained, tmp_path, capsys):
    """Bug: the run directory can't be evaluated, or a second conversion overwrites it."""
    out = tmp_path / "converted"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["convert", str(trained), "--cache-percent", "80", "--out", str(out)])
        assert convert.main() == 0
        told = capsys.readouterr().out
        assert "before" in told
        assert "R = 8" in told
        result = json.loads((out / "eval.json").read_text())
        assert (result["step"], result["train_tokens"], result["family"]) == (0, 0, "mha-to-lrkv1")
        assert result["cache_percent_of_mha"] <= 80
        assert RunConfig.load(out).attention == lrkv.Config(heads=2, head_dim=8, rank=1)
        again = convert.Source(out, "newest")
        assert again.step == 0
        with pytest.raises(UserError, match="nothing is overwritten"):
            convert.main()
        patch.setattr(
            "sys.argv", ["convert", str(trained), "--rank", "1", "--by-layer", "--ranks", "--out", f"{tmp_path}/layers"]
        )
        assert convert.main() == 0
        family = RunConfig.load(tmp_path / "layers").attention
        ranks = tuple(family.of_layer(index).rank for index in range(2))
        assert sum(ranks) == 2
        assert ("ranks           " in capsys.readouterr().out) == (ranks != (1, 1))
        patch.setattr("sys.argv", ["convert", str(trained), "--rank", "2", "--kv-heads", "1", "--out", "elsewhere"])
        with pytest.raises(UserError, match="--to lrkv: takes --rank or --cache-percent, one of them"):
            convert.main()
