# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Role upgrade by the real Ansible: two nodes whose units are real processes, and an engine that knows one word."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._way_back import read_unit
from ansible_collections.sparks.hy3.tests.unit.roles.render import render_units, run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.systemd import Systemd

RAY, SERVE = "hy3-ray.service", "hy3-serve.service"
UNITS = (("spark-1", RAY), ("spark-1", SERVE), ("spark-2", RAY))
OLD, NEW = "a" * 64, "b" * 64
# An engine with one answer, on the port that it is given.
ENGINE = """\
#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = {{"token": {answer!r}, "logprob": -0.1}}
CHOICE = {{
    "index": 0, "delta": {{"content": {answer!r}}}, "finish_reason": "stop",
    "logprobs": {{"content": [TOKEN | {{"top_logprobs": [TOKEN]}}]}},
}}


class Engine(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def reply(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(json.dumps({{"data": [{{"id": "hy3-tiny"}}]}}).encode() if "models" in self.path else b"")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
        frames = [{{"choices": [CHOICE]}}, {{"choices": [], "usage": usage}}]
        text = "".join(f"data: {{json.dumps(frame)}}\\n\\n" for frame in frames) + "data: [DONE]\\n\\n"
        self.reply(text.encode(), "text/event-stream")


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
"""
MEMBERS = json.dumps([[f"192.168.100.{number}", True, {"GPU": 1.0}] for number in (1, 2)])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Cluster:
    """Two nodes that serve with the engine in ``old``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.port = root, free_port()
        self.systemd = Systemd(root)
        monkeypatch.setenv("PATH", self.systemd.path)
        self.old, self.new = self.engine("old", "Paris."), self.engine("new", "Paris.")
        (root / "model").mkdir()
        for node in ("spark-1", "spark-2"):
            (root / node / "programs").mkdir(parents=True)
            (root / node / "programs/roce.py").write_text("# of the old release\n")
            self.systemd.write(node, "hy3.slice", "[Slice]\nMemoryMax=1\n")
        self.write("system", OLD, self.old)
        for node, unit in UNITS:
            self.systemd.start(node, unit)
        self.systemd.moved()

    def engine(self, name: str, answer: str) -> Path:
        """A venv with an engine, and Ray's membership for whoever asks its Python."""
        programs = self.root / name / "bin"
        programs.mkdir(parents=True)
        texts = {"vllm": ENGINE.format(python=sys.executable, answer=answer)}
        texts |= {"python": f"#!/bin/sh\necho '{MEMBERS}'\n"}
        for program, text in texts.items():
            (programs / program).write_text(text)
            (programs / program).chmod(0o755)
        return self.root / name

    def write(self, place: str, digest: str, venv: Path) -> None:
        """The units of both nodes, in ``ROOT/NODE/system`` or where the play takes the new ones from."""
        for node, unit in UNITS:
            command = f"{venv}/bin/vllm {self.port}" if unit == SERVE else "/bin/sleep 600"
            text = f"[Service]\nUser={getpass.getuser()}\nEnvironment=HY3_DIGEST={digest}\n"
            text += f"Environment=PATH={venv}/bin:/usr/bin:/bin\nExecStart={command}\n"
            path = (self.root / node / place if place == "system" else self.root / place / node) / unit
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def play(
        self, venv: Path, *options: str, digest: str = NEW, **variables: t.Any
    ) -> subprocess.CompletedProcess[str]:
        self.write("new", digest, venv)
        node = f"{self.root}/{{{{ inventory_hostname }}}}"
        own = {
            "upgrade_root": str(self.root),
            "upgrade_paths": {
                "config": f"{node}/etc",
                "programs": f"{node}/programs",
                "way_back": f"{node}/etc/way-back",
            },
            "upgrade_facts": {"hy3_engine": {"vllm": "0.25.1+cpu", "ray": "2.60.0"}},
            "__hy3_upgrade_systemd": f"{node}/system",
            "__hy3_preflight_patience": 0,
            "hy3_profile": "tiny_lab",
            "hy3_allow": ["cap-not-enforced", "memlock-limited"],
            "hy3_user": getpass.getuser(),
            "hy3_checkpoint_dir": str(self.root / "model"),
            "hy3_api_port": self.port,
            "hy3_venv": str(venv),
            "hy3_reports_dir": str(self.root / "reports"),
        }
        return run_playbook("upgrade", self.root, {**own, **variables}, *options)

    def digests(self) -> set[str]:
        return {self.systemd.digest(node, unit) for node, unit in UNITS}

    def report(self) -> dict[str, t.Any]:
        """The newest one."""
        path = max((self.root / "reports").glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns)
        report: dict[str, t.Any] = json.loads(path.read_text())
        return report

    def keeps(self) -> list[Path]:
        return list(self.root.glob("spark-*/etc/way-back"))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(tmp_path, monkeypatch)
    yield made
    made.systemd.end()


def said(done: subprocess.CompletedProcess[str]) -> str:
    """On one line."""
    return " ".join((done.stdout + done.stderr).split())


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return said(done)


STOPS = ["stop hy3-serve on spark-1", "stop hy3-ray on spark-1", "stop hy3-ray on spark-2"]
STARTS = ["start hy3-ray on spark-1", "start hy3-ray on spark-2", "start hy3-serve on spark-1"]


def test_switch(cluster: Cluster) -> None:
    done = cluster.play(cluster.new, hy3_engine_packages=["vllm==0.25.1"])
    assert done.returncode == 0, done.stdout + done.stderr
    text = said(done)
    assert f"From {cluster.old} (vllm 0.24.0) to {cluster.new} (vllm 0.25.1+cpu, ray 2.60.0). This stops what" in text
    assert f"Hy3 is served from {cluster.new}. What served before, {cluster.old}, stays on every node and holds" in text
    assert f"set hy3_venv back to {cluster.old} and hy3_engine_packages to what it was (vllm 0.24.0 is there)" in text
    assert f"-m ansible.builtin.file -a 'path={cluster.old} state=absent'" in text
    assert cluster.digests() == {NEW}
    assert cluster.systemd.moved()[:3] == STOPS
    assert cluster.report()["upgrade"] == {
        "from": str(cluster.old), "to": str(cluster.new), "version": "0.24.0", "outcome": "switched",
    }  # fmt: skip
    # Role verify forgets what was kept.
    assert len(cluster.keeps()) == 2


def test_a_failed_question_goes_back(cluster: Cluster) -> None:
    """The engine is up and healthy, and its answer is wrong."""
    before = {(node, unit): cluster.systemd.read(node, unit) for node, unit in UNITS}
    rome = cluster.engine("rome", "Rome.")
    text = refused(cluster.play(rome))
    assert cluster.digests() == {OLD}
    assert {(node, unit): cluster.systemd.read(node, unit) for node, unit in UNITS} == before
    assert f"spark-1: The upgrade from {cluster.old} to {rome} failed in 'Ask a question' on spark-1:" in text
    assert (
        f"{cluster.old} serves, with its old digest, and the inventory still names {rome}, which the next serve_hy3 "
        f"would start; set hy3_venv back to {cluster.old}, or mend {rome} and run upgrade_hy3 again."
    ) in text
    moved = cluster.systemd.moved()
    assert moved[:3] == STOPS
    assert moved[-6:] == STOPS + STARTS
    assert cluster.keeps() == []
    report = cluster.report()
    assert (report["ok"], report["healthy"], report["upgrade"]["outcome"]) == (False, True, "went back")
    assert report["smoke"]["text"] == "Paris."


def test_going_back_fails_as_well(cluster: Cluster) -> None:
    """What is kept stays, and the next run can still go back to it. The first cause is another node's each time."""
    engine = cluster.old / "bin/vllm"
    engine.rename(cluster.root / "vllm")
    text = refused(cluster.play(cluster.new, upgrade_breaks="its cable is out."))
    assert "failed in 'Break a node' on spark-2: its cable is out. Going back failed as well: " in text
    assert f"The units that served are kept in {cluster.root}/spark-1/etc/way-back on every node; set hy3_venv" in text
    assert len(cluster.keeps()) == 2
    report = cluster.report()
    assert (report["healthy"], report["upgrade"]["outcome"]) == (False, "stuck")
    assert report["failures"][0]["msg"].startswith(f"The upgrade from {cluster.old} to {cluster.new} failed in")

    (cluster.root / "vllm").rename(engine)
    text = refused(cluster.play(cluster.new, upgrade_breaks="its cable is out."))
    assert f"An upgrade that did not end is gone on with: from {cluster.old} (vllm 0.24.0) to {cluster.new}" in text
    assert f"its cable is out. {cluster.old} serves, with its old digest" in text
    assert cluster.digests() == {OLD}
    assert cluster.keeps() == []


def test_where_nothing_restarted_nothing_does(cluster: Cluster) -> None:
    same = {"hy3_engine": {"vllm": "0.24.0"}}
    given = {"upgrade_breaks": "no.", "upgrade_facts": same, "upgrade_starts": False}
    text = refused(cluster.play(cluster.old, digest=OLD, **given))
    assert "The change of settings failed in 'Break a node' on spark-2: no. Nothing was restarted." in text
    assert f"From {cluster.old}" not in text
    assert cluster.systemd.moved() == []
    assert cluster.keeps() == []


def test_an_engine_that_was_changed_where_it_lies(cluster: Cluster) -> None:
    text = refused(cluster.play(cluster.old))
    assert (
        f"{cluster.old} on spark-1 has vllm 0.25.1+cpu, and what runs from there is 0.24.0, so there is nothing to go "
        "back to; put that version back and the other into another hy3_venv, or run serve_hy3, which has no way back."
    ) in text
    assert cluster.systemd.moved() == []
    assert cluster.keeps() == []


def test_check_mode(cluster: Cluster) -> None:
    done = cluster.play(cluster.new, "--check", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr
    sentence = "A run would stop what serves, start the other and ask it; what served before comes back if that fails."
    assert sentence in said(done)
    # It names what would stop.
    assert re.search(r"Of the others, stop hy3-ray\] \*+\n(?:skipping.*\n)?changed: \[spark-2\]", done.stdout)
    assert cluster.systemd.moved() == []
    assert cluster.digests() == {OLD}
    assert cluster.keeps() == []


def test_reads_the_units_that_roles_write(tmp_path: Path) -> None:
    facts = {node: {"fabric_env": {}} for node in ("spark-1", "spark-2")}
    done = render_units(tmp_path, facts, hy3_venv="/opt/my venv")
    assert done.returncode == 0, done.stdout + done.stderr
    for node, unit in UNITS:
        text = (tmp_path / node / unit).read_text()
        found = read_unit(text)
        assert found.digest
        assert f"HY3_DIGEST={found.digest}\n" in text
        assert (found.venv, found.user) == ("/opt/my venv", "hy3")
        assert found.checkpoint == ("0" * 64 if unit == SERVE else None)
