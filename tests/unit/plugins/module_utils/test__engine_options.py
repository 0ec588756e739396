# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_options import (
    Answer,
    command,
    parse_answer,
    problems_of,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

# Some of what the real parsers have; tests/sglang asks SGLang's.
NEW = ["--model-path", "--cuda-graph-max-bs-decode", "--cuda-graph-max-bs-prefill", "--disable-prefill-cuda-graph"]
OLD = ["--model-path", "--cuda-graph-max-bs", "--disable-piecewise-cuda-graph"]
VLLM = ["--enforce-eager", "--no-enforce-eager", "--moe-backend", "--speculative-config", "--max-model-len"]
NULL = " (null in hy3_engine_args takes an option of the profile out)."


def answer(names: list[str], said: str | None = None) -> Answer:
    return Answer(names=names, said=said)


# (engine, arguments, answer, sentence)
PROBLEMS: dict[str, tuple[str, list[str], Answer, str]] = {
    "SGLang's flags of seed 003": (
        "sglang",
        ["--cuda-graph-max-bs", "32", "--disable-piecewise-cuda-graph"],
        answer(NEW, "ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, ..."),
        "hy3_engine_args or the profile has --cuda-graph-max-bs 32 --disable-piecewise-cuda-graph, and the parser of "
        "sglang 1.0 does not have them; write --cuda-graph-max-bs-decode 32 --disable-prefill-cuda-graph instead"
        + NULL,
    ),
    "our profile on an older SGLang": (
        "sglang",
        ["--cuda-graph-max-bs-decode", "32", "--disable-prefill-cuda-graph"],
        answer(OLD, "unrecognized arguments: ..."),
        "hy3_engine_args or the profile has --cuda-graph-max-bs-decode 32 --disable-prefill-cuda-graph, and the parser "
        "of sglang 1.0 does not have them; write --cuda-graph-max-bs 32 --disable-piecewise-cuda-graph instead" + NULL,
    ),
    "a slip of the pen": (
        "vllm",
        ["--enforce-eagr", "--moe-backend", "marlin"],
        answer(VLLM, "unrecognized arguments: --enforce-eagr"),
        "hy3_engine_args or the profile has --enforce-eagr, and the parser of vllm 1.0 does not have it; write "
        "--enforce-eager instead" + NULL,
    ),
    "nothing like it": (
        "vllm",
        ["--frobnicate=3"],
        answer(VLLM, "unrecognized arguments: --frobnicate=3"),
        "hy3_engine_args or the profile has --frobnicate 3, and the parser of vllm 1.0 does not have it; take "
        "--frobnicate out" + NULL,
    ),
    "an abbreviation, which the parser takes": (
        "vllm",
        ["--max-model", "8"],
        answer(VLLM),
        "hy3_engine_args or the profile has --max-model 8, and the parser of vllm 1.0 does not have it; write "
        "--max-model-len 8 instead" + NULL,
    ),
    "a value": (
        "vllm",
        ["--max-model-len", "x"],
        answer(VLLM, "argument --max-model-len: invalid value: 'x'"),
        "hy3_engine_args is not what vllm 1.0 takes (argument --max-model-len: invalid value: 'x'); correct it.",
    ),
}


@pytest.mark.parametrize(("engine", "arguments", "found", "sentence"), PROBLEMS.values(), ids=PROBLEMS)
def test_one_sentence(engine: str, arguments: list[str], found: Answer, sentence: str) -> None:
    assert problems_of(engine, "1.0", arguments, found) == [sentence]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--enforce-eager", "--speculative-config", '{"method":"--x"}'],
        ["--speculative-config.method", "mtp"],
        ["--max-model-len=-1"],
    ],
)
def test_what_it_takes(arguments: list[str]) -> None:
    assert problems_of("vllm", "1.0", arguments, answer(VLLM)) == []


def test_the_answer_is_the_last_line() -> None:
    assert parse_answer("INFO importing\n" + json.dumps(answer(VLLM))) == answer(VLLM)


@pytest.mark.parametrize("stdout", ["", "no driver", "[]", '{"names": []}'])
def test_no_answer(stdout: str) -> None:
    with pytest.raises(Hy3Error, match="gave no answer"):
        parse_answer(stdout)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_program_is_python(engine: str) -> None:
    python, flag, program, timeout, *arguments = command(engine, "/venv/bin/python", ["--a", "{}"], timeout=9)
    assert (python, flag, timeout, arguments) == ("/venv/bin/python", "-c", "9", ["--a", "{}"])
    compile(program, engine, "exec")
