# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.filter.bench_workloads import FilterModule


def test_fits_the_plan() -> None:
    workload = {
        "id": "one_256",
        "output_tokens": 256,
        "streams": 1,
        "temperature": 0.0,
        "top_p": None,
        "source": "here",
    }
    fitting = FilterModule().filters()["bench_workloads"]
    # An inventory's numbers may be text.
    found = fitting([workload], plan={"engine_args": {"max-num-seqs": 2}}, streams=["2"], only=["one_256"])
    assert found == [
        {**workload, "sized": []},
        {**workload, "id": "streams_2", "streams": 2, "source": "hy3_bench_streams", "sized": []},
    ]
