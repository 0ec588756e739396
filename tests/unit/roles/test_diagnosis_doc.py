# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/diagnosis.md is the data, written out, and names what covers each warning of a recipe and each field case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _diagnosis, _remarks, _unit_failures
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import OOM_PROCESS, RULES
from ansible_collections.sparks.hy3.plugins.module_utils._rules import IDS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/diagnosis.md").read_text()
# How many warnings each recipe has: its troubleshooting, landmines, and what its steps say must not be left out.
SEEDS = {"seed 000": 20, "seed 001": 7, "seed 002": 3, "seed 003": 8}


def section(title: str) -> list[list[str]]:
    """The rows of the table below a heading, without its head."""
    text = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line[2:-2] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r" ?\| ?", row)] for row in rows[1:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def without_a_line() -> set[str]:
    """The ids of states and remarks, as their sources have them."""
    sources = "".join(Path(module.__file__ or "").read_text() for module in (_diagnosis, _unit_failures))
    states = set(re.findall(r'made\(\s*"([a-z-]+)"', sources))
    states |= {f"unit-{result}" for result in _unit_failures._RESULTS}
    remarks = {row[0] for rows in (_remarks.LINE_REMARKS, _remarks.WAIT_REMARKS, _remarks.STALLS) for row in rows}
    return states | remarks | {"acceptance", "cold"}


FAILURES = {rule.id for rule in (*RULES, OOM_PROCESS)} | without_a_line()
BEFORE = {
    *IDS,
    *(path.stem for kind in ("modules", "filter") for path in (ROOT / f"plugins/{kind}").glob("*.py")),
    *(path.name for path in (ROOT / "roles").iterdir()),
    *(f"P{number}" for number in range(1, 9)),
}


def test_every_warning_of_each_recipe() -> None:
    rows = section("What the recipes warn of")
    assert {name: sum(row[0] == name for row in rows) for name in SEEDS} == SEEDS
    assert len(rows) == sum(SEEDS.values())
    assert len({(row[0], row[1]) for row in rows}) == len(rows)


def test_every_field_case() -> None:
    cases = [row[0] for row in section("The field cases")]
    assert len(set(cases)) == len(cases) == 88


@pytest.mark.parametrize("title", ["What the recipes warn of", "The field cases"])
def test_each_is_covered_by_something_that_exists(title: str) -> None:
    for row in section(title):
        assert set(named(row[2])) <= FAILURES, row
        assert set(named(row[3])) <= BEFORE, row
        # Whatever has no line that names it says why.
        assert named(row[2]) or row[4], row
        assert named(row[2]) or named(row[3]) or row[4].startswith("not ours:"), row


def test_the_table_of_failures_is_the_data() -> None:
    rows = [line for line in PAGE.split("## All failures", 1)[1].splitlines() if line.startswith("| `")]
    cells = [
        (f"`{rule.id}`", rule.kind, *(text.replace("|", "/") for text in (rule.cause, rule.fix, rule.source)))
        for rule in (*RULES, OOM_PROCESS)
    ]
    assert rows == [f"| {' | '.join(row)} |" for row in cells]


def test_what_has_no_line_is_listed() -> None:
    assert set(named(PAGE.split("## Without a line", 1)[1])) == without_a_line()
