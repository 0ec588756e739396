# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Two kinds of charts as SVG for a page that needs nothing else. Pure; all text is escaped."""

from __future__ import annotations

import math
import typing as t
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 50
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_ROW, _ASIDE = 34, 10


class Point(t.TypedDict):
    """A value with the lowest and highest that were seen."""

    x: float
    y: float
    low: float
    high: float


class Series(t.TypedDict):
    """A line; its points are drawn from the left to the right."""

    name: str
    points: list[Point]


class Bar(t.TypedDict):
    """A bar of C(value), out of C(of) where that is not None; C(text) stands behind it."""

    name: str
    value: float
    of: float | None
    text: str


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least C(highest), in at most five steps."""
    if not 0 < highest < math.inf:
        highest = 1.0
    raw = highest / 5
    power = 10.0 ** math.floor(math.log10(raw))
    # The multiple may be a hair above 10 by rounding.
    step = next((factor for factor in (1, 2, 2.5, 5) if factor * power >= raw), 10) * power
    return [number * step for number in range(math.ceil(highest / step - 1e-9) + 1)]


def line_chart(series: t.Sequence[Series], *, x: str, y: str) -> str:
    """Lines over whole numbers (streams), with a whisker from the lowest to the highest value of each point."""
    points = [point for line in series for point in line["points"]]
    places = sorted({point["x"] for point in points})
    marks = ticks(max((point["high"] for point in points), default=1.0))
    right = WIDTH - _RIGHT - (_legend_width(series) if len(series) > 1 else 0)

    def across(value: float) -> float:
        # Equal steps: 1, 2 and 64 streams would else lie on each other.
        share = (places.index(value) + 0.5) / len(places)
        return _LEFT + share * (right - _LEFT)

    def up(value: float) -> float:
        return HEIGHT - _BOTTOM - value / marks[-1] * (HEIGHT - _TOP - _BOTTOM)

    parts = [_grid(up(mark), right, f"{mark:g}") for mark in marks]
    parts += [_text(across(place), HEIGHT - _BOTTOM + 18, f"{place:g}", anchor="middle") for place in places]
    parts += [_text((_LEFT + right) / 2, HEIGHT - 10, x, anchor="middle"), _vertical(y)]
    for number, line in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        # Beside each other, or one whisker hides the next.
        parts += _line(line, colour, across, up, aside=_ASIDE * (number - (len(series) - 1) / 2))
        if len(series) > 1:
            parts += _legend(line["name"], colour, right + 14, _TOP + 8 + 20 * number)
    return _svg(HEIGHT, f"{y} by {x}", parts)


def bar_chart(bars: t.Sequence[Bar], *, title: str) -> str:
    """Bars on one scale, one below the other."""
    highest = max((each["of"] or each["value"] for each in bars), default=1.0) or 1.0
    name_width = 20 + 7 * max((len(each["name"]) for each in bars), default=0)
    room = WIDTH - name_width - 20 - 7 * max((len(each["text"]) for each in bars), default=0)
    parts = []
    for number, each in enumerate(bars):
        top = 8 + _ROW * number
        full, width = ((each["of"] or 0) / highest * room, each["value"] / highest * room)
        parts += [
            _text(name_width - 8, top + 16, each["name"], anchor="end"),
            f'<rect x="{name_width}" y="{top}" width="{full:.1f}" height="22" fill="#e4e4e4"/>',
            f'<rect x="{name_width}" y="{top}" width="{width:.1f}" height="22" fill="{_COLOURS[0]}"/>',
            _text(name_width + max(full, width) + 8, top + 16, each["text"]),
        ]
    return _svg(_ROW * len(bars) + 12, title, parts)


def _line(
    line: Series,
    colour: str,
    across: t.Callable[[float], float],
    up: t.Callable[[float], float],
    *,
    aside: float,
) -> list[str]:
    points = sorted(line["points"], key=lambda point: point["x"])
    way = " ".join(f"{across(point['x']) + aside:.1f},{up(point['y']):.1f}" for point in points)
    parts = [f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for point in points:
        left, low, high = across(point["x"]) + aside, up(point["low"]), up(point["high"])
        said = escape(f"{line['name']}: {point['y']:.4g} ({point['low']:.4g} to {point['high']:.4g})")
        parts += [
            f'<path d="M{left:.1f} {low:.1f}V{high:.1f}M{left - 4:.1f} {low:.1f}h8M{left - 4:.1f} {high:.1f}h8" '
            f'stroke="{colour}"/>',
            f'<circle cx="{left:.1f}" cy="{up(point["y"]):.1f}" r="4" fill="{colour}"><title>{said}</title></circle>',
        ]
    return parts


def _legend_width(series: t.Sequence[Series]) -> int:
    return 40 + 7 * max(len(line["name"]) for line in series)


def _legend(name: str, colour: str, left: float, top: float) -> list[str]:
    return [
        f'<rect x="{left}" y="{top - 6}" width="12" height="12" fill="{colour}"/>',
        _text(left + 18, top + 4, name),
    ]


def _grid(height: float, right: float, label: str) -> str:
    line = f'<path d="M{_LEFT} {height:.1f}H{right:.1f}" stroke="#d0d0d0"/>'
    return line + _text(_LEFT - 8, height + 4, label, anchor="end")


def _vertical(label: str) -> str:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return f'<g transform="translate(16 {middle:.0f}) rotate(-90)">{_text(0, 0, label, anchor="middle")}</g>'


def _text(left: float, top: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: int, title: str, parts: t.Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
    head += 'role="img" font-family="sans-serif" font-size="13" fill="#222">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])
