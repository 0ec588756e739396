# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._guard import (
    SSH_UNITS,
    Decision,
    Earlyoom,
    Host,
    Node,
    Seen,
    bias,
    decide,
    parse_earlyoom,
    unapplied,
    watched,
)
from hypothesis import given, settings
from hypothesis import strategies as st

GIB = 1024**3
SPARK, SWAP = 127600748 * 1024, 16 * GIB
DEBIAN = ["/usr/bin/earlyoom", "-r", "3600"]


# ---- What an earlyoom was told

# (arguments, version, bytes available, bytes of swap free)
THRESHOLDS: dict[str, tuple[list[str], str, int | None, int]] = {
    "Debian's default": (DEBIAN, "earlyoom v1.7", SPARK // 10, SWAP // 10),
    "a share": (["earlyoom", "-m", "2"], "v1.7", SPARK // 50, SWAP // 10),
    "a share and when to kill": (["earlyoom", "-m4,2", "-s", "100,100"], "", SPARK // 25, SWAP),
    "a broken share": (["earlyoom", "-m", "2.5"], "", SPARK // 40, SWAP // 10),
    "a size": (["earlyoom", "-M", "524288,102400"], "", GIB // 2, SWAP // 10),
    "the lower of both": (["earlyoom", "-m", "10", "-M", "1048576"], "", GIB, SWAP // 10),
    "the lower of both the other way": (["earlyoom", "-m", "1", "-M", "104857600"], "", SPARK // 100, SWAP // 10),
    "a size of swap": (["earlyoom", "-S", "1024"], "", SPARK // 10, 1024**2),
    "1.8, whose share is another": (["earlyoom", "-m", "2"], "earlyoom v1.8.2", None, SWAP // 10),
    "2.0": (["earlyoom"], "earlyoom 2.0", None, SWAP // 10),
}


@pytest.mark.parametrize(("argv", "version", "memory", "swap"), THRESHOLDS.values(), ids=THRESHOLDS)
def test_when_earlyoom_acts(argv: list[str], version: str, memory: int | None, swap: int) -> None:
    found = parse_earlyoom(argv, mem_total=SPARK, swap_total=SWAP, version=version)
    assert (found.memory, found.swap, found.readable) == (memory, swap, True)


def test_without_swap_only_memory_counts() -> None:
    assert parse_earlyoom(["earlyoom", "-S", "1024"], mem_total=SPARK, swap_total=0).swap == 0


def test_patterns_and_rehearsal() -> None:
    argv = ["earlyoom", "--prefer=^(Web|vllm)", "--avoid", "sshd", "--dryrun", "-g", "--ignore", "x", "--sort-by-rss"]
    found = parse_earlyoom(argv, mem_total=SPARK, swap_total=SWAP)
    assert (found.prefer, found.avoid, found.ignore, found.dry_run) == ("^(Web|vllm)", "sshd", "x", True)


@pytest.mark.parametrize("option", ["--of-tomorrow", "-Q", "-m"])
def test_an_option_that_nobody_knows_is_said(option: str) -> None:
    found = parse_earlyoom(["earlyoom", option], mem_total=SPARK, swap_total=SWAP)
    assert not found.readable
    (_chosen, unread) = decide(host(oomd="missing", earlyoom=found)).says
    assert "newer than what is known" in unread


@given(st.lists(st.text(max_size=12), max_size=6), st.text(max_size=12))
@settings(max_examples=200)
def test_any_arguments_and_names_are_read(argv: list[str], name: str) -> None:
    bias(parse_earlyoom(["earlyoom", *argv], mem_total=SPARK, swap_total=SWAP), name)


BIASES: dict[str, tuple[Earlyoom, str, float]] = {
    "nothing said": (Earlyoom(), "sshd", 0),
    "preferred": (Earlyoom(prefer="^ssh"), "sshd", 300),
    "avoided": (Earlyoom(avoid="^(sshd|init)$"), "sshd", -300),
    "both": (Earlyoom(prefer="s", avoid="d"), "sshd", 0),
    "ignored": (Earlyoom(prefer="sshd", ignore="sshd"), "sshd", float("-inf")),
    "of a long name the kernel has 15 bytes": (Earlyoom(prefer="^VLLM::EngineCor$"), "VLLM::EngineCore", 300),
    "a pattern that is none": (Earlyoom(prefer="(", avoid="*"), "sshd", 0),
}


@pytest.mark.parametrize(("guard", "name", "expected"), BIASES.values(), ids=BIASES)
def test_bias(guard: Earlyoom, name: str, expected: float) -> None:
    assert bias(guard, name) == expected


# ---- The decision


def host(**changed: t.Any) -> Host:
    """A Spark with Ubuntu's desktop and systemd-oomd, but for what is changed."""
    usual = Host(
        cgroup2=True,
        psi=True,
        swap_total=SWAP,
        oomd="active",
        earlyoom=None,
        sshd="ssh.service",
        sshd_score=-1000,
    )
    return usual._replace(**changed)


QUIET = Earlyoom(memory=2 * GIB, swap=GIB)
OOMD, TAKEN = "Guard: systemd-oomd on hy3.slice.", "Guard: the earlyoom that runs here."
ONLY_LIMITS = "Nothing but the limits of its units guards hy3.slice, because "
NO_PACKAGE = "systemd-oomd is not installed; install the package systemd-oomd"
V1 = "its memory controller is not on cgroup v2"
BOTH = "systemd-oomd runs as well, and is told nothing of hy3.slice; disable one of the two."
# wanted, the node, the killer, whether sshd is protected, refusals, what is said
DECISIONS: dict[str, tuple[str, Host, str, bool, list[str], list[str]]] = {
    "a Spark": ("auto", host(), "oomd", True, [], [OOMD]),
    "not started yet": ("auto", host(oomd="inactive"), "oomd", True, [], [OOMD]),
    "the user's earlyoom": ("auto", host(oomd="missing", earlyoom=QUIET), "earlyoom", True, [], [TAKEN]),
    "both run": ("auto", host(earlyoom=QUIET), "earlyoom", True, [], [TAKEN, BOTH]),
    "no package": ("auto", host(oomd="missing"), "none", True, [], [f"{ONLY_LIMITS}{NO_PACKAGE}."]),
    "masked": (
        "auto",
        host(oomd="masked"),
        *("none", True, []),
        [f"{ONLY_LIMITS}systemd-oomd is masked; `systemctl unmask systemd-oomd`."],
    ),
    "cgroup v1 without a package, as in a container": (
        "auto",
        host(cgroup2=False, oomd="missing", sshd_score=0),
        *("none", False, []),
        [
            f"{ONLY_LIMITS}{V1} and systemd-oomd is not installed; boot it with systemd.unified_cgroup_hierarchy=1 and "
            "install the package systemd-oomd."
        ],
    ),
    "no PSI": (
        "auto",
        host(psi=False),
        *("none", True, []),
        [f"{ONLY_LIMITS}its kernel tells no memory pressure (PSI); boot it with psi=1."],
    ),
    "no swap": (
        "auto",
        host(swap_total=0),
        *("oomd", True, []),
        [OOMD, "This node has no swap, and memory can then run out faster than systemd-oomd acts (its manual)."],
    ),
    "a rehearsal is no guard": (
        "auto",
        host(earlyoom=Earlyoom(dry_run=True)),
        *("oomd", True, []),
        ["earlyoom runs with --dryrun and ends nothing.", OOMD],
    ),
    "oomd by name": ("oomd", host(), "oomd", True, [], [OOMD]),
    "oomd by name beside earlyoom": (
        "oomd",
        host(earlyoom=QUIET),
        *("none", True),
        ["hy3_guard is oomd, and earlyoom runs here: stop that, or set hy3_guard to earlyoom"],
        [],
    ),
    "oomd by name without a package": (
        "oomd",
        host(oomd="missing"),
        *("none", True),
        [f"hy3_guard is oomd, and this node cannot have it because {NO_PACKAGE}, or set it to auto"],
        [],
    ),
    "earlyoom by name": ("earlyoom", host(oomd="inactive", earlyoom=QUIET), "earlyoom", True, [], [TAKEN]),
    "earlyoom by name and none runs": (
        "earlyoom",
        host(),
        *("none", True),
        ["hy3_guard is earlyoom, and none runs here: start it, or set hy3_guard to oomd"],
        [],
    ),
    "earlyoom by name that rehearses": (
        "earlyoom",
        host(earlyoom=Earlyoom(dry_run=True)),
        *("none", True),
        ["hy3_guard is earlyoom, and it runs with --dryrun: start it, or set hy3_guard to oomd"],
        [],
    ),
    "none": ("none", host(), "none", False, [], ["hy3_guard is none: only the limits of its units guard hy3.slice."]),
    "none beside earlyoom": (
        "none",
        host(earlyoom=Earlyoom(prefer="sshd")),
        *("none", False, []),
        ["hy3_guard is none: only the limits of its units guard hy3.slice. earlyoom acts all the same."],
    ),
    "another way in than sshd": (
        "auto",
        host(sshd="", sshd_score=None),
        *("oomd", False, []),
        [OOMD, "Neither ssh.service nor sshd.service is here, so whatever lets people in is not protected."],
    ),
    "sshd that does not run yet": ("auto", host(sshd_score=None), "oomd", True, [], [OOMD]),
    "sshd that the kernel may take": (
        "auto",
        host(sshd_score=0),
        *("oomd", True, []),
        [
            OOMD,
            "The process of ssh.service has an oom_score_adj of 0, where sshd gives itself -1000: the kernel may take "
            "it.",
        ],
    ),
}


@pytest.mark.parametrize(("wanted", "node", "killer", "protect", "refused", "says"), DECISIONS.values(), ids=DECISIONS)
def test_decision(  # noqa: PLR0917  # the columns of a table
    wanted: str, node: Host, killer: str, protect: bool, refused: list[str], says: list[str]
) -> None:
    assert decide(node, wanted) == Decision(killer, protect, refused, says)


@pytest.mark.parametrize("prefer", ["sshd", "^ssh", "sshd-session", "."])
def test_an_earlyoom_that_takes_sshd_is_refused(prefer: str) -> None:
    (problem,) = decide(host(earlyoom=Earlyoom(prefer=prefer))).refused
    assert f"--prefer {prefer!r}, which finds sshd" in problem
    assert decide(host(earlyoom=Earlyoom(prefer=prefer, avoid="^sshd"))).refused == []


DRIVERS_FIRST = {
    "nothing said": (Earlyoom(), False),
    "the driver preferred": (Earlyoom(prefer="^vllm$"), True),
    "the engine's core preferred": (Earlyoom(prefer="EngineCor"), True),
    "workers avoided": (Earlyoom(avoid="Worker|sglang"), True),
    "workers ignored": (Earlyoom(ignore="^(ray::|VLLM::W|sglang::)"), True),
    "both preferred": (Earlyoom(prefer="^(vllm|VLLM::|ray::)"), False),
    "workers preferred": (Earlyoom(prefer="^ray::"), False),
    "the driver avoided": (Earlyoom(avoid="^(vllm|VLLM)"), False),
}


@pytest.mark.parametrize(("guard", "first"), DRIVERS_FIRST.values(), ids=DRIVERS_FIRST)
def test_an_earlyoom_that_takes_the_driver_first_is_said(guard: Earlyoom, first: bool) -> None:
    said = decide(host(oomd="missing", earlyoom=guard)).says
    assert any("takes the driver before the workers" in sentence for sentence in said) == first


# Seed 000: 0.85 of the node and 8 GiB of host side leave 10.25 GiB.
SPARE = int(SPARK * 0.15) - 8 * GIB
EARLY = {
    "its default ends a healthy engine once the swap is full": (DEBIAN, SWAP, SPARE, "as soon as the swap is full"),
    "and at once where there is no swap": (DEBIAN, 0, SPARE, "at once"),
    "a share of 2 percent does not": ([*DEBIAN, "-m", "2"], SWAP, SPARE, None),
    "what is left is not known": (DEBIAN, SWAP, None, None),
}


@pytest.mark.parametrize(("argv", "swap", "spare", "when"), EARLY.values(), ids=EARLY)
def test_an_earlyoom_that_ends_a_healthy_engine_is_said(
    argv: list[str], swap: int, spare: int | None, when: str | None
) -> None:
    guard = parse_earlyoom(argv, mem_total=SPARK, swap_total=swap, version="earlyoom v1.7")
    said = decide(host(oomd="missing", swap_total=swap, earlyoom=guard), spare=spare).says
    sentences = [sentence for sentence in said if "ends a healthy one" in sentence]
    assert [f"healthy one {when}:" in sentence for sentence in sentences] == ([] if when is None else [True])
    assert all("12.17 GiB are available" in one and "leaves 10.25 GiB" in one for one in sentences)


# ---- What is in force

IN_FORCE = Seen(reload=False, pressure="kill", monitored=True, sshd_min=64 * 1024**2, sshd_omitted=True)
MISSING: dict[str, tuple[Host, Seen, list[str]]] = {
    "all": (host(), IN_FORCE, []),
    "nothing": (
        host(oomd="inactive"),
        Seen(reload=True, pressure="auto", monitored=None, sshd_min=0, sshd_omitted=False),
        [
            "systemd has ManagedOOMMemoryPressure=auto for hy3.slice instead of kill",
            "systemd-oomd is inactive instead of active",
            "the kernel keeps no memory for ssh.service (memory.min is 0)",
            "the control group of ssh.service is not marked for systemd-oomd to spare",
        ],
    ),
    "systemd-oomd was not told": (
        host(),
        IN_FORCE._replace(monitored=False),
        ["systemd-oomd does not watch hy3.slice, which is active"],
    ),
    "nothing of ours runs yet": (host(), IN_FORCE._replace(monitored=None), []),
    "sshd waits for its socket": (host(), IN_FORCE._replace(sshd_min=None, sshd_omitted=False), []),
    "earlyoom": (host(earlyoom=QUIET), IN_FORCE._replace(pressure="auto", monitored=False), []),
    "cgroup v1": (host(cgroup2=False), IN_FORCE._replace(pressure="auto", sshd_min=0, sshd_omitted=False), []),
}


@pytest.mark.parametrize(("node", "seen", "expected"), MISSING.values(), ids=MISSING)
def test_what_is_not_in_force(node: Host, seen: Seen, expected: list[str]) -> None:
    assert unapplied(decide(node), node, seen) == expected


# By oomctl(1) of systemd 252, in its form and not from a run.
OOMCTL = """\
Dry Run: no
Swap Used Limit: 90.00%
Default Memory Pressure Limit: 60.00%
Default Memory Pressure Duration: 20s
System Context:
        Memory: Used: 2.1G Total: 121.6G
        Swap: Used: 0B Total: 15.9G
Swap Monitored CGroups:
        Path: /hy3.slice
Memory Pressure Monitored CGroups:
        Path: /user.slice/user-1000.slice/user@1000.service
                Memory Pressure Limit: 50.00%
                Pressure: Avg10: 0.00 Avg60: 0.00 Avg300: 0.00 Total: 0
"""


def test_watched() -> None:
    user = "/user.slice/user-1000.slice/user@1000.service"
    assert watched(OOMCTL) == [user]
    assert watched(f"{OOMCTL}        Path: /hy3.slice\n") == [user, "/hy3.slice"]
    assert watched("Failed to get bus connection") == []


# ---- A node

UNITS: dict[str, dict[str, str]] = {
    "hy3.slice": {"ActiveState": "active", "ControlGroup": "/hy3.slice", "ManagedOOMMemoryPressure": "kill"},
    "system.slice": {"ActiveState": "active"},
    "systemd-oomd.service": {"ActiveState": "active"},
    "ssh.service": {"ActiveState": "active", "ControlGroup": "/system.slice/ssh.service", "MainPID": "812"},
    "sshd.service": {"LoadState": "not-found", "ActiveState": "inactive"},
}
FILES = {
    "proc/meminfo": "MemTotal:       127600748 kB\nMemAvailable:   118566368 kB\nSwapTotal:      16777216 kB\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 total=0\n",
    "proc/812/oom_score_adj": "-1000\n",
    "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids\n",
    "sys/fs/cgroup/system.slice/ssh.service/memory.min": "67108864\n",
}


def node(
    root: Path,
    *,
    units: t.Mapping[str, t.Mapping[str, str]] | None = None,
    files: t.Mapping[str, str | None] | None = None,
    **prints: str,
) -> Node:
    """A node of files below ``root``, changed in some units and files, where commands print what they are given."""
    for name, text in (FILES | dict(files or {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)

    def run(command: list[str]) -> str | None:
        if command[0] != "systemctl":
            return prints.get(command[0])
        shown = [
            {"Id": name, "LoadState": "loaded", "NeedDaemonReload": "no", "MainPID": "0"}
            | UNITS[name]
            | dict((units or {}).get(name, {}))
            for name in command[command.index("--") + 1 :]
        ]
        return "\n\n".join("\n".join(f"{key}={value}" for key, value in unit.items()) for unit in shown)

    return Node(run, str(root))


def start(root: Path, pid: int, name: str, argv: list[str], *, namespace: str = "pid:[1]") -> None:
    """A process with a name, arguments and a namespace of process ids."""
    place = root / "proc" / str(pid)
    (place / "ns").mkdir(parents=True)
    (place / "comm").write_text(f"{name}\n")
    (place / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in argv))
    (place / "ns/pid").symlink_to(namespace)


def test_host(tmp_path: Path) -> None:
    assert node(tmp_path).host() == host()


HOSTS: dict[str, tuple[dict[str, t.Any], dict[str, t.Any]]] = {
    "cgroup v1": ({"files": {"sys/fs/cgroup/cgroup.controllers": None}}, {"cgroup2": False}),
    "hybrid, with memory on v1": ({"files": {"sys/fs/cgroup/cgroup.controllers": "pids\n"}}, {"cgroup2": False}),
    "no PSI": ({"files": {"proc/pressure/memory": None}}, {"psi": False}),
    "no swap": ({"files": {"proc/meminfo": "MemTotal: 8 kB\nMemAvailable: 8 kB\n"}}, {"swap_total": 0}),
    "no package": ({"units": {"systemd-oomd.service": {"LoadState": "not-found"}}}, {"oomd": "missing"}),
    "masked": ({"units": {"systemd-oomd.service": {"LoadState": "masked"}}}, {"oomd": "masked"}),
    "an alias": (
        {"units": {"sshd.service": {**UNITS["ssh.service"], "LoadState": "loaded", "Id": "ssh.service"}}},
        {},
    ),
    "the one of two that runs": (
        {
            "units": {
                "ssh.service": {"ActiveState": "failed"},
                "sshd.service": UNITS["ssh.service"] | {"LoadState": "loaded"},
            }
        },
        {"sshd": "sshd.service"},
    ),
    "a socket waits": (
        {"units": {"ssh.service": {"ActiveState": "inactive", "MainPID": "0", "ControlGroup": ""}}},
        {"sshd_score": None},
    ),
    "no sshd": (
        {"units": {name: {"LoadState": "not-found"} for name in SSH_UNITS}},
        {"sshd": "", "sshd_score": None},
    ),
}


@pytest.mark.parametrize(("differs", "expected"), HOSTS.values(), ids=HOSTS)
def test_host_that_differs(tmp_path: Path, differs: dict[str, t.Any], expected: dict[str, t.Any]) -> None:
    assert node(tmp_path, **differs).host() == host(**expected)


def test_a_running_earlyoom_is_read_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[1]")
    start(tmp_path, 700, "earlyoom", ["earlyoom", "-m", "50"], namespace="pid:[2]")
    assert node(tmp_path).host().earlyoom is None, "one in a container cannot reach us"
    start(tmp_path, 701, "earlyoom", [])
    start(tmp_path, 702, "vim earlyoom", ["vim", "earlyoom"])
    assert node(tmp_path).host().earlyoom is None, "one that has ended, and another program"
    start(tmp_path, 703, "earlyoom", ["/usr/bin/earlyoom", "-m", "2", "--avoid", "sshd"])
    assert node(tmp_path, earlyoom="earlyoom v1.7").host().earlyoom == Earlyoom(
        memory=SPARK // 50, swap=SWAP // 10, avoid="sshd"
    )
    assert node(tmp_path, earlyoom="earlyoom v1.8.2").host().earlyoom == Earlyoom(swap=SWAP // 10, avoid="sshd")


def test_seen(tmp_path: Path) -> None:
    seen = node(tmp_path, oomctl=f"{OOMCTL}        Path: /hy3.slice\n").seen()
    assert seen == IN_FORCE._replace(sshd_omitted=False)
    assert node(tmp_path, oomctl=OOMCTL).seen().monitored is False
    assert node(tmp_path).seen().monitored is None, "without oomctl"


def test_the_mark_for_systemd_oomd_is_read(tmp_path: Path) -> None:
    found = node(tmp_path)
    try:
        os.setxattr(tmp_path / "sys/fs/cgroup/system.slice/ssh.service", "user.oomd_omit", b"1")
    except OSError as exc:
        pytest.skip(f"this file system has no attributes: {exc.strerror}")
    assert found.seen().sshd_omitted


def test_what_does_not_run_has_nothing_to_read(tmp_path: Path) -> None:
    idle = {"ActiveState": "inactive", "ControlGroup": "", "NeedDaemonReload": "yes"}
    seen = node(tmp_path, units={"hy3.slice": idle, "ssh.service": idle}, oomctl=OOMCTL).seen()
    assert (seen.reload, seen.monitored, seen.sshd_min, seen.sshd_omitted) == (True, None, None, False)


@pytest.mark.parametrize("said", [None, "", "System has not been booted with systemd as init system (PID 1)."])
def test_a_node_without_systemd_is_refused(said: str | None) -> None:
    with pytest.raises(Hy3Error, match="needs a running systemd"):
        Node(lambda _command: said)
