# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The benchmark on a lab that serves: real load generator, real counters, two nodes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ansible_collections.sparks.hy3.tests.integration.lab import ROOT, changed_nothing, command_of, play

CHOSEN = json.dumps({"hy3_bench_workloads": ["one_256", "six_512"], "hy3_bench_runs": 1})


def newest(pattern: str) -> Path:
    return max((ROOT / "reports/lab").glob(pattern))


def test_a_benchmark() -> None:
    play("serve-hy3")
    output = play("bench-hy3", "-e", CHOSEN)
    assert changed_nothing(output)
    report = json.loads(newest("*-bench.json").read_text())
    one, six = report["bench"]["workloads"]
    assert (one["id"], one["shortest"], one["failed"], one["others"]) == ("one_256", 256, 0, 0)
    assert one["decode_tps"]["median"] > 1
    # The drafter of the lab's checkpoint is right by construction.
    assert one["acceptance"]["rate"] > 0.9
    assert (six["streams"], six["sized"]) == (2, ["2 streams instead of 6, as max-num-seqs is 2"])
    page = newest("*-bench.html").read_text()
    assert page.count("<svg") == 5
    assert "<script" not in page


def test_check_mode_measures_nothing() -> None:
    output = play("bench-hy3", "--check", "-e", CHOSEN)
    assert "would measure one_256: 256 tokens, 1 at a time" in output
    assert changed_nothing(output)


def test_a_cluster_that_does_not_answer_is_refused() -> None:
    play("stop-hy3")
    try:
        done = subprocess.run(
            command_of("bench-hy3", "-e", CHOSEN), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "does not answer as a healthy model" in done.stdout
    finally:
        play("serve-hy3")
