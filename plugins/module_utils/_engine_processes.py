# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Engine processes of any owner, as the kernel shows them: what they are, what they were started with, where they log.

What a process changed in itself later shows in its log at best; secrets never show.
"""

from __future__ import annotations

import json
import os
import re
import typing as t
from pathlib import Path, PurePosixPath

from ansible_collections.sparks.hy3.plugins.module_utils._memory import memory_limit
from ansible_collections.sparks.hy3.plugins.module_utils._units import MASK, Processes, is_secret_name, mask_argv

# Variables that an engine, Ray or NCCL reads. Any other of a process is its owner's business.
PREFIXES = (
    *("VLLM_", "SGLANG_", "RAY_", "NCCL_", "GLOO_", "UCX_", "TP_SOCKET_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_"),
    *("CUDA_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "OMP_", "MALLOC_", "LMCACHE_", "HY3_"),
)
NAMES = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "XDG_CONFIG_HOME", "HOME")
# Where an interpreter keeps packages: a venv, and Debian's own.
PACKAGES = ("site-packages", "dist-packages")
# Switches that take no value, so that a word after one is an argument of its own.
SWITCHES = frozenset({"trust-remote-code", "enforce-eager", "headless", "head", "block", "skip-tokenizer-init"})
SWITCH_PREFIXES = ("enable-", "disable-", "no-")
SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-n": "nnodes"}
ALIASES = {"tp-size": "tensor-parallel-size", "pp-size": "pipeline-parallel-size", "tp": "tensor-parallel-size"}
ALIASES |= {"model-path": "model", "pp": "pipeline-parallel-size"}
# Bytes of a log's beginning and end that are read: what an engine changes it says while it starts.
LOG_BYTES = 4_000_000
LOG_FILES = 200

_OVERWRITING = re.compile(r"Overwriting environment variable (\w+) from '([^'\n]*)' to '([^'\n]*)'")
# Secrets within a word: the user of a URL, a variable before a command, an option in Ray's command for its workers.
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*(?=@)")
_ASSIGNED = re.compile(r"\b(\w*(?:KEY|TOKEN|SECRET|PASSW)\w*=)[^\s\"']+")
_NESTED = re.compile(r"((?:^|\s)--?[\w-]*(?:api[-_]key|token|password|passwd|secret)[=\s]+)[^\s\"']+", re.IGNORECASE)
_TITLES = (
    ("worker", re.compile(r"ray::RayWorker|VLLM::Worker|sglang::scheduler|ray::\S*Worker")),
    ("engine_core", re.compile(r"VLLM::\w|sglang::\w")),
)


class Change(t.TypedDict):
    """A variable that the engine overwrote in a process, and the log that says so."""

    variable: str
    before: str
    after: str
    log: str


def command_of(argv: t.Sequence[str]) -> list[str]:
    """The words from the program on, without its interpreter: ``python -I /v/bin/vllm serve`` begins at ``vllm``."""
    words = list(argv)
    if words and re.fullmatch(r"python[\d.]*", PurePosixPath(words[0]).name):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    return words


def kind_of(argv: t.Sequence[str]) -> tuple[str, str] | None:
    """Kind of process and its engine, None for any other.

    Kinds are ``driver`` (the API server with its arguments), ``engine_core``, ``worker``, ``ray_start``, ``raylet`` and
    ``gcs``. A shell or ssh that merely carries such a command is none of them.
    """
    title = argv[0] if argv else ""
    for kind, pattern in _TITLES:
        if pattern.match(title):
            return kind, "sglang" if title.startswith("sglang") else "vllm"
    words = command_of(argv)
    program = PurePosixPath(words[0]).name if words else ""
    second = words[1] if len(words) > 1 else ""
    if program in ("raylet", "gcs_server"):
        return program.removesuffix("_server"), "ray"
    if (program, second) in (("vllm", "serve"), ("sglang", "serve"), ("ray", "start")):
        return ("ray_start", "ray") if program == "ray" else ("driver", program)
    if program == "-m" and re.fullmatch(r"vllm\.entrypoints\.(?:openai\.api_server|cli\.main)", second):
        return "driver", "vllm"
    if program == "-m" and second in ("sglang.launch_server", "sglang"):
        return "driver", "sglang"
    return None


def venv_of(argv: t.Sequence[str]) -> str | None:
    """The prefix that a process has its packages in: its program's, of Ray's own files, else its interpreter's."""
    for word in (*command_of(argv)[:1], *argv[:1]):
        path = PurePosixPath(word)
        if path.is_absolute() and path.parent.name == "bin":
            return str(path.parent.parent)
        place = next((name for name in PACKAGES if name in path.parts[3:]), None)
        if place:
            return str(PurePosixPath(*path.parts[: path.parts.index(place) - 2]))
    return None


def _value(text: str) -> t.Any:
    if text[:1] in "{[":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _put(arguments: dict[str, t.Any], name: str, value: t.Any) -> None:
    """Set an option; ``speculative-config.method`` is a key of the dictionary ``speculative-config``."""
    outer, dot, inner = name.partition(".")
    if dot and inner:
        below = arguments.setdefault(outer, {})
        if isinstance(below, dict):
            below[inner.replace("-", "_")] = int(value) if str(value).isdecimal() and len(str(value)) < 16 else value
    else:
        arguments[name] = value


def arguments_of(argv: t.Sequence[str]) -> dict[str, t.Any]:
    """The options of a command line by name, dashes within and none before; a switch is true, ``--no-x`` makes x false.

    The first word without dashes after ``serve`` is C(model). Values are text, or what JSON text holds.
    """
    arguments: dict[str, t.Any] = {}
    words = command_of(argv)
    words = words[2:] if words[:1] == ["-m"] else words[1:]
    words = words[1:] if words[:1] in (["serve"], ["start"]) else words
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--?[A-Za-z]", word):
            arguments.setdefault("model", word)
            continue
        flag, equals, value = word.partition("=")
        name, dot, rest = SHORT.get(flag, flag.lstrip("-")).partition(".")
        name = name.replace("_", "-")
        name = ALIASES.get(name, name) + dot + rest
        if equals:
            _put(arguments, name, _value(value))
        elif name in SWITCHES or name.startswith(SWITCH_PREFIXES) or at == len(words) or _is_flag(words[at]):
            _put(arguments, name, True)
            if name.startswith("no-"):
                arguments[name.removeprefix("no-")] = False
        else:
            _put(arguments, name, _value(words[at]))
            at += 1
    return arguments


def _is_flag(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def without_secrets(text: str) -> str:
    """The text with what looks like a secret in it masked: in a URL, in an assignment, after an option."""
    return _NESTED.sub(rf"\1{MASK}", _ASSIGNED.sub(rf"\1{MASK}", _CREDENTIALS.sub(MASK, text)))


def shown_environment(pairs: t.Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to an engine; a secret is named and its value masked."""
    return {
        name: MASK if is_secret_name(name) else without_secrets(value)
        for name, value in sorted(pairs.items())
        if name.startswith(PREFIXES) or name in NAMES
    }


def changes_in(text: str, log: str) -> list[Change]:
    """What a log, named ``log``, says the engine overwrote in the environment, each once, and no secret's values."""
    found: dict[tuple[str, str, str], Change] = {}
    for match in _OVERWRITING.finditer(text):
        name, before, after = match.groups()
        if is_secret_name(name):
            before = after = MASK
        change = Change(variable=name, before=without_secrets(before), after=without_secrets(after), log=log)
        found.setdefault((name, before, after), change)
    return list(found.values())


class EngineProcesses:
    """Finds them below ``proc``. What ends meanwhile, or may not be read, is left out or None."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = Path(proc)
        self._processes = Processes(proc)

    def find(self) -> list[dict[str, t.Any]]:
        """All engine processes in the order of their ids."""
        pids = sorted(int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit())
        return [found for pid in pids if (found := self._describe(pid))]

    def _describe(self, pid: int) -> dict[str, t.Any] | None:
        argv = self._processes.argv(pid)
        kind = kind_of([argv[0].strip(), *argv[1:]]) if argv else None
        if not kind:
            return None
        try:
            user = (self._proc / str(pid)).stat().st_uid
        except OSError:
            return None
        pairs = self._processes.variables(pid)
        masked = [without_secrets(word) for word in mask_argv(argv)]
        named = kind[0] in ("driver", "ray_start", "raylet")
        unit = self._processes.unit(pid)
        return {
            "pid": pid,
            "kind": kind[0],
            "engine": kind[1],
            "user": user,
            "unit": unit,
            "user_unit": self._processes.in_user_manager(pid),
            "root": self.root_of(pid),
            "venv": venv_of(argv),
            "argv": masked if kind[0] not in ("worker", "engine_core") else [argv[0].strip()],
            "arguments": arguments_of(masked) if named else None,
            "environment": None if pairs is None else shown_environment(pairs),
            "memlock": self._processes.memlock(pid),
            "memory_limit": self._memory_limit(pid),
            "log": self.log_of(pid, argv),
            "invocation_id": None if pairs is None else pairs.get("INVOCATION_ID"),
        }

    def root_of(self, pid: int) -> str:
        """Where this process finds the files of that one: empty, or below /proc for one in a container."""
        try:
            shared = os.readlink(self._proc / str(pid) / "ns/mnt") == os.readlink(self._proc / "self/ns/mnt")
        except OSError:
            return ""
        return "" if shared else f"{self._proc}/{pid}/root"

    def _memory_limit(self, pid: int) -> int | None:
        try:
            return memory_limit(pid).limit
        except (ValueError, OSError):
            return None

    def log_of(self, pid: int, argv: t.Sequence[str]) -> str | None:
        """Where it logs: a file, Ray's directory of logs, ``journal``, or None for a terminal or a pipe."""
        for word in argv:
            if word.startswith("--log_dir="):
                return self.root_of(pid) + word.partition("=")[2]
        try:
            target = os.readlink(self._proc / str(pid) / "fd/1")
        except OSError:
            return None
        if target.startswith("socket:"):
            return "journal"
        is_file = target.startswith("/") and not target.startswith(("/dev/", "/proc/")) and " (deleted)" not in target
        return self.root_of(pid) + target if is_file else None


def read_log(path: Path) -> str:
    """The beginning and the end of a log file as text, empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(LOG_BYTES)
            size = os.fstat(file.fileno()).st_size
            if size > 2 * LOG_BYTES:
                file.seek(size - LOG_BYTES)
            return (head + file.read(LOG_BYTES)).decode(errors="replace")
    except OSError:
        return ""


def log_files(place: Path) -> list[Path]:
    """The files of one log: the file itself, or the newest of Ray's workers in its directory."""
    if not place.is_dir():
        return [place] if place.is_file() else []
    files = [path for pattern in ("worker-*.out", "worker-*.err") for path in place.glob(pattern)]

    def age(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    return sorted(files, key=age, reverse=True)[:LOG_FILES]
