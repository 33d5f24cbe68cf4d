"""Whether a process joins others at all."""

import os

import jax
import pytest

from lrkv_jax import distributed
from lrkv_jax.settings import UserError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
NO_FLAGS = dict.fromkeys(("distributed.coordinator", "distributed.processes", "distributed.process_id"))
NO_FLAGS |= {"distributed.heartbeat_seconds": 60}


@pytest.mark.parametrize(
    ("env", "joins"),
    [
        ({}, False),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        (SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, False),
        (SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, True),
    ],
    ids=["laptop", "one task", "a shell in a larger allocation", "eight tasks"],
)
def test_joining_is_the_clusters_word(monkeypatch, env, joins):
    """Bugs: a shell in an allocation waits for processes that nobody started; a real step of several runs apart."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **flags: calls.append(flags))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    distributed.start(NO_FLAGS)
    assert len(calls) == joins
    assert not joins or calls[0]["coordinator_address"] is None
    distributed.start(NO_FLAGS | {"distributed.processes": 1})  # the user's word goes first
    assert len(calls) == joins


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"coordinator": "host:1"}, "--distributed.processes is missing"),
        ({"coordinator": "host:1", "processes": 2, "process_id": 2}, "must be in 0 ... 1"),
        ({"coordinator": "host", "processes": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"processes": 0}, "--distributed.processes 0: must be at least 1"),
        ({"processes": 1, "heartbeat_seconds": 0}, "--distributed.heartbeat-seconds 0: must be at least 1"),
    ],
)
def test_flags_that_do_not_fit(flags, says):
    """Bug: a run hangs on a flag that was forgotten or mistyped."""
    with pytest.raises(UserError, match=says):
        distributed.start(NO_FLAGS | {f"distributed.{name}": value for name, value in flags.items()})
