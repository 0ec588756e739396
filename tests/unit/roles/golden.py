# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a published recipe says against what real Ansible renders for it: the comparison, and how all of ours differ.

A recipe is two kinds of tables: what its author wrote, and where we differ, with the reason. Laid over each other they
must be exactly what is rendered. A test of one recipe is a subclass of :class:`Golden` with its tables.
"""

from __future__ import annotations

import json
import re
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._roce import Sysfs, render_env_file, resolve
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import make_sysfs, v4
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT, render_units
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import (
    read_environment,
    read_options,
    read_unit,
    split_words,
)

RAY, SERVE = "hy3-ray", "hy3-serve"


class Ours(t.NamedTuple):
    """Our value where it differs from the recipe's; None: we leave it out."""

    value: str | None
    reason: str


Table = dict[str, str]
Differences = dict[str, Ours]
Comparison = tuple[Table, Differences]


class Port(t.NamedTuple):
    """A port on the fabric, and the GID index that its node has for it."""

    netdev: str
    hca: str
    address: str
    gid_index: int


class Node(t.NamedTuple):
    """A node: the address at which Ray finds it, its ports, and the netdev of that address where it is no port's."""

    address: str
    ports: tuple[Port, ...]
    management: str = ""


def expected(comparison: Comparison) -> Table:
    """The recipe's values with ours laid over them."""
    seed, differences = comparison
    laid = {name: differences[name].value if name in differences else value for name, value in seed.items()}
    laid |= {name: ours.value for name, ours in differences.items()}
    return {name: value for name, value in laid.items() if value is not None}


# ---- How every cluster of ours differs

PORT = "Ray listens on all addresses and picks ports at random, so they are fixed for a firewall to know (decision 6)"
RAY_WORKER: Differences = {
    "node-manager-port": Ours("6380", PORT),
    "object-manager-port": Ours("6381", PORT),
    "metrics-export-port": Ours("6382", PORT),
    "runtime-env-agent-port": Ours("6383", PORT),
    "dashboard-agent-grpc-port": Ours("6384", PORT),
    "dashboard-agent-listen-port": Ours("6385", PORT),
    "min-worker-port": Ours("10100", PORT),
    "max-worker-port": Ours("10299", PORT),
    "disable-usage-stats": Ours("", "a private cluster reports to nobody"),
    "block": Ours("", "the raylet stays the unit's main process, so that systemd sees it end"),
}
RAY_HEAD: Differences = RAY_WORKER | {
    "ray-client-server-port": Ours("10001", "its default, stated because the firewall names it (decision 6)"),
    "include-dashboard": Ours("false", "the dashboard runs code for whoever reaches it (decision 6)"),
    "temp-dir": Ours("/var/lib/hy3/ray", "not in the shared /tmp; short, as sockets lie in it (decision 2)"),
}

API: Differences = {
    "host": Ours("127.0.0.1", "only the head itself reaches the API until a user gives it a key (decision 7)"),
    "disable-fastapi-docs": Ours("", "three routes fewer that a key does not guard (decision 7)"),
}

TOKEN = "Ray runs code for whoever reaches its ports, unless it has a token (decision 6)"


COMPILERS = "on a cold cache ninja starts a compiler of 1.5 GiB for each of 20 cores (case B42)"


def environment_of_both(cluster: str) -> Differences:
    """Of raylets and driver."""
    return {
        "RAY_AUTH_MODE": Ours("token", TOKEN),
        "RAY_AUTH_TOKEN_PATH": Ours(f"/etc/hy3/ray_token_{cluster}", "a path: every user can read a unit (decision 7)"),
        "HY3_DIGEST": Ours("SHA256", "restart by digest (decision 1)"),
        "PATH": Ours(
            "/opt/hy3/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "recipes take it from a login shell or an image, and a unit has none; JIT compilers need nvcc and ninja",
        ),
        "VLLM_CONFIG_ROOT": Ours("/etc/hy3/vllm", "where ray_non_carry_over_env_vars.json lies (decision 3)"),
        "VLLM_NO_USAGE_STATS": Ours("1", "a private cluster reports to nobody"),
        "VLLM_ENGINE_READY_TIMEOUT_S": Ours("2400", "the default of 600 s is shorter than a cold start"),
        "MAX_JOBS": Ours("2", COMPILERS),
        "RAY_USAGE_STATS_ENABLED": Ours("0", "a private cluster reports to nobody"),
    }


# NCCL's own log, which the ranks write and verify reads.
NCCL_LOG: Differences = {
    "NCCL_DEBUG": Ours("INFO", "NCCL's own log proves the index and NET/IB (decision 3)"),
    "NCCL_DEBUG_SUBSYS": Ours("INIT,NET,ENV", "the part of that log which says so"),
    "NCCL_DEBUG_FILE": Ours("/run/hy3-ray/nccl.%p.log", "where verify reads that log"),
}
NOT_THE_DRIVERS = "whatever the driver has, an executor may copy over the other nodes' own values (decision 3)"


def environment_of_driver(cluster: str, head: str) -> Differences:
    """Of the driver, beside what it must not have."""
    return environment_of_both(cluster) | {
        "RAY_ADDRESS": Ours(f"{head}:6379", "the driver must join our cluster and never start another (decision 2)"),
        "RAY_DEDUP_LOGS": Ours("0", "Ray folds equal lines of two ranks, and the log is read for progress and causes"),
        "HY3_CHECKPOINT": Ours("SHA256", "another checkpoint at the same path means a restart (decision 1)"),
    }


UNIT: Differences = {
    "Unit.Description": Ours("TEXT", "for a person"),
    "Unit.Wants": Ours("network-online.target", "the fabric address must be there after a boot"),
    "Unit.After": Ours("network-online.target", "as Wants"),
    "Service.Type": Ours("exec", "a start fails when the program cannot be executed"),
    "Service.User": Ours("hy3", "the recipe's user is whoever logs in (decision 2)"),
    "Service.Slice": Ours("hy3.slice", "caps of single units do not bound their sum (decision 2)"),
    "Service.LimitMEMLOCK": Ours("infinity", "RDMA registers memory; a login shell or an image has this elsewhere"),
    "Service.LogRateLimitIntervalSec": Ours("0", "the log is read for progress and causes, so no line may be dropped"),
    "Service.TimeoutStartSec": Ours("900", "waiting for the head happens before the start and takes up to 600 s"),
    "Service.TimeoutStopSec": Ours("60", "the engine frees the GPU before it ends"),
    "Service.KillMode": Ours("mixed", "`ray start --block` ends its processes in order when it alone gets the signal"),
}
RAY_UNIT: Differences = UNIT | {
    "Service.RuntimeDirectory": Ours("hy3-ray", "holds this start's GID index and NCCL's log"),
    "Service.StateDirectory": Ours("hy3/ray", "Ray's --temp-dir"),
    "Unit.BindsTo": Ours("hy3-firewall.service", "no Ray without its firewall, as it listens everywhere (decision 6)"),
    "Unit.After": Ours("network-online.target hy3-firewall.service", "as Wants and BindsTo"),
    "Service.EnvironmentFile": Ours("-/run/hy3-ray/fabric.env", "the index drifts: found at each start (decision 4)"),
}
SERVE_UNIT: Differences = UNIT | {
    "Unit.BindsTo": Ours("hy3-ray.service", "the engine's ranks live in the raylet"),
    "Unit.After": Ours("network-online.target hy3-ray.service", "as Wants and BindsTo"),
    "Service.RuntimeDirectory": Ours("hy3-serve", "one per unit; a shared one goes when either stops (decision 2)"),
}
# Compared in tests of their own.
ELSEWHERE = {"Service.Environment", "Service.ExecStart", "Service.ExecStartPre"}


# ---- The comparison


class Rendered:
    """The units that Ansible wrote, by node and name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def unit(self, node: str, name: str) -> dict[str, list[str]]:
        return read_unit((self.root / node / name).read_text())

    def settings(self, node: str, name: str) -> Table:
        unit = {name: " ".join(values) for name, values in self.unit(node, name).items() if name not in ELSEWHERE}
        return unit | ({"Unit.Description": "TEXT"} if unit["Unit.Description"].startswith("Hy3: ") else {})

    def environment(self, node: str, name: str) -> Table:
        found = read_environment(self.unit(node, name)["Service.Environment"])
        return {key: re.sub(r"\b[0-9a-f]{64}\b", "SHA256", value) for key, value in found.items()}

    def argv(self, node: str, name: str) -> list[str]:
        (line,) = self.unit(node, name)["Service.ExecStart"]
        return split_words(line, command=True)

    def before(self, node: str, name: str) -> list[list[str]]:
        return [split_words(line, command=True) for line in self.unit(node, name).get("Service.ExecStartPre", [])]


def taken(argv: list[str], option: str) -> tuple[list[str], list[str]]:
    """The values of an option that may stand several times, and the rest."""
    at = [index for index, word in enumerate(argv) if word == option]
    rest = [word for index, word in enumerate(argv) if index not in at and index - 1 not in at]
    return [argv[index + 1] for index in at], rest


class Golden:
    """The tests of one recipe. The first node is the head; caps of the slices are GiB."""

    inventory: str
    profile: str
    nodes: dict[str, Node]
    nccl: str | None = None
    packages = "/opt/hy3/venv"  # where the resolver looks for NCCL's version
    ranks: str  # the unit that they live in
    variables: t.ClassVar[dict[str, t.Any]] = {}  # beside the inventory's
    environment: dict[str, Comparison]  # of the ranks
    units: dict[tuple[str, str], Comparison]
    slices: dict[str, int]
    stated: dict[str, object]

    @property
    def head(self) -> str:
        return next(iter(self.nodes))

    def comparisons(self) -> list[Comparison]:
        return [*self.environment.values(), *self.units.values()]

    @classmethod
    def resolved(
        cls, sysfs: Path, node: str, *, address: str, hca: str | None, interface: str | None, links: list[str]
    ) -> Table:
        """What the resolver finds on a node that looks like the recipe's, as EnvironmentFile= would read it."""
        places = {port.netdev: port.address for port in cls.nodes[node].ports}
        if cls.nodes[node].management:
            places[cls.nodes[node].management] = cls.nodes[node].address
        found = resolve(
            address=address,
            hca=hca,
            interface=interface,
            sysfs=Sysfs(str(sysfs / node)),
            list_addresses=lambda: json.dumps(
                [{"ifname": netdev, "addr_info": [{"local": place}]} for netdev, place in places.items()]
            ),
            nccl_version=cls.nccl,
            links=links,
        )
        return dict(line.split("=", 1) for line in render_env_file(found.env).splitlines())

    @pytest.fixture(scope="class")
    @classmethod
    def sysfs(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        root = tmp_path_factory.mktemp("sysfs")
        for name, node in cls.nodes.items():
            tables = {
                f"{port.hca}:1": [(port.gid_index, v4(port.address), "RoCE v2", port.netdev)] for port in node.ports
            }
            make_sysfs(root / name, tables, devices={port.netdev: [port.hca] for port in node.ports})
        return root

    @pytest.fixture(scope="class")
    @classmethod
    def rendered(cls, tmp_path_factory: pytest.TempPathFactory, sysfs: Path) -> Rendered:
        root = tmp_path_factory.mktemp("rendered")
        facts = {
            name: {
                "fabric_env": cls.resolved(
                    sysfs,
                    name,
                    address=node.address,
                    hca=None,
                    interface=None,
                    links=[port.netdev for port in node.ports] if node.management else [],
                )
            }
            for name, node in cls.nodes.items()
        }
        return cls.render(root, facts)

    @classmethod
    def render(cls, root: Path, nodes: dict[str, t.Any]) -> Rendered:
        done = render_units(root, nodes, inventory=cls.inventory, **cls.variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return Rendered(root)

    def test_every_difference_differs_and_has_its_reason(self) -> None:
        for seed, differences in self.comparisons():
            for name, ours in differences.items():
                assert ours.value != seed.get(name), name
                assert len(ours.reason) > 5, name

    def test_each_node_gets_its_units_and_no_other(self, rendered: Rendered) -> None:
        written = {str(path.relative_to(rendered.root)) for path in rendered.root.glob("spark-*/*")}
        slices = {f"{node}/hy3.slice" for node in self.nodes}
        assert written == slices | {f"{node}/{unit}.service" for node, unit in self.units}
        assert {(node, self.ranks) for node in self.nodes} <= set(self.units)

    def test_units(self, rendered: Rendered) -> None:
        for (node, unit), comparison in self.units.items():
            assert rendered.settings(node, f"{unit}.service") == expected(comparison), (node, unit)

    def test_slice_bounds_the_sum(self, rendered: Rendered) -> None:
        """Recipes add up by hand what systemd then enforces for each unit only."""
        for node, gib in self.slices.items():
            assert rendered.settings(node, "hy3.slice") == {
                "Unit.Description": "TEXT",
                "Slice.MemoryMax": str(gib * 1024**3),
                "Slice.MemorySwapMax": "0",
            }, node
        assert set(self.slices) == set(self.nodes)

    def test_rank_environment(self, rendered: Rendered, sysfs: Path) -> None:
        """The unit's own part and what the resolver, called as the unit calls it, writes into the environment file."""
        for node, comparison in self.environment.items():
            own = rendered.environment(node, f"{self.ranks}.service")
            resolver = rendered.before(node, f"{self.ranks}.service")[0]
            assert resolver[:3] == ["/usr/bin/python3", "-I", "/usr/local/lib/hy3/roce.py"]
            links, rest = taken(resolver[3:], "--link")
            options = read_options(rest)
            assert (options.pop("output"), options.pop("sysfs-root")) == (f"/run/{self.ranks}/fabric.env", "/sys")
            assert options.pop("venv") == self.packages
            found = self.resolved(
                sysfs,
                node,
                address=options.pop("address"),
                hca=options.pop("hca", None),
                interface=options.pop("interface", None),
                links=links,
            )
            assert options == {}
            assert found.keys() & own.keys() == set(), "a value that drifts must not be fixed in the unit"
            assert own | found == expected(comparison), node
        assert set(self.environment) == set(self.nodes)

    def test_profile_states_what_the_recipe_does(self) -> None:
        profile = yaml.safe_load((ROOT / f"roles/profile/files/profiles/{self.profile}.yml").read_text())
        del profile["memory"]["needs"]  # recipes have none: what is used is not what may be used
        assert {name: profile[name] for name in self.stated} == self.stated


class GoldenRay(Golden):
    """A recipe for vLLM on Ray: raylets on all nodes, the driver on the head."""

    model: str
    ranks = RAY
    ray: dict[str, Comparison]
    vllm: Comparison
    driver: Comparison

    def comparisons(self) -> list[Comparison]:
        return [*super().comparisons(), *self.ray.values(), self.vllm, self.driver]

    def test_only_the_head_has_a_driver(self) -> None:
        assert set(self.units) == {(node, RAY) for node in self.nodes} | {(self.head, SERVE)}

    def test_ray_arguments(self, rendered: Rendered) -> None:
        for node, comparison in self.ray.items():
            argv = rendered.argv(node, f"{RAY}.service")
            assert argv[:2] == ["/opt/hy3/venv/bin/ray", "start"]
            assert read_options(argv[2:]) == expected(comparison), node
        assert set(self.ray) == set(self.nodes)

    def test_vllm_arguments(self, rendered: Rendered) -> None:
        argv = rendered.argv(self.head, f"{SERVE}.service")
        assert argv[:3] == ["/opt/hy3/venv/bin/vllm", "serve", self.model]
        assert read_options(argv[3:]) == expected(self.vllm)

    def test_driver_environment(self, rendered: Rendered) -> None:
        assert rendered.environment(self.head, f"{SERVE}.service") == expected(self.driver)

    def test_workers_wait_for_the_head(self, rendered: Rendered) -> None:
        """The recipes sleep for some seconds, or start by hand."""
        wait = ["/usr/bin/python3", "-I", "/usr/local/lib/hy3/port.py", "wait"]
        wait += ["--host", self.nodes[self.head].address, "--port", "6379", "--timeout", "600"]
        for node in self.nodes:
            assert rendered.before(node, f"{RAY}.service")[1:] == ([] if node == self.head else [wait]), node
        assert rendered.before(self.head, f"{SERVE}.service") == []


class GoldenRanks(Golden):
    """A recipe whose engine starts its own ranks on each node, without Ray."""

    ranks = SERVE
    program: t.ClassVar[list[str]]
    arguments: dict[str, Comparison]  # by node

    def comparisons(self) -> list[Comparison]:
        return [*super().comparisons(), *self.arguments.values()]

    def test_arguments(self, rendered: Rendered) -> None:
        for node, comparison in self.arguments.items():
            argv = rendered.argv(node, f"{SERVE}.service")
            assert argv[: len(self.program)] == self.program
            assert read_options(argv[len(self.program) :]) == expected(comparison), node
        assert set(self.arguments) == set(self.nodes)

    def test_no_rank_waits_for_another_before_its_start(self, rendered: Rendered) -> None:
        """They meet by themselves; a start that waited for rank 0 would hide why that one does not come."""
        for node in self.nodes:
            assert rendered.before(node, f"{SERVE}.service")[1:] == [], node
