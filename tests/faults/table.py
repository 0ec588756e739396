# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What became of each fault: one row, the table of all of them, and the file that keeps it. Pure but for that file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One fault. Seconds are counted from the fault, ``back_s`` from the end of its cause.

    ``noticed_s`` is None where no question went without an answer and no unit ended. ``back_s`` is None where it took
    `serve-hy3` to answer again. Faults of one ``start`` struck the same start of the engine.
    """

    fault: str
    start: int = 0
    watched: bool = True
    noticed_s: float | None = None
    noticed_by: str = ""
    said_by: str = ""
    said: str = ""
    back_s: float | None = None
    converged_s: float | None = None
    changes: int | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class Results:
    """All rows of one run; ``date`` is that of its end, ``seconds`` how long all of it took."""

    date: str
    seconds: float
    rows: list[Row]


COLUMNS = ("Fault", "Start", "Noticed after", "What the user reads", "Answers again", "The next serve-hy3")


def seconds(value: float) -> str:
    """``9 s``, or from two minutes on ``2 min 05 s``."""
    whole = round(value)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60:02d} s"


def noticed(row: Row) -> str:
    if row.noticed_s is not None:
        return f"{seconds(row.noticed_s)}: {row.noticed_by}"
    return "not at all: it answers on" if row.watched else "-"


def back(row: Row) -> str:
    if row.watched and row.noticed_s is None and row.back_s is not None:
        return "never stopped"
    return "needed serve-hy3" if row.back_s is None else f"by itself after {seconds(row.back_s)}"


def converged(row: Row) -> str:
    """What the next run did; a row that was never finished says so."""
    if row.problems:
        return "NOT RIGHT: " + " ".join(row.problems)
    if row.converged_s is None:
        return "not run"
    did = f"{row.changes} changes, then none" if row.changes else "no change"
    return f"{seconds(row.converged_s)}, {did}; nothing lost"


def cells(row: Row) -> tuple[str, ...]:
    said = f"{row.said_by}: {row.said}" if row.said else "-"
    return (row.fault, str(row.start), noticed(row), said, back(row), converged(row))


def text(results: Results) -> str:
    """For a terminal: a line for each fault and what belongs to it below."""
    lines = []
    for row in results.rows:
        fault, start, *rest = cells(row)
        lines.append(f"{fault} (start {start})")
        lines += [f"    {name + ':':21} {value}" for name, value in zip(COLUMNS[2:], rest, strict=True)]
    return "\n".join([*lines, f"{len(results.rows)} faults in {seconds(results.seconds)}, {results.date}"])


def markdown(results: Results) -> str:
    """For a page."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, results.rows)]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*table, "", f"{len(results.rows)} faults in {seconds(results.seconds)}, run on {results.date}."])


def save(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=2) + "\n")


def load(path: Path) -> Results:
    kept: dict[str, Any] = json.loads(path.read_text())
    return Results(kept["date"], kept["seconds"], [Row(**row) for row in kept["rows"]])
