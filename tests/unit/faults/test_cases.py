# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The faults as data."""

from __future__ import annotations

import re

import pytest
from ansible_collections.sparks.hy3.tests.faults.cases import EIGHT, REST
from ansible_collections.sparks.hy3.tests.faults.suite import Fault


def test_names_differ() -> None:
    names = [fault.name for fault in (*EIGHT, *REST)]
    assert len(names) == len(set(names))
    assert len(EIGHT) == 8


@pytest.mark.parametrize("fault", [*EIGHT, *REST], ids=lambda fault: fault.name)
def test_fault_makes_sense(fault: Fault) -> None:
    re.compile(fault.says)
    assert fault.says
    assert fault.ask in ("", "status-hy3", "serve-hy3", "doctor-hy3")
    # The last run of an asked serve-hy3 must not be taken for the next one, and what rides must be looked at.
    assert not (fault.rider and not fault.ask)
    assert not (fault.ask_afterwards and not fault.ask)


def test_the_last_of_a_suite_leaves_nothing_to_a_next_one() -> None:
    assert not EIGHT[-1].rider and not REST[-1].rider
