# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

from ansible_collections.sparks.hy3.plugins.filter.fabric_problems import FilterModule
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.fabric_facts import node, port

PAIR = {"spark-1": node(port("enp1s0f1np1", "10.77.0.1/24")), "spark-2": node(port("enp1s0f1np1", "10.77.0.2/24"))}


def test_judges_the_results_of_all_nodes() -> None:
    judge = FilterModule().filters()["fabric_problems"]
    found = judge(PAIR)
    assert found == judge(PAIR, environment={})
    # As hostvars and a report need it.
    assert json.loads(json.dumps(found)) == {
        "topology": "pair",
        "rails": ["10.77.0.0/24"],
        "reach": {"spark-1": {"spark-2": "10.77.0.2"}, "spark-2": {"spark-1": "10.77.0.1"}},
        "other_rails": {"spark-1": [], "spark-2": []},
        "problems": [],
        "warnings": [],
        "nccl": ["NCCL uses one HCA of each node (spark-1 rocep1s0f1; spark-2 rocep1s0f1)."],
        "set": {
            name: {
                "NCCL_IB_HCA": "=rocep1s0f1",
                "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
                "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
            }
            for name in PAIR
        },
        "unset": [],
    }
