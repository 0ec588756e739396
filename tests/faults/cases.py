# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The faults as data. Eight of them strike in every `make test`. They share starts of the engine, so the order counts.

Start 1 is that of a play that is killed; the cut link and the frozen node leave it running, and the reboot of the
worker ends it. The other four have a start each, which takes as long as everything else about a fault.
"""

from __future__ import annotations

from functools import partial

from ansible_collections.sparks.hy3.tests.faults import nodes
from ansible_collections.sparks.hy3.tests.faults.nodes import HEAD, WORKER, kill_play, kill_process, simply
from ansible_collections.sparks.hy3.tests.faults.suite import Fault
from ansible_collections.sparks.hy3.tests.integration.lab import cut_power, freeze, plug, switch_off, thaw

NO_ANSWER = r"Hy3 does not answer at "
ANSWERS = r"Hy3 answers at "


def cut_power_of_both() -> None:
    for node in (HEAD, WORKER):
        cut_power(node)


EIGHT = (
    Fault(
        "play killed while the engine starts",
        kill_play("serve_unit : Wait until it answers"),
        says=r"Took the cluster over from \S+, process \d+, which ended without giving it back",
        ask="",
        watched=False,
    ),
    Fault(
        "fabric link of the worker down for 10 s",
        simply(partial(plug, WORKER, into=False)),
        mend=partial(plug, WORKER, into=True),
        says=ANSWERS,
        lasts=10.0,
        ask_afterwards=True,
        silent=True,  # whoever asks nothing in these seconds misses nothing
        rider=True,
    ),
    Fault(
        "worker node frozen: it answers ping and nothing else",
        simply(partial(freeze, WORKER)),
        mend=partial(thaw, WORKER),
        says=rf"{WORKER} cannot be reached over SSH",
        ask="serve-hy3",  # status-hy3 would ask the engine for a minute, which is more than Ray waits for a node
        rider=True,
    ),
    Fault(
        "reboot of the worker node",
        simply(partial(switch_off, WORKER)),
        mend=nodes.boot,
        says=NO_ANSWER,
    ),
    Fault("worker process killed (kill -9), on the worker", kill_process(WORKER, "rank"), says=NO_ANSWER),
    Fault("raylet killed (kill -9), on the worker", kill_process(WORKER, "raylet"), says=NO_ANSWER),
    Fault("engine core killed (kill -9), on the head", kill_process(HEAD, "core"), says=NO_ANSWER),
    Fault("reboot of the head node", simply(partial(switch_off, HEAD)), mend=nodes.boot, says=NO_ANSWER),
)

# A play killed in each role and at random moments is tests/integration/test_kill.py.
REST = (
    Fault("API server killed (kill -9), on the head", kill_process(HEAD, "api"), says=NO_ANSWER),
    Fault("power of both nodes lost at once", simply(cut_power_of_both), mend=nodes.boot, says=NO_ANSWER),
    Fault(
        "fabric link of the worker down until somebody looks",
        simply(partial(plug, WORKER, into=False)),
        mend=partial(plug, WORKER, into=True),
        # systemd-networkd takes the address off a port without a carrier; else the port or the path is named.
        says=r"No interface (?:of this node )?owns 198\.18\.20\.2|\S+ has no carrier|\S+ does not answer a small",
        ask="serve-hy3",
        lasts=100.0,  # longer than Ray waits for a node
    ),
    Fault(
        "MTU 1500 on the head's port, 9000 on the worker's",
        simply(partial(nodes.mtu, HEAD, 1500)),
        mend=partial(nodes.mtu, HEAD, 9000),
        says=r"\S+ of \S+ has MTU \d+ and \S+ of \S+ \d+, so small messages pass and large ones are lost",
        ask="serve-hy3",
        silent=True,  # a small model has small messages
    ),
    Fault(
        "GID table of the worker changed while it serves",
        simply(partial(nodes.move_gid, WORKER, "198.18.20.2", "198.18.20.1", 7)),
        mend=partial(nodes.move_gid_back, WORKER),
        says=rf"restart needed: hy3-ray\.service on {WORKER}, because it runs with other settings",
        ask="serve-hy3",
        silent=True,  # an index is read at a start
    ),
    Fault(
        "disk full under the head's journal",
        simply(partial(nodes.fill_journal, HEAD)),
        mend=partial(nodes.empty_journal, HEAD),
        says=ANSWERS,
        silent=True,
    ),
    Fault(
        "log of the start rotated away, on the head",
        simply(partial(nodes.rotate_journal, HEAD)),
        says=r"the log of this start no longer says",
        ask="",
        silent=True,
    ),
    Fault(
        "virtual environment removed, on the worker",
        simply(partial(nodes.hide_venv, WORKER)),
        mend=partial(nodes.show_venv, WORKER),
        says=rf"hy3_venv is \S+, which on {WORKER} has no bin/python",
        ask="serve-hy3",
        silent=True,
    ),
    Fault(
        "two plays at once",
        nodes.two_plays,
        says=r"\S+, process \d+ has worked on this cluster since",
        ask="",
        watched=False,
    ),
)
