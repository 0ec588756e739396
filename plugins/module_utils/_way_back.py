# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What an upgrade can go back to: the units that serve now, or those that an upgrade kept which did not end."""

from __future__ import annotations

import json
import re
import typing as t

SERVE = "hy3-serve.service"
# As systemd_quote writes them.
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}

Facts = t.Mapping[str, t.Any]
Texts = t.Mapping[str, str]


class Unit(t.NamedTuple):
    """What a unit file of ours says; None where it does not."""

    digest: str | None
    venv: str | None
    user: str | None
    checkpoint: str | None  # the digest of its manifest


class Kept(t.NamedTuple):
    """Unit files by name, and the version of their engine where it is known."""

    units: Texts
    version: str | None


class Node(t.TypedDict):
    """One node: the units that the plan has there, how they run (of engine_status), their files, and what was kept."""

    wanted: list[str]
    units: dict[str, Facts]
    files: dict[str, str]
    kept: str


class WayBack(t.TypedDict):
    """C(nodes) has the files of each node by name, C(digests) those of its units that run; C(venv) is the head's.

    C(runs) says whether any of these units runs now, C(kept) whether they come from an upgrade that did not end.
    """

    problems: list[str]
    kept: bool
    runs: bool
    venv: str | None
    version: str | None
    nodes: dict[str, dict[str, str]]
    digests: dict[str, dict[str, str]]


def _unquote(word: str) -> str:
    if word.startswith('"'):
        word = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), word[1:-1])
    return word.replace("%%", "%")


def read_unit(text: str) -> Unit:
    """Read a unit file as this collection writes it, with one variable on a line."""
    lines = [line.partition("=") for line in text.splitlines()]
    words = [_unquote(value) for name, _equals, value in lines if name == "Environment"]
    variables = {name: value for name, _equals, value in (word.partition("=") for word in words)}
    venv, found, _rest = variables.get("PATH", "").partition("/bin:")
    return Unit(
        digest=variables.get("HY3_DIGEST"),
        venv=venv if found else None,
        user=next((value for name, _equals, value in lines if name == "User"), None),
        checkpoint=variables.get("HY3_CHECKPOINT"),
    )


def parse_kept(text: str) -> Kept | None:
    """What an upgrade kept on a node; None for a file that is not there (empty) or broken, which keeps nothing."""
    try:
        kept = Kept(**json.loads(text))
    except (ValueError, TypeError):
        return None
    is_kept = isinstance(kept.units, dict) and all(isinstance(unit, str) for unit in kept.units.values())
    return kept if is_kept and isinstance(kept.version, (str, type(None))) else None


def _kept_by_all(nodes: t.Mapping[str, Node]) -> dict[str, Kept]:
    """What each node has kept, if all of them kept all that they serve with; else nothing: no unit was touched yet."""
    found = {host: parse_kept(node["kept"]) for host, node in nodes.items()}
    whole = {host: kept for host, kept in found.items() if kept and set(nodes[host]["wanted"]) <= set(kept.units)}
    return whole if whole.keys() == nodes.keys() else {}


def _running_problem(host: str, name: str, node: Node) -> str | None:
    """Why the file of a unit is not what this unit runs with."""
    unit = node["units"][name]
    if unit["active_state"] != "active":
        return (
            f"{name} on {host} is {unit['active_state']}, and an upgrade goes back to what runs now; run serve_hy3 "
            "first, with the engine and the executor that this cluster has had."
        )
    if unit["digest"] != read_unit(node["files"].get(name, "")).digest:
        return (
            f"{name} on {host} does not run with what its file says, since a play was killed between writing and "
            "restarting it, so there is nothing to keep; run serve_hy3 with the settings that run now, and then "
            "upgrade_hy3."
        )
    return None


def _other_changes(serve: Unit, *, user: str, checkpoint: str | None) -> list[str]:
    """What must not change with the engine, because it is not in the units alone."""
    way = "change one thing at a time: run serve_hy3 with the old engine first."
    problems = []
    if serve.user != user:
        problems.append(f"hy3_user is '{user}', and the engine that serves runs as '{serve.user}'; {way}")
    if checkpoint and serve.checkpoint and checkpoint != serve.checkpoint:
        problems.append(
            f"The checkpoint is not the one that is served (digest {checkpoint[:12]} instead of "
            f"{serve.checkpoint[:12]}); {way}"
        )
    return problems


def find_way_back(
    nodes: t.Mapping[str, Node],
    *,
    head: str,
    silence: str | None,
    version: str | None,
    user: str,
    checkpoint: str | None,
) -> WayBack:
    """Where an upgrade goes back to, and why it cannot, in sentences.

    What was kept comes first: it stays until something else has passed the questions of role verify, so it is the last
    that did. ``silence`` is why the engine does not answer as it must, or None, ``version`` the engine's that runs,
    ``user`` and ``checkpoint`` (the digest, None if unknown) are the plan's.
    """
    kept = _kept_by_all(nodes)
    files: dict[str, Texts] = {host: kept[host].units if kept else node["files"] for host, node in nodes.items()}
    problems: list[str] = []
    if not kept and silence is not None:
        problems = [
            f"The engine does not answer as it must ({silence.rstrip('.')}), so there is nothing that an upgrade could "
            "go back to; run serve_hy3, which starts what the inventory names."
        ]
    elif not kept:
        found = [_running_problem(host, name, node) for host, node in nodes.items() for name in node["wanted"]]
        problems = [problem for problem in found if problem]
    serve = read_unit(files[head].get(SERVE, ""))
    problems = problems or _other_changes(serve, user=user, checkpoint=checkpoint)
    digests = {
        host: {name: read_unit(files[host].get(name, "")).digest or "" for name in node["wanted"]}
        for host, node in nodes.items()
    }
    return {
        "problems": problems,
        "kept": bool(kept),
        "runs": any(
            node["units"][name]["digest"] == digest
            for host, node in nodes.items()
            for name, digest in digests[host].items()
        ),
        "venv": serve.venv,
        "version": kept[head].version if kept else version,
        "nodes": {host: dict(texts) for host, texts in files.items()},
        "digests": digests,
    }
