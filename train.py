"""Trains a model: a config becomes a mesh, a corpus, a program, a state, a loop, a score.

    python train.py                                            the default, configs/tiny.py, LRKV
    python train.py --config configs/tiny.py:mha --train.steps 1000 --run-dir runs/mine
    python train.py --init-from runs/tiny-lrkv --data.dataset text_files --data.path ~/notes --run-dir runs/notes
    python train.py --init-from runs/tiny-mha-lrkv --distill-from runs/tiny-mha --train.distill-weight 0.5

The same command again on a run directory resumes it; on a finished run it prints the result again. On several hosts,
start the same command on each: docs/scale.md.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from types import FrameType, TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lrkv_jax import accounting, chips, distributed, figures, profiling, report, rundir, sharding
from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.config import Command, RunConfig, flatten, parse_command
from lrkv_jax.data import Store
from lrkv_jax.evaluate import evaluate, make_eval_step
from lrkv_jax.fit import check_fit
from lrkv_jax.initial import find_origin, initial_state
from lrkv_jax.metrics import Metrics, NotFinite
from lrkv_jax.origin import Origin
from lrkv_jax.settings import UserError, command
from lrkv_jax.step import Program, compile_train_step
from lrkv_jax.storage import AnyPath
from lrkv_jax.teacher import find_teacher, model_of, read_teacher


class Stopped:
    """While entered, turns SIGTERM and SIGINT into a number that the loop reads between steps; a second one kills.

    Several processes all stop before the same step, whichever the signal reached: before each, the devices find the
    largest number noted by any process. JAX's preemption service, made for this, misses a signal that comes before the
    loop of a resumed run, and miscounts when Orbax asks it from a thread of its own about steps long past.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.signal = 0  # what all agree on
        self._noted = 0  # what has reached this process
        self._mesh, self._votes = mesh, deque[jax.Array]()
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        # The answer is read a step late, when the device has long had it; fake CPU devices must not run ahead.
        self._lag = 0 if jax.default_backend() == "cpu" else 1

    def __enter__(self) -> Stopped:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        self._ballot = self._vote()
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted = number
        signal.signal(number, signal.SIG_DFL)

    def _vote(self) -> jax.Array:
        """What this process has noted, on each of its devices; together an array over the mesh."""
        spread = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        noted = np.full((1,), self._noted, np.int32)
        return jax.make_array_from_callback((self._mesh.size,), spread, lambda _: noted)

    def before(self, step: int) -> bool:
        """Whether to stop before this step; to be asked before each."""
        if not distributed.several():
            self.signal = self._noted
            return bool(self.signal)
        if self._noted:
            self._ballot = self._vote()
        self._votes.append(self._largest(self._ballot))
        if len(self._votes) > self._lag:
            self.signal = int(self._votes.popleft())
        return bool(self.signal)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:  # the last save may have been long
            self.signal = max(distributed.gathered(self._noted))


@distributed.together
def main() -> int:
    """Command line to exit status: 0 done, 128 + signal when stopped, 2 for a mistake (one line on stderr)."""
    options = parse_command("train.py", __doc__)
    config, run_dir = options.config, options.run_dir
    origin, teacher = find_origin(options), find_teacher(options)
    teacher_config = model_of(teacher, config)
    if options.dry_run:
        print(accounting.dry_run(config, teacher_config))
        return 0
    shared = flatten(config.model_dump(mode="json", exclude={"data": {"path", "tokenizer", "cache_dir"}}))
    others = {"--init-from": options.init_from, "--distill-from": options.distill_from}
    distributed.check_same(shared | {"--run-dir": str(run_dir)} | others)
    mesh = sharding.make_mesh(config.mesh)
    check_fit(config, mesh, teacher_config)
    profiling.keep_compiled(options.compile_cache, config.data.cache())
    store = rundir.enter(run_dir, config, origin, teacher)
    program = rundir.make_run_program(config, store, teacher_config)
    result_path = run_dir / "eval.json"
    if not distributed.agreed(lambda: finished(result_path, config)):
        with Stopped(mesh) as stopped:  # here only; preparing the data and scoring may be killed at any time
            state, step = fit(options, origin, teacher, store, program, mesh, stopped)
        if stopped.signal:
            name = signal.Signals(stopped.signal).name
            say(f"stopped by {name}; step {step} is saved, the same command resumes")
            return 128 + stopped.signal
        result = report.score(config, program, state["params"], step, store, mesh, "test", teacher_config)
        if distributed.is_first():
            figures.loss_curve(run_dir)
            result.write(run_dir)
    if distributed.is_first():
        print(report.table(rundir.read_json(result_path)))
    say(f"run directory  {run_dir}")
    return 0


def say(line: str) -> None:
    """Prints once, however many processes there are."""
    if distributed.is_first():
        print(line)


def finished(result_path: AnyPath, config: RunConfig) -> bool:
    """Whether the run's last step has been scored."""
    return result_path.exists() and rundir.read_json(result_path)["step"] == config.train.steps


def fit(
    options: Command,
    origin: Origin | None,
    teacher: Origin | None,
    store: Store,
    program: Program,
    mesh: Mesh,
    stopped: Stopped,
) -> tuple[dict[str, Any], int]:
    """Trains from the newest checkpoint, its origin or scratch to the last step or a signal; returns state and step.

    Whatever decides here is the same in every process: step numbers, losses, and what process 0 has seen on the disk.
    """
    config, run_dir = options.config, options.run_dir
    train, every = config.train, config.checkpoint.every_steps
    abstract, train_step = compile_train_step(program, mesh)
    eval_step = make_eval_step(program, mesh)
    batches = store.batches(train.batch_size, train.seed)
    rows = sharding.local_rows(mesh, train.batch_size)
    logging = log_options(config, mesh, model_of(teacher, config))

    with jax.set_mesh(mesh), contextlib.closing(Checkpointer(run_dir, config.checkpoint)) as checkpoints:
        restored = checkpoints.restore(abstract)
        state, step = restored or (initial_state(program, abstract, train.seed, origin), 0)
        teacher_params = read_teacher(teacher, program, mesh) if step < train.steps else ()
        stream = contextlib.closing(batches.iterate(step, rows))
        log = Metrics(run_dir, step=step, resumed=restored is not None, **logging)
        profile = profiling.Profile(run_dir, options.profile if distributed.is_first() else None)

        def validate() -> None:
            """Scores the validation split, and keeps the state if it is the best so far."""
            log.settle()
            with log.timed("eval"):
                windows = store.windows("validation")
                found = evaluate(
                    eval_step, state["params"], windows, train.batch_size, mesh, limit=train.eval_windows
                ).summary()
            log.evaluation(step, "validation", found["ce"], found["bits_per_byte"])
            with log.timed("checkpoint"):
                checkpoints.save_best(step, state, found["ce"])

        try:
            with stream as batch, log, profile:
                if origin is not None and restored is None:  # what its source knew; from here on it is not needed
                    validate()
                while step < train.steps and not stopped.before(step):
                    profile.before(step + 1, state)
                    with log.timed("data"):
                        tokens = sharding.place_rows(mesh, next(batch), train.batch_size)
                    state, metrics = train_step(state, tokens, *teacher_params)
                    step += 1
                    log.train(step, metrics)
                    if step % train.eval_every == 0 or step == train.steps:
                        validate()
                    if step % every == 0:
                        log.settle()
                        with log.timed("checkpoint"):
                            checkpoints.save(step, state)
                profile.finish(state)
                log.settle()
                checkpoints.save(step, state)
        except NotFinite as error:
            checkpoints.wait()
            raise UserError(not_finite(error, train.seed, checkpoints.steps())) from None
    return state, step


def not_finite(error: NotFinite, seed: int, kept: list[int]) -> str:
    """The line that a run ends in: what was no number and where, what is left, what to try."""
    values = ", ".join(f"{name} = {value}" for name, value in error.values.items())
    return (
        f"{values} at step {error.step} (batch_at({error.step - 1}) of train.seed = {seed}); last good checkpoint: "
        f"{f'step {kept[-1]}' if kept else 'none'}. Try a lower optimizer.peak_lr or more warm-up, in another --run-dir"
    )


def log_options(config: RunConfig, mesh: Mesh, teacher_config: RunConfig | None) -> dict[str, Any]:
    """What Metrics must know of a run, and of the teacher's model."""
    return {
        "steps": config.train.steps,
        "tokens_per_step": config.train.batch_size * config.data.context,
        # Fake CPU devices deadlock when steps pile up; elsewhere the host runs one step ahead.
        "lag": 0 if jax.default_backend() == "cpu" else 1,
        "devices": mesh.size,
        "flops_per_token": accounting.train_flops_per_token(config, teacher_config),
        "peak_flops": chips.peak_flops(jax.devices()[0].device_kind),
        "writes": distributed.is_first(),
    }


if __name__ == "__main__":
    command(main)()
