# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's small programs, without starting a lab."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path
from types import ModuleType

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._roce import Gid, Port, Sysfs, resolve

FILES = Path(__file__).parents[3] / "roles/lab/files"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_roce_sysfs, lab_node, mend_engine = load("make_roce_sysfs"), load("lab_node"), load("mend_engine")


# ---- make_roce_sysfs.py

FIRST, SECOND = "198.18.20.1", "198.18.20.2"
HCA, NETDEV = "rocep1s0f1", "enp1s0f1np1"
# own address, the other node's, own index, the other node's
NODES = {"node 1": (FIRST, SECOND, 3, 6), "node 2": (SECOND, FIRST, 6, 3)}
node_tables = pytest.mark.parametrize(("own", "other", "index", "others_index"), NODES.values(), ids=NODES)


def write_tree(root: Path, *, own: str, other: str, index: int) -> bool:
    table = make_roce_sysfs.rows(own, other, index)
    changed = make_roce_sysfs.write(root, hca=HCA, netdev=NETDEV, table=table)
    assert isinstance(changed, bool)
    return changed


def read_table(root: Path) -> dict[int, Gid]:
    return {row.index: row for row in Sysfs(str(root)).table(Port(HCA, 1))}


@node_tables
def test_the_collections_resolver_finds_the_wanted_index(
    tmp_path: Path, own: str, other: str, index: int, others_index: int
) -> None:
    write_tree(tmp_path, own=own, other=other, index=index)
    links = [{"ifname": NETDEV, "addr_info": [{"local": own}]}]
    found = resolve(
        address=own, hca=None, interface=None, sysfs=Sysfs(str(tmp_path)), list_addresses=lambda: json.dumps(links)
    )
    assert (found.index, found.hca, found.interface, found.warnings) == (index, f"={HCA}", NETDEV, [])


@node_tables
def test_only_that_row_is_right(tmp_path: Path, own: str, other: str, index: int, others_index: int) -> None:
    """Each way of guessing must be seen to fail: another row's type, another row's address, the other node's index."""
    write_tree(tmp_path, own=own, other=other, index=index)
    table = read_table(tmp_path)
    address = IPv4Address(own)
    assert [number for number, row in table.items() if row.usable and row.gid.ipv4_mapped == address] == [index]
    first_of_v2 = next(number for number, row in table.items() if row.type == "v2")
    first_with_address = next(number for number, row in table.items() if row.gid.ipv4_mapped == address)
    assert index not in {first_of_v2, first_with_address, others_index}
    assert table[first_with_address].type == "v1"


def test_the_netdev_has_the_hca_as_its_device(tmp_path: Path) -> None:
    write_tree(tmp_path, own=FIRST, other=SECOND, index=3)
    assert [path.name for path in (tmp_path / "class/net" / NETDEV / "device/infiniband").iterdir()] == [HCA]


def test_on_node_2_the_index_of_node_1_is_usable_and_wrong(tmp_path: Path) -> None:
    write_tree(tmp_path, own=SECOND, other=FIRST, index=6)
    row = read_table(tmp_path)[3]
    assert (row.usable, row.gid.ipv4_mapped) == (True, IPv4Address(FIRST))


def test_written_again_only_when_something_differs(tmp_path: Path) -> None:
    assert write_tree(tmp_path, own=FIRST, other=SECOND, index=3)
    assert not write_tree(tmp_path, own=FIRST, other=SECOND, index=3)
    assert write_tree(tmp_path, own=FIRST, other=SECOND, index=4)
    right = [n for n, row in read_table(tmp_path).items() if row.usable and row.gid.ipv4_mapped == IPv4Address(FIRST)]
    assert right == [4], "a row that moved leaves none behind"


def test_command_line_says_whether_it_changed_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(FILES / "make_roce_sysfs.py"), str(tmp_path)]
    command += [f"--address={FIRST}", f"--decoy={SECOND}", "--index=3"]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _run in range(2)]
    assert said == ["changed\n", "unchanged\n"]


# ---- lab_node.py

# control groups with a list of processes, where a node's own group belongs
HIERARCHIES: dict[str, tuple[list[str], list[str]]] = {
    "v2": (["."], ["."]),
    "v1": (["memory", "systemd"], ["systemd"]),
    "v1 with the unified tree beside": (["memory", "systemd", "unified"], ["systemd", "unified"]),
}


@pytest.mark.parametrize(("trees", "chosen"), HIERARCHIES.values(), ids=HIERARCHIES)
def test_hierarchies(tmp_path: Path, trees: list[str], chosen: list[str]) -> None:
    for tree in trees:
        (tmp_path / tree).mkdir(exist_ok=True)
        (tmp_path / tree / "cgroup.procs").touch()
    assert lab_node.hierarchies(tmp_path) == [tmp_path / name for name in chosen]


def test_a_node_has_one_group_in_each_hierarchy() -> None:
    assert lab_node.groups("spark-1") == [base / "hy3lab-spark-1" for base in lab_node.hierarchies()]


def test_groups_of_two_nodes_differ() -> None:
    assert not set(lab_node.groups("spark-1")) & set(lab_node.groups("spark-2"))


def test_a_node_that_never_started_has_no_processes_and_nothing_to_stop() -> None:
    assert lab_node.members("of-this-test-only") == set()
    assert lab_node.stop("of-this-test-only") is False


STATUSES = {
    "first process of a node": ("Name:\tsystemd\nNSpid:\t4711\t1\n", True),
    "another of it": ("Name:\tsshd\nNSpid:\t4722\t12\n", False),
    "first process of this machine": ("Name:\tsystemd\nNSpid:\t1\n", False),
    "another of this machine": ("Name:\tsystemd-nspawn\nNSpid:\t4710\n", False),
    "a kernel that does not say": ("Name:\tsystemd\n", False),
}


@pytest.mark.parametrize(("status", "expected"), STATUSES.values(), ids=STATUSES)
def test_first_process_of_a_node(status: str, expected: bool) -> None:
    assert lab_node.is_init(status) is expected


RATES = {"": 0, "8kbit": 1000, "400mbit": 50_000_000, "1gbit": 125_000_000}


@pytest.mark.parametrize(("rate", "expected"), RATES.items())
def test_rate(rate: str, expected: int) -> None:
    assert lab_node.bytes_per_second(rate) == expected


# tc of iproute2 6.1
NO_QDISC = '[{"kind":"noqueue","handle":"0:","root":true,"refcnt":2,"options":{}}]\n'
CAPPED = (
    '[{"kind":"tbf","handle":"8001:","root":true,"refcnt":3,"options":{"rate":50000000,"burst":500000,"lat":50000}}]'
)


@pytest.mark.parametrize(("shown", "expected"), [(NO_QDISC, 0), ("[]", 0), (CAPPED, 50_000_000)])
def test_cap_as_tc_shows_it(shown: str, expected: int) -> None:
    assert lab_node.capped_at(shown) == expected


# What the device has now, the rate that is asked for, what tc is asked to do.
CAPS: dict[str, tuple[str, str, str]] = {
    "none, and none wanted": (NO_QDISC, "", ""),
    "the wanted one": (CAPPED, "400mbit", ""),
    "a new one": (NO_QDISC, "400mbit", "qdisc replace dev d0 root tbf rate 400mbit burst 500000 latency 50ms"),
    "another one": (CAPPED, "8mbit", "qdisc replace dev d0 root tbf rate 8mbit burst 131072 latency 50ms"),
    "taken off": (CAPPED, "", "qdisc del dev d0 root"),
}


@pytest.mark.parametrize(("shown", "rate", "asked"), CAPS.values(), ids=CAPS)
def test_cap_one_end(tmp_path: Path, shown: str, rate: str, asked: str) -> None:
    """A test double stands for tc."""
    (tmp_path / "shown").write_text(shown)
    tc = tmp_path / "tc"
    tc.write_text(f'#!/bin/sh\ncd {tmp_path}\n[ "$1" = -json ] && exec cat shown\necho "$@" >asked\n')
    tc.chmod(0o755)
    assert lab_node.cap_end([str(tc)], "d0", rate) is bool(asked)
    done = tmp_path / "asked"
    assert (done.read_text().strip() if done.exists() else "") == asked


# ---- mend_engine.py


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    for name, text in mend_engine.wanted("0.32.0").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_metadata_name_vllm_with_a_cpu_version(site_packages: Path) -> None:
    found = {dist.name: dist for dist in importlib.metadata.distributions(path=[str(site_packages)])}
    assert {name: dist.version for name, dist in found.items()} == {"vllm": "0.32.0+cpu", "hy3-lab-platform": "1"}


def members_of(source: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def returned_name(function: ast.AST) -> tuple[str, str]:
    """Module and member that a function returns as ``module.member``."""
    (answer,) = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    module, _dot, member = ast.literal_eval(answer or ast.Constant("")).partition(".")
    return module, member


def test_plugin_leads_to_classes_that_exist(site_packages: Path) -> None:
    """From the entry point to the platform and to the communicator, name by name; vLLM itself is not here to ask."""
    (found,) = importlib.metadata.distributions(path=[str(site_packages)], name="hy3-lab-platform")
    (entry,) = found.entry_points
    assert entry.group == "vllm.platform_plugins"
    platform = members_of((site_packages / f"{entry.module}.py").read_text())
    module, member = returned_name(platform[entry.attr])
    assert module == entry.module
    module, member = returned_name(platform[member])
    assert member in members_of((site_packages / f"{module}.py").read_text())


def test_nothing_but_metadata_depends_on_the_version() -> None:
    old, new = mend_engine.wanted("0.32.0"), mend_engine.wanted("0.33.0")
    assert {name for name in old if name.endswith(".py")} == {"hy3_lab_platform.py", "hy3_lab_communicator.py"}
    assert {name for name in old if old[name] == new.get(name)} == {
        name for name in old if not name.startswith("vllm-")
    }
