# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The action run by ansible itself, on a stand-in systemd whose engine advances with every look."""

from __future__ import annotations

import http.server
import json
import os
import stat
import subprocess
import sys
import threading
import typing as t
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
UNIT = "hy3-serve.service"
SHOWN = """\
MainPID=0
Result={result}
NRestarts=0
ExecMainStatus=0
MemoryCurrent=[not set]
MemoryMax=infinity
Id=hy3-serve.service
LoadState=loaded
ActiveState={state}
SubState=running
InactiveExitTimestamp=@4102444800
ActiveEnterTimestamp=@4102444800
InvocationID=396cb9fa04ff472caccb8b767f92df7c
"""
STARTS = "Starting to load model /ck...\n"
LOADS = STARTS + "Loading safetensors checkpoint shards:  12% Completed | 12/99 [00:10<01:20,  1.1it/s]\n"
LOADED = LOADS + "Loading safetensors checkpoint shards: 100% Completed | 99/99 [01:30<00:00,  1.1it/s]\n"
SERVES = LOADED + "Starting vLLM server on http://127.0.0.1:8000\n"
CRASHES = LOADED + (
    "Loading drafter model...\n"
    "RuntimeError: The size of tensor a (2048) must match the size of tensor b (4096) at non-singleton dimension 1\n"
)


class ApiDouble(http.server.BaseHTTPRequestHandler):
    """The API of an engine, which answers as soon as the log in the directory's C(journal) says that it starts."""

    def log_message(self, *args: t.Any) -> None:
        pass

    def do_GET(self) -> None:
        ready = t.cast("ApiServer", self.server).is_ready()
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "hy3"}]}' if self.path == "/v1/models" else b"")


class ApiServer(http.server.ThreadingHTTPServer):
    """The double on a free port of the loopback."""

    daemon_threads = True

    def __init__(self, looks: Path) -> None:
        super().__init__(("127.0.0.1", 0), ApiDouble)
        self._looks = looks

    def is_ready(self) -> bool:
        return "Starting vLLM server" in (self._looks / "last").read_text()


class Boot:
    """Runs the action with journals that follow each other, one a look; the last one stays."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _program(self, name: str, text: str) -> None:
        path = self._directory / name
        path.write_text(f"#!{sys.executable}\nimport pathlib\nhere = pathlib.Path(__file__).parent\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def __call__(
        self,
        *journals: str,
        state: str = "active",
        result: str = "success",
        check: bool = False,
        **more: t.Any,
    ) -> tuple[str, dict[str, t.Any]]:
        for index, journal in enumerate(journals):
            (self._directory / f"journal.{index}").write_text(journal)
        (self._directory / "last").write_text("")
        self._program("systemctl", f"print({SHOWN.format(state=state, result=result)!r})")
        self._program(
            "journalctl",
            "found = sorted(here.glob('journal.*'))\ntext = found[0].read_text()\n"
            "(here / 'last').write_text(text)\nprint(text)\nlen(found) > 1 and found[0].unlink()",
        )
        with ApiServer(self._directory) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            arguments = {"unit": UNIT, "url": f"http://127.0.0.1:{server.server_port}", "interval": 0.05} | more
            output = self._ansible(arguments, ["--check"] if check else [])
            server.shutdown()
        shown, _host, answer = output.partition("localhost |")
        return shown, json.loads(answer[answer.index("{") : answer.rindex("}") + 1])

    def _ansible(self, arguments: dict[str, t.Any], options: list[str]) -> str:
        command = [sys.executable, "-m", "ansible", "adhoc", "localhost", "-c", "local", *options]
        environment = {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")} | os.environ  # ansible-test has its own
        environment |= {
            "PYTHONPATH": "",  # where ansible-test has an Ansible without commands
            "PATH": f"{self._directory}:{os.environ['PATH']}",
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "ANSIBLE_HOME": str(self._directory / "home"),
            "ANSIBLE_NOCOLOR": "true",
        }
        done = subprocess.run(  # noqa: S603 - the command is ours
            [*command, "-m", "sparks.hy3.serve_wait", "-a", json.dumps(arguments)],
            env=environment,
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "{" in done.stdout, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    return Boot(tmp_path)


def test_progress_until_ready(boot: Boot) -> None:
    shown, result = boot("", LOADS, LOADS, LOADED, SERVES, model="hy3")
    lines = [line.rsplit(",", 1)[0] for line in shown.splitlines() if line.startswith("localhost: ")]
    assert lines == [
        "localhost: starting the engine",
        "localhost: loading weights 12/99 shards",
        "localhost: loading weights 99/99 shards",
        "localhost: starting the API",
    ]
    assert [seen["phase"] for seen in result["phases"]] == ["starting", "loading", "ready"]
    assert (result["changed"], result["failure"], result["ended"]) == (False, None, False)
    assert result["log"]["shards"]["target"] == {"loaded": 99, "total": 99}
    assert result["elapsed_s"] > 0


def test_a_fatal_line_ends_the_wait(boot: Boot) -> None:
    _shown, result = boot(LOADS, CRASHES, timeout=100)
    assert "Apply patch P1 on every node" in result["msg"]
    assert "The size of tensor a (2048)" in result["failure"]["line"]
    assert result["elapsed_s"] < 60


def test_a_failed_unit_ends_the_wait(boot: Boot) -> None:
    _shown, result = boot(LOADS, state="failed", result="oom-kill")
    assert result["msg"].startswith(f"{UNIT} is failed (result oom-kill")
    assert result["ended"] is True


def test_the_timeout_says_where_it_stood(boot: Boot) -> None:
    _shown, result = boot(LOADS, timeout=1)
    assert "still loading weights 12/99 shards" in result["msg"]
    assert "12/99 [00:10<01:20" in result["msg"]
    assert result["ended"] is False, "it may be ready later"


def test_check_mode_does_not_wait(boot: Boot) -> None:
    shown, result = boot(LOADS, check=True)
    nothing = {"changed": False, "elapsed_s": 0.0, "ended": False, "failure": None, "log": None, "phases": []}
    assert (shown, result) == ("", nothing)


def test_an_unknown_option_is_refused(boot: Boot) -> None:
    _shown, result = boot(LOADS, patience=3)
    assert "patience" in result["msg"]
