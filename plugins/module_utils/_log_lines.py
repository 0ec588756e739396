# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The lines of logs with the times of their writers: what journald, Ray, engines and torch put before a message."""

from __future__ import annotations

import heapq
import re
import typing as t
from datetime import datetime

from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines

# journalctl --output=short-unix: "1796064460.123456 spark-1 vllm[4242]: message".
_UNIX = re.compile(r"(\d{9,11}\.\d{1,6}) \S+ ([^:\[\]]{1,64}(?:\[\d+\])?): ?(.*)")

# Each writer adds its own before what it forwards, so they are taken off one after the other.
_PREFIX = re.compile(
    r"""\s*(?:
      [^\W\d_]{1,9}\.?\ +\d{1,2}\ \d\d:\d\d:\d\d(?:[.,]\d+)?\ \S+\ [^\s:\[\]]+(?:\[\d+\])?:\ ?   # journald, syslog
    | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*\ \S+\ [^\s:\[\]]+(?:\[\d+\])?:\ ?                        # journald, ISO times
    | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*\ (?:std(?:out|err)\ [FP]\ )?                               # containers
    | \d{9,11}\.\d{1,6}\ \S+\ [^:\[\]]{1,64}(?:\[\d+\])?:\ ?
    | \((?:[\w:.+-]+(?:\ \+\w+)?|[\w:.]+\ pid=\d+|pid=\d+)(?:,\ ip=[^)]*)?\)\ ?                    # Ray, vLLM
    | \[rank\d+\]:\ ?
    | \[[IWEF]\d{3,4}\ [^\]]*\]\ ?                                                                # torch
    | \[\d{4}-\d\d-\d\d[^\]]*\]\ ?(?:\(\w+\)\ )?(?:[\w.]+\.cc:\d+:\ )?                             # SGLang, Ray, NCCL
    | (?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\ \d\d-\d\d\ \d\d:\d\d:\d\d\S*\ (?:\[[^\]]*\]\ ?)?      # vLLM
    | \d{4}-\d\d-\d\d\ \d\d:\d\d:\d\d(?:[.,]\d+)?[\s-]+(?:\w+[\s:-]+)??(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b
      [\s:-]*(?:[\w./]+\.py:\d+[\s:-]*)?(?:--\ )?                                                 # Python, Ray
    | [\w.-]+\s+\|\                                                                                  # Compose
    | [|+]\ +                                                                                     # exception groups
    )""",
    re.VERBOSE,
)
_FULL = re.compile(r"(?<!\d)(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_SHORT = re.compile(r"(?<![\d-])(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?(?!\d)")
_TORCH = re.compile(r"\[[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
# What an engine writes once, when its API server starts; else when its core does.
_STARTS = (
    re.compile(r"vLLM API server version|non-default args: |server_args=(?:ServerArgs\(|\{)"),
    re.compile(r"Initializing a V\d LLM engine"),
)
_HEAD = 240  # characters of a line in which its writer's time stands
_DAY = 24 * 3600


class Line(t.NamedTuple):
    """A line of a log and its time in Unix seconds, None where neither it nor one before it has any."""

    text: str
    time: float | None


def message_of(text: str) -> str:
    """What is left of a line without what journald, Ray, an engine or torch put before it."""
    for _prefix in range(8):
        match = _PREFIX.match(text)
        if not match or not match.end():
            break
        text = text[match.end() :]
    return text


def own_time(text: str, now: float) -> float | None:
    """The time that a line gives itself, in Unix seconds of this machine's zone; None if it has none.

    ``now`` supplies the year where the writer leaves it out.
    """
    head = text[:_HEAD]
    if match := _FULL.search(head):
        numbers = [int(part) for part in match.groups()[:6]]
        return _unix(numbers, match[7])
    match = _SHORT.search(head) or _TORCH.search(head)
    if not match:
        return None
    numbers = [int(part) for part in match.groups()[:5]]
    try:
        year = datetime.fromtimestamp(now).year
    except (ValueError, OverflowError, OSError):
        return None
    found = _unix([year, *numbers], match[6])
    # A log of December that is read in January.
    return _unix([year - 1, *numbers], match[6]) if found is not None and found > now + _DAY else found


def _unix(numbers: t.Sequence[int], fraction: str | None) -> float | None:
    try:
        year, month, day, hour, minute, second = numbers
        return datetime(year, month, day, hour, minute, second).timestamp() + float(f"0.{fraction or 0}")
    except (ValueError, OverflowError, OSError):
        return None


def timed(text: str, *, now: float, source: bool = False) -> list[Line]:
    """The cleaned lines of a log with their times, from journald where it gives them, else as the lines say.

    ``source`` keeps the writer's name that journald puts before a message. A line without a time has that of the line
    before it, so that a traceback belongs to its first line.
    """
    lines: list[Line] = []
    time: float | None = None
    for raw in clean_lines(text):
        match = _UNIX.match(raw)
        if match:
            time = float(match[1])
            lines.append(Line(f"{match[2]}: {match[3]}" if source else match[3], time))
        else:
            time = own_time(raw, now) or time
            lines.append(Line(raw, time))
    return [line for line in lines if line.text.strip()]


def last_start(lines: t.Sequence[Line]) -> list[Line]:
    """The lines of the last start: a file that is appended to keeps the failures of earlier ones. All if none shows."""
    for mark in _STARTS:
        starts = [index for index, line in enumerate(lines) if mark.search(line.text)]
        if starts:
            return list(lines[starts[-1] :])
    return list(lines)


def merged(*logs: t.Sequence[Line]) -> list[Line]:
    """The lines of several logs in the order of their times; those before the first time of their log come first.

    Each log keeps its own order, also where its clock was set back.
    """
    return list(heapq.merge(*logs, key=lambda line: line.time or 0.0))
