"""Scores a run on a whole split, from its directory alone.

    python eval.py RUN_DIR [--split test|validation] [--step newest|best|N]

The test split at the newest step goes to RUN_DIR/eval.json, anything else to RUN_DIR/eval-SPLIT-STEP.json; sums by
document beside it, in documents.json or documents-SPLIT-STEP.json.
"""

from __future__ import annotations

import argparse
import sys

import jax

from lrkv_jax import distributed, profiling, report, rundir, sharding
from lrkv_jax.config import RunConfig
from lrkv_jax.fit import runnable
from lrkv_jax.origin import TEACHER, recorded
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.sharding import MeshConfig
from lrkv_jax.storage import path
from lrkv_jax.teacher import model_of
from lrkv_jax.trained import restored


@distributed.together
def main() -> int:
    """Command line to exit status."""
    parser = Parser(prog="eval.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=path)
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--step", default="newest", help="newest, best, or a step's number")
    profiling.add_cache_flag(parser)
    distributed.add_flags(parser)
    options = parser.parse_args()
    distributed.check_same({"--split": options.split, "--step": options.step, "RUN_DIR": str(options.run_dir)})
    config = RunConfig.load(options.run_dir)
    mesh = sharding.make_mesh(fitting(config.mesh))
    config = runnable(config, mesh)
    profiling.keep_compiled(options.compile_cache, config.data.cache())
    store = rundir.open_corpus(options.run_dir, config)
    program = rundir.make_run_program(config, store)
    abstract = program.abstract_state(mesh)["params"]
    params, step = restored(options.run_dir, config, abstract, options.step)
    teacher_config = model_of(recorded(options.run_dir, TEACHER), config)
    result = report.score(config, program, params, step, store, mesh, options.split, teacher_config)
    if distributed.is_first():
        print(report.table(result.eval))
        default = options.split == "test" and options.step == "newest"
        result.write(options.run_dir, "" if default else f"-{options.split}-{options.step}")
    return 0


def fitting(config: MeshConfig) -> MeshConfig:
    """The run's mesh, or where there are other devices here, all of them side by side; told on stderr."""
    try:
        sharding.make_mesh(config)
    except UserError as error:
        if distributed.is_first():
            print(f"{error}; scoring with {jax.device_count()} copies of the model instead", file=sys.stderr)
        slices = {getattr(device, "slice_index", 0) for device in jax.devices() if device.platform == "tpu"}
        return MeshConfig(slices=max(len(slices), 1))
    return config


if __name__ == "__main__":
    command(main)()
