# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A head that lost its worker, and a peer whose kernel has the reason: the real roles, with stand-ins for systemd."""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook

START = 1796064000
SYSTEMCTL = """\
#!{python}
import sys
states = {states!r}
for unit in [word for word in sys.argv if word.endswith(".service")]:
    active, result = states.get(unit, ("inactive", "success"))
    known = "loaded" if unit in states else "not-found"
    print(f"Id={{unit}}\\nDescription=Hy3: x of cluster sparks\\nLoadState={{known}}\\nActiveState={{active}}")
    print(f"SubState=x\\nResult={{result}}\\nExecMainStatus=1\\nMainPID=0\\nNRestarts=0")
    print("InvocationID=" + ("a1" if unit in states else ""))
    print("InactiveExitTimestamp=@{start}\\nActiveEnterTimestamp=@{start}\\n")
"""
JOURNALCTL = """\
#!{python}
import sys
print({kernel!r} if "_TRANSPORT=kernel" in sys.argv else {log!r})
"""
CANCELLED = f"""\
{START + 400}.000001 spark-1 vllm[42]: (EngineCore pid=7) ERROR 12-01 11:02:09 [core.py:1231] RuntimeError: cancelled
{START + 402}.000001 spark-1 vllm[42]: RuntimeError: Engine core initialization failed. See root cause above.
"""
KILL = (
    f"{START + 395}.000001 spark-2 kernel: oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,"
    "task_memcg=/hy3.slice/hy3-ray.service,task=ray::RayWorkerP,pid=4242,uid=1000"
)


def programs(root: Path, node: str, states: dict[str, tuple[str, str]], *, log: str = "", kernel: str = "") -> None:
    (root / node).mkdir(parents=True)
    given: dict[str, t.Any] = {"python": sys.executable, "states": states, "start": START, "log": log, "kernel": kernel}
    for name, text in {"systemctl": SYSTEMCTL, "journalctl": JOURNALCTL}.items():
        (root / node / name).write_text(text.format(**given))
        (root / node / name).chmod(0o755)


def test_the_play_names_the_peer_and_its_kernels_word(tmp_path: Path) -> None:
    ray = ("active", "success")
    states = {"hy3-ray.service": ray, "hy3-serve.service": ("failed", "exit-code")}
    programs(tmp_path / "programs", "spark-1", states, log=CANCELLED)
    programs(tmp_path / "programs", "spark-2", {"hy3-ray.service": ray}, kernel=KILL)
    given = {
        "sick_programs": str(tmp_path / "programs"),
        "hy3_reports_dir": str(tmp_path / "reports"),
        "hy3_venv": str(tmp_path / "venv"),
        "hy3_api_port": 9,
    }
    done = run_playbook("sick", tmp_path, given)
    assert done.returncode == 0, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    reason = "The kernel killed ray::RayWorkerP in hy3-ray.service, because the node had no memory left"
    assert f"SAID The head lost a worker. spark-2: {reason}" in words
    [file] = (tmp_path / "reports").glob("*/*-status.json")
    report = json.loads(file.read_text())
    assert (report["diagnosis"]["host"], report["diagnosis"]["cause"]) == ("spark-2", reason)
    assert [one["rule"] for one in report["diagnosis"]["followed"]] == ["cancelled", "engine-failed"]
    assert f"spark-2: {reason}" in words
    assert "then spark-1: The head lost a worker" in words
