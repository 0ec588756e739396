# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the fault suite reads in a play's output."""

from __future__ import annotations

import re

import pytest
from ansible_collections.sparks.hy3.tests.faults import output
from ansible_collections.sparks.hy3.tests.unit.faults.said import RECAP, REFUSED, STATUS


def test_summary_is_as_it_was_before_yaml_wrapped_it() -> None:
    lines = output.summary(STATUS)
    assert lines[1] == (
        "  A worker or the engine core ended, and the rest noticed: Look at the unit's log and the memory of the other "
        "nodes"
    )
    assert len(lines) == 7
    assert output.summary("PLAY [x] ***\n") == []


@pytest.mark.parametrize(
    ("said", "pattern", "found"),
    [
        (STATUS, r"Hy3 does not answer at ", "Hy3 does not answer at http://127.0.0.1:8000/v1 on spark-1"),
        (STATUS, r"spark-2 +198\S+ +cannot be reached", "spark-2  198.18.20.2  cannot be reached over SSH"),
        (
            REFUSED,
            r"spark-2 cannot be reached over SSH",
            "spark-2 cannot be reached over SSH (Connection timed out during banner exchange)",
        ),
        (
            "=>\n    msg: 'restart needed: hy3-ray.service on spark-2, because it runs with\n        other settings'",
            r"restart needed: hy3-ray\.service on spark-2, because it runs with other",
            "restart needed: hy3-ray.service on spark-2, because it runs with other settings",
        ),
        ("=>\n    msg: it's not theirs'\n\nTASK [x] ***", "it's", "it's not theirs"),
        ("=>\n    msg: none\n\nTASK [x] ***", "none", "none"),
        (STATUS, r"Hy3 answers at ", None),
    ],
)
def test_sentence(said: str, pattern: str, found: str | None) -> None:
    assert output.sentence(said, pattern) == found


def test_cause() -> None:
    assert str(output.cause(STATUS)).startswith("A worker or the engine core ended")
    assert output.cause(re.sub(r"(?s)    - '  A worker.*unexpectedly'\n", "", STATUS)) is None
    assert output.cause(REFUSED) is None


def test_changes_are_those_of_all_hosts() -> None:
    assert output.changes(STATUS) == 0
    assert output.changes(RECAP.format(3, 4)) == 7
    with pytest.raises(ValueError, match="without a recap"):
        output.changes(REFUSED)
