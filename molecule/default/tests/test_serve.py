# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a served lab must look like, seen from outside of the collection: the kernel, systemd and the API."""

from __future__ import annotations

import json
import re
import typing as t

import pytest

FABRIC = {"spark-1": ("198.18.20.1", "3"), "spark-2": ("198.18.20.2", "6")}
PER_NODE = ("NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
API = "http://127.0.0.1:8000"


@pytest.fixture
def name(host: t.Any) -> str:
    """The inventory name of the node under test."""
    return str(host.check_output("hostname"))


def head_only(name: str) -> bool:
    return name == "spark-1"


def chat(host: t.Any, **body: t.Any) -> dict[str, t.Any]:
    """The parsed answer of one chat completion, and the HTTP status as ``status``."""
    request = {"model": "hy3-tiny", "temperature": 0, **body}
    quoted = json.dumps(request).replace("'", "'\\''")
    out = host.check_output(
        f"curl -s -w '\\n%{{http_code}}' {API}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"
    )
    text, _newline, status = out.rpartition("\n")
    return {**json.loads(text), "status": int(status)}


def processes(host: t.Any, unit: str) -> dict[int, str]:
    """Title by pid of every process whose control group is the unit's."""
    found = host.check_output(
        f"for d in /proc/[0-9]*; do grep -qs '/{unit}$' $d/cgroup && "
        "echo ${d#/proc/} $(tr '\\0' ' ' <$d/cmdline); done; true"
    )
    return {int(pid): title for pid, _space, title in (line.partition(" ") for line in found.splitlines())}


def environment(host: t.Any, pid: int) -> dict[str, str]:
    raw = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ")
    return dict(line.split("=", 1) for line in raw.splitlines() if "=" in line)


def test_units_run_as_the_user_in_the_slice(host: t.Any, name: str) -> None:
    for unit in ["hy3-ray", "hy3-serve"] if head_only(name) else ["hy3-ray"]:
        assert host.service(unit).is_running
        shown = host.check_output(f"systemctl show {unit} -p User,Slice,MemoryMax,MemorySwapMax,NRestarts")
        assert "User=hy3" in shown
        assert "Slice=hy3.slice" in shown
        assert "MemorySwapMax=0" in shown
        assert "NRestarts=0" in shown


def test_strangers_stay_outside(host: t.Any, name: str) -> None:
    token = host.file("/etc/hy3/ray_token_lab")
    assert (token.user, token.mode, token.size) == ("hy3", 0o600, 64)
    table = host.check_output("nft list table inet hy3_lab")
    peer = next(address for node, (address, _index) in FABRIC.items() if node != name)
    assert f"ip saddr {peer} accept" in table
    assert host.service("hy3-firewall").is_running


def test_shared_memory_outlives_sessions(host: t.Any) -> None:
    assert host.file("/var/lib/systemd/linger/hy3").exists


def test_one_rank_on_each_node_with_its_own_fabric(host: t.Any, name: str) -> None:
    ranks = [pid for pid, title in processes(host, "hy3-ray.service").items() if title.startswith("ray::RayWorkerProc")]
    assert len(ranks) == 1
    address, index = FABRIC[name]
    seen = environment(host, ranks[0])
    assert seen["NCCL_IB_GID_INDEX"] == index
    assert seen["NCCL_IB_HCA"] == "=rocep1s0f1"
    assert seen["VLLM_HOST_IP"] == address


def test_driver_has_no_per_node_variable(host: t.Any, name: str) -> None:
    for pid in processes(host, "hy3-serve.service") if head_only(name) else []:
        assert not set(PER_NODE) & set(environment(host, pid))


def test_arguments_arrive_byte_for_byte(host: t.Any, name: str) -> None:
    if not head_only(name):
        assert not host.service("hy3-serve").is_running
        return
    pid = host.check_output("systemctl show hy3-serve -p MainPID --value")
    argv = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/cmdline").splitlines()
    assert argv[argv.index("--speculative-config") + 1] == '{"method":"mtp","num_speculative_tokens":1}'
    # Odd on purpose; inventories/lab sets it.
    assert argv[argv.index("--hf-overrides") + 1] == json.dumps(
        {"hy3_lab_note": "a \"b\" 'c' $HOME %h \\ d"}, separators=(",", ":")
    )


def test_answer(host: t.Any, name: str) -> None:
    if not head_only(name):
        return
    answer = chat(host, messages=[{"role": "user", "content": "capital of France? one word"}], max_tokens=8)
    assert answer["status"] == 200
    assert answer["choices"][0]["message"]["content"] == "Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] > 0


def test_drafts_are_accepted(host: t.Any, name: str) -> None:
    if not head_only(name):
        return
    chat(host, messages=[{"role": "user", "content": "go on"}], max_tokens=200, ignore_eos=True)
    text = host.check_output(f"curl -s {API}/metrics")
    counters = dict(re.findall(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\{.*?\} ([\d.e+]+)$", text, re.M))
    drafted, accepted = float(counters["draft"]), float(counters["accepted"])
    assert drafted > 0
    assert accepted / drafted > 0.9


def test_patched_file_serves(host: t.Any) -> None:
    site = host.check_output("echo /var/lib/hy3-lab/venv/lib/python3*/site-packages")
    assert 'prefix="lm_head"' in host.file(f"{site}/vllm/model_executor/models/hy_v3_mtp.py").content_string


def test_sshd_keeps_memory_where_the_kernel_can(host: t.Any) -> None:
    # Control groups of version 1 have no such thing, and role guard said so.
    able = "memory" in host.run("cat /sys/fs/cgroup/cgroup.controllers").stdout.split()
    assert host.file("/etc/systemd/system/ssh.service.d/50-hy3-guard.conf").exists is able
    assert host.file("/etc/systemd/system/system.slice.d").exists is able


def test_no_rsync_daemon_is_left(host: t.Any) -> None:
    assert host.run("pgrep -x rsync").rc == 1
    assert host.run("ls -d /run/hy3-checkpoint*").rc == 2
