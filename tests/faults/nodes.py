# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's two nodes as the faults need them: asked a question, looked at, and struck."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ansible_collections.sparks.hy3.tests.faults import look, state
from ansible_collections.sparks.hy3.tests.integration.lab import (
    LAB,
    NODES,
    attempt,
    command_of,
    kill,
    on,
    play,
    reached,
)

HEAD, WORKER = NODES
FABRIC = "enp1s0f1np1"
API = "http://127.0.0.1:8000"
QUESTION = {
    "model": "hy3-tiny",
    "messages": [{"role": "user", "content": "capital of France? one word"}],
    "max_tokens": 8,
    "temperature": 0,
}
ANSWER = "Paris."
# What an SSH session of its own takes on a busy machine.
SSH_SECONDS = 6.0
LOOK = (Path(__file__).parent / "look.py").read_text()


class Played(NamedTuple):
    """A playbook that ran to its end."""

    succeeded: bool
    output: str


def look_at(node: str) -> state.Node:
    return state.Node(**json.loads(on(node, f"python3 -I - <<'END'\n{LOOK}\nEND")))


class Lab:
    """The cluster on the lab, as :class:`suite.Suite` asks for it."""

    head = HEAD

    def answers(self, patience: float) -> bool:
        """Whether the known answer to the known question comes within ``patience`` seconds."""
        body = shlex.quote(json.dumps(QUESTION))
        ask = f"curl -s -m {patience:g} {API}/v1/chat/completions -H 'Content-Type: application/json' -d {body}"
        try:
            answer = json.loads(reached(HEAD, ask, patience + SSH_SECONDS) or "")
            return bool(answer["choices"][0]["message"]["content"] == ANSWER)
        except (ValueError, KeyError, IndexError):
            return False

    def units(self) -> dict[str, dict[str, state.Unit]]:
        """The units of each node that can be reached."""
        shown = {node: reached(node, state.SHOW, SSH_SECONDS) for node in NODES}
        return {node: state.units(text) for node, text in shown.items() if text}

    def play(self, playbook: str) -> Played:
        done = attempt(playbook)
        return Played(done.returncode == 0, done.stdout + done.stderr)

    def look(self) -> dict[str, state.Node]:
        return {node: look_at(node) for node in NODES}

    def keep(self) -> dict[str, state.Node]:
        """Give each node files of its user, and return how the nodes are then."""
        for node in NODES:
            for name in look.KEPT:
                on(node, f"echo 'of {node}: {name}' > /{name}")
        return self.look()

    def source(self) -> dict[str, str]:
        """The checkpoint's files, where both nodes' trees come from."""
        tree = LAB / "models/Hy3-tiny"
        return look.digests(list(tree.glob("*")), tree)


# ---- What strikes. Each calls ``strikes`` when it does.

Strikes = Callable[[], None]


def simply(strike: Callable[[], object]) -> Callable[[Strikes], None]:
    """A strike that needs no preparation."""

    def inject(strikes: Strikes) -> None:
        strikes()
        strike()

    return inject


def kill_process(node: str, kind: str) -> Callable[[Strikes], None]:
    """SIGKILL the one process of a kind, which is found through its unit's control group."""

    def inject(strikes: Strikes) -> None:
        found = [one for one in look_at(node).processes if one["kind"] == kind and one["unit"] in state.UNITS]
        (pid,) = [one["pid"] for one in found]
        strikes()
        on(node, f"kill -KILL {pid}")

    return inject


def kill_play(task: str) -> Callable[[Strikes], None]:
    """A start from nothing whose play ends at a task."""

    def inject(strikes: Strikes) -> None:
        play("stop-hy3")
        kill(command_of("serve-hy3"), at=rf"^TASK \[sparks\.hy3\.{task}")
        strikes()

    return inject


def two_plays(strikes: Strikes) -> str:
    """A start from nothing, and a second play as soon as the first has taken the cluster; what the second says."""
    play("stop-hy3")
    first = subprocess.Popen(
        command_of("serve-hy3"), cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert first.stdout is not None
    try:
        lines = [first.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("TASK [sparks.hy3.engine :"):
            lines.append(first.stdout.readline())
        strikes()
        second = attempt("serve-hy3")
    finally:
        output = "".join(lines) + first.communicate()[0]
    assert second.returncode != 0, "the second play was let in"
    assert first.returncode == 0 and f"-> {ANSWER}" in output, output[-4000:]
    return second.stdout + second.stderr


def boot() -> None:
    """Switch the nodes on that are off."""
    play("lab_up")


# ---- Faults of a node's files, which a mount hides and gives back

GID_TREE = "/srv/hy3/sys"
GONE, JOURNAL = "mount -t tmpfs -o size=1m hy3-gone", "/var/log/journal"


def move_gid(node: str, address: str, peer: str, index: int) -> None:
    """Let the right row of the GID table be another one."""
    program = f"{LAB}/files/make_roce_sysfs.py"
    on(
        node,
        f"cp -a {GID_TREE} {GID_TREE}.before && "
        f"python3 {program} {GID_TREE} --address {address} --decoy {peer} --index {index} --netdev {FABRIC}",
    )


def move_gid_back(node: str) -> None:
    on(node, f"test ! -e {GID_TREE}.before || {{ rm -rf {GID_TREE} && mv {GID_TREE}.before {GID_TREE}; }}")


def hide_venv(node: str) -> None:
    """For whatever starts from now on there is nothing in it."""
    on(node, f"{GONE} {LAB}/venv")


def show_venv(node: str) -> None:
    on(node, f"! mountpoint -q {LAB}/venv || umount {LAB}/venv")


def fill_journal(node: str) -> None:
    """The journal goes on in a small file system, which is then filled."""
    on(
        node,
        f"journalctl --relinquish-var; mkdir -p {JOURNAL} && mount -t tmpfs -o size=64m hy3-full {JOURNAL} && "
        f"journalctl --flush && {{ dd if=/dev/zero of={JOURNAL}/full bs=64k 2>/dev/null || true; }}; "
        f"logger hy3 writes on; test $(df --output=avail {JOURNAL} | tail -1) -lt 128",
    )


def empty_journal(node: str) -> None:
    on(
        node,
        f"! mountpoint -q {JOURNAL} || {{ rm -f {JOURNAL}/full; journalctl --relinquish-var && umount {JOURNAL}; }}",
    )


def rotate_journal(node: str) -> None:
    """All that was written so far is gone."""
    on(node, "journalctl --rotate && sleep 2 && journalctl --vacuum-time=1s")


def mtu(node: str, size: int) -> None:
    on(node, f"ip link set dev {FABRIC} mtu {size}")
