# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The other faults, which take their time. Needs `make lab-up`; leaves a cluster that serves."""

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.tests.faults.cases import REST
from ansible_collections.sparks.hy3.tests.faults.suite import Fault, Suite


@pytest.mark.parametrize("fault", REST, ids=lambda fault: fault.name)
def test_it_keeps_running(fault: Fault, suite: Suite) -> None:
    assert suite.strike(fault) == []
