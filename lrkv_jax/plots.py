"""Panels as pictures: every point as an error bar of matplotlib, coloured by what the model is. Imports no JAX.

Colours are those of Okabe and Ito, which colour-blind readers tell apart, and each has a marker of its own; ranks run
through viridis. Sizes are for a picture shown at half of the page's width.
"""

from __future__ import annotations

import io
import textwrap
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lrkv_jax.panels import Panel, Point
from lrkv_jax.tags import GREY, place

PAPER_GROUND = "0.95"  # of panels that hold nothing of ours
LOOKS = {
    "lrkv full": ("#0072B2", "o", "-"),
    "lrkv shared": ("#56B4E9", "s", "--"),
    "lrkv latent": ("#CC79A7", "^", ":"),
    "mla": ("#D55E00", "D", "-"),
    "mha": ("#000000", "P", "-"),
    "gqa": ("#009E73", "v", "-"),
    "mqa": ("#E69F00", "X", "-"),
    "paper": (GREY, "d", ""),
    "other": (GREY, "p", "-"),
}
RANK_MARKERS = "osD^vPX<>"
CONTROL_MARKERS = "<>hpd8H"
TEXT = {
    "font.size": 13,
    "axes.titlesize": 13,
    "axes.labelsize": 12.5,
    "legend.fontsize": 11.5,
    "svg.hashsalt": "lrkv",  # the same runs draw the same file
}
LEGEND = {"framealpha": 0.9, "handlelength": 1.5, "columnspacing": 1.0, "handletextpad": 0.5}
NOTE = {"ha": "center", "va": "bottom", "color": GREY, "fontsize": 10.5}
WIDTH, HEIGHT = 8.4, 3.8  # inches, of a row of two panels


class Style(NamedTuple):
    """How one series is drawn."""

    colour: str | tuple
    marker: str
    line: str
    fill: str


def pictures(name: str, panels: list[Panel]) -> dict[str, bytes]:
    """A figure's two files, PNG and SVG, by name."""
    files = {}
    with plt.rc_context(TEXT):  # also while saving: the choice of ticks depends on the size of their labels
        figure = draw(panels)
        for suffix, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            picture = io.BytesIO()
            figure.savefig(picture, format=suffix, **options)
            files[f"{name}.{suffix}"] = picture.getvalue()
    plt.close(figure)
    return files


def draw(panels: list[Panel]) -> Figure:
    """One figure: its panels two in a row or wide, one legend below for those that have none of their own."""
    figure, grid = _grid(panels)
    handles: dict[str, Line2D] = {}
    for panel, axes in zip(panels, grid, strict=True):
        found = _panel(panel, axes)
        if panel.legend:
            axes.legend(handles=list(found.values()), loc="upper right", ncols=len(found) // 5 + 1, **LEGEND)
        else:
            handles |= {line: handle for line, handle in found.items() if line not in handles}
    if handles:
        figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=3, **LEGEND)
    for _ in range(2):  # the first sets the limits of second y axes, whose labels then need room
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for panel, axes in zip(panels, grid, strict=True):
        place(axes, panel.points, _series(panel.points).values())
    return figure


def _grid(panels: list[Panel]) -> tuple[Figure, list[Axes]]:
    """A figure with axes for each panel, row by row."""
    places, row, column = [], 0, 0
    for panel in panels:
        if panel.wide and column:
            row, column = row + 1, 0
        places.append((row, slice(0, 2) if panel.wide else column))
        column = (column + 1 + panel.wide) % 2
        row += not column
    rows = row + bool(column)
    figure = plt.figure(figsize=(WIDTH, HEIGHT * rows), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    grid = figure.add_gridspec(rows, 2)
    return figure, [figure.add_subplot(grid[place]) for place in places]


def _panel(panel: Panel, axes: Axes) -> dict[str, Line2D]:
    """Draws a panel's points; its legend's entries by name."""
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    axes.grid(alpha=0.3)
    if not panel.points:
        axes.set(xticks=[], yticks=[])
        _excuse(panel, axes)
        return {}
    if all(point.source == "paper" for point in panel.points):
        axes.set_facecolor(PAPER_GROUND)
    styles = _styles(panel.points)
    for (line, look, fill), points in _series(panel.points).items():
        style = styles[line, look, fill]
        axes.errorbar(
            [point.x for point in points],
            [point.y for point in points],
            yerr=[float("nan") if point.error is None else point.error for point in points],
            color=style.colour,
            marker=style.marker,
            linestyle=style.line if points[0].joined else "",
            fillstyle=style.fill,
            **({"markerfacecoloralt": "white"} if style.fill == "left" else {}),
            markersize=7 if panel.window is None else 5,
            linewidth=1.4,
            capsize=3,
            zorder=2 if points[0].joined else 3,
        )
    axes.margins(0.09, 0.12)
    if panel.note and not any(point.source == "ours" for point in panel.points):
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.5 * (high - low), high)
        _excuse(panel, axes)
    if panel.anchor is not None:
        anchor = panel.anchor
        second = axes.secondary_yaxis("right", functions=(lambda y: y - anchor, lambda y: y + anchor))
        second.set_ylabel("difference to MHA")
    if panel.ticks is not None:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
    if panel.window is not None:
        _zoom(panel, axes)
    return _handles(panel.points, styles)


def _excuse(panel: Panel, axes: Axes) -> None:
    """Writes into an empty part of the axes why nothing of ours is there."""
    note = textwrap.shorten(f"nothing of ours: {panel.note}", 130, placeholder=" ...")
    axes.text(0.5, 0.04, textwrap.fill(note, 34), transform=axes.transAxes, **NOTE)


def _series(points: list[Point]) -> dict[tuple[str, str, str], list[Point]]:
    """Points that are drawn alike, by x."""
    found: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.line, point.look, point.fill), []).append(point)
    return {key: sorted(members, key=lambda point: point.x) for key, members in found.items()}


def _styles(points: list[Point]) -> dict[tuple[str, str, str], Style]:
    """Colour by look, marker too; ranks through a scale, controls with markers of their own."""
    styles, controls = {}, 0
    keys = list(_series(points))
    ranks = [key for key in keys if key[1].startswith("rank ")]
    for key in keys:
        line, look, fill = key
        colour, marker, dash = LOOKS.get(look, LOOKS["other"])
        if key in ranks:
            place = ranks.index(key)
            colour = matplotlib.colormaps["viridis"](0.95 * place / max(len(ranks) - 1, 1))
            marker, dash = RANK_MARKERS[place % len(RANK_MARKERS)], "-"
        elif fill == "none" and line not in ("MLP width adjusted",) and not line.startswith("paper"):
            marker = CONTROL_MARKERS[controls % len(CONTROL_MARKERS)]
            controls += 1
        styles[key] = Style(colour, marker, dash, fill)
    return styles


def _handles(points: list[Point], styles: dict[tuple[str, str, str], Style]) -> dict[str, Line2D]:
    """One legend entry a line: as it looks, or grey where several looks share it."""
    entries = {}
    for line in dict.fromkeys(point.line for point in points):
        alike = [style for key, style in styles.items() if key[0] == line]
        joined = any(point.joined for point in points if point.line == line)
        style = alike[0] if len(alike) == 1 else Style(GREY, "o", "", alike[0].fill)
        entries[line] = Line2D(
            [],
            [],
            color=style.colour,
            marker=style.marker,
            linestyle=style.line if joined else "",
            fillstyle=style.fill,
            markerfacecoloralt="white",
            markersize=7,
            label=line,
        )
    return entries


def _zoom(panel: Panel, axes: Axes) -> None:
    """Limits to the points from the window on."""
    inside = [point for point in panel.points if point.x >= panel.window]
    low, high = min(point.y for point in inside), max(point.y for point in inside)
    right = max(point.x for point in inside)
    room = high - low or 1.0
    axes.set_xlim(panel.window, right + 0.04 * (right - panel.window))
    axes.set_ylim(low - 0.08 * room, high + 0.25 * room)  # the legend lies above a falling curve
