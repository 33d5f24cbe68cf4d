"""Several processes as one run: who takes part, what they agree on, and how the failure of one ends them all.

JAX's own runtime does the work. Here it is decided whether to start it, and its key-value store, which the processes
reach without their devices, carries what must be said between them: what process 0 has seen on a disk, and the one line
of a failure. A process that dies without a word is noticed by JAX, which aborts the others after the heartbeat.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import jax

# Private, as is all of JAX that tells a cluster's size before joining it, and its key-value store.
from jax._src import distributed as runtime
from jax._src.clusters import ClusterEnv

from lrkv_jax.settings import Parser, UserError, one_line

T = TypeVar("T")

HOUR = 3_600_000  # milliseconds; how long one call waits before it is made again
FAREWELL = 10.0  # seconds that process 0 gives the others to read why the run ends
GRACE = 1.0  # seconds in which those that have answered exit, before JAX aborts them for want of process 0
FAILED, LEFT = "lrkv/failed", "lrkv/left"
APART = {"--help", "-h", "--dry-run"}  # what is asked of one process and answered without the others


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where a run runs; they are no part of its config."""
    group = parser.add_argument_group("several processes", "not needed on Cloud TPU and SLURM, which JAX knows")
    group.add_argument("--distributed.coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--distributed.processes", type=int, metavar="N", help="processes in all; 1: never join others")
    group.add_argument("--distributed.process-id", type=int, metavar="I", help="this one's number, from 0")
    group.add_argument(
        "--distributed.heartbeat-seconds",
        type=int,
        metavar="S",
        default=60,
        help="a process silent for so long is taken for dead and ends the run (default 60)",
    )


def together(main: Callable[[], int | None]) -> Callable[[], int | None]:
    """Wraps a command's main: joins the other processes first, and ends with them.

    If any of them fails, process 0 prints that one's line and all exit with its status. Alone, it only calls main.
    """

    @functools.wraps(main)
    def joined() -> int | None:
        if APART.isdisjoint(sys.argv):
            parser = Parser(add_help=False, allow_abbrev=False)
            add_flags(parser)
            start(vars(parser.parse_known_args()[0]))
        if not several():
            return main()
        watch = threading.Thread(target=_await_failure, daemon=True)
        watch.start()
        try:
            status = main()
        except BaseException as error:
            _tell_failure(error)
            watch.join()  # it ends the process, as it does in every other
            raise
        jax.distributed.shutdown()  # waits for the others
        watch.join()  # a thread inside the runtime while Python goes would abort it
        return status

    return joined


def start(flags: dict[str, Any]) -> None:
    """Joins the other processes if the flags name them or a cluster that JAX knows does; alone, does nothing.

    JAX's own watch over SIGTERM stays off: outside of the training loop, which minds it, SIGTERM ends a process.

    Raises UserError for flags that don't fit together, and where the others can't be reached.
    """
    for name in ("processes", "heartbeat_seconds"):
        value = flags[f"distributed.{name}"]
        if value is not None and value < 1:
            raise UserError(f"--distributed.{name.replace('_', '-')} {value}: must be at least 1")
    names = ("coordinator", "processes", "process_id")
    given = {name: flags[f"distributed.{name}"] for name in names if flags[f"distributed.{name}"] is not None}
    if given.get("processes") == 1:
        return
    if given:
        if missing := [name for name in names if name not in given]:
            raise UserError(f"--distributed.{missing[0].replace('_', '-')} is missing: the three come together")
        if not 0 <= given["process_id"] < given["processes"]:
            raise UserError(
                f"--distributed.process-id {given['process_id']}: must be in 0 ... {given['processes'] - 1}"
            )
        if not given["coordinator"].rpartition(":")[2].isdecimal():
            raise UserError(f"--distributed.coordinator {given['coordinator']}: must be HOST:PORT")
    try:
        if not given and not announced():
            return
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            coordinator_address=given.get("coordinator"),
            num_processes=given.get("processes"),
            process_id=given.get("process_id"),
            cluster_detection_method="deactivate" if given else None,
            heartbeat_timeout_seconds=flags["distributed.heartbeat_seconds"],
        )
    except (RuntimeError, OSError, LookupError, ValueError) as error:  # of JAX's runtime, and of asking a cluster
        where = given.get("coordinator", "the cluster's coordinator")
        raise UserError(
            f"could not join the other processes at {where}: {str(error).splitlines()[0]} "
            f"(--distributed.processes 1 runs alone)"
        ) from error


def announced() -> bool:
    """Whether a cluster that JAX knows says that this is one of several processes."""
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
        return False  # a login shell in a larger allocation, whose size is all that JAX looks at
    cluster = next(
        (env for env in ClusterEnv._cluster_types if not env.opt_in_only_method and env.is_env_present()), None
    )
    return cluster is not None and cluster.get_process_count() > 1


def several() -> bool:
    """Whether this is one of several processes."""
    return runtime.global_state.client is not None


def is_first() -> bool:
    """Whether this process is the one that writes and prints; alone, it is."""
    return runtime.global_state.process_id == 0


def agreed(make: Callable[[], T]) -> T:
    """What process 0 makes, in all of them: a JSON value. Every process must get here in the same order.

    An error of process 0 ends the others.
    """
    if not several():
        return make()
    client, key = runtime.global_state.client, f"lrkv/agreed/{next(_numbers)}"
    if is_first():
        client.key_value_set(key, json.dumps(make()))
    return json.loads(_value(client, key))


def gathered(value: T) -> list[T]:
    """The JSON values of all processes, in their order; a few messages for each pair, so not for every step."""
    if not several():
        return [value]
    client, key = runtime.global_state.client, f"lrkv/gathered/{next(_numbers)}"
    client.key_value_set(f"{key}/{runtime.global_state.process_id}", json.dumps(value))
    others = range(runtime.global_state.num_processes)
    return [json.loads(_value(client, f"{key}/{number}")) for number in others]


def check_same(values: dict[str, Any]) -> None:
    """Raises UserError naming the first value in which this process differs from process 0."""
    theirs = agreed(lambda: values)
    for name in sorted(values.keys() | theirs.keys()):
        if values.get(name) != theirs.get(name):
            raise UserError(f"{name} = {values.get(name)} here and {theirs.get(name)} on process 0: must be the same")


_numbers = itertools.count()  # of exchanges so far, the same in every process


def _value(client: Any, key: str) -> str:
    """What the store holds under a key, however late: a wait ends by the other side's word or by JAX's heartbeat."""
    while True:
        try:
            return client.blocking_key_value_get(key, HOUR)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _tell_failure(error: BaseException) -> None:
    """Leaves the one line of an error where every process waits for it; the first to fail is the one that's told."""
    line, status = one_line(error), 2
    if line is None:
        traceback.print_exception(error)
        line, status = f"{type(error).__name__}: {error}", 1
    told = json.dumps({"process": runtime.global_state.process_id, "line": line, "status": status})
    try:
        runtime.global_state.client.key_value_set(FAILED, told)
    except jax.errors.JaxRuntimeError as refusal:
        if "ALREADY_EXISTS" not in str(refusal):
            raise


def _await_failure() -> None:
    """Ends this process when any has failed. Process 0, which keeps the store, prints the line and goes last."""
    state = runtime.global_state
    client = state.client
    try:
        told = json.loads(_value(client, FAILED))
    except jax.errors.JaxRuntimeError:
        return  # the end of the run, or of JAX's runtime, which says so itself
    if is_first():
        where = f"process {told['process']}: " if told["process"] else ""
        print(f"error: {where}{told['line']}", file=sys.stderr)
        deadline = time.monotonic() + FAREWELL
        for number in range(1, state.num_processes):
            left = max(1, round(1000 * (deadline - time.monotonic())))  # milliseconds
            try:
                client.blocking_key_value_get(f"{LEFT}/{number}", left)
            except jax.errors.JaxRuntimeError:
                print(f"process {number} did not answer and may still run", file=sys.stderr)
        time.sleep(GRACE)
    sys.stdout.flush()
    sys.stderr.flush()
    if not is_first():
        client.key_value_set(f"{LEFT}/{state.process_id}", "")
    os._exit(told["status"])  # the main thread may wait for ever on a process that is no more
