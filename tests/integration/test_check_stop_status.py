# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode on a lab that never served and on one that serves; status and stop. Makes the lab's nodes anew."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import NODES, ROOT, changed_nothing, command_of, on, play

# What a node holds that the play could have touched: units and files of ours, their content, and what runs.
TRACES = r"""
cd /; for tree in etc/systemd/system etc/hy3 usr/local/lib/hy3 srv/hy3/models run/hy3-ray run/hy3-serve; do
    find $tree -printf '%p %s %m %T@\n' 2>/dev/null | sort
done
sha256sum /var/lib/hy3-lab/venv/lib/python3*/site-packages/vllm/model_executor/models/hy_v3_mtp.py
systemctl show hy3-ray hy3-serve -p MainPID,InvocationID
"""


def traces() -> dict[str, str]:
    return {node: on(node, TRACES) for node in NODES}


@pytest.fixture(scope="module")
def fresh() -> None:
    """Nodes on which nothing was ever deployed."""
    play("lab_down")
    play("lab_up")


@pytest.fixture(scope="module")
def served(fresh: None) -> t.Iterator[None]:
    play("serve-hy3")
    yield
    # Leave a cluster that serves to the next file.
    play("serve-hy3")


def test_check_mode_before_anything_is_deployed(fresh: None) -> None:
    before = traces()
    output = play("serve-hy3", "--check", "--diff")
    assert "would be copied from spark-1" in output
    assert 'prefix="lm_head",' in output
    assert "ExecStart=" in output
    assert "Check mode: nothing was changed." in output
    assert traces() == before


def test_status_before_anything_is_deployed(fresh: None) -> None:
    assert "Hy3 does not answer" in play("status-hy3")


def test_check_mode_while_it_serves(served: None) -> None:
    before = traces()
    assert changed_nothing(play("serve-hy3", "--check", "--diff"))
    assert traces() == before


def test_status_while_it_serves(served: None) -> None:
    output = play("status-hy3")
    assert "-> Paris." in output
    assert "Ray      198.18.20.1, 198.18.20.2 with 2 GPUs" in output
    assert changed_nothing(output)


def test_status_of_a_node_that_is_not_there(served: None, tmp_path: Path) -> None:
    gone = {"ansible_host": "198.18.10.77", "ansible_timeout": 3}
    (tmp_path / "gone.yml").write_text(json.dumps({"sparks": {"hosts": {"spark-2": gone}}}))
    output = play("status-hy3", "-i", str(tmp_path / "gone.yml"), "-e", "hy3_cluster=lab")
    assert "-> Paris." in output
    assert "spark-2  198.18.20.2  cannot be reached over SSH" in output


def newest_report() -> dict[str, t.Any]:
    path = max((ROOT / "reports/lab").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    report: dict[str, t.Any] = json.loads(path.read_text())
    return report


def test_report_of_a_good_run(served: None) -> None:
    play("serve-hy3")
    report = newest_report()
    assert (report["play"], report["ok"], report["healthy"], report["failures"]) == ("serve", True, True, [])
    assert (report["smoke"]["text"], report["smoke"]["logprobs_finite"]) == ("Paris.", True)
    assert report["kv"]["tokens"] > 0
    assert report["metrics"]["acceptance"] > 0.9
    assert [report["nodes"][node]["gid_index"] for node in NODES] == [3, 6]
    assert all(report["nodes"][node]["memory"]["available"] > 0 for node in NODES)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ('{"hy3_profile": "nope"}', "hy3_profile is 'nope', which is no profile; choose one of "),
        ('{"hy3_venv": "/nowhere"}', "hy3_venv is /nowhere, which on spark-1 has no bin/python that user hy3 can run;"),
        ('{"ansible_host": "198.18.10.77", "ansible_timeout": 3}', "spark-1 cannot be reached over SSH"),
    ],
)
def test_report_of_a_run_that_failed(served: None, variables: str, sentence: str) -> None:
    done = subprocess.run(
        command_of("serve-hy3", "-e", variables), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    report = newest_report()
    assert (report["play"], report["ok"], report["healthy"]) == ("serve", False, False)
    assert report["failures"][0]["msg"].startswith(sentence)
    assert "Traceback" not in done.stdout + done.stderr


LEASE = "/run/hy3/lease.json"


def held_by_another(until: float) -> str:
    """The lease of another controller's play lies on the head; its content."""
    since = int(time.time()) - 7200
    # As a machine of this controller's name would have written it, with an older release: that name alone says nothing.
    holder = f"{socket.gethostname()}:999999999:1"
    lease = {"holder": holder, "who": "ann@desk, process 4242", "since": since, "until": int(until)}
    on("spark-1", f"mkdir -p /run/hy3 && echo '{json.dumps(lease)}' > {LEASE}")
    return json.dumps(lease)


def test_a_play_of_another_controller_is_not_disturbed(served: None) -> None:
    before, lease = traces(), held_by_another(time.time() + 600)
    try:
        # This would restart the engine.
        variables = json.dumps({"hy3_engine_args": {"seed": 7}})
        for options in ([], ["--check"]):
            done = subprocess.run(
                command_of("serve-hy3", "-e", variables, *options),
                cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode != 0
            assert "ann@desk, process 4242 has worked on this cluster since" in done.stdout + done.stderr
            assert f"end it and remove {LEASE} on the head" in done.stdout + done.stderr
            assert changed_nothing(done.stdout)
            assert on("spark-1", f"cat {LEASE}").strip() == lease
            assert traces() == before
    finally:
        on("spark-1", f"rm -f {LEASE}")


def test_an_expired_lease_is_taken_over_and_said(served: None) -> None:
    held_by_another(time.time() - 60)
    output = play("serve-hy3")
    assert output.count("Took the cluster over from ann@desk, process 4242, which has worked on it since") == 1
    assert "and did not renew its lease, which expired at" in output
    assert changed_nothing(output)
    assert on("spark-1", f"test -e {LEASE} || echo given back").strip() == "given back"


def test_stop_stops_ours_and_nothing_else(served: None) -> None:
    # The same user and venv, and a title that a search by name would take for Ray's.
    on("spark-2", "systemd-run --unit=not-ours --uid=hy3 bash -c 'exec -a ray::Somebody sleep 1000'")
    try:
        play("stop-hy3")
        for node in NODES:
            shown = on(node, "systemctl show hy3-ray hy3-serve -p ActiveState,MainPID")
            assert set(shown.split()) == {"ActiveState=inactive", "MainPID=0"}
            assert on(node, "pgrep -u hy3 -f 'raylet|gcs_server|vllm|VLLM' || true").strip() == ""
        assert on("spark-2", "pgrep -u hy3 -f ray::Somebody").strip()
        assert changed_nothing(play("stop-hy3"))
        assert "Hy3 does not answer" in play("status-hy3")
    finally:
        on("spark-2", "systemctl stop not-ours")
