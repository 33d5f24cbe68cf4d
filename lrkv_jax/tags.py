"""Words beside points, where they hide least. Imports no JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes

from lrkv_jax.panels import Point

GREY = "0.35"
SIZE = 11  # points
# Where a word is tried: offset in points, and which part of it stands there.
PLACES = (
    *((8, 0, "left", "center"), (-8, 0, "right", "center"), (0, 8, "center", "bottom"), (0, -8, "center", "top")),
    *((6, 6, "left", "bottom"), (-6, 6, "right", "bottom"), (6, -6, "left", "top"), (-6, -6, "right", "top")),
    *((0, 15, "center", "bottom"), (0, -15, "center", "top"), (-3, 8, "right", "bottom"), (3, -8, "left", "top")),
    *((12, 12, "left", "bottom"), (-12, 12, "right", "bottom"), (12, -12, "left", "top"), (-12, -12, "right", "top")),
)
# What a pixel of something hidden costs; beside it, a word nearer to another point, and one outside of the axes.
WORD, MARKER, LINE = 3.0, 2.0, 1.0
AMBIGUOUS, OUTSIDE = 200.0, 1e6


def place(axes: Axes, points: list[Point], lines: Iterable[list[Point]]) -> None:
    """Writes each point's tag, one after the other. `lines` are the points that are drawn together, in their order.

    The figure's layout must be settled: places are compared in pixels.
    """
    renderer = axes.figure.canvas.get_renderer()
    if not any(point.tag for point in points):
        return
    centres = axes.transData.transform([(point.x, point.y) for point in points])
    frame = axes.get_window_extent(renderer).extents
    boxes, weights = _drawn(axes, lines)
    if axes.get_legend():
        boxes, weights = [*boxes, axes.get_legend().get_window_extent(renderer).extents], [*weights, WORD]
    for point, centre in zip(points, centres, strict=True):
        if not point.tag:
            continue
        colour = GREY if point.look == "paper" else "black"
        text = axes.annotate(
            point.tag, (point.x, point.y), textcoords="offset points", xytext=(0, 0), color=colour, fontsize=SIZE
        )
        tries = []
        for dx, dy, ha, va in PLACES:
            text.set(position=(dx, dy), ha=ha, va=va)
            box = text.get_window_extent(renderer).extents
            cost = math.hypot(dx, dy) + float(_overlaps(box, np.array(boxes)) @ np.array(weights))
            away = _distances(box, centres)
            cost += AMBIGUOUS * bool((away < _distances(box, centre[None]) - 2).any())
            cost += OUTSIDE * bool((box[:2] < frame[:2]).any() or (box[2:] > frame[2:]).any())
            tries.append((cost, len(tries), box))
        _, best, box = min(tries, key=lambda found: found[:2])
        dx, dy, ha, va = PLACES[best]
        text.set(position=(dx, dy), ha=ha, va=va)
        boxes, weights = [*boxes, box], [*weights, WORD]


def _drawn(axes: Axes, lines: Iterable[list[Point]]) -> tuple[list[np.ndarray], list[float]]:
    """Boxes (left, bottom, right, top) of markers, error bars and lines in pixels, and what hiding them costs."""
    boxes, weights = [], []

    def add(x: float, low: float, high: float, half: float, weight: float) -> None:
        boxes.append(np.array((x - half, low - half, x + half, high + half)))
        weights.append(weight)

    for points in lines:
        places = axes.transData.transform([(point.x, point.y) for point in points])
        for point, (x, y) in zip(points, places, strict=True):
            add(x, y, y, 7.0, MARKER)
            ends = [(point.x, point.y - (point.error or 0)), (point.x, point.y + (point.error or 0))]
            (_, low), (_, high) = axes.transData.transform(ends)
            add(x, low, high, 4.0, LINE)
        for start, end in itertools.pairwise(places) if points[0].joined else ():
            pieces = max(int(math.dist(start, end) / 8), 1)
            for i in range(pieces):
                x, y = start + (end - start) * (i + 0.5) / pieces
                add(x, y, y, 4.0, LINE)
    return boxes, weights


def _overlaps(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Area that a box shares with each of the others."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    return sides.clip(min=0).prod(axis=1)


def _distances(box: np.ndarray, places: np.ndarray) -> np.ndarray:
    """From each place to the nearest side of a box; 0 inside."""
    return np.hypot(*np.maximum(np.maximum(box[:2] - places, places - box[2:]), 0).T)
