# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two clusters of one node each from two inventories of one controller. Needs `make lab-up`; leaves both stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import ROOT, changed_nothing, on, play, run

CLUSTERS = {"east": "spark-1", "west": "spark-2"}


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
    yield made
    for path in made.values():
        run("ansible-playbook", "playbooks/stop-hy3.yml", "-i", str(path))


def serve(inventory: Path) -> str:
    return run("ansible-playbook", "playbooks/serve-hy3.yml", "-i", str(inventory))


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
        assert f"hy3_{cluster}" in on(node, "nft list tables")
        assert f"cluster {cluster}" in on(node, "systemctl show -p Description hy3-ray hy3-serve")
        assert list((ROOT / "reports" / cluster).glob("*-serve.json"))


def test_stopping_one_leaves_the_other_serving(inventories: dict[str, Path]) -> None:
    run("ansible-playbook", "playbooks/stop-hy3.yml", "-i", str(inventories["east"]))
    assert on("spark-1", "systemctl is-active hy3-serve || true").strip() == "inactive"
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
