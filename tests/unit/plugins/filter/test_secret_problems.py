# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.filter.secret_problems import is_loopback, secret_problems

KEY = "sentinel-0123456789-abcdef"
LAN = ["192.168.1.0/24"]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "api_key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


def problems(key: str | None = "", *, firewall: bool = True, engine: str = "vllm", **changes: t.Any) -> list[str]:
    """The problems of a plan with ``changes`` in its API, or in its engine's arguments or environment."""
    outer = {name: changes.pop(name, {}) for name in ("engine_args", "engine_env")}
    api = {"host": "127.0.0.1", "port": 8000, "key_file": "", "sources": []} | changes
    return secret_problems({"api": api, "engine": engine, "firewall": firewall, **outer}, key)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("spark-1", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


# Whether there is a key, and then the rest of the plan.
GOOD: dict[str, tuple[bool, dict[str, t.Any]]] = {
    "loopback without a key": (False, {}),
    "loopback with a key": (True, {}),
    "loopback without a firewall": (False, {"firewall": False}),
    "loopback of SGLang": (False, {"engine": "sglang"}),
    "exposed": (True, {"host": "0.0.0.0", "sources": LAN}),
    "exposed to both families": (True, {"host": "::", "sources": [*LAN, "fd00::/8", "10.0.0.1"]}),
    "exposed behind another firewall": (True, {"host": "0.0.0.0", "firewall": False}),
    "harmless variables": (
        False,
        {"engine_env": {"TOKENIZERS_PARALLELISM": "false"}, "engine_args": {"api-server": 1}},
    ),
}


@pytest.mark.parametrize(("has_key", "plan"), GOOD.values(), ids=GOOD)
def test_nothing_is_open(has_key: bool, plan: dict[str, t.Any], key_file: Path) -> None:
    assert problems(KEY if has_key else "", key_file=str(key_file) if has_key else "", **plan) == []


BAD: dict[str, tuple[bool, dict[str, t.Any], str]] = {
    "exposed without a key": (
        False,
        {"host": "0.0.0.0", "sources": LAN},
        "hy3_api_host is 0.0.0.0 and the API has no key;",
    ),
    "a name without a key": (
        False,
        {"host": "spark-1", "sources": LAN},
        "hy3_api_host is spark-1 and the API has no key;",
    ),
    "exposed to nobody": (True, {"host": "192.168.1.5"}, "hy3_api_host is 192.168.1.5 and no network may reach it;"),
    "a list that nothing enforces": (
        True,
        {"host": "0.0.0.0", "sources": LAN, "firewall": False},
        "hy3_api_sources is 192.168.1.0/24 and hy3_firewall is off,",
    ),
    "a source that is none": (
        True,
        {"host": "0.0.0.0", "sources": ["office"]},
        "hy3_api_sources has 'office', which is no network (",
    ),
    "a source with host bits": (
        True,
        {"host": "0.0.0.0", "sources": ["192.168.1.7/24"]},
        "hy3_api_sources has '192.168.1.7/24', which is no network (192.168.1.7/24 has host bits set);",
    ),
    "a key as an argument": (False, {"engine_args": {"api-key": KEY}}, "hy3_engine_args has api-key, and every user"),
    "an admin's key as an argument of SGLang": (
        False,
        {"engine": "sglang", "engine_args": {"admin-api-key": KEY}},
        "hy3_engine_args has admin-api-key, and every user of a node can read arguments; take it out",
    ),
    "SGLang exposed": (
        False,
        {"engine": "sglang", "host": "0.0.0.0", "sources": LAN},
        "hy3_api_host is 0.0.0.0, and SGLang's API has no key here, because it would write one into its log; use "
        "127.0.0.1 and an SSH tunnel,",
    ),
    "SGLang with a key": (
        True,
        {"engine": "sglang"},
        "hy3_api_key_file is set, and SGLang takes a key only to write it into its log and to answer it at ",
    ),
    "a key in the environment": (False, {"engine_env": {"VLLM_API_KEY": KEY}}, "hy3_engine_env has VLLM_API_KEY, and"),
    "a token in the environment": (False, {"engine_env": {"HF_TOKEN": KEY}}, "hy3_engine_env has HF_TOKEN, and"),
}


@pytest.mark.parametrize(("has_key", "plan", "sentence"), BAD.values(), ids=BAD)
def test_something_is_open(has_key: bool, plan: dict[str, t.Any], sentence: str, key_file: Path) -> None:
    (problem,) = problems(KEY if has_key else "", key_file=str(key_file) if has_key else "", **plan)
    assert problem.startswith(sentence)
    assert problem.endswith(".")
    assert KEY not in problem


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(0o600, False), (0o400, False), (0o640, False), (0o644, True), (0o606, True), (0o601, True)],
    ids=lambda value: f"{value:04o}" if not isinstance(value, bool) else None,
)
def test_mode_of_the_keys_file(mode: int, refused: bool, key_file: Path) -> None:
    key_file.chmod(mode)
    found = problems(KEY, key_file=str(key_file))
    wanted = f"hy3_api_key_file {key_file} has mode {mode:04o}, so others can use it; run `chmod 600 {key_file}`."
    assert found == ([wanted] if refused else [])


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("", "0 line(s) and 0 characters"),
        ("k" * 19, "1 line(s) and 19 characters"),
        (f"{KEY}\n{KEY}", "2 line(s) and 53 characters"),
        (f"{KEY} {KEY}", "1 line(s) and 53 characters"),
        (f'{KEY}"', "1 line(s) and 27 characters"),
        (f"{KEY}$HOME", "1 line(s) and 31 characters"),
        (f"{KEY}\u00e4", "1 line(s) and 27 characters"),
    ],
    ids=["empty", "short", "two lines", "a space", "a quote", "a dollar", "not ASCII"],
)
def test_key_that_is_none(key: str, found: str, key_file: Path) -> None:
    (problem,) = problems(key, key_file=str(key_file))
    assert problem.startswith(f"hy3_api_key_file {key_file} holds {found}, and it must be one line of at least 20 ")
    assert not key or key not in problem


def test_longest_forms_of_a_key(key_file: Path) -> None:
    assert problems("AZaz09._~+/-AZaz09==", key_file=str(key_file)) == []


def test_file_that_is_none(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    (problem,) = problems(None, key_file=str(missing))
    assert problem.startswith(f"hy3_api_key_file is {missing}, which is no file on the controller;")
    (problem,) = problems(None, key_file="keys/api")
    assert problem.startswith("hy3_api_key_file is 'keys/api', which is not absolute;")


def test_file_that_cannot_be_read(key_file: Path) -> None:
    (problem,) = problems(None, key_file=str(key_file))
    assert problem.startswith(f"hy3_api_key_file {key_file} cannot be read by the user who runs this play;")
