# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter as a play uses it: results that lack what was not asked for. The decisions are tested in module_utils."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.cluster_diagnosis import FilterModule, cluster_diagnosis
from hypothesis import given, settings
from hypothesis import strategies as st

UNREACHABLE = {"unreachable": True, "msg": "Failed to connect to the host via ssh: Connection timed out"}


def test_its_name() -> None:
    assert FilterModule().filters() == {"cluster_diagnosis": cluster_diagnosis}


@pytest.mark.parametrize(
    "statuses", [{}, {"spark-1": {}}, {"spark-1": None, "spark-2": "skipped"}, {"spark-1": {"skipped": True}}]
)
def test_nothing_was_looked_at(statuses: dict[str, t.Any]) -> None:
    assert cluster_diagnosis(statuses, head="spark-1") is None


def test_a_node_that_is_not_reached() -> None:
    found = cluster_diagnosis({"spark-1": {"units": {}}, "spark-2": UNREACHABLE})
    assert found is not None
    assert (found["host"], found["rule"]) == ("spark-2", "node-unreachable")


keys = st.sampled_from(
    ["units", "failures", "failure", "troubles", "kills", "engines", "memory", "booted", "ray", "msg"]
)
values = st.one_of(st.none(), st.just({}), st.just([]))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.dictionaries(keys, values)))
def test_results_that_lack_anything_give_no_traceback(statuses: dict[str, t.Any]) -> None:
    cluster_diagnosis(statuses, head="a", addresses={"a": "10.77.0.1"})
