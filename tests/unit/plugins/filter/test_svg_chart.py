# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.filter.svg_chart import FilterModule

POINT = {"x": 1, "y": 19.5, "low": 19.1, "high": 19.9}


@pytest.mark.parametrize(
    ("kind", "data", "drawn"),
    [
        ("lines", [{"name": "a", "points": [POINT]}], "<polyline"),
        ("bars", [{"name": "a", "value": 1, "of": None, "text": "1"}], "<rect"),
    ],
)
def test_draws(kind: str, data: list[dict[str, object]], drawn: str) -> None:
    svg = FilterModule().filters()["svg_chart"](data, kind=kind, x="streams", y="tok/s")
    assert isinstance(svg, str)
    assert svg.startswith("<svg")
    assert drawn in svg
