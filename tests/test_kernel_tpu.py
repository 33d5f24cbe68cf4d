"""The TPU kernel interpreted against float64, and compiled for TPUs that aren't here."""

import dataclasses
import functools
import importlib.util
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from kernel_cases import Case, cases, oracle

from lrkv_jax.attention import cache, kernels
from lrkv_jax.attention.kernels import tpu

# Before libtpu loads: several processes may, and it looks for no machine and says so nowhere.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

# Largest error against the largest sum. bfloat16 is twice what was measured over `cases`: 0.0038 where M meets the
# angles in bfloat16, 0.0009 elsewhere.
ERROR = {jnp.float32: 2e-5, jnp.bfloat16: 0.008}
# The cases that between them have every product in bfloat16.
ROUNDED = {"gqa", "mla-scale-bias", "lrkv-shared-bias", "lrkv-full", "lrkv-full-grouped", "lrkv-rank0-bias"}

FULL = Case("full", groups=18, shared=128, rank=55, angles=128, code=False, k_scale=True)
MHA = Case("mha-6.3b", groups=32, rank=128)
SPLIT = dataclasses.replace(FULL, name="full-split", groups=9)  # over two devices: their key scales aren't padded
COMPILED = [
    FULL,
    SPLIT,
    Case("shared-latent", groups=18, shared=128, rank=55, k_scale=True, bias=True),
    Case("mla", groups=18, shared=384 + 64, one_shared=True, k_scale=True),
    Case("mha", groups=18, rank=128),
    Case("gqa", groups=6, members=3, rank=128),
    Case("mqa", groups=1, members=18, rank=128),
    dataclasses.replace(FULL, name="full-6.3b", groups=32, rank=54),
    dataclasses.replace(FULL, name="full-of-gqa", groups=8, members=4, rank=128, m_bias=True),
]


# One of each form, and the one that takes most memory: for every generation. The others are for one of them.
EVERYWHERE = {"full", "shared-latent", "mla", "gqa", "mha-6.3b-float32"}


def compilations():
    """(case, dtype, topology)."""
    named = {case.name: (case, jnp.bfloat16) for case in COMPILED}
    named |= {f"{case.name}-float32": (case, jnp.float32) for case in (FULL, MHA)}
    return [
        pytest.param(*pair, topology, id=f"{name}-{topology}")
        for name, pair in named.items()
        for topology in (("v5e:2x2", "v5p:2x2x1", "v6e:2x2") if name in EVERYWHERE else ("v5e:2x2",))
    ]


def padded(blocks, split=False):
    """Rows as the kernel wants them; with heads `split` over devices, key scales as they are."""

    def pad(a):
        rows = tpu.padded_rows(a.shape[-2])
        return jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, rows - a.shape[-2]), (0, 0)])

    filled = jax.tree.map(pad, blocks)
    return filled._replace(k_scale=blocks.k_scale) if split else filled


def check(case, dtype=jnp.float32, poison=False, **sizes):
    queries, blocks, lengths = case.build(dtype, block=128, **sizes)
    wanted = oracle(queries, blocks, lengths, case.scale)
    blocks = padded(blocks)
    if poison:
        unused = np.arange(blocks.k_shared.shape[0])[:, None] * 128 >= np.asarray(lengths)[:, 0]
        spoil = lambda a: jnp.where(unused.reshape(*unused.shape, *[1] * (a.ndim - 2)), jnp.nan, a)  # noqa: E731
        blocks = jax.tree.map(spoil, blocks)
    attend = jax.jit(functools.partial(tpu.attend, scale=case.scale, interpret=True))
    got = attend(queries, blocks, lengths)
    for name, want in wanted.items():
        have = getattr(got, name)
        assert (have is None) == (want is None)
        if want is not None:
            assert have.dtype == jnp.float32
            assert have.shape == want.shape
            assert np.abs(have - want).max() <= ERROR[dtype] * np.abs(want).max()
            assert not np.any(have[np.asarray(lengths)[:, 0] == 0])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(*case.values, jnp.float32, id=case.id) for case in cases()]
    + [pytest.param(*case.values, jnp.bfloat16, id=f"{case.id}-bfloat16") for case in cases() if case.id in ROUNDED],
)
def test_equals_float64(case, dtype):
    """Fails if a part of the form is dropped, meets another head's or block's, or a row sees beyond its length."""
    check(case, dtype)


@pytest.mark.parametrize("rank", [1, 51, 128])
def test_any_rank(rank):
    """Fails if a padded row of codes meets anything, or the sums come back padded."""
    full = Case(f"full-{rank}", groups=2, shared=10, rank=rank, angles=10, code=False, k_scale=True)
    check(full, batch=2, blocks=2)
    check(Case(f"shared-{rank}", groups=2, shared=10, rank=rank), batch=2, blocks=2)


def test_unused_blocks_do_not_enter():
    """Fails if a block beyond a row's length is computed: it is all NaN."""
    check(Case("poison", shared=10, rank=5, angles=10, code=False, k_scale=True, angle_rows=True), poison=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("features", [(3, 8), (16,)], ids=["per-head", "shared"])
def test_write_is_the_scatter(features, dtype):
    """Bug: a token lands in another tile, row or lane, or one beyond the cache overwrites its last slot."""
    stored = jax.random.normal(jax.random.key(0), (3, 5, *features, 256)).astype(dtype)
    new = jax.random.normal(jax.random.key(1), (5, *features)).astype(dtype)
    slots = jnp.array([0, 255, 256, 700, 768])
    wanted = cache.write({"leaf": stored}, {"leaf": new[:, None]}, slots[:, None])["leaf"]
    assert np.sum(np.asarray(wanted != stored)) == 4 * math.prod(features)
    np.testing.assert_array_equal(tpu.write(stored, new, slots, interpret=True), wanted)


def test_refuses_what_it_cannot_read():
    """Fails if several queries a row, or blocks without padding, reach Mosaic and its messages."""
    queries, blocks, lengths = Case("refused", shared=10).build(block=128)
    with pytest.raises(ValueError, match=r"T = 2: .* use implementation = blocked"):
        tpu.attend(queries, padded(blocks), jnp.tile(lengths, (1, 2)), scale=1.0, interpret=True)
    with pytest.raises(ValueError, match=r"k_shared float32\[3, 5, 10, 128\]: .* padded"):
        tpu.attend(queries, blocks, lengths, scale=1.0, interpret=True)


def test_sizes_are_those_of_tiles():
    """Fails if padding takes more than a tile, or a block outgrows its budget though it could be smaller."""
    assert [tpu.padded_rows(rank) for rank in (0, 1, 16, 55)] == [0, 8, 16, 56]
    assert [tpu.block_size(size) for size in (1, 4704, 16384, 1 << 30)] == [1024, 768, 256, 128]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed: requirements-dev.txt")
@pytest.mark.parametrize(("case", "dtype", "topology"), compilations())
def test_compiles_for(case, dtype, topology):
    """Fails if a TPU can't hold or lay out the kernel, or the cache takes more memory there than it says, or a copy."""
    queries, blocks = abstract(case, dtype, batch=8, slots=8192)
    lengths = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    run = jax.jit(
        functools.partial(tpu.attend, scale=case.scale), in_shardings=jax.sharding.SingleDeviceSharding(device)
    )
    compiled = run.lower(queries, blocks, lengths).compile()
    text = compiled.as_text()
    assert "tpu_custom_call" in text
    stored = compiled.memory_analysis().argument_size_in_bytes
    assert stored <= 1.05 * (nbytes(queries) + nbytes(blocks))
    moved = re.findall(r"\[([\d,]+)\]\S* (?:copy|transpose|fusion)\(", text)
    sizes = {math.prod(int(size) for size in shape.split(",")) for shape in moved}
    scales = blocks.k_scale if case is SPLIT else None  # not padded, and copied at every step: 4 bytes a head and token
    assert not sizes & {a.size for a in jax.tree.leaves(blocks) if a is not scales}


def abstract(case, dtype, batch, slots):
    """Shapes of the case's (Queries, Blocks), the blocks as a decoder stores them."""
    queries, blocks, _ = case.build(dtype, batch=1, blocks=1, block=1)
    blocks = blocks._replace(angles=kernels.stored_tables(blocks.angles, "pallas_tpu", dtype))
    blocks = jax.eval_shape(functools.partial(padded, split=case is SPLIT), blocks)
    block = tpu.block_size(nbytes(blocks))

    def leaf(a):
        rows = 1 if a is blocks.angles else batch
        return jax.ShapeDtypeStruct((-(-slots // block), rows, *a.shape[2:-1], block), a.dtype)

    queries = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype), queries)
    return queries, jax.tree.map(leaf, blocks)


def nbytes(tree):
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
