# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._memory import (
    GIB,
    MemoryInputError,
    MemoryLimit,
    Owner,
    format_gib,
    is_delegated,
    memory_charged,
    memory_limit,
    oom_kills,
    parse_cgroups,
    parse_limits,
    parse_meminfo,
    parse_owners,
    parse_size,
    swap_limit,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# Field cases about memory and limits whose answer is not in this directory's tests of _memory and _budget, and why.
NOT_OURS = {
    "B30": "Ray's memory monitor is switched off by every profile; its words are in test__engine_failures",
    "B41": "systemd-oomd's words are in test__engine_failures",
    "B107": "the engine's words about its pool are read by _engine_log and _engine_failures",
    "B114": "how often a start is tried again is for recovery",
    "B117": "what a wedged node leaves in its journal is for recovery",
}

# DGX Spark: total and available, where only 7.4 GiB are free and the rest is reclaimable cache.
SPARK_MEMINFO = """\
MemTotal:       127600748 kB
MemFree:          7759462 kB
MemAvailable:   118566368 kB
Active(anon):     4194304 kB
HugePages_Total:      12
"""


def test_parse_meminfo() -> None:
    """B39: the figures of a GB10 come from here, with what can be reclaimed counted as available."""
    found = parse_meminfo(SPARK_MEMINFO)
    assert found["MemTotal"] == 130663165952
    assert [format_gib(found[name]) for name in ("MemTotal", "MemAvailable")] == ["121.69 GiB", "113.07 GiB"]
    assert (found["Active(anon)"], found["HugePages_Total"]) == (4 * GIB, 12)


def test_parse_meminfo_refuses_a_node_without_memory() -> None:
    with pytest.raises(MemoryInputError, match="has a MemTotal of 0"):
        parse_meminfo(SPARK_MEMINFO.replace("127600748", "0"))


@pytest.mark.parametrize("name", ["MemTotal", "MemAvailable"])
def test_parse_meminfo_refuses(name: str) -> None:
    with pytest.raises(MemoryInputError, match=f"has no {name} line"):
        parse_meminfo(SPARK_MEMINFO.replace(name, "Other"))


# B38 among them.
TEST_SIZES: list[tuple[str | None, int | None]] = [
    ("104G", 111669149696),
    ("106496M", 111669149696),
    ("111669149696", 111669149696),
    ("0.5G", 536870912),
    ("1T", 1024 * GIB),
    ("1P", 1024**2 * GIB),
    ("1E", 1024**3 * GIB),
    ("16B", 16),
    ("4K", 4096),
    (" 4K\n", 4096),
    ("0", 0),
    ("infinity", None),
    (None, None),
    ("50%", 65331582976),
    ("12.5%", 16332895744),
    ("100%", 130663165952),
]


@pytest.mark.parametrize(("text", "expected"), TEST_SIZES)
def test_parse_size(text: str | None, expected: int | None) -> None:
    assert parse_size(text, mem_total=127600748 * 1024) == expected


@pytest.mark.parametrize("text", ["", "104GB", "104GiB", "104g", "-1G", "1e9", "G", "max", "1 G", "٣", "1Z", "1KB"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(MemoryInputError, match="is not a number with B, K, M, G, T, P or E"):
        parse_size(text)


def test_parse_size_refuses_a_share_of_nothing() -> None:
    with pytest.raises(MemoryInputError, match="'50%' is a share"):
        parse_size("50%")


def test_parse_size_refuses_more_than_all() -> None:
    with pytest.raises(MemoryInputError, match="'101%' is more than the whole memory"):
        parse_size("101%", mem_total=GIB)


# Recorded: /proc/self/limits of a container where the hard limit of locked memory cannot be raised.
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max stack size            8388608              unlimited            bytes     
Max open files            1024                 524288               files     
Max locked memory         8388608              8388608              bytes     
Max nice priority         0                    0                    
Max realtime timeout      unlimited            unlimited            us        
"""  # noqa: W291 - as recorded


def test_parse_limits() -> None:
    assert parse_limits(LIMITS) == {
        "Max cpu time": (None, None),
        "Max stack size": (8388608, None),
        "Max open files": (1024, 524288),
        "Max locked memory": (8388608, 8388608),
        "Max nice priority": (0, 0),
        "Max realtime timeout": (None, None),
    }


def test_memlock_of_a_raylet_that_kept_its_old_session_s() -> None:
    """B33: limits.d says unlimited, and the kernel has 8 MiB for this process."""
    text = "Max locked memory         8388608              8388608              bytes"
    assert parse_limits(text) == {"Max locked memory": (8388608, 8388608)}


# id, text, owners
TEST_OWNERS: list[tuple[str, str, list[Owner]]] = [
    ("B39", "4242, VLLM::EngineCore, 104277\n", [Owner(4242, "VLLM::EngineCore", 104277)]),
    ("not told", "7, /opt/venv/bin/python3, [N/A]\n", [Owner(7, "/opt/venv/bin/python3", None)]),
    ("a comma in the name", "8, a, b, 12\n", [Owner(8, "a, b", 12)]),
    ("two, with another line", "No running processes found\n1, a, 2\n3, b, 4", [Owner(1, "a", 2), Owner(3, "b", 4)]),
    ("B39 memory of the whole GPU", "NVIDIA GB10, [N/A], [N/A], [N/A]", []),
    ("nothing", "", []),
]


@pytest.mark.parametrize(("text", "owners"), [case[1:] for case in TEST_OWNERS], ids=[case[0] for case in TEST_OWNERS])
def test_parse_owners(text: str, owners: list[Owner]) -> None:
    assert parse_owners(text) == owners


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


def test_parse_cgroups_refuses_what_is_none() -> None:
    with pytest.raises(MemoryInputError, match="The cgroup line 'garbage' is not ID:CONTROLLERS:PATH"):
        parse_cgroups("0::/\ngarbage\n")


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


def plant(root: Path, cgroups: str, files: dict[str, str], meminfo: str = "SwapTotal: 8 kB\n") -> dict[str, str]:
    """Write process 7 and its cgroup files below ``root``; returns where they are."""
    named = {**{f"cgroup/{name}": f"{text}\n" for name, text in files.items()}, "proc/7/cgroup": cgroups}
    for name, text in {**named, "proc/meminfo": meminfo}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {"proc": str(root / "proc"), "cgroup": str(root / "cgroup")}


@pytest.mark.parametrize(
    ("cgroups", "files", "limit", "source"), [case[1:] for case in TEST_LIMITS], ids=[case[0] for case in TEST_LIMITS]
)
def test_memory_limit(tmp_path: Path, cgroups: str, files: dict[str, str], limit: int | None, source: str) -> None:
    found = memory_limit(7, **plant(tmp_path, cgroups, files))
    assert found == MemoryLimit(limit, source and str(tmp_path / "cgroup" / source))


# id, /proc/PID/cgroup, files below the cgroup mount, meminfo, limit
SWAP = "SwapTotal:       2097148 kB\n"
TEST_SWAP: list[tuple[str, str, dict[str, str], str, int | None]] = [
    ("v2 none may be", UNIFIED, {"hy3.slice/hy3-ray.service/memory.swap.max": "0"}, SWAP, 0),
    (
        "v2 the slice is smaller",
        UNIFIED,
        {"hy3.slice/memory.swap.max": "0", "hy3.slice/hy3-ray.service/memory.swap.max": "max"},
        SWAP,
        0,
    ),
    ("v2 all may be", UNIFIED, {"hy3.slice/hy3-ray.service/memory.swap.max": "max"}, SWAP, None),
    ("v2 kernel does not account for swap", UNIFIED, {"hy3.slice/hy3-ray.service/memory.max": "5"}, SWAP, None),
    ("a node without swap", UNIFIED, {}, "SwapTotal:             0 kB\n", 0),
    (
        "v1 memory and swap together",
        HYBRID,
        {
            "memory/hy3.slice/hy3-ray.service/memory.limit_in_bytes": "100",
            "memory/hy3.slice/hy3-ray.service/memory.memsw.limit_in_bytes": "130",
        },
        SWAP,
        30,
    ),
    (
        "v1 memory alone",
        HYBRID,
        {
            "memory/hy3.slice/hy3-ray.service/memory.limit_in_bytes": "100",
            "memory/hy3.slice/hy3-ray.service/memory.memsw.limit_in_bytes": V1_NONE,
        },
        SWAP,
        None,
    ),
    ("v1 kernel does not account for swap", HYBRID, {"memory/memory.limit_in_bytes": "100"}, SWAP, None),
]


@pytest.mark.parametrize(
    ("cgroups", "files", "meminfo", "limit"), [case[1:] for case in TEST_SWAP], ids=[case[0] for case in TEST_SWAP]
)
def test_swap_limit(tmp_path: Path, cgroups: str, files: dict[str, str], meminfo: str, limit: int | None) -> None:
    assert swap_limit(7, **plant(tmp_path, cgroups, files, meminfo)) == limit


# id, /proc/PID/cgroup, files below the cgroup mount, whether the unit has the controller
TEST_DELEGATED: list[tuple[str, str, dict[str, str], bool]] = [
    ("v2", UNIFIED, {"hy3.slice/hy3-ray.service/memory.max": "max"}, True),
    ("v2 a group of its own below", f"{UNIFIED[:-1]}/x\n", {"hy3.slice/hy3-ray.service/memory.max": "5"}, True),
    ("v2 controller off below the slice", UNIFIED, {"hy3.slice/memory.max": "5"}, False),
    ("v2 in a container that shows its root only", "0::/\n", {"memory.max": "5"}, False),
    ("v1", HYBRID, {"memory/hy3.slice/hy3-ray.service/memory.limit_in_bytes": "5"}, True),
    (
        "v1 read-only: systemd has a group, memory has not",
        "9:name=systemd:/hy3.slice/hy3-ray.service\n4:memory:/\n0::/hy3.slice/hy3-ray.service\n",
        {"memory/memory.limit_in_bytes": "5"},
        False,
    ),
]


@pytest.mark.parametrize(
    ("cgroups", "files", "delegated"), [case[1:] for case in TEST_DELEGATED], ids=[case[0] for case in TEST_DELEGATED]
)
def test_is_delegated(tmp_path: Path, cgroups: str, files: dict[str, str], delegated: bool) -> None:
    assert is_delegated(7, "hy3-ray.service", **plant(tmp_path, cgroups, files)) == delegated


# id, /proc/PID/cgroup, files below the cgroup mount, kills of the unit
EVENTS = "low 0\nhigh 0\nmax 7\noom 4\noom_kill 3\noom_group_kill 0"
TEST_KILLS: list[tuple[str, str, dict[str, str], int | None]] = [
    ("v2", UNIFIED, {"hy3.slice/hy3-ray.service/memory.events": EVENTS}, 3),
    ("v2 counts below the unit too", f"{UNIFIED[:-1]}/x\n", {"hy3.slice/hy3-ray.service/memory.events": EVENTS}, 3),
    ("v2 of the slice is not the unit's", UNIFIED, {"hy3.slice/memory.events": EVENTS}, None),
    ("v2 an old kernel counts none", UNIFIED, {"hy3.slice/hy3-ray.service/memory.events": "low 0\noom 0"}, None),
    (
        "v1",
        HYBRID,
        {"memory/hy3.slice/hy3-ray.service/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2"},
        2,
    ),
    ("in a container that shows its root only", "0::/\n", {"memory.events": EVENTS}, None),
    ("garbage", "garbage\n", {}, None),
]


@pytest.mark.parametrize(
    ("cgroups", "files", "kills"), [case[1:] for case in TEST_KILLS], ids=[case[0] for case in TEST_KILLS]
)
def test_oom_kills(tmp_path: Path, cgroups: str, files: dict[str, str], kills: int | None) -> None:
    """B36: the counter is shown, and 0 does not mean that the GPU's memory was enough."""
    assert oom_kills(7, "hy3-ray.service", **plant(tmp_path, cgroups, files)) == kills


# id, /proc/PID/cgroup, files below the cgroup mount, bytes charged
SCOPE = f"docker-{'6f' * 32}.scope"
TEST_CHARGED: list[tuple[str, str, dict[str, str], int | None]] = [
    ("v2", f"0::/hy3.slice/{SCOPE}\n", {f"hy3.slice/{SCOPE}/memory.current": "4096\n"}, 4096),
    ("podman's own level", f"0::/hy3.slice/{SCOPE}/container\n", {f"hy3.slice/{SCOPE}/memory.current": "4096"}, 4096),
    ("v1", f"4:memory:/hy3.slice/{SCOPE}\n", {f"memory/hy3.slice/{SCOPE}/memory.usage_in_bytes": "4096"}, 4096),
    ("the slice's is not the container's", f"0::/hy3.slice/{SCOPE}\n", {"hy3.slice/memory.current": "4096"}, None),
    ("another's", "0::/system.slice/x.scope\n", {"system.slice/x.scope/memory.current": "4096"}, None),
    ("garbage", "garbage\n", {}, None),
]


@pytest.mark.parametrize(
    ("cgroups", "files", "charged"), [case[1:] for case in TEST_CHARGED], ids=[case[0] for case in TEST_CHARGED]
)
def test_memory_charged(tmp_path: Path, cgroups: str, files: dict[str, str], charged: int | None) -> None:
    assert memory_charged(7, SCOPE, **plant(tmp_path, cgroups, files)) == charged


@pytest.mark.parametrize("read", [memory_limit, swap_limit], ids=["memory", "swap"])
def test_limit_of_a_dead_process(tmp_path: Path, read: Callable[..., object]) -> None:
    with pytest.raises(MemoryInputError, match="Cannot read the cgroup of process 7 "):
        read(7, proc=str(tmp_path))
    assert not is_delegated(7, "hy3-ray.service", proc=str(tmp_path))
    assert oom_kills(7, "hy3-ray.service", proc=str(tmp_path)) is None


def test_memory_limit_of_this_process() -> None:
    found = memory_limit("self")
    assert (found.limit is None) == (found.source == "")


# ---- Whatever stands in these files: a value, or one sentence

LINES = st.text(st.sampled_from("Mem:Totalvib kB0129/.-\t\r\0٣é\n"), max_size=60) | st.text(max_size=40)


@settings(max_examples=100, deadline=None)
@given(text=LINES, prefix=st.sampled_from(["", SPARK_MEMINFO]))
def test_any_meminfo(text: str, prefix: str) -> None:
    try:
        found = parse_meminfo(prefix + text)
    except MemoryInputError as error:
        assert "\n" not in str(error)
    else:
        assert all(size >= 0 for size in found.values())


@settings(max_examples=100, deadline=None)
@given(text=LINES | st.none() | st.from_regex(r"[0-9]{0,40}(\.[0-9]{0,40})?[BKMGTPE%]?", fullmatch=True))
def test_any_size(text: str | None) -> None:
    try:
        size = parse_size(text, mem_total=GIB)
    except MemoryInputError as error:
        assert "\n" not in str(error)
    else:
        assert size is None or size >= 0


PATHS = st.sampled_from(["/", "/hy3.slice", "/hy3.slice/hy3-ray.service", "/../x", "", "//", "/a\0b", "/" + "x" * 300])
CGROUPS = st.lists(
    st.tuples(st.sampled_from(["0:", "4:memory", "4:cpu,memory", "1:name=systemd", ""]), PATHS), max_size=4
).map(lambda rows: "".join(f"{row}:{path}\n" for row, path in rows))
VALUES = st.sampled_from(["max", "0", "-1", "9" * 25, V1_NONE, "", "٣", "5\n6"]) | st.integers(0, 2**64).map(str)


@settings(max_examples=100, deadline=None)
@given(cgroups=CGROUPS | LINES, value=VALUES, stat=LINES, meminfo=LINES)
def test_any_cgroup(
    tmp_path_factory: pytest.TempPathFactory, cgroups: str, value: str, stat: str, meminfo: str
) -> None:
    files = {"hy3.slice/hy3-ray.service/memory.max": value, "hy3.slice/hy3-ray.service/memory.swap.max": value}
    files |= {"memory/hy3.slice/memory.limit_in_bytes": value, "memory/hy3.slice/memory.memsw.limit_in_bytes": value}
    where = plant(tmp_path_factory.mktemp("any"), cgroups, {**files, "memory/memory.stat": stat}, meminfo)
    is_delegated(7, "hy3-ray.service", **where)
    oom_kills(7, "hy3-ray.service", **where)
    memory_charged(7, "hy3-ray.service", **where)
    for read in (lambda: memory_limit(7, **where).limit, lambda: swap_limit(7, **where)):
        try:
            limit = read()
        except MemoryInputError as error:
            assert "\n" not in str(error)
        else:
            assert limit is None or limit >= 0


@settings(max_examples=100, deadline=None)
@given(text=LINES)
def test_any_table(text: str) -> None:
    parse_limits(text + LIMITS + text)
    parse_owners(text + "1, a, 2\n" + text)
