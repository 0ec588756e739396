# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._progress import Progress, describe


@pytest.mark.parametrize(
    ("seen", "rate", "eta"),
    [
        ([(0, 0)], 0, None),
        ([(0, 0), (2, 100)], 50, 18),
        ([(0, 50), (2, 50)], 0, None),
        # Only the last seconds count.
        ([(0, 0), (10, 10), (15, 10), (20, 500)], 49, 10),
        ([(0, 100), (1, 0)], 0, None),
    ],
)
def test_progress(*, seen: list[tuple[float, int]], rate: int, eta: int | None) -> None:
    progress = Progress(1000, 7)
    facts: dict[str, t.Any] = {}
    for now, done in seen:
        facts = progress.at(now, done=done, files_done=3)
    assert facts == {
        "bytes": seen[-1][1],
        "bytes_total": 1000,
        "files": 3,
        "files_total": 7,
        "rate": rate,
        "eta_s": eta,
    }


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "12 of 108 files, 41.20 of 157.40 GiB, 0.98 GB/s, 2m07s left"),
        ({"rate": 0, "eta_s": None}, "12 of 108 files, 41.20 of 157.40 GiB, nothing comes"),
        ({"rate": 4_000_000, "eta_s": 31_000}, "12 of 108 files, 41.20 of 157.40 GiB, 0.004 GB/s, 8h36m left"),
        ({"rate": "fast"}, None),
        ({"files": None}, None),
    ],
)
def test_in_words(more: dict[str, t.Any], words: str | None) -> None:
    facts = Progress(round(157.4 * 2**30), 108).at(0, done=round(41.2 * 2**30), files_done=12)
    assert describe(json.dumps(facts | {"rate": 980_000_000, "eta_s": 127} | more)) == words


@pytest.mark.parametrize("text", ["", "null", "[]", '"bytes"', "{}", '{"bytes": 1', "cat: no such file"])
def test_what_is_no_progress_is_not_shown(text: str) -> None:
    assert describe(text) is None
