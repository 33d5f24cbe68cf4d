"""Trains a model: a config becomes a mesh, a corpus, a program, a state, a loop, a score.

    python train.py                                            the default, configs/tiny.py, LRKV
    python train.py --config configs/tiny.py:mha --train.steps 1000 --run-dir runs/mine

The same command again on a run directory resumes it; on a finished run it prints the result again.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.sharding import Mesh

from lrkv_jax import accounting, figures, report, rundir, sharding
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import RunConfig, parse_command
from lrkv_jax.data import Store
from lrkv_jax.evaluate import evaluate, make_eval_step
from lrkv_jax.metrics import Metrics, NotFinite
from lrkv_jax.settings import UserError, command
from lrkv_jax.step import Program, compile_train_step


class Stopped:
    """Turns SIGTERM and SIGINT into a flag that the loop reads between steps; a second signal kills as usual."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


def main() -> int:
    """Command line to exit status: 0 done, 128 + signal when stopped, 2 for a mistake (one line on stderr)."""
    config, run_dir, dry_run = parse_command("train.py", __doc__)
    if dry_run:
        print(accounting.dry_run(config))
        return 0
    mesh = sharding.make_mesh(config.mesh)
    check_fit(config, mesh)
    store = rundir.enter(run_dir, config)
    program = rundir.make_run_program(config, store)
    result_path = run_dir / "eval.json"
    if not finished(result_path, config):
        stopped = Stopped()  # from here on; preparing the data may be killed at any time
        with jax.set_mesh(mesh):
            state, step = fit(config, run_dir, store, program, mesh, stopped)
        if stopped.signal:
            name = signal.Signals(stopped.signal).name
            print(f"stopped by {name}; step {step} is saved, the same command resumes")
            return 128 + stopped.signal
        result = report.score(config, program, state["params"], step, store, mesh, "test")
        figures.loss_curve(run_dir)
        rundir.write_json(result_path, result)  # last: it says that the run is finished
    print(report.table(rundir.read_json(result_path)))
    print(f"run directory  {run_dir}")
    return 0


def check_fit(config: RunConfig, mesh: Mesh) -> None:
    """Raises UserError where batch or model don't divide over the mesh, before anything is written."""
    rows, ways = config.train.batch_size // config.train.microbatches, sharding.row_ways(mesh)
    if rows % ways:
        raise UserError(
            f"train.batch_size = {config.train.batch_size} in {config.train.microbatches} microbatch(es): {rows} rows "
            f"don't divide over mesh data x fsdp = {ways}"
        )
    accounting.textless_program(config).abstract_state(mesh)


def finished(result_path: Path, config: RunConfig) -> bool:
    """Whether the run's last step has been scored."""
    return result_path.exists() and rundir.read_json(result_path)["step"] == config.train.steps


def fit(
    config: RunConfig, run_dir: Path, store: Store, program: Program, mesh: Mesh, stopped: Stopped
) -> tuple[dict[str, Any], int]:
    """Trains from the newest checkpoint, or from scratch, to the last step or a signal; returns state and step."""
    train = config.train
    abstract, train_step = compile_train_step(program, mesh)
    eval_step = make_eval_step(program, mesh)
    rows = sharding.batch_sharding(mesh)
    batches = store.batches(train.batch_size, train.seed)
    log_options = {"steps": train.steps, "tokens_per_step": train.batch_size * config.data.context}
    # Fake CPU devices deadlock when steps pile up; elsewhere the host runs one step ahead.
    log_options["lag"] = 0 if jax.default_backend() == "cpu" else 1

    with contextlib.closing(Checkpointer(run_dir, config.checkpoint)) as checkpoints:
        state, step = checkpoints.restore(abstract) or (fresh(program, abstract, train.seed), 0)
        stream = contextlib.closing(batches.iterate(step))
        try:
            with stream as batch, Metrics(run_dir, step=step, **log_options) as log:
                while step < train.steps and not stopped.signal:
                    state, metrics = train_step(state, jax.device_put(next(batch), rows))
                    step += 1
                    log.train(step, metrics)
                    if step % train.eval_every == 0 or step == train.steps:
                        log.settle()
                        windows = store.windows("validation")
                        found = evaluate(
                            eval_step, state["params"], windows, train.batch_size, mesh, limit=train.eval_windows
                        ).summary()
                        log.evaluation(step, "validation", found["ce"], found["bits_per_byte"])
                        checkpoints.save_best(step, state, found["ce"])
                    if step % config.checkpoint.every_steps == 0:
                        log.settle()
                        checkpoints.save(step, state)
                log.settle()
                checkpoints.save(step, state)
        except NotFinite as error:
            checkpoints.wait()
            kept = checkpoints.steps()
            raise UserError(
                f"{', '.join(f'{name} = {value}' for name, value in error.values.items())} at step {error.step} "
                f"(batch_at({error.step - 1}) of train.seed = {train.seed}); last good checkpoint: "
                f"{f'step {kept[-1]}' if kept else 'none'}. Try a lower optimizer.peak_lr or more warm-up, in another "
                f"--run-dir"
            ) from None
    return state, step


def fresh(program: Program, abstract: dict[str, Any], seed: int) -> dict[str, Any]:
    """The initial state, each device making its own part."""
    return jax.jit(program.init_state, out_shardings=sharding.shardings(abstract))(jax.random.key(seed))


if __name__ == "__main__":
    command(main)()
