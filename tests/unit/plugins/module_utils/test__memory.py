# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._memory import (
    GIB,
    MemoryInputError,
    MemoryLimit,
    format_gib,
    memory_limit,
    parse_cgroups,
    parse_limits,
    parse_meminfo,
    parse_size,
)

# DGX Spark: total and available, where only 7.4 GiB are free and the rest is reclaimable cache.
SPARK_MEMINFO = """\
MemTotal:       127600748 kB
MemFree:          7759462 kB
MemAvailable:   118566368 kB
Active(anon):     4194304 kB
HugePages_Total:      12
"""


def test_parse_meminfo() -> None:
    found = parse_meminfo(SPARK_MEMINFO)
    assert found["MemTotal"] == 130663165952
    assert [format_gib(found[name]) for name in ("MemTotal", "MemAvailable")] == ["121.69 GiB", "113.07 GiB"]
    assert (found["Active(anon)"], found["HugePages_Total"]) == (4 * GIB, 12)


@pytest.mark.parametrize("name", ["MemTotal", "MemAvailable"])
def test_parse_meminfo_refuses(name: str) -> None:
    with pytest.raises(MemoryInputError, match=f"has no {name} line"):
        parse_meminfo(SPARK_MEMINFO.replace(name, "Other"))


TEST_SIZES: list[tuple[str, int | None]] = [
    ("104G", 111669149696),
    ("106496M", 111669149696),
    ("111669149696", 111669149696),
    ("0.5G", 536870912),
    ("1T", 1024 * GIB),
    ("4K", 4096),
    (" 4K\n", 4096),
    ("0", 0),
    ("infinity", None),
]


@pytest.mark.parametrize(("text", "expected"), TEST_SIZES)
def test_parse_size(text: str, expected: int | None) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "104GB", "104GiB", "104g", "-1G", "1e9", "G", "max", "1 G", "٣"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(MemoryInputError, match="is not a number with K, M, G or T"):
        parse_size(text)


def test_parse_size_refuses_a_share() -> None:
    with pytest.raises(MemoryInputError, match="'50%' is a share"):
        parse_size("50%")


# Recorded: /proc/self/limits of a container where the hard limit of locked memory cannot be raised.
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max stack size            8388608              unlimited            bytes     
Max open files            1024                 524288               files     
Max locked memory         8388608              8388608              bytes     
Max nice priority         0                    0                    
Max realtime timeout      unlimited            unlimited            us        
"""  # noqa: W291


def test_parse_limits() -> None:
    assert parse_limits(LIMITS) == {
        "Max cpu time": (None, None),
        "Max stack size": (8388608, None),
        "Max open files": (1024, 524288),
        "Max locked memory": (8388608, 8388608),
        "Max nice priority": (0, 0),
        "Max realtime timeout": (None, None),
    }


def test_parse_limits_of_this_process() -> None:
    assert len(parse_limits(Path("/proc/self/limits").read_text())) == 16


V1_NONE = "9223372036854771712"
HYBRID = "9:name=systemd:/hy3.slice\n4:memory:/hy3.slice/hy3-ray.service\n2,1:cpu,cpuacct:/\n0::/hy3.slice\n"
UNIFIED = "0::/hy3.slice/hy3-ray.service\n"


def test_parse_cgroups() -> None:
    assert parse_cgroups(HYBRID) == {
        "name=systemd": "/hy3.slice",
        "memory": "/hy3.slice/hy3-ray.service",
        "cpu": "/",
        "cpuacct": "/",
        "": "/hy3.slice",
    }


def test_parse_cgroups_keeps_a_colon_in_a_path() -> None:
    assert parse_cgroups("0::/a:b\n") == {"": "/a:b"}


# id, /proc/PID/cgroup, files below the cgroup mount, limit, file that sets it
TEST_LIMITS: list[tuple[str, str, dict[str, str], int | None, str]] = [
    (
        "v2 own limit",
        UNIFIED,
        {"hy3.slice/memory.max": "max", "hy3.slice/hy3-ray.service/memory.max": "100"},
        100,
        "hy3.slice/hy3-ray.service/memory.max",
    ),
    (
        "v2 slice is smaller",
        UNIFIED,
        {"hy3.slice/memory.max": "90", "hy3.slice/hy3-ray.service/memory.max": "100"},
        90,
        "hy3.slice/memory.max",
    ),
    ("v2 zero", UNIFIED, {"hy3.slice/hy3-ray.service/memory.max": "0"}, 0, "hy3.slice/hy3-ray.service/memory.max"),
    ("v2 no limit", UNIFIED, {"hy3.slice/memory.max": "max", "hy3.slice/hy3-ray.service/memory.max": "max"}, None, ""),
    ("v2 controller off", UNIFIED, {"hy3.slice/cgroup.procs": ""}, None, ""),
    ("v2 namespace root", "0::/\n", {"memory.max": "100"}, 100, "memory.max"),
    (
        "hybrid: v1 binds, a stray memory.max does not",
        HYBRID,
        {
            "memory/memory.limit_in_bytes": V1_NONE,
            "memory/hy3.slice/memory.limit_in_bytes": "200",
            "memory/hy3.slice/hy3-ray.service/memory.limit_in_bytes": V1_NONE,
            "hy3.slice/memory.max": "1",
            "unified/hy3.slice/memory.max": "1",
        },
        200,
        "memory/hy3.slice/memory.limit_in_bytes",
    ),
    (
        "v1 unit without its own group: accepted, not enforced",
        HYBRID,
        {"memory/memory.limit_in_bytes": V1_NONE},
        None,
        "",
    ),
    (
        "v1 with 64 KiB pages",
        HYBRID,
        {"memory/hy3.slice/memory.limit_in_bytes": "9223372036854710272"},
        None,
        "",
    ),
    (
        "v1 ancestor outside the namespace",
        "4:memory:/\n0::/\n",
        {
            "memory/memory.limit_in_bytes": V1_NONE,
            "memory/memory.stat": "cache 5\nhierarchical_memory_limit 300\nhierarchical_memsw_limit 7\n",
        },
        300,
        "memory/memory.stat",
    ),
]


@pytest.mark.parametrize(
    ("cgroups", "files", "limit", "source"), [case[1:] for case in TEST_LIMITS], ids=[case[0] for case in TEST_LIMITS]
)
def test_memory_limit(tmp_path: Path, cgroups: str, files: dict[str, str], limit: int | None, source: str) -> None:
    root = tmp_path / "cgroup"
    for name, text in {**{f"cgroup/{name}": text for name, text in files.items()}, "proc/7/cgroup": cgroups}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n" if name != "proc/7/cgroup" else text)
    found = memory_limit(7, proc=str(tmp_path / "proc"), cgroup=str(root))
    assert found == MemoryLimit(limit, source and str(root / source))


def test_memory_limit_of_a_dead_process(tmp_path: Path) -> None:
    with pytest.raises(MemoryInputError, match="Cannot read the cgroup of process 7 "):
        memory_limit(7, proc=str(tmp_path))


def test_memory_limit_of_this_process() -> None:
    found = memory_limit("self")
    assert (found.limit is None) == (found.source == "")
