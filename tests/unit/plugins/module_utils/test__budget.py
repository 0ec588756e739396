# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._budget import Cap, ObjectStore, judge
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB

SPARK = 127600748 * 1024  # 121.69 GiB
SMALL = 125483110 * 1024  # 119.67 GiB


def caps(**sizes: int) -> list[Cap]:
    return [Cap(name, size * GIB) for name, size in sizes.items()]


# id, MemTotal, caps, headroom in GiB, problem
TEST_CAPS: list[tuple[str, int, list[Cap], float, list[str]]] = [
    ("head", SPARK, caps(raylet=104, driver=8), 5.69, []),
    ("worker", SPARK, caps(raylet=110), 7.69, []),
    ("nothing capped", SPARK, [], 117.69, []),
    (
        "head with the worker's cap",
        SPARK,
        caps(raylet=110, driver=8),
        -0.31,
        [
            "The caps (raylet 110.00 GiB + driver 8.00 GiB) and the reserve of 4.00 GiB add up to 122.00 GiB, "
            "more than the 121.69 GiB of this node: lower the caps by 0.31 GiB in all"
        ],
    ),
    (
        "smaller node",
        SMALL,
        caps(raylet=110, driver=6),
        -0.33,
        [
            "The caps (raylet 110.00 GiB + driver 6.00 GiB) and the reserve of 4.00 GiB add up to 120.00 GiB, "
            "more than the 119.67 GiB of this node: lower the caps by 0.33 GiB in all"
        ],
    ),
    ("exact fit", 116 * GIB, caps(raylet=104, driver=8), 0, []),
]


@pytest.mark.parametrize(
    ("mem_total", "units", "headroom", "problems"),
    [case[1:] for case in TEST_CAPS],
    ids=[case[0] for case in TEST_CAPS],
)
def test_caps(mem_total: int, units: list[Cap], headroom: float, problems: list[str]) -> None:
    verdict = judge(mem_total=mem_total, reserve=4 * GIB, caps=units)
    assert (round(verdict.headroom / GIB, 2), verdict.problems, verdict.device_budget) == (headroom, problems, None)


# id, share, host side in GiB, problem
TEST_DEVICE: list[tuple[str, float, int, list[str]]] = [
    ("head", 0.85, 8, []),
    ("worker", 0.85, 0, []),
    (
        "0.9 with what the processes need",
        0.9,
        14,
        [
            "The device budget of 109.52 GiB, the host side of 14.00 GiB and the reserve of 4.00 GiB add up to "
            "127.52 GiB, more than the 121.69 GiB of this node: lower gpu_memory_utilization to 0.85"
        ],
    ),
    ("the advice itself", 0.85, 14, []),
    (
        "no share helps",
        0.1,
        120,
        [
            "The device budget of 12.17 GiB, the host side of 120.00 GiB and the reserve of 4.00 GiB add up to "
            "136.17 GiB, more than the 121.69 GiB of this node: lower the host side or the reserve"
        ],
    ),
]


@pytest.mark.parametrize(
    ("share", "host_side", "problems"), [case[1:] for case in TEST_DEVICE], ids=[case[0] for case in TEST_DEVICE]
)
def test_device_budget(share: float, host_side: int, problems: list[str]) -> None:
    verdict = judge(
        mem_total=SPARK,
        reserve=4 * GIB,
        caps=caps(raylet=104, driver=8),
        gpu_memory_utilization=share,
        host_side=host_side * GIB,
    )
    assert verdict.problems == problems


def test_device_budget_is_rounded_up_as_the_engine_does() -> None:
    verdict = judge(mem_total=SPARK, reserve=0, caps=[], gpu_memory_utilization=0.85)
    assert verdict.device_budget == 111063691060


def test_object_store_lives_inside_its_cap() -> None:
    verdict = judge(
        mem_total=SPARK, reserve=4 * GIB, caps=caps(raylet=110), object_store=ObjectStore("raylet", 110 * GIB)
    )
    assert (verdict.caps_total, verdict.problems) == (110 * GIB, [])


def test_object_store_larger_than_its_cap() -> None:
    verdict = judge(mem_total=SPARK, reserve=4 * GIB, caps=caps(raylet=2), object_store=ObjectStore("raylet", 3 * GIB))
    assert verdict.problems == [
        "The object store of 3.00 GiB lives inside the cap raylet of 2.00 GiB and does not fit: make it smaller"
    ]


@pytest.mark.parametrize("share", [0, -0.5, 1.01, 85, float("nan")])
def test_share_that_is_none(share: float) -> None:
    with pytest.raises(Hy3Error, match="gpu_memory_utilization is"):
        judge(mem_total=SPARK, reserve=0, caps=[], gpu_memory_utilization=share)


def test_object_store_without_a_cap() -> None:
    with pytest.raises(Hy3Error, match="lives in 'ray', which is none of the caps"):
        judge(mem_total=SPARK, reserve=0, caps=caps(raylet=2), object_store=ObjectStore("ray", 1))


def test_repeated_cap() -> None:
    with pytest.raises(Hy3Error, match="The caps raylet, raylet repeat a name"):
        judge(mem_total=SPARK, reserve=0, caps=[Cap("raylet", 1), Cap("raylet", 2)])
