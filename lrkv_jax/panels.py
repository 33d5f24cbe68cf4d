"""What every figure shows, as numbers: groups of runs, and the paper's models, to points. Nothing is drawn here.

A figure is what its points say and no more, so figures.csv, which lists them, holds every plotted number.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from lrkv_jax import paper
from lrkv_jax.grouping import KINDS, Group, mean_sd
from lrkv_jax.records import Record
from lrkv_jax.savings import savings

NAMES = {"lrkv": "LRKV", "mla": "MLA", "mha": "MHA", "gqa": "GQA", "mqa": "MQA"}
CACHE = "KV cache, % of MHA's"
PAPER_CACHE = "KV cache, % of MHA's, as the paper counts"
TO_MHA = "difference to MHA"
RATIO = 46 / 128  # the paper's R/C at 128M: where one LRKV stands for all, the one nearest to it
LATENT_RATIO = 1.0  # and its L/C
WAYS = ("1", "2", "3", "6")  # of tensor parallelism


class Point(NamedTuple):
    """One plotted number."""

    series: str
    """The model, as figures.csv names it."""
    x: float
    y: float
    error: float | None = None
    """Standard deviation over seeds."""
    seeds: int | None = None
    """Behind y; None for the paper, which names none."""
    source: Literal["ours", "paper"] = "ours"
    """Whose number."""
    line: str = ""
    """Entry in the legend; points of one line and look are joined where the line is of one quantity."""
    look: str = "other"
    """What the model is, for colour and marker."""
    tag: str = ""
    """A word beside the point."""
    fill: Literal["full", "none", "left"] = "full"
    """Of the marker: hollow for controls and the paper's 128M, half for its 2.5B."""
    joined: bool = False
    """Whether a line runs through it."""


class Panel(NamedTuple):
    """One pair of axes."""

    figure: str
    name: str
    title: str
    x: str
    y: str
    points: list[Point]
    note: str = ""
    """Why it is empty or lacks something."""
    anchor: float | None = None
    """MHA's value: a second y axis counts from there."""
    window: float | None = None
    """The x from where on the axes show the points; earlier ones lie outside."""
    ticks: dict[float, str] | None = None
    """Words at places of the x axis, rather than numbers."""
    wide: bool = False
    """Whether it takes a row of its own."""
    legend: bool = False
    """Whether it has a legend of its own, rather than a share in the figure's."""


def all_panels(found: list[Group]) -> list[Panel]:
    """The panels of all four figures, in order."""
    shown = [group for group in found if group.role != "apart"]
    main = [group for group in shown if group.role == "main"]
    return [*quality(shown, main), *saved(shown, main), *per_device(main), *diversity(main)]


def quality(shown: list[Group], main: list[Group]) -> list[Panel]:
    """Figure 1: cross-entropy against cache and against tokens."""
    return [
        _against_cache("1", "a", "ce", "test CE, nats/token", "a  Our models", shown, main),
        _paper_against_cache("1", "a paper", "ce", f"{TO_MHA}, nats/token"),
        *_by_rank(main),
    ]


def saved(shown: list[Group], main: list[Group]) -> list[Panel]:
    """Figure 2: bits per byte against cache, and compute saved."""
    return [
        _against_cache("2", "a", "bits_per_byte", "bits per byte", "a  Our models", shown, main),
        _paper_against_cache("2", "a paper", "bits_per_byte", f"{TO_MHA}, bits/byte"),
        _saved(main, "FLOPs"),
        _saved(main, "tokens"),
    ]


def _look(group: Group) -> str:
    return f"{group.kind} {group.mode}".strip()


def _tag(group: Group) -> str:
    return {"lrkv": f"R={group.size}", "mla": f"L={group.size}"}.get(group.kind, group.label)


def _dress(group: Group, shown: list[Group]) -> dict:
    """Legend entry and look of a group among those of its panel."""
    if group.role == "matched":
        return {"line": "MLP width adjusted", "look": _look(group), "fill": "none"}
    if group.role == "control":
        return {"line": group.label, "look": _look(group), "fill": "none"}
    alike = [other for other in shown if other.role == "main" and _look(other) == _look(group)]
    mode = "" if group.mode in ("", "full") else group.mode
    by = {"lrkv": "R", "mla": "L"}.get(group.kind)
    if len(alike) > 1 and by:
        line = f"{NAMES[group.kind]} {mode}".strip() + f" by {by}"
        return {"line": line, "look": _look(group), "tag": _tag(group), "joined": True}
    return {"line": group.label, "look": _look(group), "tag": mode or group.label}


def _against_cache(
    figure: str, name: str, field: str, y: str, title: str, shown: list[Group], main: list[Group]
) -> Panel:
    points = []
    for group in shown:
        mean, sd = group.mean(field)
        points.append(Point(group.label, group.cache_percent, mean, sd, group.seeds, **_dress(group, shown)))
    missing = [NAMES[kind] for kind in KINDS if kind not in {group.kind for group in main}]
    note = f"no finished run of {', '.join(missing)}" if missing else ""
    mha = _first(main, "mha")
    return Panel(figure, name, title, CACHE, y, points, note, anchor=mha and mha.mean(field)[0], wide=True)


def _paper_against_cache(figure: str, name: str, field: str, y: str) -> Panel:
    points = []
    for model in paper.TABLE:
        value = getattr(model, field)
        if value is not None:
            difference = value - getattr(paper.mha(model.scale), field)
            points.append(_printed(model, model.cache_percent, difference))
    return Panel(
        figure, name, "a  The paper's models, on another corpus", PAPER_CACHE, y, points, legend=True, wide=True
    )


def _printed(model: paper.Printed, x: float, y: float) -> Point:
    small = model.scale == "128M"
    tag = {"lrkv": f"R={model.size}", "mla": f"L={model.size}"}.get(model.kind, model.label)
    return Point(
        f"{model.label}, {model.scale}",
        x,
        y,
        source="paper",
        line=f"paper, {model.scale}",
        look="lrkv full" if model.kind == "lrkv" else model.kind,
        tag=tag if small else "",
        fill="none" if small else "left",
        joined=small and model.size is not None,
    )


def _by_rank(main: list[Group]) -> list[Panel]:
    """Held-out curves of the mode with most ranks and of MHA, and where they end, by rank."""
    modes = [group.mode for group in main if group.kind == "lrkv"]
    mode = max(modes, key=modes.count, default="full")
    ranks = [group for group in main if group.kind == "lrkv" and group.mode == mode]
    mha = _first(main, "mha")
    points = [point for group in [*ranks, *([mha] if mha else [])] for point in _curve(group)]
    note = "" if ranks else "no finished run of LRKV"
    unseen = note or ("" if points else "no evaluation while training")
    last = max((point.x for point in points), default=0.0)
    curves = Panel(
        *(
            "1",
            "b",
            f"b  Ours, LRKV {mode} by R",
            "training tokens, millions",
            "validation CE, nats/token",
            points,
            unseen,
        ),
        window=0.5 * last,
        legend=True,
    )
    ends = [point for group in ranks if mha for point in _end(group, mha)]
    if not ends:
        note = note or ("no seed in common with MHA" if mha else "no finished run of MHA")
    ends += [
        _printed(model, model.size / paper.HEAD_DIM, model.ce - paper.mha("128M").ce)._replace(tag="")
        for model in paper.TABLE
        if (model.kind, model.scale) == ("lrkv", "128M")
    ]
    title = "b  Where they end"
    return [curves, Panel("1", "b end", title, "R / C", f"test CE, {TO_MHA}", ends, note, legend=True)]


def _curve(group: Group) -> list[Point]:
    """Mean held-out curve, where all seeds were evaluated."""
    curves = [dict(run.curve()) for run in group.runs]
    dress = {"line": _tag(group), "look": f"rank {group.size}" if group.kind == "lrkv" else "mha", "joined": True}
    steps = sorted(set.intersection(*map(set, curves)))
    means = [mean_sd([curve[tokens] for curve in curves]) for tokens in steps]
    return [
        Point(group.label, tokens / 1e6, mean, sd, group.seeds, **dress)
        for tokens, (mean, sd) in zip(steps, means, strict=True)
    ]


def _end(group: Group, mha: Group) -> list[Point]:
    """Final difference to MHA, seed by seed: a seed fixes the order of the data for both."""
    differences = [ours.eval["ce"] - theirs.eval["ce"] for ours, theirs in pairs(group, mha)]
    if not differences:
        return []
    mean, sd = mean_sd(differences)
    ratio = group.size / group.fields["attention.head_dim"]
    line = f"ours, LRKV {group.mode}"
    return [Point(group.label, ratio, mean, sd, len(differences), line=line, look=_look(group), joined=True)]


def pairs(group: Group, other: Group) -> list[tuple[Record, Record]]:
    """Runs of two groups that share their seed."""
    theirs = {run.seed: run for run in other.runs}
    return [(run, theirs[run.seed]) for run in group.runs if run.seed in theirs]


def _first(main: list[Group], kind: str) -> Group | None:
    return next((group for group in main if group.kind == kind), None)


def references(main: list[Group]) -> list[Group]:
    """Of each rope mode the LRKV whose R/C is nearest to the paper's."""
    ranks = [group for group in main if group.kind == "lrkv"]
    modes = dict.fromkeys(group.mode for group in ranks)
    return [_nearest([group for group in ranks if group.mode == mode], RATIO) for mode in modes]


def _nearest(alike: list[Group], ratio: float) -> Group:
    return min(alike, key=lambda group: abs(group.size / group.fields["attention.head_dim"] - ratio))


def _saved(main: list[Group], unit: Literal["FLOPs", "tokens"]) -> Panel:
    """Share of a baseline's compute that LRKV does without, seed by seed."""
    baselines = [group for group in main if group.kind != "lrkv"]
    found = [_saving(ours, baseline, unit) for ours in references(main) for baseline in baselines]
    points = [point for point in found if isinstance(point, Point)]
    notes = [why for why in found if isinstance(why, str)]
    if not found:
        notes = ["no finished run of LRKV" if baselines else "no finished run of a baseline"]
    if unit == "FLOPs":
        for kind, percent in paper.SAVINGS.items():
            model = next(model for model in paper.TABLE if (model.scale, model.kind) == ("2.5B", kind))
            series = f"LRKV R=55 to reach {model.label}, 2.5B"
            dress = {"line": "paper, 2.5B, R/C = 0.43", "look": "paper", "tag": NAMES[kind], "fill": "none"}
            points.append(Point(series, model.cache_percent, percent, source="paper", **dress))
    points = [point if _is_top(point, points) else point._replace(tag="") for point in points]
    x, y = "KV cache of the baseline, %", "% of the baseline's"
    return Panel("2", f"b {unit}", f"b  Compute saved, {unit}", x, y, points, "; ".join(notes))


def _is_top(point: Point, points: list[Point]) -> bool:
    """Whether no other point of the same source stands above this one, which then names the baseline for all."""
    return point.y == max(other.y for other in points if (other.x, other.source) == (point.x, point.source))


def _saving(ours: Group, baseline: Group, unit: str) -> Point | str:
    """The point, or why there is none."""
    what = f"{ours.label} to reach {baseline.label}"
    found = []
    for run, other in pairs(ours, baseline):
        if not run.curve() or not other.curve() or other.curve()[-1][0] != other.eval["train_tokens"]:
            return f"{what}: n/a, not evaluated while training or at its end (seed {run.seed})"
        costs = [one.eval["train_flops"] / one.eval["train_tokens"] if unit == "FLOPs" else 1.0 for one in (run, other)]
        found.append(savings(run.curve(), other.curve(), *costs))
    if not found:
        return f"{what}: n/a, no seed in common"
    reached = [saved for saved in found if saved]
    if len(reached) < len(found):
        return f"{what}: n/a, reached by {len(reached)} of {len(found)} seeds"
    mean, sd = mean_sd([100 * saved.share for saved in reached])
    least = any(saved.at_least for saved in reached)
    return Point(
        what + " (at least)" * least,
        baseline.cache_percent,
        mean,
        sd,
        len(reached),
        line=ours.label,
        look=_look(ours),
        tag="≥ " * least + _tag(baseline),
    )


def per_device(main: list[Group]) -> list[Panel]:
    """Figure 3: cross-entropy against the bytes that each device keeps of a token, by ways of tensor parallelism."""
    lacking = [group.label for group in main if not group.runs[0].shards]
    note = f"no cache bytes per device (`shards`) in {', '.join(lacking)}" if lacking else ""
    ways = sorted({way for group in main for way in group.runs[0].shards or ()}, key=int) or WAYS
    panels = []
    for way in ways:
        points = []
        for group in main:
            if way in (group.runs[0].shards or ()):
                mean, sd = group.mean("ce")
                dress = _dress(group, main)
                points.append(Point(group.label, float(group.runs[0].shards[way]), mean, sd, group.seeds, **dress))
        x = "KV cache per device, bytes/token"
        panels.append(Panel("3", f"tensor {way}", f"tensor = {way}", x, "test CE, nats/token", points, note))
    return panels


def diversity(main: list[Group]) -> list[Panel]:
    """Figure 4: effective rank of the heads by layer; the paper's are means over layers."""
    latents = [group for group in main if group.kind == "mla"]
    chosen = references(main) + ([_nearest(latents, LATENT_RATIO)] if latents else [])
    chosen += [group for group in main if group.kind not in ("lrkv", "mla")]
    lacking = [group.label for group in chosen if not any(run.diversity for run in group.runs)]
    note = f"no head diversity (python -m lrkv_jax.diversity RUN_DIR) in {', '.join(lacking)}" if lacking else ""
    if not chosen:
        note = "no finished run"
    panels = []
    for index, name in enumerate(("uncentred", "centred")):
        points = [point for group in chosen for point in _ranks(group, name)]
        right = max((point.x for point in points), default=0.0) + 1
        for kind, shares in paper.DIVERSITY.items():
            look = "lrkv full" if kind == "lrkv" else kind
            dress = {"line": "paper, 2.5B, all layers", "look": look, "fill": "left"}
            points.append(Point(f"{NAMES[kind]}, 2.5B", right, shares[index], source="paper", **dress))
        layers = sorted({point.x for point in points if point.source == "ours"})
        ticks = {layer: f"{layer:.0f}" for layer in layers[:: len(layers) // 8 + 1]} | {right: "paper"}
        y = "effective rank, % of H"
        panels.append(Panel("4", name, f"Head diversity, {name}", "layer", y, points, note, ticks=ticks))
    return panels


def _ranks(group: Group, name: str) -> list[Point]:
    runs = [run.diversity for run in group.runs if run.diversity]
    points = []
    for rows in zip(*runs, strict=True):
        mean, sd = mean_sd([100 * row[name] / row["heads"] for row in rows])
        dress = {"line": group.label, "look": _look(group), "joined": True}
        points.append(Point(group.label, float(rows[0]["layer"]), mean, sd, len(runs), **dress))
    return points
