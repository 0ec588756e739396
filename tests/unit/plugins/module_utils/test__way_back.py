# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.way_back import way_back
from ansible_collections.sparks.hy3.plugins.module_utils._way_back import (
    Node,
    Unit,
    WayBack,
    find_way_back,
    parse_kept,
    read_unit,
)

OLD, NEW = "a" * 64, "b" * 64
RAY, SERVE = "hy3-ray.service", "hy3-serve.service"
WANTED = {"spark-1": [RAY, SERVE], "spark-2": [RAY]}


def unit_file(digest: str = OLD, *, venv: str = "/opt/hy3/venv", user: str = "hy3", checkpoint: str = "c" * 64) -> str:
    return (
        f"# Made by sparks.hy3\n[Service]\nUser={user}\nEnvironment=HY3_DIGEST={digest}\n"
        f"Environment=HY3_CHECKPOINT={checkpoint}\nEnvironment=PATH={venv}/bin:/usr/bin\n"
        f"ExecStart={venv}/bin/vllm serve\n"
    )


def test_read_unit() -> None:
    assert read_unit(unit_file()) == Unit(OLD, "/opt/hy3/venv", "hy3", "c" * 64)
    assert read_unit("") == Unit(None, None, None, None)


# As systemd_quote writes it: the path.
QUOTED = {
    r'"PATH=/opt/my venv/bin:/usr/bin"': "/opt/my venv",
    r'"PATH=/opt/50%% \"x\" \\y/bin:/usr/bin"': r'/opt/50% "x" \y',
    "PATH=/usr/bin": None,
}


@pytest.mark.parametrize(("word", "venv"), QUOTED.items())
def test_read_unit_unquotes(word: str, venv: str | None) -> None:
    assert read_unit(f"[Service]\nEnvironment={word}\n").venv == venv


KEPT = json.dumps({"units": {RAY: unit_file(), SERVE: unit_file(), "hy3.slice": "[Slice]\n"}, "version": "0.24.0"})
BROKEN = ["", "{", "[]", "{}", '{"units": [], "version": null}', '{"units": {"a": 1}, "version": null}']
BROKEN += ['{"units": {}, "version": 1}', '{"units": {}, "version": null, "more": 1}']


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_keeps_nothing(text: str) -> None:
    assert parse_kept(text) is None


def running(digest: str | None = OLD, state: str = "active") -> dict[str, t.Any]:
    return {"active_state": state, "digest": digest}


DEAD = running(None, "inactive")


def nodes(*, units: dict[str, t.Any] | None = None, file: str | None = None, kept: str = "") -> dict[str, Node]:
    """Both nodes with the same; ``units`` differ by name on the second one alone, where Ray is."""
    found = {RAY: running(), SERVE: running()}
    text = file or unit_file()
    files = {RAY: text, SERVE: text, "hy3.slice": "[Slice]\n"}
    return {
        host: {"wanted": wanted, "units": found | (units or {}), "files": dict(files), "kept": kept}
        for host, wanted in WANTED.items()
    }


def find(
    seen: dict[str, Node], *, silence: str | None = None, user: str = "hy3", checkpoint: str = "c" * 64
) -> WayBack:
    return find_way_back(seen, head="spark-1", silence=silence, version="0.24.0", user=user, checkpoint=checkpoint)


def test_what_runs_and_answers() -> None:
    way = find(nodes())
    assert (way["problems"], way["kept"], way["runs"]) == ([], False, True)
    assert (way["venv"], way["version"]) == ("/opt/hy3/venv", "0.24.0")
    assert way["digests"] == {"spark-1": {RAY: OLD, SERVE: OLD}, "spark-2": {RAY: OLD}}
    assert way["nodes"]["spark-2"]["hy3.slice"] == "[Slice]\n"


# What runs now, what is said of the engine: whether the old one runs.
GONE_ON_WITH: dict[str, tuple[dict[str, t.Any], str | None, bool]] = {
    "killed before it stopped anything": ({}, None, True),
    "killed while nothing ran": ({RAY: DEAD, SERVE: DEAD}, "refused", False),
    "killed when the new one ran": ({RAY: running(NEW), SERVE: running(NEW)}, None, False),
    "killed between the two": ({RAY: running(NEW), SERVE: DEAD}, "refused", False),
}


@pytest.mark.parametrize(("units", "silence", "runs"), GONE_ON_WITH.values(), ids=GONE_ON_WITH)
def test_an_upgrade_that_did_not_end(units: dict[str, t.Any], silence: str | None, runs: bool) -> None:
    """What it kept counts, whatever runs and lies there now."""
    kept = json.loads(KEPT)
    kept["version"] = "0.23.0"
    way = find(nodes(units=units, file=unit_file(NEW, venv="/opt/hy3/new"), kept=json.dumps(kept)), silence=silence)
    assert (way["problems"], way["kept"], way["runs"]) == ([], True, runs)
    assert (way["venv"], way["version"]) == ("/opt/hy3/venv", "0.23.0")
    assert set(way["digests"]["spark-1"].values()) == {OLD}


def test_what_only_some_nodes_keep_is_nothing() -> None:
    """Killed while it kept, before it touched a unit."""
    seen = nodes(kept=KEPT)
    seen["spark-2"]["kept"] = ""
    assert not find(seen)["kept"]
    # Nor what lacks a unit of the plan, as after a change of the executor.
    seen["spark-2"]["kept"] = json.dumps({"units": {SERVE: unit_file()}, "version": None})
    assert not find(seen)["kept"]


WAY = "change one thing at a time: run serve_hy3 with the old engine first."
REFUSED: dict[str, tuple[dict[str, t.Any], dict[str, t.Any], str]] = {
    "silent": (
        {},
        {"silence": "http://127.0.0.1:8000 refuses the connection."},
        "The engine does not answer as it must (http://127.0.0.1:8000 refuses the connection), so there is nothing "
        "that an upgrade could go back to; run serve_hy3, which starts what the inventory names.",
    ),
    "another executor": (
        {"units": {RAY: DEAD}},
        {},
        f"{RAY} on spark-1 is inactive, and an upgrade goes back to what runs now; run serve_hy3 first, with the "
        "engine and the executor that this cluster has had.",
    ),
    "written and not restarted": (
        {"file": unit_file(NEW)},
        {},
        f"{RAY} on spark-1 does not run with what its file says, since a play was killed between writing and "
        "restarting it, so there is nothing to keep; run serve_hy3 with the settings that run now, and then "
        "upgrade_hy3.",
    ),
    "another user": ({}, {"user": "ann"}, f"hy3_user is 'ann', and the engine that serves runs as 'hy3'; {WAY}"),
    "another checkpoint": (
        {},
        {"checkpoint": "d" * 64},
        f"The checkpoint is not the one that is served (digest dddddddddddd instead of cccccccccccc); {WAY}",
    ),
    "another checkpoint, gone on with": (
        {"kept": KEPT},
        {"checkpoint": "d" * 64, "silence": "refused"},
        f"The checkpoint is not the one that is served (digest dddddddddddd instead of cccccccccccc); {WAY}",
    ),
}


@pytest.mark.parametrize(("seen", "plan", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(seen: dict[str, t.Any], plan: dict[str, t.Any], sentence: str) -> None:
    assert find(nodes(**seen), **plan)["problems"][0] == sentence


def test_each_unit_of_each_node_is_said() -> None:
    problems = find(nodes(units={RAY: DEAD}))["problems"]
    assert [problem.partition(" is ")[0] for problem in problems] == [f"{RAY} on spark-1", f"{RAY} on spark-2"]


def test_a_file_that_was_removed_is_nothing_to_keep() -> None:
    seen = nodes()
    del seen["spark-1"]["files"][SERVE]
    assert find(seen)["problems"][0].startswith(f"{SERVE} on spark-1 does not run with what its file says")


# What chat_smoke returned, failed or not: what is said of it.
ANSWERS: dict[str, tuple[dict[str, t.Any], str]] = {
    "right": ({"ok": True}, ""),
    "wrong": (
        {"ok": False, "msg": "The text 'Rome.' does not match 'Paris'"},
        "(The text 'Rome.' does not match 'Paris')",
    ),
    "unreachable": ({"unreachable": True, "msg": "timed out"}, "(timed out)"),
    "skipped": ({"skipped": True}, "(it was not asked)"),
}


@pytest.mark.parametrize(("answer", "said"), ANSWERS.values(), ids=ANSWERS)
def test_filter(answer: dict[str, t.Any], said: str) -> None:
    way = way_back(nodes(), head="spark-1", answer=answer, log={"version": "0.24.0"}, user="hy3", checkpoint=None)
    assert bool(way["problems"]) == bool(said)
    assert said in " ".join(way["problems"])
    assert way["version"] == "0.24.0"
    assert way_back(nodes(), head="spark-1", answer=answer, user="hy3")["version"] is None
