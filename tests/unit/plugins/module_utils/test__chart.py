# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import math
import typing as t
from xml.etree import ElementTree

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._chart import Bar, Series, bar_chart, line_chart, ticks

SVG = "{http://www.w3.org/2000/svg}"
WILD = "<script>alert('1 & \"2\"')</script>"

TEST_TICKS: list[tuple[float, list[float]]] = [
    (19.5, [0, 5, 10, 15, 20]),
    (20.0, [0, 5, 10, 15, 20]),
    (60.0, [0, 20, 40, 60]),
    (0.3, [0, 0.1, 0.2, 0.3]),
    (252.0, [0, 100, 200, 300]),
    (1000.0, [0, 200, 400, 600, 800, 1000]),
    (0.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    (math.inf, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    (math.nan, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
]


@pytest.mark.parametrize(("highest", "expected"), TEST_TICKS, ids=[str(row[0]) for row in TEST_TICKS])
def test_ticks(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == pytest.approx(expected)


def line(name: str, *points: tuple[float, float, float, float]) -> Series:
    return Series(name=name, points=[{"x": x, "y": y, "low": low, "high": high} for x, y, low, high in points])


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}text")]


def test_a_line_goes_up_with_its_values() -> None:
    svg = line_chart([line("a", (4, 40.0, 38.0, 41.0), (1, 20.0, 19.0, 21.0))], x="streams", y="tok/s")
    (way,) = parsed(svg).iter(f"{SVG}polyline")
    (left, low), (right, high) = (map(float, point.split(",")) for point in way.attrib["points"].split())
    assert left < right
    assert low > high  # SVG counts from the top
    assert [text for text in texts(svg) if text in ("1", "4", "streams", "tok/s")] == ["1", "4", "streams", "tok/s"]
    assert "a: 20 (19 to 21)" in [element.text for element in parsed(svg).iter(f"{SVG}title")]


def test_all_points_are_inside() -> None:
    svg = line_chart([line("a", (1, 5.0, 0.0, 252.0)), line("b", (2, 1.0, 1.0, 1.0))], x="x", y="y")
    for circle in parsed(svg).iter(f"{SVG}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 640
        assert 0 <= float(circle.attrib["cy"]) <= 300


def test_one_line_needs_no_legend() -> None:
    assert "a" not in texts(line_chart([line("a", (1, 1.0, 1.0, 1.0))], x="x", y="y"))
    both = texts(line_chart([line("a", (1, 1.0, 1.0, 1.0)), line("b", (1, 1.0, 1.0, 1.0))], x="x", y="y"))
    assert {"a", "b"} <= set(both)


def test_bars_are_on_one_scale() -> None:
    bars: list[Bar] = [
        {"name": "n1", "value": 60.0, "of": 120.0, "text": "60"},
        {"name": "n2", "value": 30.0, "of": None, "text": "30"},
    ]
    widths = [float(rect.attrib["width"]) for rect in parsed(bar_chart(bars, title="memory")).iter(f"{SVG}rect")]
    assert [width / widths[0] for width in widths] == pytest.approx([1.0, 0.5, 0.0, 0.25], abs=0.01)


TEST_WILD: list[tuple[str, t.Callable[[], str]]] = [
    ("lines", lambda: line_chart([line(WILD, (1, 1.0, 1.0, 1.0)), line("b")], x=WILD, y=WILD)),
    ("bars", lambda: bar_chart([{"name": WILD, "value": 1.0, "of": None, "text": WILD}], title=WILD)),
    ("no-lines", lambda: line_chart([], x=WILD, y=WILD)),
    ("no-bars", lambda: bar_chart([], title=WILD)),
    ("all-zero", lambda: bar_chart([{"name": WILD, "value": 0.0, "of": 0.0, "text": WILD}], title=WILD)),
]


@pytest.mark.parametrize("draw", [row[1] for row in TEST_WILD], ids=[row[0] for row in TEST_WILD])
def test_text_is_escaped(draw: t.Callable[[], str]) -> None:
    svg = draw()
    assert "<script" not in svg
    (title,) = [child for child in parsed(svg) if child.tag == f"{SVG}title"]
    assert WILD in (title.text or "")
