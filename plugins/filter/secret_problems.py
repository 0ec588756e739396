# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``secret_problems``: an API that is open to strangers, and secrets where others can read them."""

from __future__ import annotations

import ipaddress
import re
import typing as t
from pathlib import Path

DOCUMENTATION = r"""
name: secret_problems
short_description: What a plan leaves open to strangers
version_added: 0.1.0
description:
  - Looks for an API that strangers could use, for a file with the API's key that others can read or that holds no
    usable key, and for secrets in places that every user of a node can read. Never repeats a secret.
  - Looks at the mode of the key's file on the controller.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  key:
    type: str
    required: true
    description: What the file with the API's key holds. Empty without such a file.
"""

EXAMPLES = r"""
- name: Nothing may be open
  ansible.builtin.assert:
    that: hy3_plan | sparks.hy3.secret_problems(key=lookup('ansible.builtin.file', hy3_api_key_file)) | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

Plan = t.Mapping[str, t.Any]

# RFC 6750, section 2.1. What it allows needs no quotes in a header, in an environment file or in a shell either.
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
# The unit's digest, which every user of a node can read, is a hash over the key's hash: it must be too long to guess.
_SHORTEST_KEY = 20
_SECRETS = ("VLLM_API_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SECRET_ARGUMENTS = ("api-key", "admin-api-key")


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches a server that listens on ``host``, an address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _file_problem(name: str, key: str | None) -> str | None:
    path = Path(name).expanduser()
    if not path.is_absolute():
        return f"hy3_api_key_file is '{name}', which is not absolute; begin it with / or ~ or {{{{ inventory_dir }}}}."
    if not path.is_file():
        return f"hy3_api_key_file is {name}, which is no file on the controller; make it with `openssl rand -hex 32`."
    mode = path.stat().st_mode & 0o777
    if mode & 0o007:
        return f"hy3_api_key_file {name} has mode {mode:04o}, so others can use it; run `chmod 600 {name}`."
    if key is None:
        return f"hy3_api_key_file {name} cannot be read by the user who runs this play; give it to that user."
    if not _KEY.fullmatch(key) or len(key) < _SHORTEST_KEY:
        return (
            f"hy3_api_key_file {name} holds {len(key.splitlines())} line(s) and {len(key)} characters, and it must be "
            f"one line of at least {_SHORTEST_KEY} of A-Z a-z 0-9 . _ ~ + / = -; make it with `openssl rand -hex 32`."
        )
    return None


def _source_problem(source: str) -> str | None:
    try:
        ipaddress.ip_network(source)
    except ValueError as error:
        return f"hy3_api_sources has '{source}', which is no network ({error}); write one like 192.168.1.0/24."
    return None


def _exposure_problem(api: Plan, *, firewall: bool) -> str | None:
    host = api["host"]
    if is_loopback(host):
        return None
    if not api["key_file"]:
        return f"hy3_api_host is {host} and the API has no key; name a file in hy3_api_key_file, or use 127.0.0.1."
    if firewall and not api["sources"]:
        return f"hy3_api_host is {host} and no network may reach it; name the networks that may in hy3_api_sources."
    if not firewall and api["sources"]:
        return (
            f"hy3_api_sources is {', '.join(api['sources'])} and hy3_firewall is off, so nothing here would keep the "
            "others out; switch hy3_firewall on, or leave the list out and let the other firewall do it."
        )
    return None


def _sglang_problem(api: Plan) -> str | None:
    """SGLang 0.5.23 writes all its arguments into its log, the key in plain text, and answers them at /server_info."""
    if api["key_file"]:
        return (
            "hy3_api_key_file is set, and SGLang takes a key only to write it into its log and to answer it at "
            "/server_info; leave it out, and let a proxy on the head ask for the key."
        )
    if is_loopback(api["host"]):
        return None
    return (
        f"hy3_api_host is {api['host']}, and SGLang's API has no key here, because it would write one into its log; "
        "use 127.0.0.1 and an SSH tunnel, or a proxy on the head that asks for a key."
    )


def _place_problems(plan: Plan) -> list[str]:
    problems = [
        f"hy3_engine_env has {name}, and every user of a node can read a unit's environment; take it out (the API's "
        "key goes into hy3_api_key_file)."
        for name in _SECRETS
        if name in plan["engine_env"]
    ]
    problems += [
        f"hy3_engine_args has {name}, and every user of a node can read arguments; "
        + ("put it in hy3_api_key_file." if plan["engine"] == "vllm" else "take it out.")
        for name in _SECRET_ARGUMENTS
        if name in plan["engine_args"]
    ]
    return problems


def secret_problems(plan: Plan, key: str | None) -> list[str]:
    """One sentence for each thing that ``plan`` leaves open; ``key`` is what its file holds, None if unreadable."""
    api = plan["api"]
    found = [_source_problem(source) for source in api["sources"]]
    if plan["engine"] == "sglang":
        found.append(_sglang_problem(api))
    else:
        found.append(_exposure_problem(api, firewall=plan["firewall"]))
        found.append(_file_problem(api["key_file"], key) if api["key_file"] else None)
    return [problem for problem in found if problem] + _place_problems(plan)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"secret_problems": secret_problems}
