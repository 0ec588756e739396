# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two clusters of one node each from two inventories of one controller. Needs `make lab-up`; leaves both stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import ROOT, changed_nothing, on, play, run

CLUSTERS = {"east": "spark-1", "west": "spark-2"}
FABRIC = {"spark-1": "198.18.20.1", "spark-2": "198.18.20.2"}
LEASE = "/run/hy3/lease.json"
STARTED = time.time()
# Who listens on the ports of Ray's head and of the API, by unit.
LISTENERS = r"""
for port in 6379 8000; do
    for pid in $(ss -Hltnp sport = :$port | grep -o 'pid=[0-9]*' | cut -d= -f2 | sort -u); do
        echo $port $(grep -o 'hy3-[a-z]*[.]service' /proc/$pid/cgroup | sort -u)
    done
done | sort -u
"""


def inventory(directory: Path, cluster: str, node: str) -> Path:
    """The lab's inventory with one of its nodes, under the cluster's name."""
    made = directory / cluster
    shutil.copytree(ROOT / "inventories/lab", made)
    hosts = (made / "hosts.yml").read_text().splitlines()
    (made / "hosts.yml").write_text("\n".join(line for line in hosts if "spark-" not in line or node in line) + "\n")
    with (made / "group_vars/sparks.yml").open("a") as variables:
        variables.write("hy3_profile: tiny_lab_tp1\n")
    return made


@pytest.fixture(scope="module")
def inventories(tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[dict[str, Path]]:
    play("stop-hy3")
    # Each node is its own head here, and a head has its checkpoint beforehand.
    on("spark-2", "cp -a /var/lib/hy3-lab/models/Hy3-tiny /srv/hy3/models/ 2>/dev/null || true")
    directory = tmp_path_factory.mktemp("clusters")
    made = {cluster: inventory(directory, cluster, node) for cluster, node in CLUSTERS.items()}
    for path in made.values():  # what a run that failed left
        stop(path)
    yield made
    for path in made.values():
        stop(path)


def serve(inventory: Path) -> str:
    return run("ansible-playbook", "playbooks/serve-hy3.yml", "-i", str(inventory))


def stop(inventory: Path) -> str:
    return run("ansible-playbook", "playbooks/stop-hy3.yml", "-i", str(inventory))


def reports(cluster: str) -> list[dict[str, t.Any]]:
    """Those that this run of the tests has left."""
    files = (ROOT / "reports" / cluster).glob("*-serve.json")
    return [json.loads(path.read_text()) for path in files if path.stat().st_mtime >= STARTED]


def answer(node: str) -> str:
    messages = [{"role": "user", "content": "capital of France? one word"}]
    body = json.dumps({"model": "hy3-tiny", "temperature": 0, "messages": messages})
    url = "http://127.0.0.1:8000/v1/chat/completions"
    answer = json.loads(on(node, f"curl -s {url} -H 'Content-Type: application/json' -d '{body}'"))
    return str(answer["choices"][0]["message"]["content"])


def test_two_clusters_at_once(inventories: dict[str, Path]) -> None:
    command = ["ansible-playbook", "playbooks/serve-hy3.yml", "-i"]
    both = {
        cluster: subprocess.Popen(
            [*command, str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for cluster, path in inventories.items()
    }
    outputs = {cluster: process.communicate()[0] for cluster, process in both.items()}
    assert {process.returncode for process in both.values()} == {0}, outputs
    assert all("-> Paris." in output for output in outputs.values())


def test_nothing_is_shared(inventories: dict[str, Path]) -> None:
    tokens = {on(node, f"sha256sum /etc/hy3/ray_token_{cluster}").split()[0] for cluster, node in CLUSTERS.items()}
    assert len(tokens) == 2
    for cluster, node in CLUSTERS.items():
        others = set(CLUSTERS) - {cluster}
        tables = on(node, "nft list tables")
        assert f"hy3_{cluster}" in tables and not any(f"hy3_{other}" in tables for other in others)
        descriptions = on(node, "systemctl show -p Description --value hy3-ray hy3-serve hy3-firewall").split("\n\n")
        assert [text.strip().rpartition(" of cluster ")[2] for text in descriptions] == [cluster] * 3
        assert [set(report["nodes"]) for report in reports(cluster)] == [{node}]


def test_ports_and_processes_are_ones_own(inventories: dict[str, Path]) -> None:
    for cluster, node in CLUSTERS.items():
        other = next(address for name, address in FABRIC.items() if name != node)
        # The same ports on both nodes, each in the hands of the node's own units.
        assert on(node, LISTENERS).splitlines() == ["6379 hy3-ray.service", "8000 hy3-serve.service"]
        assert other not in on(node, "ss -Htn state established; ps -u hy3 -o args")
        status = run("ansible-playbook", "playbooks/status-hy3.yml", "-i", str(inventories[cluster]))
        assert f"Ray      {FABRIC[node]} with 1 GPUs" in status


def test_a_lease_holds_one_cluster_only(inventories: dict[str, Path]) -> None:
    lease = {"holder": "desk:1:1", "who": "ann@desk, process 1", "since": 1000, "until": int(time.time()) + 600}
    for node in CLUSTERS.values():
        assert on(node, f"test -e {LEASE} || echo given back").strip() == "given back"
    on("spark-1", f"echo '{json.dumps(lease)}' > {LEASE}")
    try:
        done = subprocess.run(
            ["ansible-playbook", "playbooks/serve-hy3.yml", "-i", str(inventories["east"])],
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert "ann@desk, process 1 has worked on this cluster since" in done.stdout + done.stderr
        assert changed_nothing(serve(inventories["west"]))
    finally:
        on("spark-1", f"rm -f {LEASE}")


def test_stopping_with_an_overlapping_inventory_stops_neither(inventories: dict[str, Path]) -> None:
    """The lab's inventory has both nodes, and is that of neither cluster."""
    output = stop(ROOT / "inventories/lab")
    assert changed_nothing(output)
    said = " ".join(output.replace("''", "'").split())  # YAML quotes and wraps
    for cluster, node in CLUSTERS.items():
        assert (
            f"{node}: hy3-ray.service runs here as 'Hy3: Ray head' of cluster '{cluster}', and this inventory" in said
        )
        assert f"is that of 'lab', so it is left alone; run stop_hy3 with the inventory of '{cluster}'," in said
        assert answer(node) == "Paris."


def test_stopping_one_leaves_the_other_serving(inventories: dict[str, Path]) -> None:
    """By an inventory that is its own but for a node that the other one has."""
    both = inventories["east"].parent / "both" / "east"
    shutil.copytree(ROOT / "inventories/lab", both)
    output = stop(both)
    assert "spark-2: hy3-serve.service runs here as" in output
    assert "spark-1: hy3-serve.service runs here as" not in output
    assert on("spark-1", "systemctl is-active hy3-serve hy3-ray hy3-firewall || true").split() == ["inactive"] * 3
    assert answer("spark-2") == "Paris."
    assert changed_nothing(serve(inventories["west"]))


def test_a_node_of_another_cluster_is_refused(inventories: dict[str, Path]) -> None:
    done = subprocess.run(
        ["ansible-playbook", "playbooks/serve-hy3.yml", "-i", "inventories/lab"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "west" in done.stdout
    assert answer("spark-2") == "Paris."
