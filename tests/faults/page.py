# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the tables of the newest runs into docs/faults.md: an explicit step, for a run of tests changes no page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from ansible_collections.sparks.hy3.tests.faults import table

ROOT = Path(__file__).parents[2]
# Where a run keeps its rows; git ignores it.
KEPT = ROOT / "reports/faults"
PAGE = ROOT / "docs/faults.md"
TABLES = ("eight", "rest")
# What pytest writes of tests/integration/test_kill.py.
KILLS = "kills"


def replaced(page: str, name: str, content: str) -> str:
    """The page with another content between the marks of ``name``; one without marks is refused."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"docs/faults.md must have {begin} and {end} once each; put them where the table belongs")
    head, _begin, rest = page.partition(begin)
    return f"{head}{begin}\n\n{content}\n\n{end}{rest.partition(end)[2]}"


def kills(junit: str) -> str:
    """A line for each test in pytest's XML: its name in words, how it ended, and its seconds."""
    suite = next(ElementTree.fromstring(junit).iter("testsuite"))
    lines = ["| Play killed | Ended | Took |", "| --- | --- | --- |"]
    for case in suite.iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        name = re.sub(r"^test_killed_", "", case.get("name", "")).replace("_", " ")
        lines.append(
            f"| {name} | {'NOT RIGHT' if bad else 'converged'} | {table.seconds(float(case.get('time', 0)))} |"
        )
    return "\n".join([*lines, "", f"Run on {suite.get('timestamp', '')[:10]}."])


def main() -> int:
    page = PAGE.read_text()
    for name in TABLES:
        path = KEPT / f"{name}.json"
        if path.exists():
            page = replaced(page, name, table.markdown(table.load(path)))
    junit = KEPT / f"{KILLS}.xml"
    if junit.exists():
        page = replaced(page, KILLS, kills(junit.read_text()))
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
