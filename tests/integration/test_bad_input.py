# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input is refused with one sentence before anything is changed on any node.

Needs a lab (`make lab-up`). Whatever the sentence is about is a variable, a file beside the real one, or a process of
the test's own; the cluster that serves meanwhile is not touched.
"""

from __future__ import annotations

import json
import re
import subprocess
import typing as t
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import NODES, ROOT, changed_nothing, command_of, on, play

PROFILES = sorted(path.stem for path in (ROOT / "roles/profile/files/profiles").glob("*.yml"))
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*-hy3.yml"))
MODELS = "/srv/hy3/models"
PYTHON = "/usr/bin/python3"
RUNNING = "systemctl show hy3-ray hy3-serve -p ActiveState,MainPID,InvocationID"


@pytest.fixture(scope="module", autouse=True)
def served() -> list[str]:
    """A cluster that serves; what of it runs on each node."""
    play("serve-hy3")
    return [on(node, RUNNING) for node in NODES]


def refuse(command: list[str], sentence: str) -> None:
    """Run a command that must fail, say the sentence to its end and change nothing.

    ``...`` in the sentence stands for what is not the test's to know: sizes of this machine, words of ssh.
    """
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0, output[-4000:]
    # On one line, in what Ansible says of the error; it wraps the same text where it shows the result as YAML.
    end = r"(?=\s)" if sentence.endswith(".") else "$"
    pattern = ".+?".join(map(re.escape, sentence.split("..."))) + end
    assert re.search(pattern, output, re.MULTILINE), output[-4000:]
    assert changed_nothing(done.stdout), output[-4000:]
    assert "Traceback" not in output


def refuse_variables(sentence: str, *, playbook: str = "serve-hy3", **variables: object) -> None:
    refuse(command_of(playbook, "-e", json.dumps(variables)), sentence)


def test_no_rate_of_a_link() -> None:
    sentence = (
        "hy3_lab_link_rate is '400', which is no rate; write a number and kbit, mbit or gbit, as in 400mbit, or leave "
        "it out for no cap."
    )
    refuse(command_of("lab_up", "-e", "hy3_lab_link_rate=400"), sentence)


def of_node(first: str, second: str) -> str:
    """A value that differs between the nodes."""
    return f"{{{{ '{first}' if inventory_hostname == 'spark-1' else '{second}' }}}}"


VARIABLES: dict[str, tuple[dict[str, object], str]] = {
    "unknown profile": (
        {"hy3_profile": "nope"},
        f"hy3_profile is 'nope', which is no profile; choose one of {', '.join(PROFILES)}.",
    ),
    "misspelt variable": (
        {"hy3_api_prot": 8001},
        "hy3_api_prot is a name that no role knows; write hy3_api_port, or take it out.",
    ),
    "misspelt variable of the lab": (
        {"hy3_lab_dri": "/srv"},
        "hy3_lab_dri is a name that no role knows; write hy3_lab_dir, or take it out.",
    ),
    "words for a port": (
        {"hy3_api_port": "eighty"},
        "hy3_api_port is 'eighty', and it must be a whole number; write its digits.",
    ),
    "port of Ray's": (
        {"hy3_api_port": 6379},
        "hy3_api_port is 6379, which Ray needs for itself; choose another, for instance 8000.",
    ),
    "text for engine arguments": (
        {"hy3_engine_args": "--seed 0"},
        "hy3_engine_args is '--seed 0', and it must be a dictionary; write `name: value` pairs.",
    ),
    "unknown rule": (
        {"hy3_allow": ["cap-not-enforce", "memlock-limited"]},
        "hy3_allow has 'cap-not-enforce', which it does not know; write cap-not-enforced.",
    ),
    "unknown head": (
        {"hy3_head": "spark-3"},
        "hy3_head is 'spark-3', which is no host of this play (spark-1, spark-2); name one of them.",
    ),
    "unknown node": (
        {"hy3_nodes": ["spark-1", "spark-3"]},
        "hy3_nodes is spark-1, spark-3, and the hosts of this play are spark-1, spark-2; name exactly these "
        "in rank order, or leave it out.",
    ),
    "one address for two nodes": (
        {"hy3_fabric_address": "198.18.20.1"},
        "hy3_fabric_address 198.18.20.1 is that of spark-1 and spark-2, and each node has its own; correct the others.",
    ),
    "tensor parallel as text": (
        {"hy3_engine_args": {"tensor-parallel-size": "2"}},
        "hy3_engine_args has tensor-parallel-size '2', and it must be a whole number above 0; write one, "
        "without quotes.",
    ),
    "tensor parallel beyond the GPUs": (
        {"hy3_engine_args": {"tensor_parallel_size": 4}},
        "tensor-parallel-size 4 x pipeline-parallel-size 1 needs 4 GPU(s) and 2 node(s) x 1 GPU(s) have 2; correct "
        "hy3_engine_args, or choose another profile.",
    ),
    "pipeline parallel beyond the GPUs": (
        {"hy3_engine_args": {"pipeline-parallel-size": 2}},
        "tensor-parallel-size 2 x pipeline-parallel-size 2 needs 4 GPU(s) and 2 node(s) x 1 GPU(s) have 2; correct "
        "hy3_engine_args, or choose another profile.",
    ),
    "caps above the box": (
        {"hy3_memory": {"head": {"ray": "9000G"}}},
        "spark-1: The caps (ray 9000.00 GiB + serve 4.00 GiB) and the reserve of 4.00 GiB add up to 9008.00 GiB, more "
        "than the ... GiB of this node: lower the caps by ... GiB in all, in hy3_memory",
    ),
    "address that no node owns": (
        {"hy3_fabric_address": of_node("198.18.20.1", "198.18.20.77")},
        "No interface of this node owns 198.18.20.77: it has ... on ..., so correct hy3_fabric_address (in a ring "
        "hy3_host_address) or configure it",
    ),
    "missing user": (
        {"hy3_user": "nobody-here"},
        "hy3_user is 'nobody-here', which spark-1 does not know; name an unprivileged user of that node, for "
        "instance the owner of the venv.",
    ),
    "unreachable node": (
        {"ansible_host": of_node("198.18.10.1", "198.18.10.77"), "ansible_timeout": 3},
        "spark-2 cannot be reached over SSH (...); mend the connection, or if it answers ping and nothing else, free "
        "the memory of its peers first.",
    ),
    "checkpoint that is not there": (
        {"hy3_checkpoint_dir": "/nowhere"},
        "spark-1: /nowhere is no directory; fetch the checkpoint to it.",
    ),
    "node of another cluster": (
        {"hy3_cluster": "other"},
        "hy3-ray.service runs here as 'Hy3: Ray head' of cluster 'lab', and a node serves one cluster at a time, here "
        "'other'; run stop_hy3 with that cluster's inventory, or set hy3_cluster if it is the same one.",
    ),
}


@pytest.mark.parametrize(("variables", "sentence"), VARIABLES.values(), ids=VARIABLES)
def test_variables(variables: dict[str, object], sentence: str) -> None:
    refuse_variables(sentence, **variables)


# Not the doctor: it names the variable among the faults, and goes on.
@pytest.mark.parametrize("playbook", [name for name in PLAYBOOKS if name not in ("serve-hy3", "doctor-hy3")])
def test_misspelt_variable(playbook: str) -> None:
    refuse_variables(VARIABLES["misspelt variable"][1], playbook=playbook, hy3_api_prot=8001)


@pytest.mark.parametrize("options", [[], ["--limit", "spark-1"]], ids=["whole", "limited"])
@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_inventory_without_sparks(playbook: str, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(json.dumps({"spark": {"hosts": {"spark-1": {"ansible_host": "198.18.10.1"}}}}))
    sentence = (
        "The inventory has no host in a group 'sparks' (its groups are spark), and only that group is served; name "
        "your nodes' group so, or another inventory with -i."
    )
    refuse(["ansible-playbook", f"playbooks/{playbook}.yml", "-i", str(tmp_path), *options], sentence)


# What is done to a copy of the checkpoint on the head.
CHECKPOINTS: dict[str, tuple[str, str]] = {
    "missing shard": (
        "rm model-00002-of-00004.safetensors",
        "spark-1: 1 of the 4 shards that the index names are missing: model-00002-of-00004.safetensors; fetch them.",
    ),
    "truncated shard": (
        "truncate -s -100 model-00002-of-00004.safetensors",
        "spark-1: model-00002-of-00004.safetensors is no whole safetensors file: ... bytes are 100 fewer than its "
        "header describes; fetch it again.",
    ),
    "unfinished download": (
        "touch model-00002-of-00004.safetensors.incomplete",
        "spark-1: Unfinished downloads are left: model-00002-of-00004.safetensors.incomplete; finish the download, or "
        "remove them if none is running.",
    ),
    "odd KV heads": (
        "sed -Ei 's/(\"num_key_value_heads\": )[0-9]+/\\13/' config.json",
        "spark-1: num_key_value_heads is 3 at tensor-parallel-size 2, and KV heads are split evenly, or copied evenly "
        "when there are more ranks (a checkpoint padded to 72/9 heads runs at 3, and not at 2 or 4 as its card says); "
        "serve a padded checkpoint with the ranks that it is padded for, and the original with 1, 2, 4 or 8 "
        "(rule tp-kv-heads; hy3_allow can accept it).",
    ),
    "odd heads": (
        "sed -Ei 's/(\"num_attention_heads\": )[0-9]+/\\17/' config.json",
        "spark-1: num_attention_heads is 7 at tensor-parallel-size 2, and each rank takes the same number of heads; "
        "use a size that divides them, or a checkpoint padded for it (72/9 heads for 3) "
        "(rule tp-heads; hy3_allow can accept it).",
    ),
    "no MTP layer": (
        "sed -Ei 's/(\"num_hidden_layers\": )[0-9]+/\\17/' config.json",
        "spark-1: MTP is on and the checkpoint has no tensors for model.layers.7, and some conversions lose that layer "
        "and leave the configuration as it was; serve without MTP, or use a conversion that kept it "
        "(rule mtp-no-layer; hy3_allow can accept it).",
    ),
}


@pytest.mark.parametrize(("damage", "sentence"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoint(damage: str, sentence: str) -> None:
    try:
        on("spark-1", f"cd {MODELS} && rm -rf bad && cp -r Hy3-tiny bad && cd bad && {damage}")
        refuse_variables(sentence, hy3_checkpoint_dir=f"{MODELS}/bad")
    finally:
        on("spark-1", f"rm -rf {MODELS}/bad")


def test_no_gid_row() -> None:
    gid = "0000:0000:0000:0000:0000:ffff:c612:1402"  # 198.18.20.2
    empty = "0000:0000:0000:0000:0000:0000:0000:0000"
    try:
        for node in NODES:
            on(node, "rm -rf /srv/hy3/bad && cp -r /srv/hy3/sys /srv/hy3/bad")
        on("spark-2", f"cd /srv/hy3/bad/class/infiniband && sed -i s/{gid}/{empty}/ */ports/1/gids/*")
        sentence = (
            "No RoCE v2 GID for 198.18.20.2 on rocep1s0f1:1: usable are ..., so correct hy3_fabric_address or hy3_hca"
        )
        refuse_variables(sentence, hy3_sysfs_root="/srv/hy3/bad")
    finally:
        for node in NODES:
            on(node, "rm -rf /srv/hy3/bad")


def test_venv_without_the_engine() -> None:
    try:
        for node in NODES:
            on(node, f"mkdir -p /srv/hy3/bad/bin && ln -sf {PYTHON} /srv/hy3/bad/bin/python")
        sentence = (
            "hy3_venv is /srv/hy3/bad, which on spark-1 has no vllm and no torch and no ray; install vllm and ray "
            "there (hy3_engine_packages can), or name the venv that has them."
        )
        refuse_variables(sentence, hy3_venv="/srv/hy3/bad")
    finally:
        for node in NODES:
            on(node, "rm -rf /srv/hy3/bad")


@contextmanager
def stranger(node: str, port: int, name: str) -> t.Iterator[int]:
    """Somebody else's program that listens on a node, under a name of its own; its process id."""
    listen = f"import socket, time; held = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    rename = f"open('/proc/self/comm', 'w').write('{name}')"
    on(node, f'systemd-run --unit=not-ours --uid=hy3 {PYTHON} -c "{rename}; {listen}"')
    try:
        wait = f"for i in $(seq 50); do ss -Hltn sport = :{port} | grep -q . && break; sleep 0.1; done"
        yield int(on(node, f"{wait}; systemctl show -p MainPID --value not-ours"))
    finally:
        on(node, "systemctl stop not-ours")


def test_api_port_in_use() -> None:
    with stranger("spark-1", 8123, "nginx") as pid:
        refuse_variables(
            f"spark-1: Port 8123 (hy3_api_port) is in use by nginx (pid {pid}, not-ours.service), and no two can "
            "listen on one; stop that process, or choose another hy3_api_port.",
            hy3_api_port=8123,
        )


@pytest.mark.parametrize(("name", "role"), [("gcs_server", "head"), ("raylet", "worker")])
def test_node_of_another_ray(name: str, role: str) -> None:
    with stranger("spark-2", 7379, name) as pid:
        refuse_variables(
            f"spark-2: This node is the {role} of another Ray cluster, by {name} (pid {pid}, not-ours.service) on port "
            "7379, and two Rays would share its GPU and memory; end that one, or take the node out of the inventory."
        )


def test_a_second_run_is_not_bad_input(served: list[str]) -> None:
    """Its own ports and its own Ray are in nobody's way, and nothing before has touched them."""
    assert changed_nothing(play("serve-hy3"))
    assert [on(node, RUNNING) for node in NODES] == served


def test_ports_of_ray_in_use() -> None:
    """Fixed ports, where our Ray does not hold them. Comes last, because it stops the cluster."""
    play("stop-hy3")
    try:
        for node, port, what in (("spark-1", 6379, "Ray's head"), ("spark-2", 6381, "Ray's object-manager-port")):
            with stranger(node, port, "redis-server") as pid:
                refuse_variables(
                    f"{node}: Port {port} ({what}) is in use by redis-server (pid {pid}, not-ours.service), and no two "
                    "can listen on one; stop that process."
                )
    finally:
        play("serve-hy3")
