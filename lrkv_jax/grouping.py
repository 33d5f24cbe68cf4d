"""Which runs belong together in a figure: seeds into groups, groups named and given the part they play.

All groups of a figure share the text, the Transformer's depth and width and the training length. Among them the most
common head shape and MLP width make the main comparison, in which attention alone is swapped; the others are shown as
what they are, controls and matched sets, and what trained or was scored otherwise is kept apart.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from lrkv_jax.records import Record, groups

KINDS = ("lrkv", "mla", "mha", "gqa", "mqa")
Role = Literal["main", "matched", "control", "apart"]
ROLES = ("main", "matched", "control", "apart")
# Fields of every attention family; where one differs, more than the kind of attention was swapped.
HEADS = tuple(f"attention.{name}" for name in ("heads", "head_dim", "rope_base", "qk_norm", "qkv_bias"))
# What may differ within a figure: the attention, its rates, and the MLP that makes up for its parameters.
SWAPPED = ("attention.", "optimizer.", "model.mlp_width", "train.seed", "family")


class Group(NamedTuple):
    """Finished runs that differ in their seed only."""

    runs: list[Record]
    """By seed, at least one."""
    fields: dict[str, Any]
    """The config's, by dotted name; null ones left out."""
    label: str
    """One of its own, for tables and figures."""
    role: Role
    """`main`, `matched` (the MLP's width adjusted), `control` (heads or rotation differ), or `apart`."""
    cache_percent: float
    """Cache bytes over those of MHA with the main comparison's heads; of a group apart, with its own."""

    @property
    def kind(self) -> str:
        """One of KINDS, or another family's name."""
        family = self.fields["attention.family"]
        if family != "gqa":
            return family
        return "mha" if self.size == self.fields["attention.heads"] else "mqa" if self.size == 1 else "gqa"

    @property
    def mode(self) -> str:
        """LRKV's rope mode; empty for others."""
        return self.fields.get("attention.rope_mode", "")

    @property
    def size(self) -> int:
        """R, L or K; 0 for a family that we don't know."""
        knob = {"lrkv": "rank", "mla": "latent", "gqa": "kv_heads"}.get(self.fields["attention.family"], "")
        return self.fields.get(f"attention.{knob}", self.fields["attention.heads"] if knob == "kv_heads" else 0)

    @property
    def seeds(self) -> int:
        """How many runs."""
        return len(self.runs)

    def mean(self, field: str) -> tuple[float, float | None]:
        """Mean of a field of eval.json over seeds, and its standard deviation."""
        return mean_sd([run.eval[field] for run in self.runs])


def mean_sd(values: list[float]) -> tuple[float, float | None]:
    """Mean, and sample standard deviation where there are two values or more."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def arrange(records: list[Record]) -> tuple[list[Group], list[str]]:
    """All groups, the main ones first and by kind and size, and a line for every run that is not in the figures."""
    found = [
        Group(runs, runs[0].fields(), "", "apart", float(runs[0].eval["cache_percent_of_mha"]))
        for runs in groups(records)
    ]
    comparable = {id(group) for group in most_common(found, _setting)}
    main = next(iter(most_common([group for group in found if id(group) in comparable], _heads)), None)
    found = [_placed(group, main) if id(group) in comparable else group for group in found]
    found = _named(sorted(_one_each(found), key=_order))
    notes = [record.note for record in records if record.note]
    notes += [
        f"{group.label} ({group.runs[0].source}): trained or scored otherwise than the others "
        f"({_difference(group, found[0], SWAPPED)}), left out of the figures"
        for group in found
        if group.role == "apart"
    ]
    return found, notes


def most_common(found: list[Group], key: Callable[[Group], Any]) -> list[Group]:
    """The groups of the most frequent key; of equally frequent ones, the first."""
    counts = Counter(map(key, found)).most_common(1)
    return [group for group in found if key(group) == counts[0][0]]


def _setting(group: Group) -> Any:
    fields = {name: value for name, value in group.fields.items() if not name.startswith(SWAPPED)}
    return str(sorted(fields.items())), group.runs[0].scored()


def _heads(group: Group) -> Any:
    return tuple(group.fields.get(name) for name in (*HEADS, "model.mlp_width"))


def _placed(group: Group, main: Group) -> Group:
    """The group with its role, given one of the main comparison, and its cache against that comparison's MHA."""
    cache, other = (one.runs[0].eval["cache_bytes_per_token"] for one in (group, main))
    percent = cache / other * main.cache_percent
    role: Role = "main" if _heads(group) == _heads(main) else "matched"
    if _heads(group)[:-1] != _heads(main)[:-1] or not _plain(group):
        role = "control"
    return group._replace(role=role, cache_percent=percent)


def _plain(group: Group) -> bool:
    """Whether rotation and residual heads are the family's defaults, and all layers alike."""
    fields, heads, head_dim = group.fields, group.fields["attention.heads"], group.fields["attention.head_dim"]
    rotary = {"gqa": head_dim, "mla": head_dim // 2}.get(fields["attention.family"])
    usual = fields.get("attention.rotary_dim", rotary) == rotary
    alike = not fields.get("attention.ranks")
    return usual and alike and (group.kind != "lrkv" or fields.get("attention.kv_heads", heads) == heads)


def _one_each(found: list[Group]) -> Iterable[Group]:
    """Of main groups that differ in their rates only, keeps one as such: most seeds, then the least validation CE."""

    def worth(group: Group) -> tuple[int, float]:
        ends = [run.curve()[-1][1] for run in group.runs if run.curve()]
        return -group.seeds, statistics.fmean(ends) if ends else float("inf")

    best: dict[Any, Group] = {}
    for group in sorted((group for group in found if group.role == "main"), key=worth):
        best.setdefault(_model(group), group)
    for group in found:
        chosen = group.role != "main" or best[_model(group)] is group
        yield group if chosen else group._replace(role="control")


def _model(group: Group) -> Any:
    """The attention alone, whatever its rates."""
    return tuple(sorted(item for item in group.fields.items() if item[0].startswith("attention.")))


def _order(group: Group) -> tuple:
    kind = KINDS.index(group.kind) if group.kind in KINDS else len(KINDS)
    return ROLES.index(group.role), kind, group.mode != "full", group.mode, group.size


def _named(found: list[Group]) -> list[Group]:
    """Gives each group a label of its own: the one its runs bring or one from its config, and what sets it apart."""
    taken: dict[str, Group] = {}
    for index, group in enumerate(found):
        label = next((run.label for run in group.runs if run.label), describe(group))
        if label in taken:
            label = f"{label} ({_difference(group, taken[label])})"
        if label in taken:
            label = f"{label} {group.runs[0].name}"
        taken[label] = found[index] = group._replace(label=label)
    return found


def describe(group: Group) -> str:
    """A label from the config: `LRKV R=12 shared`, `GQA-3`; of an unknown family, the name of its config."""
    mode = "" if group.mode == "full" else f" {group.mode}"
    ranks = group.fields.get("attention.ranks") or [group.size]
    names = {
        "lrkv": f"LRKV R={' '.join(map(str, ranks))}{mode}",
        "mla": f"MLA L={group.size}",
        "mha": "MHA",
        "gqa": f"GQA-{group.size}",
        "mqa": "MQA",
    }
    return names.get(group.kind) or group.fields.get("family", group.kind)


def _difference(group: Group, other: Group, free: tuple[str, ...] = ("train.seed", "family")) -> str:
    """The fields in which a group differs from another, those that may be passed over; at most three of them."""
    names = sorted(group.fields.keys() | other.fields.keys())
    differ = [name for name in names if group.fields.get(name) != other.fields.get(name) and not name.startswith(free)]
    listed = [f"{name.split('.')[-1]} {group.fields.get(name, 'default')}" for name in differ]
    more = [f"{len(listed) - 3} more"] if len(listed) > 3 else []
    return ", ".join(listed[:3] + more) or "another text"
