# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What inventories/sparks would run, against LibertAI's published recipe, flag by flag.

The first half are tables: what the recipe says in its steps 2 (Ray) and 3 (vLLM), and where we differ, with the
reason. Laid over each other they must be exactly what real Ansible renders.
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
from ansible_collections.sparks.hy3.tests.unit.roles.render import render_units
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import (
    read_environment,
    read_options,
    read_unit,
    split_words,
)

ROOT = Path(__file__).parents[3]


class Ours(t.NamedTuple):
    """Our value where it differs from the recipe's; None: we leave it out."""

    value: str | None
    reason: str


Table = dict[str, str]
Differences = dict[str, Ours]


# ---- The recipe

HEAD, WORKER = "192.168.100.1", "192.168.100.2"
ADDRESSES = {"spark-1": HEAD, "spark-2": WORKER}
GID_INDEXES = {"spark-1": "3", "spark-2": "6"}
HCA, NETDEV = "rocep1s0f1", "enp1s0f1np1"

SEED_NETWORK = {
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_HCA": HCA,
    "NCCL_SOCKET_IFNAME": NETDEV,
    "GLOO_SOCKET_IFNAME": NETDEV,
}
SEED_MEMORY = {"RAY_memory_monitor_refresh_ms": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
SEED_ENVIRONMENT: dict[str, Table] = {
    node: SEED_NETWORK | SEED_MEMORY | {"VLLM_HOST_IP": address, "NCCL_IB_GID_INDEX": GID_INDEXES[node]}
    for node, address in ADDRESSES.items()
}
# Step 3 exports on the head what step 2 gives its raylet.
SEED_DRIVER_ENVIRONMENT = SEED_ENVIRONMENT["spark-1"]

SEED_RAY: dict[str, Table] = {
    "spark-1": {"head": "", "node-ip-address": HEAD, "port": "6379", "object-store-memory": "2000000000"},
    "spark-2": {"address": f"{HEAD}:6379", "node-ip-address": WORKER, "object-store-memory": "2000000000"},
}
SEED_SERVE: Table = {
    "served-model-name": "hy3-nvfp4",
    "trust-remote-code": "",
    "distributed-executor-backend": "ray",
    "tensor-parallel-size": "2",
    "pipeline-parallel-size": "1",
    "moe-backend": "marlin",
    "enforce-eager": "",
    "kv-cache-dtype": "fp8",
    "max-model-len": "163840",
    "max-num-seqs": "2",
    "max-num-batched-tokens": "8192",
    "gpu-memory-utilization": "0.85",
    "speculative-config": '{"method":"mtp","num_speculative_tokens":1}',
    "host": "0.0.0.0",
    "port": "8000",
}

# systemd-run's own options and properties, as settings of a unit.
SEED_SCOPE: Table = {"--user": "", "--scope": "", "--collect": "", "Service.MemorySwapMax": "0"}
SEED_UNITS: dict[tuple[str, str], Table] = {
    ("spark-1", "hy3-ray"): SEED_SCOPE | {"Service.MemoryMax": "104G"},
    ("spark-2", "hy3-ray"): SEED_SCOPE | {"Service.MemoryMax": "110G"},
    ("spark-1", "hy3-serve"): SEED_SCOPE | {"Service.MemoryMax": "8G"},
}


# ---- Where we differ

PORT = "Ray listens on all addresses and picks ports at random, so they are fixed for a firewall to know (decision 6)"
RAY_BOTH: Differences = {
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
RAY: dict[str, Differences] = {
    "spark-1": RAY_BOTH
    | {
        "ray-client-server-port": Ours("10001", "its default, stated because the firewall names it (decision 6)"),
        "include-dashboard": Ours("false", "the dashboard runs code for whoever reaches it (decision 6)"),
        "temp-dir": Ours("/var/lib/hy3/ray", "not in the shared /tmp; short, as sockets lie in it (decision 2)"),
    },
    "spark-2": RAY_BOTH,
}

SERVE: Differences = {
    "host": Ours("127.0.0.1", "only the head itself reaches the API until a user gives it a key (decision 7)"),
    "disable-fastapi-docs": Ours("", "three routes fewer that a key does not guard (decision 7)"),
}

TOKEN = "Ray runs code for whoever reaches its ports, unless it has a token (decision 6)"
ENVIRONMENT_BOTH: Differences = {
    "RAY_AUTH_MODE": Ours("token", TOKEN),
    "RAY_AUTH_TOKEN_PATH": Ours("/etc/hy3/ray_token_sparks", "a path, because every user can read a unit (decision 7)"),
    "HY3_DIGEST": Ours("SHA256", "restart by digest (decision 1)"),
    "PATH": Ours(
        "/opt/hy3/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "the recipe takes it from a login shell, and a unit has none; JIT compilers need nvcc and ninja on it",
    ),
    "VLLM_CONFIG_ROOT": Ours("/etc/hy3/vllm", "where ray_non_carry_over_env_vars.json lies (decision 3)"),
    "VLLM_NO_USAGE_STATS": Ours("1", "a private cluster reports to nobody"),
    "VLLM_ENGINE_READY_TIMEOUT_S": Ours("2400", "the default of 600 s is shorter than the recipe's own cold start"),
    "RAY_USAGE_STATS_ENABLED": Ours("0", "a private cluster reports to nobody"),
}
ENVIRONMENT: Differences = ENVIRONMENT_BOTH | {
    "NCCL_IB_HCA": Ours(f"={HCA}", "exact; without = NCCL takes every HCA whose name begins so"),
    "NCCL_SOCKET_IFNAME": Ours(f"={NETDEV}", "exact; without = NCCL takes a VLAN of this device too"),
    "NCCL_DEBUG": Ours("INFO", "NCCL's own log proves the index and NET/IB (decision 3)"),
    "NCCL_DEBUG_SUBSYS": Ours("INIT,NET,ENV", "the part of that log which says so"),
    "NCCL_DEBUG_FILE": Ours("/run/hy3-ray/nccl.%p.log", "where verify reads that log"),
}
NOT_THE_DRIVERS = "whatever the driver has, an executor may copy over the other nodes' own values (decision 3)"
DRIVER_ENVIRONMENT: Differences = ENVIRONMENT_BOTH | {
    **{name: Ours(None, NOT_THE_DRIVERS) for name in (*SEED_NETWORK, "NCCL_IB_GID_INDEX")},
    "RAY_ADDRESS": Ours(f"{HEAD}:6379", "the driver must join our cluster and never start another (decision 2)"),
    "RAY_DEDUP_LOGS": Ours("0", "Ray folds equal lines of two ranks, and the log is read for progress and causes"),
    "HY3_CHECKPOINT": Ours("SHA256", "another checkpoint at the same path means a restart (decision 1)"),
}

UNIT: Differences = {
    "--user": Ours(None, "a system unit outlives the login that started it (decision 2)"),
    "--scope": Ours(None, "a service, so that systemd starts, stops and reports it (decision 2)"),
    "--collect": Ours(None, "a unit that failed stays, so that status can say why"),
    "Unit.Description": Ours("TEXT", "for a person"),
    "Unit.Wants": Ours("network-online.target", "the fabric address must be there after a boot"),
    "Unit.After": Ours("network-online.target", "as Wants"),
    "Service.Type": Ours("exec", "a start fails when the program cannot be executed"),
    "Service.User": Ours("hy3", "the recipe's user is whoever logs in (decision 2)"),
    "Service.Slice": Ours("hy3.slice", "caps of single units do not bound their sum (decision 2)"),
    "Service.LimitMEMLOCK": Ours("infinity", "RDMA registers memory; the recipe gets this from a login shell"),
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
UNITS: dict[tuple[str, str], Differences] = {
    ("spark-1", "hy3-ray"): RAY_UNIT,
    ("spark-2", "hy3-ray"): RAY_UNIT,
    ("spark-1", "hy3-serve"): UNIT
    | {
        "Unit.BindsTo": Ours("hy3-ray.service", "the engine's ranks live in the raylet"),
        "Unit.After": Ours("network-online.target hy3-ray.service", "as Wants and BindsTo"),
        "Service.RuntimeDirectory": Ours("hy3-serve", "one per unit; a shared one goes when either stops (decision 2)"),
    },
}
# Compared in tests of their own.
ELSEWHERE = {"Service.Environment", "Service.ExecStart", "Service.ExecStartPre"}


# ---- The comparison


def expected(seed: Table, differences: Differences) -> Table:
    """The recipe's values with ours laid over them."""
    laid = {name: differences[name].value if name in differences else value for name, value in seed.items()}
    laid |= {name: ours.value for name, ours in differences.items()}
    return {name: value for name, value in laid.items() if value is not None}


COMPARISONS: dict[str, tuple[Table, Differences]] = {
    **{f"ray of {node}": (SEED_RAY[node], RAY[node]) for node in ADDRESSES},
    **{f"environment of {node}": (SEED_ENVIRONMENT[node], ENVIRONMENT) for node in ADDRESSES},
    **{f"{unit} of {node}": (SEED_UNITS[node, unit], UNITS[node, unit]) for node, unit in UNITS},
    "vllm": (SEED_SERVE, SERVE),
    "environment of the driver": (SEED_DRIVER_ENVIRONMENT, DRIVER_ENVIRONMENT),
}


@pytest.mark.parametrize(("seed", "differences"), COMPARISONS.values(), ids=COMPARISONS)
def test_every_difference_differs_and_has_its_reason(seed: Table, differences: Differences) -> None:
    for name, ours in differences.items():
        assert ours.value != seed.get(name), name
        assert len(ours.reason) > 5, name


def fabric_environment(sysfs: Path, *, node: str, address: str, hca: str | None, interface: str | None) -> Table:
    """What the resolver finds on a node that looks like the recipe's, as EnvironmentFile= would read it."""
    links = [{"ifname": NETDEV, "addr_info": [{"local": ADDRESSES[node]}]}]
    found = resolve(
        address=address,
        hca=hca,
        interface=interface,
        sysfs=Sysfs(str(sysfs / node)),
        list_addresses=lambda: json.dumps(links),
    )
    return dict(line.split("=", 1) for line in render_env_file(found.env).splitlines())


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sysfs")
    for node, address in ADDRESSES.items():
        rows = [(int(GID_INDEXES[node]), v4(address), "RoCE v2", NETDEV)]
        make_sysfs(root / node, {f"{HCA}:1": rows}, devices={NETDEV: [HCA]})
    return root


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


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory, sysfs: Path) -> Rendered:
    root = tmp_path_factory.mktemp("rendered")
    node_facts = {
        node: {"fabric_env": fabric_environment(sysfs, node=node, address=address, hca=None, interface=None)}
        for node, address in ADDRESSES.items()
    }
    done = render_units(root, node_facts)
    assert done.returncode == 0, done.stdout + done.stderr
    return Rendered(root)


def test_each_node_gets_its_units_and_no_other(rendered: Rendered) -> None:
    written = {str(path.relative_to(rendered.root)) for path in rendered.root.glob("spark-*/*")}
    slices = {f"{node}/hy3.slice" for node in ADDRESSES}
    assert written == slices | {f"{node}/{unit}.service" for node, unit in UNITS}


@pytest.mark.parametrize(("node", "unit"), UNITS, ids=[" ".join(key) for key in UNITS])
def test_unit(rendered: Rendered, node: str, unit: str) -> None:
    seed, differences = SEED_UNITS[node, unit], UNITS[node, unit]
    assert rendered.settings(node, f"{unit}.service") == expected(seed, differences)


@pytest.mark.parametrize(("node", "gib"), [("spark-1", 104 + 8), ("spark-2", 110)])
def test_slice_bounds_the_sum(rendered: Rendered, node: str, gib: int) -> None:
    """The recipe adds up by hand what systemd then enforces per scope only."""
    assert rendered.settings(node, "hy3.slice") == {
        "Unit.Description": "TEXT",
        "Slice.MemoryMax": str(gib * 1024**3),
        "Slice.MemorySwapMax": "0",
    }


@pytest.mark.parametrize("node", ADDRESSES)
def test_ray_arguments(rendered: Rendered, node: str) -> None:
    argv = rendered.argv(node, "hy3-ray.service")
    assert argv[:2] == ["/opt/hy3/venv/bin/ray", "start"]
    assert read_options(argv[2:]) == expected(SEED_RAY[node], RAY[node])


def test_vllm_arguments(rendered: Rendered) -> None:
    argv = rendered.argv("spark-1", "hy3-serve.service")
    assert argv[:3] == ["/opt/hy3/venv/bin/vllm", "serve", "/opt/hy3/models/Hy3-NVFP4"]
    assert read_options(argv[3:]) == expected(SEED_SERVE, SERVE)


@pytest.mark.parametrize("node", ADDRESSES)
def test_ray_environment(rendered: Rendered, sysfs: Path, node: str) -> None:
    """The unit's own part and what the resolver, called as the unit calls it, writes into the environment file."""
    own = rendered.environment(node, "hy3-ray.service")
    resolver = rendered.before(node, "hy3-ray.service")[0]
    assert resolver[:3] == ["/usr/bin/python3", "-I", "/usr/local/lib/hy3/roce.py"]
    options = read_options(resolver[3:])
    assert (options.pop("output"), options.pop("sysfs-root")) == ("/run/hy3-ray/fabric.env", "/sys")
    assert options.pop("venv") == "/opt/hy3/venv"
    found = fabric_environment(
        sysfs,
        node=node,
        address=options.pop("address"),
        hca=options.pop("hca", None),
        interface=options.pop("interface", None),
    )
    assert options == {}
    assert found.keys() & own.keys() == set(), "a value that drifts must not be fixed in the unit"
    assert own | found == expected(SEED_ENVIRONMENT[node], ENVIRONMENT)


def test_driver_environment(rendered: Rendered) -> None:
    own = rendered.environment("spark-1", "hy3-serve.service")
    assert own == expected(SEED_DRIVER_ENVIRONMENT, DRIVER_ENVIRONMENT)


def test_worker_waits_for_the_head_instead_of_six_seconds(rendered: Rendered) -> None:
    wait = ["/usr/bin/python3", "-I", "/usr/local/lib/hy3/port.py", "wait"]
    wait += ["--host", HEAD, "--port", "6379", "--timeout", "600"]
    assert rendered.before("spark-2", "hy3-ray.service")[1:] == [wait]
    assert rendered.before("spark-1", "hy3-ray.service")[1:] == []
    assert rendered.before("spark-1", "hy3-serve.service") == []


# What the profile states beside flags: the recipe's checkpoint, budget, patch, and what its author measured.
PROFILE: dict[str, object] = {
    "engine": "vllm",
    "nodes": 2,
    "checkpoint": {"repository": "LibertAIDAI/Hy3-NVFP4", "directory": "Hy3-NVFP4", "shards": 99, "size_gb": 169},
    "patches": ["P1"],
    "memory": {"os_reserve": "4G", "head": {"ray": "104G", "serve": "8G"}, "worker": {"ray": "110G"}},
    "smoke": {"question": "capital of France? one word", "expect": "Paris"},
    "readback": {"quantization": "modelopt_fp4"},
    "expected": {
        "kv_cache_tokens": 176784,
        "max_concurrency": 1.08,
        "draft_acceptance": 0.613,
        "decode_tokens_per_s": 19.5,
        "ttft_ms": 252,
        "start_minutes": 11,
        "workload": "one_256",
        "conditions": "single stream, 256 tokens, temperature 0, MTP k=1, after two warm-up generations",
    },
}


def test_profile_states_what_the_recipe_does() -> None:
    profile = yaml.safe_load((ROOT / "roles/profile/files/profiles/libertai_nvfp4_tp2.yml").read_text())
    del profile["memory"]["needs"]  # the recipe has none: what is used is not what may be used
    assert {name: profile[name] for name in PROFILE} == PROFILE
