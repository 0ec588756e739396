# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of several failures comes first, and whom each is about."""

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import find_failure, find_failures
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import Line, merged, timed

READY = "Starting vLLM server on http://127.0.0.1:8000"


def test_the_earliest_of_two_roots_is_the_reason_whatever_the_order_of_logs() -> None:
    late = timed("1796064500.0 a vllm[1]: OSError: [Errno 28] No space left on device", now=0)
    early = timed("1796064400.0 a kernel: mlx5_core 0000:01:00.1 enp1s0f1np1: Link down", now=0, source=True)
    failures = find_failures(merged(late, early), stopped=True)
    assert [(one["rule"], one["time"]) for one in failures] == [
        ("link-down", 1796064400.0),
        ("disk-full", 1796064500.0),
    ]


@pytest.mark.parametrize(("seconds", "first"), [(1, "unknown"), (9, "cancelled")])
def test_an_error_long_after_the_loss_is_an_echo(seconds: int, first: str) -> None:
    lines = [Line("RuntimeError: cancelled", 100.0), Line("ValueError: something else", 100.0 + seconds)]
    assert find_failures(lines, stopped=True)[0]["rule"] == first


@pytest.mark.parametrize(("ago", "rules"), [(100, ["disk-full", "cancelled"]), (4000, ["cancelled"])])
def test_what_an_engine_survived_long_before_its_end_does_not_count(ago: int, rules: list[str]) -> None:
    lines = [Line(READY, 0.0), Line("OSError: [Errno 28] No space left on device", 5000.0 - ago)]
    lines.append(Line("RuntimeError: cancelled", 5000.0))
    assert [one["rule"] for one in find_failures(lines, stopped=True)] == rules


# (id, log, the node that its first failure is about)
TEST_ADDRESSES: list[tuple[str, str, str | None]] = [
    (
        "peer of NCCL",
        "NCCL WARN socketProgress: Connection closed by remote peer spark-2.local<43211>",
        "spark-2.local",
    ),
    ("peer of Gloo", "RuntimeError: [pair.cc:534] Connection closed by peer [10.77.0.2]:41877", "10.77.0.2"),
    (
        "peer, said by another node",
        "(RayWorkerProc pid=9, ip=10.77.0.1) Connection closed by peer [10.77.0.2]:4",
        "10.77.0.2",
    ),
    ("rank of another node", "(RayWorkerProc pid=9, ip=10.77.0.2) RuntimeError: can't start new thread", "10.77.0.2"),
    (
        "dead node",
        "The node with node id: 0f and address: 10.77.0.2 and node name: x has been marked dead",
        "10.77.0.2",
    ),
    (
        "dead actor, on a later line",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: X\n"
        "\tip: 10.77.0.2",
        "10.77.0.2",
    ),
    (
        "an exception of a task, on an earlier line",
        "ray.exceptions.RayTaskError(RuntimeError): ray::RayWorkerProc.f() (pid=9, ip=10.77.0.2, actor_id=1)\n"
        "  File x\n"
        "RuntimeError: can't start new thread",
        "10.77.0.2",
    ),
    (
        "loopback is nobody",
        "RuntimeError: Gloo connectFullMesh failed with Connection refused, remote=[127.0.0.1]:4",
        None,
    ),
    ("says nothing", "RuntimeError: cancelled", None),
]


@pytest.mark.parametrize(
    ("log", "address"), [row[1:] for row in TEST_ADDRESSES], ids=[row[0] for row in TEST_ADDRESSES]
)
def test_whom_a_line_is_about(log: str, address: str | None) -> None:
    failure = find_failure(clean_lines(log), stopped=True)
    assert failure is not None
    assert failure["address"] == address


def test_no_secret_leaves_with_a_line() -> None:
    failure = find_failure(["vllm: error: unrecognized arguments: --api-key hush --foo HF_TOKEN=hush2"], stopped=True)
    assert failure is not None
    assert "hush" not in repr(failure)


def test_at_most_eight_and_each_rule_once() -> None:
    log = clean_lines(
        "\n".join(
            ["RuntimeError: cancelled"] * 3
            + [f"OSError: [Errno {number}]" for number in (28, 30, 24, 98, 99, 12, 13, 113)]
        )
    )
    rules = [one["rule"] for one in find_failures(log, stopped=True)]
    assert (len(rules), len(set(rules))) == (8, 8)
