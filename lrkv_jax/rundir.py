"""A run directory: what is in it, and when it may be used again.

config.json, tokenizer.json and corpus.json are written once, when the run starts, and everything later starts from
them; so are origin.json and teacher.json (origin.py) in a run that began or learns from another. metrics.jsonl and
tensorboard/ grow; checkpoints/ holds the newest and the best; eval.json, loss.png at the end.

It lies on a disk or in a bucket, where every process of a run reaches it; process 0 writes all but the checkpoints.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import sys
import uuid
from typing import IO, Any

from lrkv_jax import distributed
from lrkv_jax import origin as origins
from lrkv_jax.config import RunConfig
from lrkv_jax.data import Store, open_store
from lrkv_jax.origin import Origin
from lrkv_jax.settings import UserError
from lrkv_jax.step import Program, Tokens, make_program
from lrkv_jax.storage import AnyPath, in_bucket, write_atomically

# What a run that was killed while it started may have left, besides scratch files (.name) of ours.
FIRST_FILES = {"config.json", "corpus.json", "tokenizer.json", origins.SOURCE.file, origins.TEACHER.file}


def enter(run_dir: AnyPath, config: RunConfig, origin: Origin | None = None, teacher: Origin | None = None) -> Store:
    """Opens a run directory for training: a new one is made, a known one must be of the same config and corpus.

    `origin` and `teacher` are kept in a new one; that a known one has the same is for who makes them to see to
    (initial.py, teacher.py).

    Raises UserError where it is of another config or corpus, holds something else, can't be written, or is not one
    and the same for all processes.
    """
    begun = distributed.agreed(lambda: _claim(run_dir, config))
    check_shared(run_dir)
    if begun:
        return open_corpus(run_dir, config)
    store = open_store(config.data, config.model.vocab, progress=distributed.is_first())
    distributed.check_same({"the corpus's fingerprint": store.fingerprint})  # each process has prepared its own
    distributed.agreed(lambda: found(run_dir, config, store, origin, teacher))
    if store.note and distributed.is_first():
        print(store.note, file=sys.stderr)
    return store


def _claim(run_dir: AnyPath, config: RunConfig) -> bool:
    """Takes the directory for this run; whether the run has begun before."""
    if (run_dir / "config.json").exists():
        config.check_resume(RunConfig.load(run_dir), run_dir)
        lock(run_dir)
        return True
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir}: {error.strerror or error}") from None
    names = sorted(path.name for path in run_dir.iterdir()) if run_dir.exists() else []
    strangers = [name for name in names if name.removesuffix(".tmp") not in FIRST_FILES and not name.startswith(".")]
    if strangers:
        raise UserError(f"--run-dir {run_dir}: holds {strangers[0]} and no config.json, so it is no run directory")
    lock(run_dir)
    return False


def check_shared(run_dir: AnyPath) -> None:
    """Raises UserError where a process does not see in this directory what process 0 writes there."""
    if not distributed.several():
        return
    mark = run_dir / distributed.agreed(lambda: f".shared-{uuid.uuid4().hex}")
    distributed.agreed(lambda: write_json(mark, "removed again in a moment"))
    seen = distributed.gathered(mark.exists())
    distributed.agreed(lambda: _compare_views(run_dir, mark, seen))


def _compare_views(run_dir: AnyPath, mark: AnyPath, seen: list[bool]) -> None:
    """Takes the mark away again. Raises UserError naming the first process that has not seen it."""
    mark.unlink()
    if not all(seen):
        raise UserError(
            f"--run-dir {run_dir}: process {seen.index(False)} does not see what process 0 writes there; must be a "
            f"folder that all share, or a bucket gs://..."
        )


def found(
    run_dir: AnyPath, config: RunConfig, store: Store, origin: Origin | None = None, teacher: Origin | None = None
) -> None:
    """Writes what a run starts from. Raises UserError where it can't be written."""
    store.tokenizer.save(run_dir / "tokenizer.json")
    corpus = {"fingerprint": store.fingerprint, "store": store.directory.name, **counts(store)}
    corpus |= {"note": store.note} if store.note else {}
    corpus |= {"mixture": store.mixture} if store.mixture else {}
    write_json(run_dir / "corpus.json", corpus)
    for role, other in ((origins.SOURCE, origin), (origins.TEACHER, teacher)):
        if other is not None:
            write_json(run_dir / role.file, other.model_dump(mode="json"))
        else:  # of a start with another that was killed before it was one
            (run_dir / role.file).unlink(missing_ok=True)
    # Last: its presence says that the others are whole.
    write_json(run_dir / "config.json", config.model_dump(mode="json"))


def make_run_program(config: RunConfig, store: Store, teacher: RunConfig | None = None) -> Program:
    """The run's program; it needs the tokenizer's begin and end. `teacher` is as teacher.py has it."""
    special = (store.tokenizer.begin_id, store.tokenizer.end_id)
    tokens = Tokens(*special, config.data.isolated, config.data.marked)
    program = make_program(config.model, config.attention, config.train, config.optimizer, tokens)
    return program if teacher is None else dataclasses.replace(program, teacher=make_run_program(teacher, store))


def open_corpus(run_dir: AnyPath, config: RunConfig) -> Store:
    """The run's own corpus, made again where the cache has lost it. Raises UserError where it has changed since."""
    corpus = read_json(run_dir / "corpus.json")
    tokenizer = run_dir / "tokenizer.json"
    progress = distributed.is_first()
    store = open_store(config.data, config.model.vocab, tokenizer=tokenizer, name=corpus["store"], progress=progress)
    saved = corpus["fingerprint"]
    if store.fingerprint != saved:
        raise UserError(
            f"data.dataset = {config.data.dataset}: the corpus here (fingerprint {store.fingerprint}) is not the one "
            f"that {run_dir} was made with ({saved}); its numbers would not compare"
        )
    return store


def counts(store: Store) -> dict[str, Any]:
    """Documents, tokens and bytes of each split."""
    return {split: store.counts(split)._asdict() for split in ("train", "validation", "test")}


def lock(run_dir: AnyPath, flag: str = "--run-dir") -> None:
    """Takes a directory for this process, till it ends. Raises UserError where another works in it, or where it can't
    be written, before any work is done; `flag` is what named it.

    A bucket has no locks: there, that no two runs use one directory is up to who starts them.
    """
    if in_bucket(run_dir):
        return
    try:
        _held.append((run_dir / ".lock").open("a"))
        fcntl.flock(_held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{flag} {run_dir}: another process is training in it") from None
    except OSError as error:
        raise UserError(f"{flag} {run_dir}: cannot be written ({error.strerror})") from None


_held: list[IO[str]] = []  # locks of this process; closing a file would give its lock back


def write_json(path: AnyPath, value: Any, indent: int | None = 2) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never half of it."""
    try:
        write_atomically(path, f"{json.dumps(value, indent=indent)}\n".encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


def read_json(path: AnyPath) -> Any:
    """Reads JSON. Raises UserError where the file is missing or is none."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
