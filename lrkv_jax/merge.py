"""Adds a run's adapters (lora.py) to the weights they adapt.

    python -m lrkv_jax.merge RUN_DIR --out DIR [--step newest|best|N]

DIR becomes the directory of a run without adapters that computes the same up to rounding; it stands at step 0, and
eval.py, generate, convert and train.py --init-from take it as any other.
"""

from __future__ import annotations

import argparse

import jax

from lrkv_jax import lora, sharding
from lrkv_jax.accounting import textless_program
from lrkv_jax.config import RunConfig
from lrkv_jax.handover import write_run
from lrkv_jax.rundir import read_json
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.storage import path
from lrkv_jax.trained import restored


def main(arguments: list[str] | None = None) -> int:
    """Command line to exit status."""
    parser = Parser("python -m lrkv_jax.merge", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=path)
    parser.add_argument("--out", type=path, required=True, metavar="DIR")
    parser.add_argument("--step", default="newest", help="newest, best, or a step's number")
    options = parser.parse_args(arguments)
    config = RunConfig.load(options.run_dir)
    if not config.model.lora_rank:
        raise UserError(f"{options.run_dir}: model.lora_rank = 0: it has no adapters to merge")
    program = textless_program(config)
    mesh = sharding.make_mesh(MeshConfig())
    params, step = restored(options.run_dir, config, program.abstract_state(mesh)["params"], options.step)
    params = jax.jit(lambda params: lora.merge(program.graph, params))(params)
    corpus = read_json(options.run_dir / "corpus.json")["store"]
    write_run(options.out, config.without_adapters(), params, options.run_dir / "tokenizer.json", corpus)
    print(
        f"{options.out}: step {step} of {options.run_dir}, its adapters merged; python eval.py {options.out} scores it"
    )
    return 0


if __name__ == "__main__":
    command(main)()
