# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The numbers of an engine's C(/metrics) page (Prometheus text format)."""

from __future__ import annotations

import re
import typing as t

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics(t.TypedDict):
    """Counts since the engine's start, and its KV pool in tokens; None where the engine does not export it.

    C(accepted_per_position) has the accepted tokens by their place in a draft, C(drafts) the number of drafts.
    """

    drafts: int | None
    drafted: int | None
    accepted: int | None
    accepted_per_position: list[int] | None
    acceptance: float | None
    kv_cache_tokens: int | None
    max_concurrency: float | None
    running: int | None
    waiting: int | None


def read_metrics(text: str) -> Metrics:
    """vLLM's metrics by their names in 0.20 to 0.33; a metric with several label sets is summed over them."""
    sums: dict[str, float] = {}
    places: dict[int, int] = {}
    cache: dict[str, str] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if not match:
            continue
        if match["name"] == "vllm:cache_config_info":
            cache = dict(_LABEL.findall(match["labels"] or ""))
        else:
            value = _finite(match["value"])
            if value is not None:
                sums[match["name"]] = sums.get(match["name"], 0.0) + value
                if match["name"] == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                    place = int(dict(_LABEL.findall(match["labels"] or "")).get("position", 0))
                    places[place] = places.get(place, 0) + int(value)

    def count(name: str) -> int | None:
        return int(sums[name]) if name in sums else None

    drafted = count("vllm:spec_decode_num_draft_tokens_total")
    accepted = count("vllm:spec_decode_num_accepted_tokens_total")
    tokens = _finite(cache.get("kv_cache_size_tokens", ""))
    return Metrics(
        drafts=count("vllm:spec_decode_num_drafts_total"),
        drafted=drafted,
        accepted=accepted,
        accepted_per_position=[places.get(place, 0) for place in range(max(places) + 1)] if places else None,
        acceptance=accepted / drafted if drafted and accepted is not None else None,
        kv_cache_tokens=None if tokens is None else int(tokens),
        max_concurrency=_finite(cache.get("kv_cache_max_concurrency", "")),
        running=count("vllm:num_requests_running"),
        waiting=count("vllm:num_requests_waiting"),
    )


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None
