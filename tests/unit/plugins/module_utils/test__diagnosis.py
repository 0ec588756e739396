# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two nodes, of which one complains and the other has the reason."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._diagnosis import diagnose
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import find_failures, find_troubles
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import timed
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.failure_samples import GLOBAL, MEMCG, OOMD

START = 1796064000
ADDRESSES = {"spark-1": "10.77.0.1", "spark-2": "10.77.0.2"}
SERVE, RAY = "hy3-serve.service", "hy3-ray.service"
FREE = {"total": 122 * GIB, "available": 100 * GIB, "swap_total": 0, "swap_free": 0, "pressure": 0.0}
FULL = FREE | {"available": GIB, "swap_total": 16 * GIB, "swap_free": 2 * GIB, "pressure": 61.0}


def at(seconds: float, line: str, source: str = "vllm[1]") -> str:
    return f"{START + seconds}.000000 spark {source}: {line}"


def unit(state: str = "active", result: str = "success", status: int = 0, **more: t.Any) -> dict[str, t.Any]:
    return {
        "load_state": "loaded",
        "active_state": state,
        "result": result,
        "exec_main_status": status,
        "n_restarts": 0,
        "active_since": START,
        "oom_kills": None,
        **more,
    }


def node(log: str = "", kernel: str = "", **more: t.Any) -> dict[str, t.Any]:
    """What engine_status returns of a node, with a log and kernel lines."""
    failures = find_failures(timed(log, now=START), stopped=True)
    return {
        "units": {RAY: unit()},
        "failure": failures[0] if failures else None,
        "failures": failures,
        "troubles": find_troubles(timed(kernel, now=START, source=True)),
        "memory": FREE,
        "health": None,
        "booted": START - 1000,
        **more,
    }


def head(log: str, **more: t.Any) -> dict[str, t.Any]:
    return node(log, **{"units": {RAY: unit(), SERVE: unit("failed", "exit-code", 1)}, **more})


CANCELLED = "\n".join(
    [
        at(400, "(EngineCore pid=7) ERROR 12-01 11:02:09 [core.py:1231] RuntimeError: cancelled"),
        at(402, "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    ]
)
ECHO = "ActorDiedError: The actor died unexpectedly before finishing this task."

# (id, the head, its peer, the node with the reason, its rule, words of the text)
TEST_REASONS: list[tuple[str, dict[str, t.Any], dict[str, t.Any], str, str, str]] = [
    (
        "the seed: the peer's rank was killed by the kernel",
        head(CANCELLED),
        node(kernel=at(395, GLOBAL.removeprefix("kernel: "), "kernel")),
        *("spark-2", "oom-node", "Then spark-1: The head lost a worker"),
    ),
    (
        "by its cap",
        head(CANCELLED),
        node(kernel=at(395, MEMCG.removeprefix("kernel: "), "kernel")),
        *("spark-2", "oom-cap", "reached its memory limit"),
    ),
    (
        "by systemd-oomd",
        head(CANCELLED),
        node(kernel=at(395, OOMD.format("hy3-ray.service").partition(": ")[2], "systemd-oomd[840]")),
        *("spark-2", "oomd-kill", "systemd-oomd killed hy3-ray.service"),
    ),
    (
        "only systemd knows of the kill",
        head(CANCELLED),
        node(units={RAY: unit("failed", "oom-kill", 9)}),
        *("spark-2", "unit-oom-kill", "lost a process to the kernel"),
    ),
    (
        "only the control group's counter knows",
        head(CANCELLED),
        node(units={RAY: unit(oom_kills=1)}),
        *("spark-2", "unit-oom-kill", "has killed a process of hy3-ray.service"),
    ),
    (
        "the peer's driver found no memory",
        head(CANCELLED),
        node(
            kernel=at(
                300, "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)", "kernel"
            )
        ),
        *("spark-2", "gpu-memory-wedge", "was used up"),
    ),
    (
        "the seed: the peer has 1 GiB left and swaps, and nothing was killed yet",
        head(CANCELLED),
        node(memory=FULL),
        *("spark-2", "node-memory", "1.00 GiB of 122.00 GiB are available, 14.00 GiB of swap are in use"),
    ),
    (
        "pingable and SSH-dead",
        head(CANCELLED),
        {"unreachable": True, "msg": "Connection timed out during banner exchange"},
        *("spark-2", "node-unreachable", "end the engine on the other nodes first"),
    ),
    (
        "the peer was booted again",
        head(CANCELLED),
        node(booted=START + 390),
        *("spark-2", "node-rebooted", "booted again"),
    ),
    (
        "the peer's Ray is stopped",
        head(at(400, ECHO)),
        node(units={RAY: unit("inactive")}),
        *("spark-2", "unit-stopped", "hy3-ray.service is not running there"),
    ),
    (
        "the peer's Ray was killed by somebody",
        head(at(400, ECHO)),
        node(units={RAY: unit("failed", "signal", 9)}),
        *("spark-2", "unit-signal", "SIGKILL"),
    ),
    (
        "Ray's head does not count the peer",
        head(
            at(400, ECHO),
            ray={"nodes": [{"address": "10.77.0.1", "alive": True}, {"address": "10.77.0.2", "alive": False}]},
        ),
        node(),
        *("spark-2", "ray-member-lost", "does not count it"),
    ),
    (
        "B114: the peer's own error, which the head only hears of",
        head(at(400, "NCCL WARN socketProgress: Connection closed by remote peer spark-2<43211>")),
        node(at(399, "ValueError: heads not divisible")),
        *("spark-2", "unknown", "heads not divisible"),
    ),
    (
        "what NCCL of the peer says, where the head has only the general word",
        head(at(400, "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")),
        node(
            at(
                398,
                "spark-2:1:1 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument",
            )
        ),
        *("spark-2", "qp-refused", "GID index"),
    ),
    (
        "a link that went down before the packets were lost",
        head(
            at(
                400,
                "NCCL WARN NET/IB: Got completion from peer 10.77.0.2<1> with status=12 opcode=0 len=0 vendor err 129",
            )
        ),
        node(kernel=at(397, "mlx5_core 0000:01:00.1 enp1s0f1np1: Link down", "kernel")),
        *("spark-2", "link-down", "Then spark-1: RoCE packets"),
    ),
    (
        "the head's own reason stays, whatever became of the peer later",
        head(at(300, "ValueError: No available memory for the cache blocks.") + "\n" + CANCELLED),
        node(units={RAY: unit("inactive")}),
        *("spark-1", "kv-none", "no memory for the KV pool"),
    ),
    (
        "of two kills the first",
        head(CANCELLED, troubles=find_troubles(timed(at(396, MEMCG[8:], "kernel"), now=0, source=True))),
        node(kernel=at(395, GLOBAL[8:], "kernel")),
        *("spark-2", "oom-node", "Then spark-1: The kernel killed"),
    ),
    (
        "an error that no rule is about is not blamed on a peer that is short of memory",
        head(at(400, "ValueError: something new")),
        node(memory=FULL),
        *("spark-1", "unknown", "something new"),
    ),
    (
        "nothing but the loss: it says where it looked",
        head(CANCELLED),
        node(),
        *(
            "spark-1",
            "cancelled",
            "Looked at spark-2: 100.00 GiB of 122.00 GiB free, no kill for memory, hy3-ray.service active.",
        ),
    ),
    (
        "a kill of last week's start is none of this one's",
        head(CANCELLED),
        node(kernel=at(-5000, GLOBAL[8:], "kernel")),
        *("spark-1", "cancelled", "Looked at spark-2"),
    ),
    (
        "a kill after the loss is not its reason",
        head(CANCELLED),
        node(kernel=at(900, GLOBAL[8:], "kernel")),
        *("spark-1", "cancelled", "lost a worker"),
    ),
    (
        "a start that systemd has repeated has its reason before",
        head(CANCELLED, units={SERVE: unit("failed", "exit-code", 1, n_restarts=2)}),
        node(kernel=at(-900, GLOBAL[8:], "kernel")),
        *("spark-2", "oom-node", "no memory left"),
    ),
    (
        "the start before, where this one has said nothing yet",
        node(
            units={SERVE: unit("activating", n_restarts=1)},
            failures_before=find_failures(
                timed(at(-30, "OSError: [Errno 28] No space left on device"), now=0), stopped=True
            ),
        ),
        node(),
        *("spark-1", "disk-full", "A disk is full"),
    ),
    (
        "whom the head names",
        head(at(400, "RuntimeError: [pair.cc:534] Connection closed by peer [10.77.0.2]:41877")),
        node(),
        *("spark-1", "remote-gone", "The other node is spark-2."),
    ),
    (
        "a venv that was removed on a peer",
        head(at(400, ECHO)),
        node(units={RAY: unit("failed", "exit-code", 203)}),
        *("spark-2", "unit-exit", "its program is not there"),
    ),
]


@pytest.mark.parametrize(
    ("first", "second", "host", "rule", "words"),
    [row[1:] for row in TEST_REASONS],
    ids=[row[0] for row in TEST_REASONS],
)
def test_the_reason_and_its_node(
    first: dict[str, t.Any], second: dict[str, t.Any], host: str, rule: str, words: str
) -> None:
    found = diagnose({"spark-1": first, "spark-2": second}, head="spark-1", addresses=ADDRESSES)
    assert found is not None
    assert (found["host"], found["rule"]) == (host, rule), found["text"]
    assert words in found["text"]
    assert found["cause"] and found["fix"] and found["source"] and found["line"]


# (id, head, peer) of which nothing is wrong
TEST_WELL: list[tuple[str, dict[str, t.Any], dict[str, t.Any]]] = [
    ("nothing was ever deployed", node(units={}), node(units={})),
    ("all run", head("", units={SERVE: unit()}), node()),
    (
        "it answers, so what a peer has seen is no reason for anything",
        head("", units={SERVE: unit()}, health={"ok": True}),
        node(kernel=at(395, GLOBAL[8:], "kernel"), memory=FULL),
    ),
    ("nobody was asked", {}, {}),
]


@pytest.mark.parametrize(("first", "second"), [row[1:] for row in TEST_WELL], ids=[row[0] for row in TEST_WELL])
def test_well(first: dict[str, t.Any], second: dict[str, t.Any]) -> None:
    assert diagnose({"spark-1": first, "spark-2": second}, head="spark-1", addresses=ADDRESSES) is None


def test_all_that_followed_is_kept_in_order() -> None:
    found = diagnose(
        {"spark-1": head(CANCELLED), "spark-2": node(kernel=at(395, GLOBAL[8:], "kernel"))}, head="spark-1"
    )
    assert found is not None
    assert [(one["host"], one["rule"]) for one in found["followed"]] == [
        ("spark-1", "cancelled"),
        ("spark-1", "engine-failed"),
    ]
    assert found["looked"] == []


def test_three_nodes_and_one_that_could_not_be_read() -> None:
    nodes = {"spark-1": head(CANCELLED), "spark-2": node(), "spark-3": {"failed": True, "msg": "systemctl is missing"}}
    found = diagnose(nodes, head="spark-1")
    assert found is not None
    assert found["rule"] == "cancelled"
    assert found["looked"][1] == "spark-3 could not be looked at."
