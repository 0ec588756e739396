# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""A command in a container: the words for docker or podman, what becomes of a unit, how its processes are found. Pure.

Paths are the same inside and outside, so that a command's own arguments stay what they are without a container.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import typing as t
from pathlib import PurePosixPath

from ansible_collections.sparks.hy3.plugins.module_utils._memory import parse_size

Facts = t.Mapping[str, t.Any]

PROGRAMS = ("docker", "podman")
# Docker's hook knows the GPUs by this option. Podman's of that name did nothing before 5.0; it has CDI.
_GPUS = {"docker": ("--gpus", "all"), "podman": ("--device", "nvidia.com/gpu=all")}
# The systemd scope that each makes for a container.
_SCOPES = {"docker": "docker-{}.scope", "podman": "libpod-{}.scope"}
_SLICE = "hy3.slice"
CLUSTER = "sparks.hy3.cluster"  # label: whose container it is
# The user's home inside, kept from start to start: kernels that were compiled, compiled graphs, remote code.
CACHE = "/var/cache/hy3"
# NVIDIA's advice for its images, https://docs.nvidia.com/deeplearning/frameworks/user-guide/index.html
_STACK = 64 * 1024**2
# Seconds until a container is killed, less than the TimeoutStopSec of the unit's template.
_STOP = 50
# Reads NAME=value lines into the environment and becomes the command. What --env-file reads, `docker inspect` shows.
_WITH_SECRETS = (
    "import os, sys; os.environ.update(line.split('=', 1) for line in open(sys.argv[1]).read().splitlines() "
    "if '=' in line); os.execvp(sys.argv[2], sys.argv[2:])"
)


def _mount(source: str, target: str = "", *, readonly: bool = True) -> list[str]:
    """A bind mount, which unlike ``--volume`` fails where the source is missing. Its fields are a line of CSV."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target or source}", *(["readonly"] if readonly else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return ["--mount", line.getvalue()]


def _kind(program: str) -> str:
    """Which of PROGRAMS it is, by name or with its path."""
    return PurePosixPath(program).name


def _run(program: str, *, image: str, user: str, options: t.Sequence[str], argv: t.Sequence[str]) -> list[str]:
    """``argv`` run with ``options``; ``--pull never``, so that what was looked at is what runs."""
    common = ["--rm", "--pull", "never", "--userns", "host", "--user", user, "--workdir", "/", *_GPUS[_kind(program)]]
    return [program, "run", *common, *options, "--entrypoint", argv[0], image, *argv[1:]]


def _environment(variables: Facts) -> list[str]:
    return [word for name, value in sorted(variables.items()) for word in ("--env", f"{name}={value}")]


def inspecting_argv(
    argv: t.Sequence[str], program: str, *, image: str, user: str, environment: t.Mapping[str, str] | None = None
) -> list[str]:
    """``argv`` (its program by name) in a container that reaches nothing and ends with it; ``user`` is ``UID:GID``."""
    options = ["--network", "none", *_environment({"HOME": "/tmp", **(environment or {})})]
    return _run(program, image=image, user=user, options=options, argv=argv)


def _inner(argv: t.Sequence[str], secret_files: t.Sequence[str]) -> list[str]:
    """The command with its program by name, as an image has it elsewhere than a venv."""
    name = PurePosixPath(argv[0]).name
    inner = ["python3" if name == "python" else name, *argv[1:]]
    for file in reversed(secret_files):
        inner = ["python3", "-I", "-c", _WITH_SECRETS, file, *inner]
    return inner


def _writable(unit: Facts, plan: Facts, environment: Facts) -> list[str]:
    """Ray's sockets lie in its directory, and the engine's, between the driver and a rank of its node, in /tmp."""
    shared = [plan["paths"]["ray"], "/tmp"] if plan["executor"] == "ray" else []
    own_home = environment.get("HF_HOME")
    return [f"/run/{unit['name']}", CACHE, *shared, *([own_home] if own_home else [])]


def _readable(unit: Facts, plan: Facts, environment: Facts) -> list[str]:
    # vLLM's own settings are only made for Ray.
    names = ("RAY_AUTH_TOKEN_PATH", "VLLM_CONFIG_ROOT") if plan["executor"] == "ray" else ()
    named = [environment[name] for name in names if name in environment]
    # Ours: a user's own is about the image.
    code = [environment["PYTHONPATH"]] if unit.get("secret_files") and "PYTHONPATH" in environment else []
    return [plan["checkpoint_path"], *named, *code, *unit.get("secret_files", [])]


def _limits(cap: str | int) -> list[str]:
    """The container's processes are the daemon's children and not the unit's, so the unit's caps do not bind them.

    ``cap`` is a size of systemd, a number of bytes, or empty for none.
    """
    size = parse_size(str(cap) or None)
    memory = [] if size is None else ["--memory", str(size), "--memory-swap", str(size)]
    return [
        *("--cgroup-parent", _SLICE, *memory, "--pids-limit", "-1"),
        *("--ulimit", "memlock=-1:-1", "--ulimit", f"stack={_STACK}"),
    ]


def _remove_argv(program: str, name: str, cluster: str) -> list[str]:
    """Removes what a killed client left: by our name and our label, so that a stranger of that name stays."""
    path = shlex.quote(program)
    found = f"{path} ps --all --quiet --filter 'name=^/?{name}$' --filter 'label={CLUSTER}={cluster}'"
    return ["+/bin/sh", "-c", f"{found} | xargs --no-run-if-empty {path} rm --force"]


def contained(
    unit: Facts,
    plan: Facts,
    container: Facts,
    *,
    owner: str,
    environment: Facts,
    fabric_file: str = "",
    patched: t.Sequence[str] = (),
) -> dict[str, t.Any]:
    """The unit that runs in a container what ``unit`` runs without one.

    The client runs as root (``+``), as whoever may talk to the daemon is root anyway, and the engine as ``owner``
    (``UID:GID``). ``environment`` is all that the engine gets, but for what its image sets. ``container`` is the fact
    ``hy3_container``, ``plan`` the fact ``hy3_plan``, and ``patched`` names files relative to its ``site``. The path
    of the client is absolute in ``container``, for the engine's user may own a directory in a PATH.
    """
    program, name = container["program"], unit["name"]
    own = {"HOME": CACHE, "USER": plan["user"], "LOGNAME": plan["user"], "HF_HOME": f"{CACHE}/huggingface"}
    over = [(f"{container['copies']}/{file}", f"{container['site']}/{file}") for file in patched]
    options = [
        *("--name", name, "--label", f"{CLUSTER}={plan['cluster']}"),
        # The journal has the client's output; another copy would grow without bounds.
        *("--log-driver", "none", "--network", "host", "--ipc", "host", "--pid", "host"),
        *_limits(unit["cap"]),
        *("--security-opt", "no-new-privileges"),
        *(["--device", "/dev/infiniband"] if fabric_file else []),
        # From the unit's own environment: in its argument list, of which it is a hash, it cannot stand.
        *("--env", "HY3_DIGEST", *_environment(own | dict(environment))),
        *(["--env-file", fabric_file] if fabric_file else []),
        *[word for path in _readable(unit, plan, environment) for word in _mount(path)],
        *[word for source, target in over for word in _mount(source, target)],
        *[word for path in dict.fromkeys(_writable(unit, plan, environment)) for word in _mount(path, readonly=False)],
    ]
    inner = _inner(unit["argv"], unit.get("secret_files", []))
    argv = _run(program, image=container["image"], user=owner, options=options, argv=inner)
    remove = _remove_argv(program, name, plan["cluster"])
    return {
        **unit,
        "needs": [*unit.get("needs", []), *(["docker.service"] if _kind(program) == "docker" else [])],
        # Not the engine's: root's client must read no settings of the engine's user, whose home User= would give it.
        "environment": {"HOME": "/root"},
        "secret_files": [],
        "before": [*unit.get("before", []), remove],
        "argv": [f"+{argv[0]}", *argv[1:]],
        "stop": [f"+{program}", "stop", "-t", str(_STOP), name],
        "after": remove,
    }


# ---- Finding it again


class Inside(t.NamedTuple):
    """The container of a unit: the systemd scope of its processes, and the id of the first of them on the node."""

    scope: str
    pid: int


def client_of(argv: t.Sequence[str]) -> tuple[str, str] | None:
    """Program and container of a unit's main process, if that is the client of a container."""
    words = list(argv)
    if len(words) > 1 and _kind(words[0]) in PROGRAMS and words[1] == "run" and "--name" in words[:-1]:
        return words[0], words[words.index("--name") + 1]
    return None


def inspect_command(program: str, name: str) -> list[str]:
    """What prints the answer that :func:`parse_inspect` reads."""
    return [program, "container", "inspect", "--format", "{{.Id}} {{.State.Pid}}", name]


def parse_inspect(program: str, text: str) -> Inside | None:
    """The container, None if it does not run (yet)."""
    match = re.fullmatch(r"([0-9a-f]{64}) ([1-9][0-9]*)", text.strip())
    return Inside(_SCOPES[_kind(program)].format(match[1]), int(match[2])) if match else None
