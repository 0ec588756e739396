# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a play says to its user, from Ansible's output. Pure."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import yaml

# The tasks that end a play with a summary.
_ENDS = re.compile(r"^TASK \[[^\]]*(?:Summary|Doctor \| Report)\]", re.MULTILINE)
_NEXT = re.compile(r"^(?:TASK|PLAY|RUNNING HANDLER) ", re.MULTILINE)
_ROWS = ("Ray ", "spark-", "Report:")
_LONGEST = 300
# Of a sentence, of what YAML quotes, and of a task's output.
_STOP = re.compile(r"[.;](?=\s|['\"]|$)|['\"](?=\s|$)|\s+TASK \[")


def summary(output: str) -> list[str]:
    """The lines of the last summary, as they were before YAML quoted and wrapped them; empty without one."""
    starts = list(_ENDS.finditer(output))
    if not starts:
        return []
    part = output[starts[-1].end() :]
    end = _NEXT.search(part)
    _head, arrow, body = part[: end.start() if end else None].partition("=>")
    shown: Any = yaml.safe_load(textwrap.dedent(body)) if arrow else None
    lines = (shown or {}).get("msg", [])
    return [str(line) for line in lines] if isinstance(lines, list) else [str(lines)]


def one_line(output: str) -> str:
    """The whole output without Ansible's breaks and YAML's doubled quotes."""
    return " ".join(output.replace("''", "'").split())


def sentence(output: str, pattern: str) -> str | None:
    """What matches, to the end of its sentence or line of the summary; None if nothing does."""
    for line in [*summary(output), one_line(output)]:
        if match := re.search(pattern, line):
            rest = line[match.end() :]
            stop = _STOP.search(rest)
            return (match[0] + rest[: stop.start() if stop else None])[:_LONGEST].strip()
    return None


def cause(output: str) -> str | None:
    """The line in which `status-hy3` says why there is no answer; None if it does not."""
    lines = [line.strip() for line in summary(output)]
    where = next((number for number, line in enumerate(lines) if line.startswith("Hy3 does not answer")), None)
    if where is None or where + 1 == len(lines) or lines[where + 1].startswith(_ROWS):
        return None
    return lines[where + 1][:_LONGEST] or None


def recap(output: str) -> dict[str, dict[str, int]]:
    """The counts of the last PLAY RECAP by host; empty without one."""
    _before, mark, after = output.rpartition("PLAY RECAP")
    rows = re.findall(r"^(\S+)\s+: (ok=.*)$", after, re.MULTILINE) if mark else []
    return {host: {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", counts)} for host, counts in rows}


def changes(output: str) -> int:
    """How many tasks changed something, on all hosts; a play without a recap did not end."""
    counts = recap(output)
    if not counts:
        raise ValueError(f"the play ended without a recap: {output[-1000:]}")
    return sum(row["changed"] for row in counts.values())
