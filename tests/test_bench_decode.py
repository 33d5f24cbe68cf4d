"""The measurement of decoding: what it counts, what it times, its report and its command line. No time is asserted."""

import json
import re
import sys
from pathlib import Path

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import FAMILIES

from lrkv_jax import bench, bench_decode, bench_shapes, timing
from lrkv_jax.attention import cache, kernels
from lrkv_jax.sampling import Sampling

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from absorb_or_expand import Reader

WIDTH, BATCH = 16, 3


def stepper(family, length=10, dtype="float32", implementation="blocked", **changed):
    config = FAMILIES[family].model_copy(update=changed)
    return bench_decode.Stepper(config, WIDTH, length, BATCH, dtype, implementation)


@pytest.fixture(scope="module")
def small():
    """Makes calls and copies short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_decode, "MOST_STEPS", 2)
        patch.setattr(timing, "COPY_BYTES", {"cpu": 2**16})
        yield


@pytest.fixture(scope="module")
def report(small):
    configs = {name: FAMILIES[name] for name in ("mha", "lrkv")}
    return bench_decode.measure(configs, WIDTH, [5, 600], BATCH, ["float32", "bfloat16"], rounds=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_arrays(family):
    """Fails if a leaf, a float32 scale, the unfilled end of a block, weights or angles are not counted, or doubly."""
    made = stepper(family, kernels.BLOCK + 5, "bfloat16")
    key = (family, made.length, "bfloat16")
    row = bench_decode.summary(key, made, {key: [[1.0]]}, [1.0], made.length, "bfloat16")
    stored = cache.bytes_of(made.fill())
    assert row.cache_bytes_per_token_padded * BATCH * made.length == pytest.approx(stored)
    assert row.cache_bytes_per_token * BATCH * 2 * kernels.BLOCK == stored
    _, weights, tables = made.others
    assert row.bytes_read == stored + cache.bytes_of((weights, tables))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_timed_step_is_attention_over_the_whole_cache(family):
    """Fails if the step that is timed reads another length, other angles, or a cache whose token was not written."""
    # Random key scales are no keys' scales, which `reference` would find out.
    made, expected = (stepper(family, implementation=name, qk_norm=False) for name in ("blocked", "reference"))
    stored, step = made.fill(), jax.jit(made.step)
    ours, after = step(made.x, stored, *made.others)
    np.testing.assert_allclose(ours, jax.jit(expected.step)(made.x, stored, *expected.others)[0], atol=1e-5)
    for name, leaf in stored.items():
        changed = np.any(np.asarray(leaf != after[name]), axis=tuple(range(leaf.ndim - 1)))
        assert np.flatnonzero(changed).tolist() == [made.length - 1]
    without = lambda slot: {name: leaf.at[..., slot].set(0) for name, leaf in stored.items()}  # noqa: E731
    np.testing.assert_array_equal(ours, step(made.x, without(-1), *made.others)[0])
    assert np.any(ours != step(made.x, without(0), *made.others)[0])


@pytest.mark.parametrize("family", [name for name in decoders.ABSORBING if name not in ("mha", "mqa")])
def test_both_ways_of_reading_compute_the_same(family):
    """Fails if expanding block by block, which long chunks of a prompt take, and absorbing are different attention."""
    made = stepper(family, kernels.BLOCK + 5)
    module = nnx.merge(made.graph, made.others[1])
    positions = jnp.broadcast_to(made.key_positions()[:, : made.length], (BATCH, made.length))
    x = jax.random.normal(jax.random.key(2), (BATCH, made.length, WIDTH))
    empty = cache.allocate(made.shapes, BATCH, made.layout)
    stored = cache.write_blocks(empty, module.compress(x, positions), 0)
    absorbed, expanded = (attend(stored, *made.others[1:]) for attend in Reader(made, 3).ways.values())
    assert absorbed.shape[2] * absorbed.shape[1] == made.config.heads * 3
    np.testing.assert_allclose(absorbed, expanded, atol=1e-5)


IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter", "dynamic-update-slice", "while"}


def temporary_bytes(lowered, leaves):
    """Of a compiled program whose donated cache has these leaves; no operation in it may make one of their shape."""
    compiled = lowered.compile()
    for dtype, leaf in {(leaf.dtype.name, leaf.shape) for leaf in leaves}:
        shape = ",".join(map(str, leaf))
        found = {name for _, name in re.findall(rf"= (\w+)\[{shape}\]\S* ([\w-]+)\(", compiled.as_text())}
        assert found <= IN_PLACE, f"{dtype}[{shape}]"
    plan = compiled.memory_analysis()
    assert plan.alias_size_in_bytes >= cache.bytes_of(leaves)  # else the cache is not donated
    return plan.temp_size_in_bytes


@pytest.mark.parametrize("dtype", bench_shapes.DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_makes_no_copy_of_the_cache(family, dtype):
    """Fails if writing a token or reading the blocks copies the cache, or converts it, instead of a block at a time."""
    if dtype == "bfloat16" and jax.__version_info__ < (0, 12):
        pytest.skip("with jax 0.10.2, XLA on a CPU writes to bfloat16 arrays by way of float32: all of the cache")

    def plan(blocks):
        made = stepper(family, blocks * kernels.BLOCK, dtype)
        leaves = jax.tree.leaves(jax.eval_shape(made.fill))
        return temporary_bytes(made.lower(3), leaves), min(map(cache.bytes_of, leaves))

    (short, _), (long, smallest) = plan(2), plan(10)
    assert long - short < smallest / 8


@pytest.mark.parametrize("family", ["mha", "mla", "lrkv"])
def test_a_decoders_step_makes_no_copy_of_the_caches(family):
    """Fails if the loop over tokens, the rows that are done, or the layers cost a copy of some layer's cache."""

    def plan(slots):
        made = decoders.decoder(family, layers=2, batch=2, slots=slots, block=64)
        keys = jax.vmap(jax.random.key)(jnp.zeros(2, jnp.uint32))
        state = made.abstract_state()
        with jax.set_mesh(made.mesh):
            lowered = made._generate.lower(
                made.weights, state, keys, jnp.asarray(4, jnp.int32), count=4, sampling=Sampling()
            )
        leaves = jax.tree.leaves(state["caches"])
        return temporary_bytes(lowered, leaves), min(map(cache.bytes_of, leaves))

    (short, _), (long, smallest) = plan(128), plan(2048)
    assert long - short < smallest / 8


def test_report_has_every_row_and_its_ratios(report):
    """Fails if a row is lost or named twice, a ratio is taken across dtypes or lengths, or the report is no JSON."""
    rows = json.loads(json.dumps(report))["rows"]
    expected = {f"{n}@{s}{d}": (n, s) for n in ("mha", "lrkv") for s in (5, 600) for d in ("", ":bfloat16")}
    assert {key: (row["family"], row["length"]) for key, row in rows.items()} == expected
    for key, row in rows.items():
        assert row["dtype"] == ("bfloat16" if key.endswith(":bfloat16") else "float32")
        low, high = row["step_ms_quartiles"]
        assert low <= row["step_ms"] <= high
        assert row["tokens_per_s"] * row["step_ms"] / 1e3 == pytest.approx(BATCH)
        assert row["of_copy"] > 0
        assert row["of_mha"] == 1 or row["family"] == "lrkv"
        assert row["of_shortest"] == 1 or row["length"] == 600
        assert row["of_first_dtype"] == 1 or row["dtype"] == "bfloat16"
    assert {"device", "python", "jax", "implementation", "copy_bytes_per_s", "configs", "width", "batch"} <= set(report)
    assert report["configs"]["lrkv"]["rank"] == FAMILIES["lrkv"].rank


def test_ratios_are_of_the_right_rows():
    """Fails if a row is compared with another family's, length's or dtype's times."""
    times = {("mha", 8, "f"): 1, ("mha", 64, "f"): 4, ("mha", 64, "b"): 2, ("mha", 8, "b"): 1, ("x", 64, "b"): 6}
    times |= {("x", 64, "f"): 24, ("x", 8, "b"): 3, ("x", 8, "f"): 2}
    seconds = {key: [[1.0 * time, 1.0 * time], [7.0 * time]] for key, time in times.items()}
    made = stepper("mqa")
    row = bench_decode.summary(("x", 64, "b"), made, seconds, [made.bytes_read / 12, made.bytes_read / 84], 8, "f")
    assert (row.of_mha, row.of_shortest, row.of_first_dtype) == (3, 2, 0.25)
    assert row.of_copy == pytest.approx(2)  # it reads in 6 s what a copy takes 12 s for


def test_table_shows_every_row(report):
    """Fails if a row or a column is missing."""
    lines = bench_decode.table(report).splitlines()
    assert [line.split()[:3] for line in lines[2:-1]] == [
        [row["family"], str(row["length"]), row["dtype"]] for row in report["rows"].values()
    ]
    assert len({len(line) for line in lines[1:-1]}) == 1


def test_a_family_without_mha_beside_it_has_no_ratio_to_it(small):
    """Fails if some other row stands in for MHA."""
    report = bench_decode.measure({"mqa": FAMILIES["mqa"]}, WIDTH, [3], BATCH, "float32", rounds=1)
    assert report["rows"]["mqa@3"]["of_mha"] is None
    assert " - " in bench_decode.table(report)


def options(*flags):
    return bench.parser().parse_args(["decode", *flags])


def test_standard_shape_is_the_one_of_the_figures():
    """Fails if a default elsewhere changes the shape that all published figures refer to."""
    configs, width = bench_shapes.chosen(options("--families", *bench_shapes.FAMILIES))
    assert (width, options().batch, options().lengths) == (768, 4, [1024, 8192, 32768])
    for config in configs.values():
        assert (config.heads, config.head_dim, config.qk_norm, config.qkv_bias) == (12, 64, True, False)
    assert [configs[name].groups for name in ("mha", "gqa", "mqa", "lrkv")] == [12, 4, 1, 12]
    assert (configs["mla"].latent, configs["mla"].rotary, configs["lrkv"].rank) == (128, 32, 24)
    modes = [configs[name].rope_mode for name in ("lrkv", "lrkv_shared", "lrkv_latent")]
    assert modes == ["full", "shared", "latent"]


def test_shapes_come_from_flags_or_a_config_file():
    """Fails if a flag is ignored, or a file's shape or width is."""
    configs, width = bench_shapes.chosen(options("--heads", "6", "--rank", "46", "--width", "384", "--kv-heads", "3"))
    assert (width, configs["lrkv"].rank, configs["gqa"].groups, configs["mqa"].heads) == (384, 46, 3, 6)
    configs, width = bench_shapes.chosen(options("--config", "configs/lrkv_2_5b.py"))
    assert tuple(configs) == bench_shapes.DEFAULT_FAMILIES
    assert (width, configs["mha"].head_dim, configs["lrkv_shared"].rank, configs["mla"].latent) == (2304, 128, 55, 384)
    assert (configs["lrkv"].rope_mode, configs["lrkv_shared"].rope_mode) == ("full", "shared")
    configs, _ = bench_shapes.chosen(options("--config", "configs/lrkv_2_5b.py:mla"))
    assert list(configs) == ["mla"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--families", "mamba"], "--families mamba: have mha, gqa, mqa, mla, lrkv, lrkv_shared, lrkv_latent"),
        (["--lengths", "1024,0"], "'0' is not a whole number from 1 up"),
        (["--lengths", "1k"], "'1k' is not a whole number from 1 up"),
        (["--batch", "0"], "'0' is not a whole number from 1 up"),
        (["--dtype", "float16"], "'float16' is not of float32, bfloat16"),
        (["--dtype", "float32,float32"], "each at most once"),
        (["--implementation", "pallas_gpu"], "implementation = pallas_gpu: cannot run on cpu; these can: reference"),
        (["--implementation", "fast"], "implementation = fast: unknown; there are reference, blocked, pallas_tpu"),
        (["--families", "lrkv_latent", "--rank", "5"], "must be even"),
        (["--kv-heads", "5"], "kv_heads = 5: must divide heads = 12"),
        (
            ["--config", "configs/debug.py", "--rank", "8"],
            "--rank 8: the shapes are those of --config configs/debug.py",
        ),
        (["--config", "configs/debug.py:lrkv", "--families", "mha"], "already names one"),
        (["--config", "nowhere.py"], "no file nowhere.py"),
        (["--json", "nowhere/bench.json"], "--json nowhere/bench.json"),
        (["--length", "8"], "unrecognized arguments: --length 8"),
    ],
)
def test_bad_input_ends_in_one_line(arguments, message, monkeypatch, capsys):
    """Fails if a mistake shows a traceback or a usage text, or is only found after minutes of measuring."""
    monkeypatch.setattr("sys.argv", ["bench", "decode", *arguments])
    monkeypatch.setattr(bench_decode, "measure", lambda *_: pytest.fail("measured before the flags were checked"))
    assert message in one_line(capsys)


def test_a_cache_beyond_the_memory_is_refused(monkeypatch, capsys):
    """Fails if the machine is asked for a cache that it can't hold: an abort by the kernel, without a word; or the size
    is that of a cache on every device."""
    monkeypatch.setattr("sys.argv", ["bench", "decode", "--families", "mha", "--lengths", "1000000000"])
    error = one_line(capsys)
    assert "a cache of 1000000000 tokens of gqa, batch = 4, in float32 needs 22888.2 GiB" in error


def one_line(capsys):
    """What main prints on stderr before it exits with 2."""
    with pytest.raises(SystemExit) as stop:
        bench.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error
