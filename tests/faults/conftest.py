# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One suite for each file of tests. Its table is printed at the end and kept, without a page being written."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.faults import table
from ansible_collections.sparks.hy3.tests.faults.cases import EIGHT
from ansible_collections.sparks.hy3.tests.faults.nodes import (
    HEAD,
    WORKER,
    Lab,
    empty_journal,
    move_gid_back,
    mtu,
    show_venv,
)
from ansible_collections.sparks.hy3.tests.faults.page import KEPT
from ansible_collections.sparks.hy3.tests.faults.suite import Suite
from ansible_collections.sparks.hy3.tests.integration.lab import plug, thaw

FINISHED: list[table.Results] = []
# Seconds that the faults of `make test` may take.
LIMIT = 15 * 60


def tidy() -> None:
    """Whatever a test that was interrupted left of its fault."""
    thaw(WORKER)
    plug(WORKER, into=True)
    mtu(HEAD, 9000)
    move_gid_back(WORKER)
    show_venv(WORKER)
    empty_journal(HEAD)


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Iterator[Suite]:
    tidy()
    suite = Suite(Lab())
    yield suite
    suite.finish()
    results = table.Results(f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}", suite.seconds, suite.rows)
    FINISHED.append(results)
    table.save(results, KEPT / f"{Path(request.path).stem.removeprefix('test_')}.json")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for results in FINISHED:
        terminalreporter.section("faults")
        terminalreporter.write_line(table.text(results))
        if len(results.rows) == len(EIGHT) and results.seconds > LIMIT:
            terminalreporter.write_line(f"TOO LONG: eight faults may take {table.seconds(LIMIT)}.", red=True)
