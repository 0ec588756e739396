# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a figure is measured and printed: one line each, ``name value unit aim``."""

from __future__ import annotations

import statistics
import time
import typing as t

ROUNDS = 3


def show(name: str, value: float, unit: str, aim: str) -> None:
    print(f"{name:<58} {value:9.3f} {unit:<6} {aim}", flush=True)


def median_seconds(work: t.Callable[[], object]) -> float:
    """Median wall time of a few rounds, after one that warms the caches."""
    work()
    taken = []
    for _round in range(ROUNDS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
