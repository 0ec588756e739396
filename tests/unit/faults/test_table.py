# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of faults, and the page that it is written into."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.faults import page, table
from ansible_collections.sparks.hy3.tests.faults.table import Results, Row

ROWS = [
    Row(
        "worker process killed", 2, True, 1.4, "hy3-serve.service of spark-1 ended",
        "status-hy3", "Hy3 does not | answer", None, 71.6, 9,
    ),
    Row("link down for 10 s", 1, True, 8.2, "a question without an answer", "status-hy3", "Hy3 answers", 3.0, 25.0, 0),
    Row("GID table changed", 3, True, None, "", "serve-hy3", "restart needed", 0.9, 140.0, 12),
    Row("play killed", 4, False, None, "", "serve-hy3", "Took over", 48.0, 24.0, 0),
    Row("never finished", 5),
    Row("wrong", 5, problems=["A file is gone."]),
]  # fmt: skip
RESULTS = Results("2026-12-01", 754.2, ROWS)


def test_table() -> None:
    text = table.markdown(RESULTS)
    assert (
        "| 1 s: hy3-serve.service of spark-1 ended | status-hy3: Hy3 does not \\| answer | needed serve-hy3 | " in text
    )
    assert "| 72 s, 9 changes, then none; nothing lost |" in text
    assert "| by itself after 3 s | 25 s, no change; nothing lost |" in text
    assert "| not at all: it answers on | serve-hy3: restart needed | never stopped | 2 min 20 s, 12 changes" in text
    assert "| play killed | 4 | - | serve-hy3: Took over | by itself after 48 s |" in text
    assert "| needed serve-hy3 | not run |" in text
    assert "| NOT RIGHT: A file is gone. |" in text
    assert text.endswith("6 faults in 12 min 34 s, run on 2026-12-01.")
    assert {line.count(" | ") for line in text.splitlines() if line.startswith("|")} == {len(table.COLUMNS) - 1}


def test_text_has_what_the_page_has() -> None:
    text = table.text(RESULTS)
    assert all(cell in text for row in ROWS for cell in table.cells(row))


def test_results_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "new/eight.json"
    table.save(RESULTS, path)
    assert table.load(path) == RESULTS


# ---- The page


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Write a copy of the page from rows below ``tmp_path``, and return it."""
    copy = tmp_path / "faults.md"
    copy.write_text(page.PAGE.read_text())
    monkeypatch.setattr(page, "KEPT", tmp_path)
    monkeypatch.setattr(page, "PAGE", copy)

    def write() -> str:
        assert page.main() == 0
        return copy.read_text()

    return write


JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" timestamp="2026-12-01T10:11:12.3+00:00">
<testcase name="test_killed_in_a_role_that_only_reads[verify]" time="61.2"/>
<testcase name="test_killed_at_random_moments" time="740"><failure message="x"/></testcase></testsuite></testsuites>"""


def test_page_keeps_what_was_not_run(written: Callable[[], str], tmp_path: Path) -> None:
    before = page.PAGE.read_text()
    assert written() == before
    table.save(RESULTS, tmp_path / "rest.json")
    (tmp_path / "kills.xml").write_text(JUNIT)
    after = written()
    assert "6 faults in 12 min 34 s, run on 2026-12-01." in after
    assert "| in a role that only reads[verify] | converged | 61 s |" in after
    assert "| at random moments | NOT RIGHT | 12 min 20 s |" in after
    kept = re.compile(r"<!-- eight: begin -->.*<!-- eight: end -->", re.DOTALL)
    assert kept.findall(before) == kept.findall(after) != []
    assert written() == after, "a second time changes nothing"


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- eight: begin --> and"):
        page.replaced("no marks", "eight", "")
