"""podcheck and what it reads: each test names the fault that would make it fail."""

import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lrkv_jax import accounting, aot, chips, compiled, decode_check, hlo, plans, podcheck, sharding
from lrkv_jax.config import load_configs, parse_command
from lrkv_jax.settings import UserError

needs_libtpu = pytest.mark.skipif(
    not aot.importlib.util.find_spec("libtpu"), reason="libtpu, which compiles for TPUs, is not installed"
)
DEBUG = ("--config", "configs/debug.py:lrkv")


def run(monkeypatch, *args):
    """podcheck's exit status."""
    monkeypatch.setattr(sys, "argv", ["podcheck", *args])
    with pytest.raises(SystemExit) as stopped:
        podcheck.main()
    return stopped.value.code


def test_collectives_of_a_known_program():
    """Fails if a kind is missed, a loop's body is counted once, or bytes are those of the wrong operand."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def local(x):
        def body(carry, _):
            gathered = jax.lax.all_gather(carry, "x", tiled=True)  # [32, 16] float32: 2048 bytes
            scattered = jax.lax.psum_scatter(gathered @ jnp.ones((16, 16)), "x", tiled=True)
            return jax.lax.ppermute(scattered, "x", [(i, (i + 1) % 8) for i in range(8)]), None

        carry, _ = jax.lax.scan(body, x, None, length=5)
        return jax.lax.psum(carry, "x")

    split = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    costs = compiled.costs(jax.jit(split).lower(x).compile())
    found = compiled.by_kind(costs.collectives)
    assert {kind: (row["count"], row["payload_bytes"]) for kind, row in found.items()} == {
        "all-gather": (5, 5 * 2048),
        "all-reduce": (1, 256),
        "collective-permute": (5, 5 * 256),
        "reduce-scatter": (5, 5 * 2048),
    }
    sent = {kind: row["sent_bytes"] for kind, row in found.items()}
    assert sent == {
        "all-gather": 5 * 2048 * 7 / 8,
        "all-reduce": 2 * 256 * 7 / 8,
        "collective-permute": 5 * 256,
        "reduce-scatter": 5 * 2048 * 7 / 8,
    }
    assert costs.flops == 5 * 2 * 32 * 16 * 16
    assert costs.unknown_loops == 0


def test_replica_groups_in_each_spelling():
    """Fails if one of the ways XLA writes groups is read as all devices."""
    reader = compiled.Reader("HloModule m, num_partitions=8\n")
    assert reader.group("replica_groups={{0,2},{1,3}}, x") == 2
    assert reader.group("replica_groups=[2,4]<=[4,2]T(1,0), x") == 4
    assert reader.group("replica_groups=mesh['a'=2,'b'=4] {'b'}, x") == 4
    assert reader.group("replica_groups={}") == 8


TPU_TEXT = """\
HloModule step, num_partitions=4

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %one = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %one)
  %x = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=1
  %w = f32[16,8]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) tuple(%next, /*index=1*/%x)
}

%all-reduce-scatter.1 (q: bf16[4,8]) -> f32[16,8] {
  %q = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %big = f32[64,8]{1,0:T(8,128)} broadcast(%q), dimensions={}
  %sum = f32[64,8]{1,0:T(8,128)} all-reduce(%big), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = f32[16,8]{1,0:T(8,128)} dynamic-slice(%sum, %q), dynamic_slice_sizes={16,8}
}

%condition (c: (s32[], bf16[4,8])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%c), index=0
  %limit = s32[]{:T(128)} constant(13)
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (a: bf16[4,32,8], b: bf16[4,32,8]) -> f32[4,32,32] {
  %a = bf16[4,32,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,32,8]{2,1,0:T(8,128)(2,1)} parameter(1)
  %start = s32[]{:T(128)} constant(3)
  %x0 = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %init = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) tuple(%start, %x0)
  %loop = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) while(%init), condition=%condition, body=%body
  ROOT %dots = f32[4,32,32]{2,1,0:T(8,128)} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, \
dim_labels=0bf_0oi->0bf
}
"""


def test_a_tpu_program():
    """Fails if a TPU's ways are misread: no trip count, a fused reduce-scatter, batched products as convolutions."""
    costs = compiled.Reader(TPU_TEXT).costs()
    (scatter,) = costs.collectives
    # The counter runs from 3 below 13 by twos.
    assert (scatter.kind, scatter.times, scatter.group, scatter.payload) == ("reduce-scatter", 5, 4, 64 * 8 * 4)
    # Four products of [32, 8] and [8, 32]; the window's other twelve places meet the zeros of the dilation.
    assert costs.flops == 2 * 4 * 32 * 32 * 8
    # Rows of 8 lie in tiles of 8 x 128; what is in faster memory is not counted. The loop's counter is.
    entry = 2 * (4 * 32 * 128 * 2) + 4 * 32 * 128 * 4
    assert costs.traffic == entry + 5 * (16 * 128 * 4 + 2 * 64 * 128 * 4 + 3 * 4)


def test_a_counter_through_a_copy():
    """Fails if a step that the compiler copies before it hands it on is taken for an unknown one."""
    text = TPU_TEXT.replace(
        "%next = s32[]{:T(128)} add(%i, %one)",
        """%sum = s32[]{:T(128)} add(%i, %one)
  %next = s32[]{:T(128)} copy(%sum)""",
    )
    costs = compiled.Reader(text).costs()
    assert (costs.unknown_loops, costs.collectives[0].times) == (0, 5)


def test_tiles():
    """Fails if padding goes to the wrong dimensions of a transposed layout."""
    shape = hlo.Shape("bf16", (2, 3, 130), (1, 2, 0), (8, 128), True)
    assert shape.bytes == 2 * 3 * 130 * 2
    assert shape.stored == 2 * 136 * 128 * 2


@pytest.mark.parametrize(
    ("known", "computed"),
    [
        ("direction=LT", "direction=NE"),
        ("%start = s32[]{:T(128)} constant(3)", "%start = s32[]{:T(128)} partition-id()"),
        ("%one = s32[]{:T(128)} constant(2)", "%one = s32[]{:T(128)} partition-id()"),
        ("add(%i, %one)", "multiply(%i, %one)"),
        ("while(%init)", "while(%a)"),
    ],
)
def test_unknown_loop_is_said(known, computed):
    """Fails if a loop of unknown length is silently counted once, or a computed start or step taken for 0 or 1."""
    assert TPU_TEXT.count(known) == 1
    assert compiled.Reader(TPU_TEXT.replace(known, computed)).costs().unknown_loops == 1


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU7x", 2307e12 / 2),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),
        ("cpu", None),
    ],
)
def test_peak_of_a_device(kind, flops):
    """Fails if a v5e is taken for a v5p, an NVL card for an SXM one, a chip for a device, or an unknown one crashes."""
    assert chips.peak_flops(kind) == flops


def planner(config):
    state = jax.eval_shape(accounting.textless_program(config).init_state, jax.random.key(0))
    return plans.Planner(config, chips.of_kind("TPU v5 lite"), state)


def with_train(config, **fields):
    """The config with other fields of `train`."""
    return config.model_copy(update={"train": config.train.model_copy(update=fields)})


def on_mesh(config, **sizes):
    """The config with other sizes of its mesh."""
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})


def test_plans_divide_rows_heads_and_positions():
    """Fails if a mesh is offered that train.py refuses, or state bytes are not those of the shards."""
    config = load_configs("configs/debug.py:lrkv")[1]  # 2 heads, 8 rows of 32 tokens
    config = with_train(config, loss_chunks=4)
    made = planner(config).plans(16)
    assert made
    assert {plan.remat for plan in made} == {"none", "dots", "full"}
    for plan in made:
        mesh = plan.mesh
        assert mesh.data * mesh.fsdp * mesh.tensor * mesh.context == 16
        assert 8 % (mesh.data * mesh.fsdp) == 0
        assert 2 % mesh.tensor == 0
        assert 32 % (mesh.context * 4) == 0
    assert max(plan.mesh.context for plan in made) == 8
    eight = next(plan for plan in planner(config).plans(8) if plan.mesh.fsdp == 4 and plan.mesh.tensor == 2)
    mesh = sharding.make_mesh(eight.mesh)
    state = accounting.textless_program(config).abstract_state(mesh)
    local = [math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(state["params"])]
    assert eight.parameter_bytes == sum(local)


def test_search_corrects_its_estimates(monkeypatch):
    """Fails if a plan that ran out of memory doesn't make the search more careful, or more than four are compiled."""
    config = load_configs("configs/debug.py:lrkv")[1]
    made = planner(config)
    device = made.plans(4)[0].memory_bytes * 1.5
    at = podcheck.Target("v5e:2x2", jax.devices()[:4], chips.Chip("x", (), int(device), 1.0, 1.0, 1.0, 1), 1.0)
    tried = []

    def out_of_memory(config, plan, at):
        tried.append(plan)
        return {"fits": False, "peak_bytes": 2 * plan.memory_bytes}

    monkeypatch.setattr(podcheck, "check_training", out_of_memory)
    podcheck.search(config, made, at, plans.REMATS, most=4)
    assert 1 <= len(tried) <= 4
    assert all(2 * plan.memory_bytes <= podcheck.ROOM * at.hbm for plan in tried[1:])


def test_search_passes_over_a_refused_mesh(monkeypatch):
    """Fails if one mesh that train.py refuses ends the search, or all of them leave no reason."""
    config = load_configs("configs/debug.py:lrkv")[1]
    made = planner(config)
    first = made.plans(4)[0].mesh
    at = podcheck.Target("v5e:2x2", jax.devices()[:4], chips.of_kind("TPU v5 lite"), 1.0)

    def check(config, plan, at):
        if plan.mesh == first:
            raise UserError("refused")
        return {"fits": True, "peak_bytes": 1, "step_seconds": 1.0, "plan": plan}

    monkeypatch.setattr(podcheck, "check_training", check)
    (row,) = podcheck.search(config, made, at, plans.REMATS, most=1)
    assert row["plan"].mesh != first
    monkeypatch.setattr(made, "meshes", lambda devices: [first])
    with pytest.raises(UserError, match="refused"):
        podcheck.search(config, made, at, plans.REMATS, most=1)


def test_flags_say_every_axis_that_differs():
    """Fails if an axis of one device, which the config's own mesh has otherwise, is left out of the command."""
    config = on_mesh(load_configs("configs/debug.py:lrkv")[1], data=2, fsdp=4)
    row = {"mesh": {"slices": 1, "data": 1, "fsdp": 1, "tensor": 2, "context": 1}, "remat": config.model.remat}
    said = podcheck.train_command(["--config", "x.py", "--mesh.tensor=2"], row, config)
    assert said == "python train.py --config x.py --mesh.tensor=2 --mesh.data 1 --mesh.fsdp 1"
    plan = plans.Plan(sharding.MeshConfig(**row["mesh"]), row["remat"], 0, 0, 0.0, 0.0, 0.0)
    assert podcheck.flags(plan, config) == "--mesh.data 1 --mesh.fsdp 1 --mesh.tensor 2"


def test_slices_count():
    """Fails if slices are forgotten: in the sum of gradients or in decoding's meshes; or if -1 passes."""
    config = on_mesh(load_configs("configs/debug.py:lrkv")[1], slices=2)
    made, meshes = planner(config), [sharding.MeshConfig(slices=slices, data=2 // slices) for slices in (1, 2)]
    one, two = (made.ici_bytes(mesh, "none", 100) for mesh in meshes)
    assert one == two > 0
    found = decode_check.candidates(config, 8, 4)
    assert [(mesh.slices, mesh.data, mesh.tensor) for mesh in found] == [(2, 2, 2)]
    with pytest.raises(UserError, match="--batch 3"):
        decode_check.candidates(config, 8, 3)
    with pytest.raises(ValueError, match="slices"):
        sharding.MeshConfig(slices=-1)


DOCUMENTED = {
    # of each supervisor's lines in docs/scale.md: the words that say how many devices there are
    "gcloud": r"v5litepod-(\d+)",
    "xpk": r"v5litepod-(\d+) --num-slices (\d+)",
    "srun": r"--nodes=(\d+) --ntasks-per-node=(\d+)",
}


@pytest.mark.parametrize("supervisor", DOCUMENTED)
def test_documented_meshes_divide(supervisor):
    """Fails if a command in docs/scale.md is one that train.py refuses on the devices that stand beside it."""
    blocks = [block for block in Path("docs/scale.md").read_text().split("\n\n") if block.startswith("    # ")]
    (text,) = (block.replace("\\\n", " ") for block in blocks if f"{supervisor} " in block)
    devices = math.prod(map(int, re.search(DOCUMENTED[supervisor], text).groups()))
    args = re.search(r"python train\.py ([^\"|\n]*)", text).group(1).replace("gs://BUCKET", "runs")
    config = parse_command("train.py", "", args.split()).config
    sizes = config.mesh.model_dump()
    data, rest = divmod(devices, -math.prod(sizes.values()))  # data is -1: what is left
    assert (sizes["data"], rest) == (-1, 0)
    mesh = sharding.MeshConfig(**sizes | {"data": data})
    made = planner(config)
    assert mesh in list(made.meshes(devices))
    assert made.of_mesh(mesh, devices)


@needs_libtpu
def test_small_config_fits(monkeypatch, capsys, tmp_path):
    """Fails if the real step doesn't compile for a topology, or what is read off it is empty or of other shapes."""
    path = tmp_path / "report.json"
    mesh = ("--mesh.fsdp", "2", "--mesh.tensor", "2")
    assert run(monkeypatch, *DEBUG, "--topology", "v5e:2x2", *mesh, "--json", str(path)) == 0
    (row,) = json.loads(path.read_text())["plans"]
    assert row["fits"]
    assert row["peak_bytes"] > row["parameter_bytes"] + row["optimizer_bytes"]
    # AdamW keeps two moments of each parameter, and a count.
    assert abs(row["optimizer_bytes"] - 2 * row["parameter_bytes"]) < 100
    assert row["memory"]["arguments"] >= row["parameter_bytes"] + row["optimizer_bytes"]
    assert {"all-gather", "all-reduce", "reduce-scatter"} <= row["collectives"].keys()
    assert row["unknown_loops"] == 0
    assert 0 < row["mfu_bound"] < 1
    command = "python train.py --config configs/debug.py:lrkv --mesh.fsdp 2 --mesh.tensor 2"
    assert command in capsys.readouterr().out


@needs_libtpu
def test_too_large_is_said(monkeypatch, capsys):
    """Fails if 6.3B on four chips of 16 GiB passes, or the report lacks by how much, or what would do."""
    assert run(monkeypatch, "--config", "configs/lrkv_6_3b.py:lrkv", "--topology", "v5e:2x2") == 1
    out = capsys.readouterr().out
    assert re.search(r"does not fit: .* of 16\.00 GiB, [\d.]+ GiB too much", out)
    assert "--topology v5e:" in out


@needs_libtpu
def test_decode_step(monkeypatch, capsys, tmp_path):
    """Fails if the decode step no longer lowers from shapes, its cache is not the one that is allocated, or a step
    moves more than weights and cache once: a scatter into the cache copied it whole into another layout and back."""
    path = tmp_path / "report.json"
    args = ("--decode", "--length", "8192", "--batch", "8", "--most", "1", "--json", str(path))
    assert run(monkeypatch, *DEBUG, "--topology", "v5e:2x2", *args) == 0
    report = json.loads(path.read_text())
    (plan,) = report["plans"]
    assert report["cache_bytes_logical"] == 240 * 8192 * 8
    assert plan["cache_bytes"] * 4 >= report["cache_bytes_logical"]
    assert plan["kernels"] == 2 * (1 + 5)  # in each layer attention, and a write for each leaf
    assert plan["memory"]["temporaries"] < 0.1 * plan["cache_bytes"]
    assert plan["hbm_bytes_per_device"] < 1.3 * (plan["weight_bytes"] + plan["cache_bytes"])


@needs_libtpu
def test_compiler_says_out_of_memory():
    """Fails if libtpu's words for it change, so that a program that doesn't fit would end in a traceback."""
    (device, *_) = aot.topology_devices("v5e:2x2")
    mesh = sharding.make_mesh(sharding.MeshConfig(), [device])
    x = jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32, sharding=NamedSharding(mesh, P()))
    with pytest.raises(aot.OutOfMemory) as error:
        aot.compiled(jax.jit(jnp.negative), x)
    assert error.value.needed > 4e10
    assert 15e9 < error.value.available < 17.2e9


@needs_libtpu
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--topology is needed"),
        (("--topology", "v5e:3x3"), "--topology v5e:3x3"),
        (("--topology", "v2:2x2"), "no published rates of a TPU v2"),
        (("--topology", "v5e:2x2", "--config", "none.py"), "no file none.py"),
        (("--topology", "v5e:2x2", "--mesh.fsdp", "4", "--train.batch-size", "6"), "batch_size = 6"),
        (("--topology", "v5e:2x2", "--mesh.tensor", "4"), "heads = 2"),
        (("--topology", "v5e:2x2", "--mesh.fsdp", "3"), "needs 3 devices"),
        (("--topology", "v5e:2x2", "--decode", "--batch", "3"), "--batch 3"),
        (("--topology", "v5e:2x2", "--length", "0"), "--length"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, args, said):
    """Fails if a user's mistake becomes a traceback or another exit status."""
    assert run(monkeypatch, *(() if "--config" in args else DEBUG), *args) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1


def test_without_libtpu(monkeypatch, capsys):
    """Fails if a machine without libtpu gets an ImportError."""
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="libtpu"):
        aot.topology_devices("v5e:2x2")
