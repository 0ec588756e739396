# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.sparks.hy3.plugins.filter.engine_argv import engine_argv

ARGUMENTS: dict[str, tuple[dict[str, object], list[str]]] = {
    "nothing": ({}, []),
    "true is bare": ({"enforce-eager": True}, ["--enforce-eager"]),
    "false and null leave out": ({"enforce-eager": False, "moe-backend": None}, []),
    "the word false is a value": ({"include-dashboard": "false"}, ["--include-dashboard", "false"]),
    "zero is a value": ({"seed": 0, "cpu-offload-gb": 0.0}, ["--seed", "0", "--cpu-offload-gb", "0.0"]),
    "an empty text is a value": ({"chat-template": ""}, ["--chat-template", ""]),
    "large whole number": ({"object-store-memory": 2000000000}, ["--object-store-memory", "2000000000"]),
    "fraction": ({"gpu-memory-utilization": 0.85}, ["--gpu-memory-utilization", "0.85"]),
    "underscores": ({"max_model_len": 1}, ["--max-model-len", "1"]),
    "spaces and quotes stay": ({"name": """a "b" 'c' $d"""}, ["--name", """a "b" 'c' $d"""]),
    "dictionary": (
        {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}},
        ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'],
    ),
    "nested dictionary": (
        {"hf-overrides": {"a_b": {"c": [1, None, True]}}},
        ["--hf-overrides", '{"a_b":{"c":[1,null,true]}}'],
    ),
    "list": ({"cudagraph-capture-sizes": [1, 2]}, ["--cudagraph-capture-sizes", "[1,2]"]),
    "order is kept": ({"b": 1, "a": 2}, ["--b", "1", "--a", "2"]),
}


@pytest.mark.parametrize(("options", "argv"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_engine_argv(options: dict[str, object], argv: list[str]) -> None:
    assert engine_argv(options) == argv


@pytest.mark.parametrize("options", [["--head"], "--head", None])
def test_what_is_no_dictionary_is_refused(options: object) -> None:
    with pytest.raises(AnsibleFilterError, match="no dictionary of options; give one"):
        engine_argv(options)  # type: ignore[arg-type]  # wrong on purpose
