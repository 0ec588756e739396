# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""How far a transfer is: the facts that a node writes down while it goes on, and the line that a person sees. Pure."""

from __future__ import annotations

import json
import typing as t
from collections import deque

from ansible_collections.sparks.hy3.plugins.module_utils._wait import duration

# Seconds that a rate is taken over.
RATE_SECONDS = 10.0


class Progress:
    """Bytes over time, for rate and time left."""

    def __init__(self, total: int, files: int) -> None:
        self.total = total
        self.files = files
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, now: float, *, done: int, files_done: int) -> dict[str, t.Any]:
        """Progress as facts: bytes, bytes a second over the last seconds, seconds left (None if nothing moves)."""
        self._seen.append((now, done))
        while len(self._seen) > 1 and now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        began, before = self._seen[0]
        rate = max(0, done - before) / (now - began) if now > began else 0.0
        eta = round((self.total - done) / rate) if rate else None
        return {
            "bytes": done,
            "bytes_total": self.total,
            "files": files_done,
            "files_total": self.files,
            "rate": round(rate),
            "eta_s": eta,
        }


def describe(text: str) -> str | None:
    """Facts of ``Progress.at``, as JSON, in words: V(12 of 108 files, 41.20 of 157.41 GiB, 0.98 GB/s, 2m00s left).

    None for what is not such facts: they come from a file, which another version may have written.
    """
    try:
        facts = json.loads(text)
    except ValueError:
        return None
    if not isinstance(facts, dict):
        return None
    numbers = [facts.get(name) for name in ("files", "files_total", "bytes", "bytes_total", "rate")]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    files, files_total, done, total, rate = t.cast("list[float]", numbers)
    words = f"{files:g} of {files_total:g} files, {done / 2**30:.2f} of {total / 2**30:.2f} GiB"
    left = facts.get("eta_s")
    if not rate or not isinstance(left, int | float):
        return f"{words}, nothing comes"
    return f"{words}, {rate / 1e9:.3g} GB/s, {duration(left)} left"
