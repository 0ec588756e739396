# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which options the installed engine has, by its own parser: a program for its interpreter, and what that prints."""

from __future__ import annotations

import json
import typing as t
from difflib import get_close_matches

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

# How each engine makes the parser of its server. vLLM moved the module in 0.32.
_PARSERS = {
    "vllm": """\
from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
parser = make_arg_parser(Parser(prog="vllm serve"))
given = ["/model", *arguments]
""",
    "sglang": """\
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang")
ServerArgs.add_cli_args(parser)
given = ["--model-path", "/model", *arguments]
""",
}

# Runs in the engine's venv, where this collection is not importable. Importing prints, so the answer is the last line;
# the alarm ends an import that hangs on a driver. A parser ends the process at the first thing it does not like.
_PROGRAM = """\
import json, signal, sys
signal.alarm(int(sys.argv[1]))
arguments = sys.argv[2:]
{parser}
class Refused(Exception):
    pass
def refuse(message):
    raise Refused(message)
parser.error = refuse
said = None
try:
    parser.parse_args(given)
except (Refused, ValueError) as error:
    said = str(error)
names = [name for action in parser._actions for name in action.option_strings]
print(json.dumps({{"names": names, "said": said}}))
"""

# What took the place of an option, in either direction. Read in the wheels of 0.5.19 and 0.5.20.
_RENAMED = {
    "sglang": (
        ("cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
        ("disable-piecewise-cuda-graph", "disable-prefill-cuda-graph"),
    )
}
_CLOSE = 0.75  # how alike a name must be to be offered for one that the engine does not have, 0 to 1


class Answer(t.TypedDict):
    """C(names) of all options with their dashes; C(said), what the parser refused the arguments with, or None."""

    names: list[str]
    said: str | None


def command(engine: str, python: str, arguments: t.Sequence[str], *, timeout: int) -> list[str]:
    """The argument list that asks the parser of ``engine`` about ``arguments`` within ``timeout`` seconds."""
    return [python, "-c", _PROGRAM.format(parser=_PARSERS[engine]), str(timeout), *arguments]


def parse_answer(stdout: str) -> Answer:
    """The program's answer. Raises Hy3Error where there is none: its import failed, or it was ended."""
    lines = stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or set(answer) != {"names", "said"}:
        raise Hy3Error("the engine's parser gave no answer")
    return t.cast(Answer, answer)


def _pairs(arguments: t.Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each option of ``arguments`` with its values. A JSON value or a negative number begins with no two dashes."""
    pairs: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            pairs.append((name, [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(word)
    return pairs


def _replacement(engine: str, name: str, names: t.Sequence[str]) -> str | None:
    """The option to write instead of ``name``, if the engine has it."""
    for older, newer in _RENAMED.get(engine, ()):
        for old, new in ((older, newer), (newer, older)):
            if name == f"--{old}" and f"--{new}" in names:
                return f"--{new}"
    return next(iter(get_close_matches(name, names, n=1, cutoff=_CLOSE)), None)


def problems_of(engine: str, version: str, arguments: t.Sequence[str], answer: Answer) -> list[str]:
    """One sentence about all options that the engine lacks, or else about what its parser refused; empty is good.

    An abbreviation counts as lacking: it means another option, or none, in the next release.
    """
    names = answer["names"]
    # vLLM takes a key inside a JSON option as --option.key.
    lacking = [(name, values) for name, values in _pairs(arguments) if name.partition(".")[0] not in names]
    if not lacking:
        if answer["said"] is None:
            return []
        return [f"hy3_engine_args is not what {engine} {version} takes ({answer['said']}); correct it."]
    instead = {name: _replacement(engine, name, names) for name, _values in lacking}
    written = [" ".join([new, *values]) for name, values in lacking if (new := instead[name])]
    others = [name for name, new in instead.items() if new is None]
    ways = [f"write {' '.join(written)} instead"] if written else []
    ways += [f"take {' and '.join(others)} out"] if others else []
    return [
        f"hy3_engine_args or the profile has {' '.join(' '.join([name, *values]) for name, values in lacking)}, and "
        f"the parser of {engine} {version} does not have {'it' if len(lacking) == 1 else 'them'}; {', and '.join(ways)}"
        " (null in hy3_engine_args takes an option of the profile out)."
    ]
