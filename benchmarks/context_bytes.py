"""What context parallelism sends: collective bytes of one attention layer of 2.5B, read off the compiled program.

    python benchmarks/context_bytes.py                  compiles for v5e:2x2 (needs libtpu), writes the JSON, prints
    python benchmarks/context_bytes.py --print          prints the table again

The sequence of 2048 tokens is split over 4 chips. Compressed entries are gathered in the forward pass and their
gradients scattered in the backward pass, so a family sends what it would cache (key scales excepted, which are formed
again after arrival). Summing the gradients of the weights, which every family does, is not counted here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))
from lrkv_jax import accounting, aot, compiled, sharding
from lrkv_jax.config import RunConfig, load_configs
from lrkv_jax.sharding import MeshConfig

RESULTS = Path(__file__).parent / "results" / "context_bytes.json"
CONFIG, TOPOLOGY, CONTEXT = "configs/lrkv_2_5b.py", "v5e:2x2", 4
FAMILIES = ("mha", "lrkv", "gqa", "mqa", "mla")


def layer_costs(config: RunConfig, devices: list[jax.Device], batch: int) -> compiled.Costs:
    """Collectives of the gradient of one attention layer, by parameters and input [batch, T, D], T split."""
    mesh = sharding.make_mesh(MeshConfig(data=1, context=len(devices)), devices)
    module = accounting.abstract_attention(config.model, config.attention)
    graph, params = nnx.split(module)

    def objective(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
        out = nnx.merge(graph, params)(x, positions)
        return jnp.sum(out.astype(jnp.float32) * weights)  # no two positions alike, so that nothing is simplified away

    params = sharding.with_shardings(params, mesh)
    split = NamedSharding(mesh, P(None, "context"))
    shape = (batch, config.data.context, config.model.width)
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(config.model.dtype), sharding=split)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)
    gradient = jax.jit(jax.grad(objective, argnums=(0, 1)), out_shardings=(sharding.shardings(params), split))
    with jax.set_mesh(mesh):
        return compiled.costs(aot.compiled(gradient, params, x, weights))


def of_entries(costs: compiled.Costs) -> dict[str, float]:
    """Bytes that a device sends to gather entries, and to scatter their gradients; and both as padded to tiles."""
    found = {"forward": 0.0, "backward": 0.0, "padded": 0.0}
    for c in costs.collectives:
        if c.kind in ("all-gather", "reduce-scatter"):
            found["forward" if c.kind == "all-gather" else "backward"] += c.times * c.sent
            found["padded"] += c.times * c.carried
    return found


def measure() -> dict[str, Any]:
    """Compiles each family's layer."""
    devices = aot.topology_devices(TOPOLOGY)
    rows = {}
    for family in FAMILIES:
        _, config = load_configs(f"{CONFIG}:{family}")
        costs = layer_costs(config, devices, batch=1)
        rows[family] = of_entries(costs) | {
            "cache_bytes_per_token": accounting.cache_per_token(config.model, config.attention)[1]
            // config.model.layers,
            "collectives": [c._asdict() for c in costs.collectives],
        }
    return {"config": CONFIG, "topology": TOPOLOGY, "context": CONTEXT, "jax": jax.__version__, "rows": rows}


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    rows = report["rows"]
    lines = [
        f"One layer of {report['config']}, {report['context']} ways of context on {report['topology']}: MiB that a "
        f"device sends a row of 2048 tokens.",
        "",
        "| | forward | backward | % of MHA's | with tiles' padding, % of MHA's | cache, % of MHA's |",
        "|---|---|---|---|---|---|",
    ]
    mha = rows["mha"]
    for family, row in rows.items():
        share = (row["forward"] + row["backward"]) / (mha["forward"] + mha["backward"])
        shares = share, row["padded"] / mha["padded"], row["cache_bytes_per_token"] / mha["cache_bytes_per_token"]
        cells = [f"{row[way] / 2**20:.2f}" for way in ("forward", "backward")] + [f"{100 * x:.1f}" for x in shares]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--print" not in sys.argv:
        aot.prepare_environment()
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(measure(), indent=2) + "\n")
    print(table(json.loads(RESULTS.read_text())))
