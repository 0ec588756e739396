# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The module with stand-ins for systemctl and journalctl, which print what systemd 252 printed, and a real server."""

from __future__ import annotations

import http.server
import json
import os
import stat
import subprocess
import sys
import threading
import time
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparks.hy3.plugins.modules import engine_status

SERVE = "hy3-serve.service"
INVOCATION = "396cb9fa04ff472caccb8b767f92df7c"
DEPLOYED = {
    "MainPID": "0",
    "Result": "success",
    "NRestarts": "0",
    "ExecMainStatus": "0",
    "MemoryCurrent": "[not set]",
    "MemoryMax": "8589934592",
    "Id": SERVE,
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InactiveExitTimestamp": "@1796064460",
    "ActiveEnterTimestamp": "@1796064461",
    "InvocationID": INVOCATION,
}
ABSENT = DEPLOYED | {
    "MemoryMax": "infinity",
    "LoadState": "not-found",
    "ActiveState": "inactive",
    "SubState": "dead",
    "InactiveExitTimestamp": "",
    "ActiveEnterTimestamp": "",
    "InvocationID": "",
}
CRASH = """\
\x1b[36m(EngineCore pid=7)\x1b[0;0m INFO 11-30 17:11:55 [gpu_model_runner.py:5184] Loading drafter model...
RuntimeError: The size of tensor a (2048) must match the size of tensor b (4096) at non-singleton dimension 1
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


class Node:
    """A directory of stand-in programs before the real PATH, and the module run with it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._directory, self._capsys = directory, capsys
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def program(self, name: str, text: str) -> str:
        path = self._directory / name
        path.write_text(f"#!{sys.executable}\nimport sys, os\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def systemd(self, *units: dict[str, str], journal: str = "") -> None:
        shown = "\n\n".join("\n".join(f"{name}={value}" for name, value in unit.items()) for unit in units)
        self.program("systemctl", f"print({shown!r})")
        # Prints the log only for the invocation that the unit names.
        self.program("journalctl", f"print({journal!r} if '_SYSTEMD_INVOCATION_ID={INVOCATION}' in sys.argv else '')")

    def status(self, **arguments: t.Any) -> dict[str, t.Any]:
        with patch_module_args(arguments), pytest.raises(SystemExit):
            engine_status.main()
        return json.loads(self._capsys.readouterr().out)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Node:
    return Node(tmp_path, monkeypatch, capsys)


def test_never_deployed(node: Node) -> None:
    node.systemd(ABSENT)
    result = node.status(units=[SERVE], log_unit=SERVE)
    unit = result["units"][SERVE]
    assert (unit["load_state"], unit["main_pid"], unit["argv"], unit["invocation_id"]) == ("not-found", None, [], None)
    assert unit["started"] is None
    assert (result["log"], result["failure"], result["changed"]) == (None, None, False)


def test_running_unit(node: Node) -> None:
    # This process stands for the engine's: its arguments and limits are read from the real kernel.
    node.systemd(DEPLOYED | {"MainPID": str(os.getpid()), "MemoryCurrent": "1000"})
    unit = node.status(units=[SERVE])["units"][SERVE]
    assert unit["argv"][0] == Path(f"/proc/{os.getpid()}/cmdline").read_bytes().split(b"\0")[0].decode()
    assert (unit["active_state"], unit["active_since"], unit["n_restarts"]) == ("active", 1796064461, 0)
    assert (unit["memory_current"], unit["memory_max"], unit["digest"]) == (1000, 8589934592, None)
    assert time.time() - 3600 * 24 < unit["started"] <= time.time()


CONTAINER = "6f1c0e9d3b5a7c2e" * 4


@pytest.fixture
def client(tmp_path: Path) -> t.Iterator[subprocess.Popen[bytes]]:
    """A process with the arguments of docker's client, as a unit's main process is."""
    (tmp_path / "run").write_text("read line\n")
    words = [str(tmp_path / "docker"), "run", "--name", "hy3-serve", "hy3:1"]
    with subprocess.Popen(words, executable="/bin/sh", cwd=tmp_path, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_unit_in_a_container(node: Node, client: subprocess.Popen[bytes]) -> None:
    """What runs in it counts, and not its client."""
    with subprocess.Popen(["sleep", "60"], env={"HY3_DIGEST": "abc"}) as inner:
        node.systemd(DEPLOYED | {"MainPID": str(client.pid), "MemoryCurrent": "1000"})
        node.program(
            "docker", f"assert sys.argv[1:3] == ['container', 'inspect'], sys.argv\nprint('{CONTAINER} {inner.pid}')"
        )
        unit = node.status(units=[SERVE])["units"][SERVE]
        inner.kill()
    assert (unit["main_pid"], unit["digest"], unit["argv"]) == (inner.pid, "abc", ["sleep", "60"])
    assert unit["scope"] == f"docker-{CONTAINER}.scope"
    # It is not in that scope here.
    assert (unit["memory_current"], unit["memory_delegated"], unit["processes"]) == (None, False, [])


def test_container_that_is_not_up_yet(node: Node, client: subprocess.Popen[bytes]) -> None:
    node.systemd(DEPLOYED | {"MainPID": str(client.pid)})
    node.program("docker", "sys.exit('Error response from daemon: No such container: hy3-serve')")
    unit = node.status(units=[SERVE])["units"][SERVE]
    assert (unit["main_pid"], unit["digest"], unit["scope"], unit["memlock"]) == (None, None, None, None)


def test_ray_in_a_container(node: Node) -> None:
    docker = node.program(
        "docker",
        "assert sys.argv[1:5] == ['exec', 'hy3-ray', 'python3', '-I'], sys.argv\n"
        'print(\'[["10.77.0.1", true, {"GPU": 1.0}]]\')',
    )
    arguments = {"ray_python": "python3", "ray_address": "10.77.0.1:6379"}
    result = node.status(ray_launcher=[docker, "exec", "hy3-ray"], **arguments)
    assert result["ray"]["nodes"] == [{"address": "10.77.0.1", "alive": True, "gpus": 1, "head": False}]
    result = node.status(ray_launcher=["/nonexistent/docker", "exec", "hy3-ray"], **arguments)
    assert result["ray"]["error"] == (
        "ray_python /nonexistent/docker exec hy3-ray python3 cannot be run: No such file or directory"
    )


# (id, properties that differ, words of the way out)
TEST_FAILURES: list[tuple[str, dict[str, str], str]] = [
    ("failed", {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}, "patch P1"),
    ("still-active", {}, "patch P1"),
    ("auto-restart", {"ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code"}, "patch P1"),
]


@pytest.mark.parametrize(("unit", "fix"), [row[1:] for row in TEST_FAILURES], ids=[row[0] for row in TEST_FAILURES])
def test_diagnosis(node: Node, unit: dict[str, str], fix: str) -> None:
    node.systemd(DEPLOYED | unit, journal=CRASH)
    result = node.status(units=[SERVE], log_unit=SERVE)
    assert fix in result["failure"]["fix"]
    assert result["log"]["phase"] == "failed"


def test_healthy_log(node: Node) -> None:
    node.systemd(DEPLOYED, journal="GPU KV cache size: 176,784 tokens\nStarting vLLM server on http://127.0.0.1:8000")
    result = node.status(units=[SERVE], log_unit=SERVE)
    assert (result["log"]["phase"], result["log"]["kv"]["tokens"], result["failure"]) == ("ready", 176784, None)


def test_ray_members(node: Node) -> None:
    # The stand-in interpreter shows that it was called with the address and the token's file.
    python = node.program(
        "python-of-the-venv",
        "import json\nassert sys.argv[-2:] == ['10.77.0.1:6379', '5'], sys.argv\n"
        "assert os.environ['RAY_AUTH_TOKEN_PATH'] == '/etc/hy3/token'\n"
        "print(json.dumps([['10.77.0.1', True, {'GPU': 1.0, 'node:__internal_head__': 1.0}]]))",
    )
    arguments = {"ray_python": python, "ray_address": "10.77.0.1:6379", "timeout": 5}
    result = node.status(ray_token_file="/etc/hy3/token", **arguments)
    assert result["ray"] == {
        "nodes": [{"address": "10.77.0.1", "alive": True, "gpus": 1, "head": True}],
        "error": None,
    }


def test_ray_that_never_answers(node: Node) -> None:
    # A module named ray that hangs on import, found by the real interpreter: the program's own alarm must end it.
    package = Path(node.program("hang.py", "import time\ntime.sleep(20)"))
    python = node.program(
        "python-of-the-venv",
        f"import runpy\nsys.path.insert(0, {str(package.parent)!r})\n"
        "program = sys.argv[3].replace('import ray', 'import hang as ray')\n"
        "sys.argv = ['-c', *sys.argv[4:]]\nexec(program)",
    )
    result = node.status(ray_python=python, ray_address="10.77.0.1:6379", timeout=1)
    assert result["ray"]["nodes"] is None
    assert "gave no answer within 1 seconds" in result["ray"]["error"]


def test_ray_without_its_interpreter(node: Node) -> None:
    result = node.status(ray_python="/nonexistent/python", ray_address="10.77.0.1:6379")
    assert result["ray"]["error"] == "ray_python /nonexistent/python cannot be run: No such file or directory"


class ApiDouble(http.server.BaseHTTPRequestHandler):
    """The three pages of a serving engine."""

    pages: t.ClassVar[dict[str, bytes]] = {
        "/health": b"",
        "/v1/models": b'{"data": [{"id": "hy3"}]}',
        "/metrics": b'vllm:num_requests_running{engine="0"} 1.0\n',
    }

    def log_message(self, *args: t.Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.pages[self.path])


def test_api(node: Node) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ApiDouble) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        result = node.status(api_url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result["health"] == {"ok": True, "status": 200, "models": ["hy3"]}
    assert result["metrics"]["running"] == 1
    assert (result["units"], result["ray"]) == ({}, None)
    assert 0 < result["memory"]["available"] <= result["memory"]["total"]


def test_api_that_is_down(node: Node) -> None:
    result = node.status(api_url="http://127.0.0.1:1")
    assert (result["health"], result["metrics"]) == ({"ok": False, "status": None, "models": []}, None)


# (arguments, words of the message)
TEST_REFUSED: list[tuple[dict[str, t.Any], str]] = [
    ({"environment": ["VLLM_API_KEY"]}, "VLLM_API_KEY looks like a secret"),
    ({"log_unit": SERVE}, f"log_unit {SERVE} is not in units"),
    ({"ray_address": "10.77.0.1:6379"}, "ray_python"),
    ({"api_url": "localhost:8000"}, "not of the form http://HOST:PORT"),
]


@pytest.mark.parametrize(("arguments", "message"), TEST_REFUSED)
def test_refused(node: Node, arguments: dict[str, t.Any], message: str) -> None:
    result = node.status(**arguments)
    assert result["failed"]
    assert message in result["msg"]


def test_systemd_that_does_not_answer(node: Node) -> None:
    node.program("systemctl", "sys.exit('Failed to connect to bus')")
    result = node.status(units=[SERVE])
    assert result["msg"] == "systemctl show failed with exit status 1: Failed to connect to bus"


def test_no_systemd(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are found all the same, and what needs its programs says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    result = node.status(find_engines=True)
    assert (result["kills"], type(result["engines"])) == ([], list)
    result = node.status(units=[SERVE])
    assert result["msg"] == "systemctl cannot be run on this node (No such file or directory); see that it has systemd"


def test_engines_of_anybody(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("Overwriting environment variable NCCL_IB_GID_INDEX from '6' to '3'\n" + CRASH)
    program = tmp_path / "somewhere/bin/vllm"
    program.parent.mkdir(parents=True)
    program.write_text("import time\ntime.sleep(60)\n")
    with log.open("a") as out:
        process = subprocess.Popen(
            [sys.executable, str(program), "serve", "/m", "--api_key", "hush", "--moe-backend", "marlin"],
            stdout=out,
            env={"VLLM_HOST_IP": "10.77.0.1", "HF_TOKEN": "hush"},
        )
    try:
        result = node.status(find_engines=True)
    finally:
        process.kill()
        process.wait()
    [found] = [one for one in result["engines"] if one["pid"] == process.pid]
    assert found["arguments"]["moe-backend"] == "marlin"
    assert found["environment"] == {"HF_TOKEN": "********", "VLLM_HOST_IP": "10.77.0.1"}
    assert [(change["variable"], change["after"]) for change in found["changes"]] == [("NCCL_IB_GID_INDEX", "3")]
    assert "patch P1" in found["failure"]["fix"]
    assert "hush" not in repr(found)
    assert node.status()["engines"] is None
