# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What failure_samples.txt has: text of logs with the rule that it is for, and text that has the same words only."""

from __future__ import annotations

from pathlib import Path

SHAPES = "RuntimeError: The size of tensor a (2048) must match the size of tensor b (4096) at non-singleton dimension 1"
OOMD = (
    "systemd-oomd[840]: Killed /user.slice/user-1000.slice/user@1000.service/app.slice/{} due to memory pressure for "
    "/user.slice/user-1000.slice/user@1000.service being 61.10% > 50.00% for > 20s with reclaim activity"
)
EARLYOOM = 'earlyoom[611]: sending SIG{} to process 4242 uid 1000 "{}": oom_score 1213, VmRSS 91120 MiB, cmdline "{}"'
KERNEL = "kernel: oom-kill:constraint=CONSTRAINT_{}cpuset=/,mems_allowed=0,{}task_memcg={},task={},pid=7,uid=1000"
MEMCG = KERNEL.format("MEMCG,", "oom_memcg=/hy3.slice,", "/hy3.slice/hy3-ray.service", "ray::RayWorkerW")
GLOBAL = KERNEL.format("NONE,", "global_oom,", "/system.slice/hy3-serve.service", "VLLM::EngineCor")


def parts() -> dict[str, list[tuple[str, str]]]:
    """Pairs of what stands after the mark and the text below it, by the part of the file."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n"):
        if line.startswith("# "):
            current = found.setdefault(line[2:], [])
        elif line.startswith("@"):
            current.append((line.lstrip("@ "), ""))
        elif current and line:
            name, text = current[-1]
            current[-1] = (name, f"{text}\n{line}" if text else line)
    return found


_PARTS = parts()
NODE = _PARTS["The node"]
NEAR_MISSES = dict(_PARTS["No failures"])
SAMPLES = [pair for part, pairs in _PARTS.items() if part != "No failures" for pair in pairs]
