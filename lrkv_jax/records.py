"""Runs as plain records, for figures and comparisons; imports no JAX and no config class.

A run comes as a run directory, or as one JSON file that holds the same (a study keeps its runs so: small, and whole
without checkpoints). Both read as a `Record`; what is broken or unfinished is a `Record` too, whose `note` says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from lrkv_jax.metrics import read_rows
from lrkv_jax.settings import UserError
from lrkv_jax.storage import AnyPath, write_atomically

TRAIN_POINTS = 200  # rows of training kept in a summary; a curve drawn needs no more
DEPTH = 2  # folders below the given one in which runs are looked for
# What a run directory may hold beside its config and metrics, and the field of the summary it becomes.
EXTRAS = {
    "eval": "eval.json",
    "documents": "documents.json",
    "diversity": "diversity/diversity.json",
    "origin": "origin.json",
    "teacher": "teacher.json",
}
# What figures and comparisons read of an eval.json.
EVAL_FIELDS = (
    *("split", "ce", "bits_per_byte", "tokens", "bytes", "documents", "parameters", "train_tokens", "train_flops"),
    *("cache_bytes_per_token", "cache_percent_of_mha"),
)
# Fields of a config that say where a run ran and what it kept, and not what it computed.
FREE = ("mesh.", "checkpoint.", "data.cache_dir", "attention.implementation")
# Fields that came after runs had been kept, and the value by which a run is what it was without them.
ADDED = {
    "model.lora_rank": 0,
    "model.lora_alpha": 16.0,
    "model.lora_targets": ["*"],
    "optimizer.freeze": [],
    "attention.ranks": [],
    "train.distill_weight": 0.0,
    "data.template": "<|{role}|>\n{content}\n",
    "data.too_long": "drop",
    "data.repeats": [],
}


class Record(NamedTuple):
    """One run, as it is on disk."""

    name: str
    """Of the run in its study, without the seed; of a run directory, the folder's."""
    seed: int
    """train.seed."""
    label: str
    """As tables and figures write it; empty where nobody gave one."""
    source: str
    """The file or folder it was read from."""
    config: dict[str, Any]
    """The resolved config.json; empty where the run could not be read."""
    metrics: list[dict[str, Any]]
    """Rows of metrics.jsonl, oldest first; of a summary, training rows thinned."""
    eval: dict[str, Any] | None = None
    """eval.json; None while the run is unfinished."""
    documents: dict[str, list] | None = None
    """Sums by test document: `nats`, `tokens`, `bytes`."""
    diversity: list[dict[str, Any]] | None = None
    """Per layer: `layer`, `heads`, and effective ranks `uncentred`, `centred`."""
    shards: dict[str, float] | None = None
    """Cache bytes per token on each device, by ways of tensor parallelism ("1", "2", ...)."""
    origin: dict[str, Any] | None = None
    """The run whose parameters it began from, as origin.py keeps it."""
    teacher: dict[str, Any] | None = None
    """The run it learned from, likewise."""
    note: str = ""
    """One line on why it can't be used, or empty."""

    def fields(self) -> dict[str, Any]:
        """Its config by dotted names, and those of the runs it came from below `origin` and `teacher`, seeds aside."""
        found = flatten(self.config)
        for role, other in (("origin", self.origin), ("teacher", self.teacher)):
            theirs = flatten(other["config"], role) if other else {}
            found |= {
                key: value for key, value in theirs.items() if key not in (f"{role}.train.seed", f"{role}.family")
            }
        return found

    def curve(self, split: str = "validation") -> list[tuple[float, float]]:
        """(tokens, cross-entropy) of every evaluation on a held-out split during training, oldest first."""
        rows = (row for row in self.metrics if row["kind"] == "eval" and row["split"] == split)
        return [(float(row["tokens"]), float(row["ce"])) for row in rows]

    def scored(self) -> tuple | None:
        """What tells the text that was scored from another: split, tokens, bytes, documents; None while unfinished."""
        return self.eval and tuple(self.eval[name] for name in ("split", "tokens", "bytes", "documents"))

    def key(self) -> str:
        """What runs of one group share, whatever their seed and name: the mathematics, and the text scored."""
        fields = {name: value for name, value in self.fields().items() if name not in ("train.seed", "family")}
        return json.dumps([fields, self.scored()], sort_keys=True)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A config's fields by dotted name, without those that don't change the mathematics.

    A field that is null, or at its value in ADDED, counts as absent: a config written before it existed means the same.
    """
    if not isinstance(tree, dict):
        says_nothing = tree is None or (prefix in ADDED and tree == ADDED[prefix])
        return {} if says_nothing or prefix.startswith(FREE) else {prefix: tree}
    return {
        key: leaf for name, sub in tree.items() for key, leaf in flatten(sub, f"{prefix}.{name}".strip(".")).items()
    }


def groups(records: list[Record]) -> list[list[Record]]:
    """The finished runs that differ in their seed only, together, each group by seed; in order of appearance."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.eval:
            found.setdefault(record.key(), []).append(record)
    return [sorted(group, key=lambda record: record.seed) for group in found.values()]


def summarise(run_dir: AnyPath, name: str, seed: int, label: str) -> dict[str, Any]:
    """One run directory as the JSON that a study keeps: every evaluation, at most TRAIN_POINTS training rows.

    Raises UserError where a file of it is missing (eval.json and the other extras may be) or broken.
    """
    rows = _rows(run_dir)
    extras = {field: _json(run_dir / file) for field, file in EXTRAS.items() if (run_dir / file).exists()}
    summary = {
        "name": name,
        "seed": seed,
        "label": label,
        "config": _json(run_dir / "config.json"),
        "metrics": thin(rows),
        "eval": None,
    }
    return summary | extras


def thin(rows: list[dict[str, Any]], points: int = TRAIN_POINTS) -> list[dict[str, Any]]:
    """All evaluations and at most `points` training rows, evenly spread, the last among them; order kept."""
    train = [index for index, row in enumerate(rows) if row["kind"] == "train"]
    if len(train) > points:
        kept = {train[(len(train) - 1) * i // (points - 1)] for i in range(points)}
        return [row for index, row in enumerate(rows) if row["kind"] != "train" or index in kept]
    return rows


def write_summary(path: AnyPath, summary: dict[str, Any]) -> None:
    """Writes a summary, one line for each field, so that a change of one of them shows as such."""
    lines = (f"{json.dumps(field)}: {json.dumps(value)}" for field, value in summary.items())
    try:
        write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


def read_runs(directory: AnyPath) -> list[Record]:
    """Every run in a folder and up to DEPTH below it, of both forms, by path; other files are passed over.

    Raises UserError where there is no such folder, or no run in it.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    found = [record for path in _candidates(directory, DEPTH) for record in [_read(path)] if record]
    if not found:
        raise UserError(
            f"{directory}: holds no run (a folder with config.json and metrics.jsonl, or a study's NAME-sSEED.json)"
        )
    return _without_repeats(found)


def _candidates(directory: AnyPath, depth: int) -> Iterator[AnyPath]:
    """Run directories, and JSON files outside of them."""
    if (directory / "config.json").exists():
        yield directory
        return
    for entry in sorted(directory.iterdir()):
        if entry.is_dir() and depth and not entry.name.startswith("."):
            yield from _candidates(entry, depth - 1)
        elif entry.suffix == ".json":
            yield entry


def _read(path: AnyPath) -> Record | None:
    """A run, or what is left of it with a note; None for JSON that is something else."""
    try:
        if path.is_dir():
            name = path.resolve().name
            found = summarise(path, name, 0, "")
            found["seed"] = found["config"]["train"]["seed"]
        else:
            found = _json(path)
            if not (isinstance(found, dict) and "config" in found and "metrics" in found):
                return None
        _check(found)
    except UserError as error:
        return Record(path.name.removesuffix(".json"), 0, "", str(path), {}, [], note=str(error))
    except (KeyError, TypeError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"is malformed ({error})"
        return Record(path.name.removesuffix(".json"), 0, "", str(path), {}, [], note=f"{path}: {what}")
    fields = {field: found.get(field) for field in Record._fields if field not in ("source", "note")}
    note = "" if fields["eval"] else f"{path}: not finished (no eval.json)"
    return Record(**fields, source=str(path), note=note)


def _check(found: dict[str, Any]) -> None:
    """Touches every field that a reader relies on, so that a malformed run is refused as a whole and by name."""
    for section in ("model", "attention", "data", "optimizer", "train"):
        found["config"][section].items()
    for field in ("family", "heads", "head_dim"):
        found["config"]["attention"][field]
    found["name"], found["seed"], found["label"]
    for row in found.get("diversity") or ():
        row["layer"], row["heads"], row["uncentred"], row["centred"]
    for row in found["metrics"]:
        _ = (row["tokens"], row["split"], row["ce"]) if row["kind"] == "eval" else (row["tokens"], row["loss"])
    for role in ("origin", "teacher"):
        if found.get(role):
            found[role]["config"].items(), found[role]["fingerprint"]
    if found.get("eval"):
        for field in EVAL_FIELDS:
            found["eval"][field]


def _without_repeats(records: list[Record]) -> list[Record]:
    """Marks all but the first of finished runs with the same config, seed, text and runs that they came from, which
    would count as two seeds."""
    seen: dict[tuple, str] = {}
    kept = []
    for record in records:
        if record.eval:
            others = [other and other["fingerprint"] for other in (record.origin, record.teacher)]
            first = seen.setdefault((record.key(), record.seed, *others), record.source)
            if first != record.source:
                record = record._replace(
                    eval=None, note=f"{record.source}: the same run as {first} (config and seed), left out"
                )
        kept.append(record)
    return kept


def _rows(run_dir: AnyPath) -> list[dict[str, Any]]:
    """Rows of a run directory's metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    try:
        return read_rows(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON lines ({error})") from None


def _json(path: AnyPath) -> Any:
    """A JSON file's value."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
