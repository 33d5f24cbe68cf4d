"""What two runs, or two methods with three seeds each, show about each other.

    python -m lrkv_jax.compare RUN_A RUN_B
    python -m lrkv_jax.compare --group A1 A2 A3 --against B1 B2 B3

A run is a run directory or the JSON file that a study keeps of one. Two runs are compared document by document of the
test split, with a bootstrap interval over documents: that is about two checkpoints. About two methods only seeds can
tell, three a side at least. A seed fixes the order of the data whatever the method, so that groups of the same seeds
are compared seed by seed, with Student's t interval over the differences; others with Welch's. Differences are A − B.

Runs of another corpus, tokenizer, split or context are refused: their numbers don't compare.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from lrkv_jax.intervals import LEVEL, RESAMPLES, Interval, paired, paired_bootstrap, smallest_difference, welch
from lrkv_jax.records import Record, read_runs
from lrkv_jax.settings import Parser, UserError, command
from lrkv_jax.storage import AnyPath, path

SEEDS = 3  # a side, for a claim about methods
# What decides which text is scored, and how it is cut.
TEXT = [
    *("dataset", "text_feature", "validation_percent", "test_percent", "begin_token", "end_token"),
    *("context", "record_tokens"),
]
SCORED = ("split", "documents", "tokens", "bytes")  # of eval.json
# Where the text lies, and what the config calls itself: no part of the method.
NAMES = ("family", "data.path", "data.tokenizer")


def main(arguments: list[str] | None = None) -> int:
    """Command line to exit status."""
    formatter = argparse.RawTextHelpFormatter
    parser = Parser("python -m lrkv_jax.compare", description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", type=path, metavar="RUN")
    parser.add_argument("--group", nargs="+", type=path, metavar="RUN", action="append", help="seeds of a method")
    parser.add_argument(
        "--against", nargs="+", type=path, metavar="RUN", action="append", dest="group", help="the same, the other one"
    )
    options = parser.parse_args(arguments)
    if options.group is None and len(options.runs) == 2:
        compare_runs(*map(read, options.runs))
    elif not options.runs and len(options.group or ()) == 2:
        compare_groups(*([read(place) for place in side] for side in options.group))
    else:
        raise UserError("compare takes two runs, RUN_A RUN_B, or two groups, --group A1 A2 A3 --against B1 B2 B3")
    return 0


def read(place: AnyPath) -> Record:
    """A finished run. Raises UserError where there is none, or not exactly one."""
    if not place.exists():
        raise UserError(f"{place}: no such run directory or file")
    folder = place if place.is_dir() else place.parent
    found = [run for run in read_runs(folder) if place.is_dir() or run.source == str(place)]
    if len(found) != 1:
        raise UserError(f"{place}: holds {len(found)} runs, where one is meant")
    if found[0].note:
        raise UserError(found[0].note)
    return found[0]


def compare_runs(a: Record, b: Record) -> None:
    """Prints what two checkpoints show about each other."""
    nats_a, nats_b = document_nats(a), document_nats(b)
    check_same_text([a, b])
    found = paired_bootstrap(nats_a, nats_b, np.array(a.documents["tokens"]))
    print(table([a], [b]))
    count = len(nats_a)
    print(
        f"\nA - B = {tell(found)}, {RESAMPLES:,} resamples of {count} documents that both scored.\n"
        f"{verdict(found, 'of these two checkpoints', 'On text such as this')}\n"
        f"That is about two checkpoints and not about two methods: one run a side can't show how far another seed "
        f"would move either.\nThree seeds a side can: compare --group A1 A2 A3 --against B1 B2 B3."
    )


def compare_groups(a: list[Record], b: list[Record]) -> None:
    """Prints what the seeds of two methods show about each other. Raises UserError below three seeds a side."""
    check_same_text([*a, *b])
    for side, group in (("A", a), ("B", b)):
        check_one_method(side, group)
    print(table(a, b))
    fewest = min(len(a), len(b))
    if fewest < SEEDS:
        print(
            "\nWhat may be said: these runs ended at these numbers. They are too few to show how much of the "
            "difference is the seeds'."
        )
        raise UserError(
            f"{len(a)} and {len(b)} seeds: a claim about two methods needs at least {SEEDS} a side (about two "
            f"checkpoints: compare RUN_A RUN_B)"
        )
    ces = [[run.eval["ce"] for run in sorted(side, key=lambda run: run.seed)] for side in (a, b)]
    apart = welch(*ces)
    pairs = {run.seed for run in a} == {run.seed for run in b}
    if pairs:
        found, sd = paired(*ces), float(np.std(np.subtract(*ces), ddof=1))
        how = f"Student's t over {fewest} differences, seed by seed; unpaired {apart.low:+.4f} to {apart.high:+.4f}"
    else:
        found, sd = apart, float(np.sqrt(np.mean([np.var(side, ddof=1) for side in ces])))
        how = f"Welch's t over {len(a)} and {len(b)} seeds"
    print(
        f"\nA - B = {tell(found)}, {how}.\n"
        f"{verdict(found, 'of these two methods', 'As these configs train on this text')}\n"
        f"With this spread over {'differences' if pairs else 'seeds'} (sd {sd:.4f}) {fewest} a side find one of "
        f"{smallest_difference(sd, fewest, pairs=pairs):.4f} four times in five; a smaller one may be there unseen.\n"
        f"All runs scored the same documents: what holds on other text, or at another size, they don't show."
    )


def document_nats(run: Record) -> np.ndarray:
    """Nats by test document. Raises UserError where the run has none, or they are of another evaluation."""
    if not run.documents:
        raise UserError(f"{run.source}: no sums by document; `python eval.py RUN_DIR` writes them")
    nats, tokens = (np.array(run.documents[name]) for name in ("nats", "tokens"))
    if abs(nats.sum() / tokens.sum() - run.eval["ce"]) > 1e-9:
        raise UserError(
            f"{run.source}: the sums by document are of another evaluation; `python eval.py RUN_DIR` writes both anew"
        )
    return nats


def check_same_text(runs: list[Record]) -> None:
    """Raises UserError naming two runs that were not scored on the same tokens of the same documents."""
    views: list[tuple[str, Callable[[Record], Any]]] = [
        *((f"data.{name}", lambda run, name=name: run.config["data"].get(name)) for name in TEXT),
        *((f"eval's {name}", lambda run, name=name: run.eval.get(name)) for name in SCORED),
        ("the corpus's fingerprint", fingerprint),
    ]
    first = runs[0]
    for run in runs[1:]:
        for name, view in views:
            ours, theirs = view(first), view(run)
            if ours != theirs and not (view is fingerprint and None in (ours, theirs)):
                raise UserError(
                    f"{name}: {ours} in {first.source}, {theirs} in {run.source}; their numbers don't compare"
                )
        if first.documents and run.documents:
            for name in ("tokens", "bytes"):
                if first.documents[name] != run.documents[name]:
                    raise UserError(
                        f"{first.source} and {run.source}: documents of different {name}, so of another text or "
                        f"tokenizer; their numbers don't compare"
                    )


def fingerprint(run: Record) -> str | None:
    """Of text, splits and tokenizer, as a run directory keeps it; None where a run is one file."""
    place = path(run.source) / "corpus.json"
    try:
        return json.loads(place.read_text())["fingerprint"] if place.exists() else None
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{place}: not a corpus.json that a run has written") from None


def check_one_method(side: str, group: list[Record]) -> None:
    """Raises UserError unless the runs of a group are one method with different seeds."""
    for run in group[1:]:
        fields = [name for name in differences(group[0], run) if name != "train.seed"]
        if fields:
            raise UserError(
                f"group {side}: {group[0].source} and {run.source} are no seeds of one method, they differ in "
                f"{', '.join(fields)}"
            )
    seeds = [run.seed for run in group]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"group {side}: seeds {', '.join(map(str, seeds))}; a run counted twice is no second seed")


def differences(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """The config's fields in which two runs differ, with both values; "-" where a run has no such field."""
    ours, theirs = a.fields(), b.fields()
    fields = (name for name in [*ours, *(theirs.keys() - ours.keys())] if name not in NAMES)
    pairs = {name: (ours.get(name, "-"), theirs.get(name, "-")) for name in fields}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def table(a: list[Record], b: list[Record]) -> str:
    """Two sides by rows; the difference where it is one."""

    def mean(side: list[Record], field: str) -> float:
        return sum(run.eval[field] for run in side) / len(side)

    def row(label: str, field: str, form: str, percent: bool = False) -> tuple[str, ...]:
        ours, theirs = mean(a, field), mean(b, field)
        share = f" ({100 * (ours / theirs - 1):+.1f} %)" if percent else ""
        return label, format(ours, form), format(theirs, form), f"{ours - theirs:+{form}}{share}"

    def each(side: list[Record], view: Callable[[Record], Any]) -> str:
        return ", ".join(str(view(run)) for run in side)

    several = len(a) + len(b) > 2
    ces = ("CE by seed", *(each(side, lambda run: f"{run.eval['ce']:.4f}") for side in (a, b)), "")
    rows = [
        ("", "A", "B", "A - B"),
        ("run", a[0].name, b[0].name, ""),
        ("seed", each(a, lambda run: run.seed), each(b, lambda run: run.seed), ""),
        *([ces] if several else []),
        row(f"{a[0].eval['split']} CE, {'mean, ' if several else ''}nats/token", "ce", ".4f"),
        row("bits per byte", "bits_per_byte", ".4f"),
        row("parameters", "parameters", ",.0f", percent=True),
        row("KV cache, bytes/token", "cache_bytes_per_token", ",.0f", percent=True),
        row("KV cache, % of MHA", "cache_percent_of_mha", ".1f"),
        row("trained on, tokens", "train_tokens", ",.0f"),
        row("training FLOPs", "train_flops", ".3g"),
    ]
    return f"{align(rows)}\n\n{confounds(differences(a[0], b[0]), several)}"


def confounds(varied: dict[str, tuple[Any, Any]], several: bool) -> str:
    """In which fields the two sides differ, and a warning where it is more than the attention."""
    if several:
        varied.pop("train.seed", None)
    listed = ", ".join(f"{name} {ours} | {theirs}" for name, (ours, theirs) in varied.items())
    told = f"Configs differ in (A | B): {listed or 'nothing'}"
    if all(name.startswith("attention.") for name in varied):
        return told
    return f"{told}\nThat is more than the attention: the difference may come of any of these fields."


def align(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of text with aligned columns, the first to the left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"{first:<{widths[0]}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        for first, *rest in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def tell(found: Interval) -> str:
    """An interval as a person reads it."""
    return f"{found.estimate:+.4f} nats/token, {100 * LEVEL:.0f} % interval {found.low:+.4f} to {found.high:+.4f}"


def verdict(found: Interval, what: str, where: str) -> str:
    """The sentence that an interval supports."""
    if not found.excludes_zero():
        return f"{where}, neither {what} can be called the better one: the interval holds 0."
    return f"{where}, {'A' if found.estimate < 0 else 'B'} is the better {what}: the interval excludes 0."


if __name__ == "__main__":
    command(main)()
