# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node-side code on a kernel with a real RoCE GID table, control groups that bind, and pressure figures."""

from __future__ import annotations

import ipaddress
import shutil
import typing as t

import pytest
from ansible_collections.sparks.hy3.tests.vm.machine import ROOT, boot

MIB = 1024**2


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, t.Any]]:
    """What the machine said, by scenario; it has ended by then."""
    # Not a temporary name: what a killed run left is removed by the next one.
    work = ROOT / "tests/output/vm-run"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found = boot(work)
    shutil.rmtree(work)
    for answer in found.values():
        print(answer["name"], f"{answer.get('took', 0):.1f} s")
    return found


@pytest.fixture
def said(request: pytest.FixtureRequest, answers: dict[str, dict[str, t.Any]]) -> dict[str, t.Any]:
    """The answer of the scenario that the test is named after."""
    answer = answers[request.node.name.removeprefix("test_").partition("_says_")[0]]
    assert "error" not in answer, answer["error"]
    return answer


Said = dict[str, t.Any]


def index_of(resolved: Said) -> str:
    assert resolved["rc"] == 0, resolved["said"]
    return str(resolved["env"]["NCCL_IB_GID_INDEX"])


def test_roce_says_the_table(said: Said) -> None:
    # Index 0 is the port's own link-local GID; the VLAN's two rows come in any order.
    rows = [tuple(row) for row in said["table"]]
    assert [row[0] for row in rows] == list(range(6))
    assert rows[0][1].startswith("fe80::")
    assert rows[1:4] == [
        (index, f"::ffff:{address}", "v2", "enp1s0f1np1")
        for index, address in enumerate(("10.0.0.1", "192.168.100.1", "192.168.100.11"), start=1)
    ]
    assert ("::ffff:192.168.140.1", "v2", "enp1s0f1np1.40") in [row[1:] for row in rows[4:]]


def test_roce_says_einval_of_empty_slots(said: Said) -> None:
    assert said["type_errors"] == [None] * 6 + ["EINVAL"] * 10


def test_roce_says_the_environment(said: Said) -> None:
    assert said["port"]["rc"] == 0
    assert (
        said["port"]["env"].items()
        >= {
            "NCCL_IB_GID_INDEX": "3",
            "NCCL_IB_HCA": "=rocep1s0f1",
            "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
            "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        }.items()
    )


def test_roce_says_the_vlan(said: Said) -> None:
    (index,) = [row[0] for row in said["table"] if row[1] == "::ffff:192.168.140.1"]
    assert (index_of(said["vlan"]), said["vlan"]["env"]["GLOO_SOCKET_IFNAME"]) == (str(index), "enp1s0f1np1.40")


@pytest.mark.parametrize("which", ["foreign", "while_gone"])
def test_roce_says_no_address(said: Said, which: str) -> None:
    # Nor is there an environment file any more, though an earlier start had left one.
    assert (said[which]["rc"], said[which]["env"]) == (1, None)
    assert len(said[which]["said"].splitlines()) == 1


def test_roce_says_another_index_after_the_address_came_back(said: Said) -> None:
    # It stood at 1, which another address took meanwhile.
    assert ipaddress.IPv6Address(said["newcomer"].strip()).ipv4_mapped == ipaddress.IPv4Address("172.31.0.9")
    assert index_of(said["back"]) == "6"


def test_roce_says_that_the_netdev_decides(said: Said) -> None:
    # One address on the port, where its index is 3, and on the port's VLAN.
    assert index_of(said["shared"]) == "7"


def test_caps_says_that_they_kill(said: Said) -> None:
    assert said["limit"] == {"limit": 64 * MIB, "source": "/sys/fs/cgroup/hy3.slice/hy3-ray.service/memory.max"}
    assert said["self"] == {"limit": None, "source": ""}
    assert said["over_cap"] == {"kills": 1, "signal": 9}


def test_caps_says_that_the_slice_bounds_the_sum(said: Said) -> None:
    # Sometimes both are killed: the kernel does not wait for the first to be gone.
    assert said["over_slice"]["kills"] >= 1
    assert (said["over_slice"]["slice_oom"] >= 1, said["over_slice"]["serve_oom"]) == (True, 0)


def test_psi_says_that_it_rises(said: Said) -> None:
    assert said["some"] > 200_000, "microseconds"
    assert said["some"] >= said["full"] > 0


def test_dirty_says_that_the_advice_needs_fsync(said: Said) -> None:
    # Field case B44. The kernel begins to write when it gets the advice, so a part of them is clean by the second step.
    written, advised, synced, advised_again = said["steps"]
    assert written == 8 * MIB > advised >= synced > 2 * MIB
    assert advised_again == 0
    assert (said["purge"]["released"], said["purge"]["resident_after"], said["purge"]["kept"]) == (8 * MIB, 0, [])


def test_tree_says_each_file_once(said: Said) -> None:
    # Two blobs with five names in all, one page in a hole of 40 MiB, and an empty file.
    assert (said["purge"]["files"], said["purge"]["resident_before"]) == (4, 2 * MIB + 4096)
    assert said["purge"]["skipped"] == [["/disk/hub/blobs/fifo", "Not a regular file"]]
    assert said["purge"]["failed"] == []


def test_tree_says_who_maps(said: Said) -> None:
    # Field case B45.
    assert said["purge"]["kept"] == [["/disk/hub/blobs/mapped", MIB]]
    assert said["mappers"] == [[True, ["/disk/hub/blobs/mapped"]]]
    assert (said["again"]["released"], said["again"]["kept"]) == (MIB, [])


def test_tree_says_what_a_stranger_may_not(said: Said) -> None:
    assert [(path, error) for path, error, _reason in said["stranger"]["failed"]] == [
        ("/disk/hub/blobs/secret", "EACCES"),
        ("/disk/hub/blobs/free", "EPERM"),
    ]


def test_drop_caches_says_that_all_is_dropped(said: Said) -> None:
    assert (said["before"], said["after"]) == (8 * MIB, 0)
