# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What modules return of two nodes that serve, and what differs when they do not."""

from __future__ import annotations

import copy
import typing as t

Facts = dict[str, t.Any]
NOW = 1796063642
HEAD, WORKER = "spark-1", "spark-2"
ADDRESSES = {HEAD: "192.168.100.1", WORKER: "192.168.100.2"}
PLAN: Facts = {
    "cluster": "sparks",
    "engine": "vllm",
    "executor": "ray",
    "hosts": [HEAD, WORKER],
    "head": {"name": HEAD, "address": ADDRESSES[HEAD]},
    "serve_hosts": [HEAD],
    "addresses": ADDRESSES,
}
WITHOUT_RAY: Facts = {**PLAN, "executor": "mp", "serve_hosts": [HEAD, WORKER]}


def view(tcp: str, **more: t.Any) -> Facts:
    """What ssh_probe says of a node."""
    alive = tcp in ("banner", "silent", "closed", "other", "refused")
    kex = "done" if tcp == "banner" else None
    return {"address": "10.0.0.2", "port": 22, "tcp": tcp, "ping": alive, "error": "", "key_exchange": kex, **more}


def peers(tcp: str, *, node: str = WORKER, **more: t.Any) -> Facts:
    """What reach_info says of another node over the fabric."""
    return {"views": [{**view(tcp), "name": node, "address": ADDRESSES[node], **more}]}


def unit(state: str = "active", *, role: str = "Hy3: Ray worker", cluster: str = "sparks", **more: t.Any) -> Facts:
    """What engine_status says of one unit."""
    result = "exit-code" if state == "failed" else "success"
    return {
        "description": f"{role} of cluster {cluster}",
        "load_state": "loaded",
        "active_state": state,
        "result": result,
        "active_since": NOW - 3600,
        "processes": [],
        **more,
    }


def units(of_ray: str = "active", of_serve: str = "active", **more: t.Any) -> Facts:
    """Our units by name; an empty state is a unit that was never there."""
    gone = {"load_state": "not-found", "description": "x"}
    found = {"hy3-ray.service": of_ray, "hy3-serve.service": of_serve}
    return {
        "units": {name: unit(state) if state else unit("inactive", **gone) for name, state in found.items()},
        **more,
    }


def members(*alive: str) -> Facts:
    return {"nodes": [{"address": ADDRESSES[name], "alive": name in alive} for name in (HEAD, WORKER)], "error": None}


LOGIN: Facts = {"ping": "pong", "failed": False}
DENIED: Facts = {"unreachable": True, "msg": "Failed to connect to the host via ssh: Permission denied (publickey)."}
HANGS: Facts = {"failed": True, "msg": "Task failed: Timed out after 60 second(s).", "timedout": True}
NO_ROUTE: Facts = {"unreachable": True, "msg": "Failed to connect to the host via ssh: No route to host"}
SERVING: Facts = {
    HEAD: {
        "view": view("banner"),
        "login": LOGIN,
        "peers": peers("banner"),
        "status": units(
            log={"phase": "ready"}, failure=None, health={"ok": True, "status": 200}, ray=members(HEAD, WORKER)
        ),
        "smoke": {"ok": True},
        "orphans": {"orphans": []},
    },
    WORKER: {
        "view": view("banner"),
        "login": LOGIN,
        "peers": peers("banner", node=HEAD),
        "status": units(of_serve=""),
        "smoke": {"ok": False},
        "orphans": {"orphans": []},
    },
}
SILENT: Facts = {HEAD: {"smoke": {"ok": False}}}
# Nothing of it answers, from anywhere.
GONE: Facts = {"view": view("timeout", ping=False), "login": NO_ROUTE}
FROZEN: Facts = {"view": view("silent"), "login": HANGS}
ORPHAN: Facts = {"pid": 900, "kind": "engine_core", "title": "VLLM::EngineCore", "unit": ""}


def laid(*overs: Facts) -> Facts:
    """The cluster that serves, with these laid over it: by node, what is named there is replaced."""
    found = copy.deepcopy(SERVING)
    for over in overs:
        for node, parts in over.items():
            found[node] |= copy.deepcopy(parts)
    return found
