# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._container import (
    Inside,
    client_of,
    contained,
    inspect_command,
    inspecting_argv,
    parse_inspect,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.docker_daemon import DOCKER, created

IMAGE = "registry.example/hy3@sha256:" + "a" * 64
PLAN: dict[str, t.Any] = {
    "launch": "docker",
    "cluster": "sparks",
    "user": "hy3",
    "executor": "mp",
    "checkpoint_path": "/models/Hy3",
    "paths": {"ray": "/var/lib/hy3/ray"},
}
CONTAINER = {"program": "/usr/bin/docker", "image": IMAGE, "site": "/site", "copies": "/copies"}
UNIT: dict[str, t.Any] = {
    "name": "hy3-serve",
    "description": "Hy3: vLLM",
    "cap": "8G",
    "environment": {"MAX_JOBS": "2"},
    "argv": ["/opt/hy3/venv/bin/vllm", "serve", "/models/Hy3", "--speculative-config", '{"method":"mtp"}'],
}


def unit(
    changes: dict[str, t.Any] | None = None,
    *,
    plan: dict[str, t.Any] | None = None,
    program: str = "/usr/bin/docker",
    **options: t.Any,
) -> dict[str, t.Any]:
    given = {"owner": "1001:1002", "environment": {"MAX_JOBS": "2"}, **options}
    return contained({**UNIT, **(changes or {})}, {**PLAN, **(plan or {})}, {**CONTAINER, "program": program}, **given)


def mount(path: str, *, writable: bool = False) -> list[str]:
    return ["--mount", f"type=bind,source={path},target={path}{'' if writable else ',readonly'}"]


def test_the_whole_of_one_unit() -> None:
    found = unit({"ranks": True}, fabric_file="/run/hy3-serve/fabric.env", patched=["vllm/a.py"])
    assert found["argv"] == [
        *("+/usr/bin/docker", "run", "--rm", "--pull", "never", "--userns", "host", "--user", "1001:1002"),
        *("--workdir", "/", "--gpus", "all", "--name", "hy3-serve", "--label", "sparks.hy3.cluster=sparks"),
        *("--log-driver", "none", "--network", "host", "--ipc", "host", "--pid", "host"),
        *("--cgroup-parent", "hy3.slice", "--memory", "8589934592", "--memory-swap", "8589934592"),
        *("--pids-limit", "-1", "--ulimit", "memlock=-1:-1", "--ulimit", "stack=67108864"),
        *("--security-opt", "no-new-privileges", "--device", "/dev/infiniband", "--env", "HY3_DIGEST"),
        *("--env", "HF_HOME=/var/cache/hy3/huggingface", "--env", "HOME=/var/cache/hy3", "--env", "LOGNAME=hy3"),
        *("--env", "MAX_JOBS=2", "--env", "USER=hy3", "--env-file", "/run/hy3-serve/fabric.env"),
        *mount("/models/Hy3"),
        *("--mount", "type=bind,source=/copies/vllm/a.py,target=/site/vllm/a.py,readonly"),
        *mount("/run/hy3-serve", writable=True),
        *mount("/var/cache/hy3", writable=True),
        *("--entrypoint", "vllm", IMAGE, *UNIT["argv"][1:]),
    ]
    assert found["stop"] == ["+/usr/bin/docker", "stop", "-t", "50", "hy3-serve"]
    assert found["environment"] == {"HOME": "/root"}
    assert found["needs"] == ["docker.service"]
    # What the template asks for beside.
    assert (found["name"], found["cap"], found["ranks"], found["secret_files"]) == ("hy3-serve", "8G", True, [])


# (id, unit's changes, plan's changes, environment, words that must be there, words that must not)
TEST_PARTS: list[tuple[str, dict[str, t.Any], dict[str, t.Any], dict[str, str], list[str], list[str]]] = [
    ("no cap", {"cap": ""}, {}, {}, ["--cgroup-parent"], ["--memory", "--memory-swap"]),
    ("a cap in bytes", {"cap": 120259084288}, {}, {}, ["--memory", "120259084288"], []),
    ("no ranks", {}, {}, {}, [], ["--device", "--env-file"]),
    ("a JSON argument", {}, {}, {}, ['{"method":"mtp"}'], []),
    ("a user's HF_HOME", {}, {}, {"HF_HOME": "/srv/hf"}, ["HF_HOME=/srv/hf", *mount("/srv/hf", writable=True)], []),
    ("a PYTHONPATH in the image", {}, {}, {"PYTHONPATH": "/opt/x"}, ["PYTHONPATH=/opt/x"], mount("/opt/x")[1:]),
    (
        "Ray",
        {},
        {"executor": "ray"},
        {"VLLM_CONFIG_ROOT": "/etc/hy3/vllm", "RAY_AUTH_TOKEN_PATH": "/etc/hy3/token"},
        [*mount("/etc/hy3/vllm"), *mount("/etc/hy3/token"), *mount("/tmp", writable=True)],
        [],
    ),
    (
        "without Ray its places are not there",
        {},
        {},
        {"VLLM_CONFIG_ROOT": "/etc/hy3/vllm"},
        ["VLLM_CONFIG_ROOT=/etc/hy3/vllm"],
        [mount("/etc/hy3/vllm")[1], mount("/var/lib/hy3/ray", writable=True)[1], mount("/tmp", writable=True)[1]],
    ),
    ("SGLang", {"argv": ["/v/bin/python", "-m", "sglang.launch_server"]}, {}, {}, ["python3", "-m"], ["/v/bin/python"]),
    (
        "a comma in a path",
        {},
        {"checkpoint_path": "/models/a,b"},
        {},
        ['type=bind,"source=/models/a,b","target=/models/a,b",readonly'],
        [],
    ),
]


@pytest.mark.parametrize(
    ("changes", "plan", "environment", "there", "absent"),
    [row[1:] for row in TEST_PARTS],
    ids=[r[0] for r in TEST_PARTS],
)
def test_parts(
    changes: dict[str, t.Any],
    plan: dict[str, t.Any],
    environment: dict[str, str],
    there: list[str],
    absent: list[str],
) -> None:
    argv = unit(changes, plan=plan, environment=environment)["argv"]
    assert [word for word in there if word not in argv] == []
    assert [word for word in absent if word in argv] == []


def test_podman() -> None:
    """It has no daemon to be bound to, and its option for GPUs did nothing for years."""
    found = unit(program="/usr/bin/podman", plan={"launch": "podman"})
    assert found["argv"][0] == "+/usr/bin/podman"
    assert found["argv"][found["argv"].index("--device") + 1] == "nvidia.com/gpu=all"
    assert "--gpus" not in found["argv"]
    assert found["needs"] == []


def test_secrets_become_the_commands_environment(tmp_path: Path) -> None:
    """The very words, run here by this Python: a value arrives byte for byte, and the command takes the place."""
    secret, other = tmp_path / "api_key.env", tmp_path / "other.env"
    secret.write_text("VLLM_API_KEY=~/a=b+c==\n\n")
    other.write_text("SECOND=2\n")
    show = "import json, os, sys; print(json.dumps([os.environ['VLLM_API_KEY'], os.environ['SECOND'], sys.argv[1:]]))"
    files = [str(secret), str(other)]
    argv = unit({"argv": ["/v/bin/python", "-c", show, "--x", '{"a": 1}'], "secret_files": files})["argv"]
    assert [word for file in files for word in mount(file) if word not in argv] == []
    at = argv.index(IMAGE)
    assert argv[at - 1] == "python3"
    (tmp_path / "python3").symlink_to(sys.executable)
    words = [str(tmp_path / "python3"), *argv[at + 1 :]]
    done = subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["~/a=b+c==", "2", ["--x", '{"a": 1}']]
    assert "~/a=b" not in " ".join(argv)


# A stand-in for docker with three containers, of which it filters as the real one does, and notes what it removes.
PROGRAM = """\
#!{python}
import re, sys
containers = [("1", "hy3-serve", "sparks"), ("2", "hy3-serve", "east"), ("3", "not-hy3-serve", "sparks")]
if sys.argv[1] == "ps":
    assert sys.argv[2:4] == ["--all", "--quiet"]
    filters = dict(word.split("=", 1) for word in sys.argv[4:] if word != "--filter")
    for number, name, cluster in containers:
        if re.search(filters["name"], "/" + name) and filters["label"] == "sparks.hy3.cluster=" + cluster:
            print(number)
else:
    open({removed!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.mark.parametrize(("cluster", "removed"), [("sparks", "rm --force 1\n"), ("west", "")])
def test_only_a_leftover_of_ours_is_removed(tmp_path: Path, cluster: str, removed: str) -> None:
    (tmp_path / "a place").mkdir()
    docker = tmp_path / "a place/docker"
    docker.write_text(PROGRAM.format(python=sys.executable, removed=str(tmp_path / "removed")))
    docker.chmod(0o755)
    found = unit(plan={"cluster": cluster}, program=str(docker))
    (remove,) = found["before"]
    assert remove == found["after"]
    assert remove[0] == "+/bin/sh", "the engine's user may not talk to the daemon"
    subprocess.run(["/bin/sh", *remove[1:]], check=True)
    assert (tmp_path / "removed").exists() is bool(removed)
    assert not removed or (tmp_path / "removed").read_text() == removed


def test_what_a_unit_did_before_comes_first() -> None:
    wait = ["/usr/bin/python3", "-I", "/usr/local/lib/hy3/port.py", "wait"]
    found = unit({"before": [wait], "needs": ["hy3-ray.service"]})
    assert found["before"][0] == wait
    assert found["needs"] == ["hy3-ray.service", "docker.service"]


def test_a_look_into_an_image() -> None:
    argv = inspecting_argv(["python3", "-c", "x"], "docker", image=IMAGE, user="1:2", environment={"A": "b c"})
    assert argv[:2] == ["docker", "run"]
    assert argv[argv.index("--network") + 1] == "none"
    assert argv[argv.index("--entrypoint") + 1 :] == ["python3", IMAGE, "-c", "x"]
    assert "A=b c" in argv


@pytest.mark.skipif(DOCKER is None, reason="docker's client is not installed here")
def test_docker_understands_a_look_and_a_comma(tmp_path: Path) -> None:
    assert shutil.which("docker")
    asked = created(inspecting_argv(["python3", "-c", "x"], "docker", image=IMAGE, user="1:2"), tmp_path, {})
    assert (asked["Entrypoint"], asked["Cmd"], asked["HostConfig"]["NetworkMode"]) == (["python3"], ["-c", "x"], "none")
    argv = unit(plan={"checkpoint_path": '/models/a,"b'})["argv"]
    asked = created(argv, tmp_path, {"HY3_DIGEST": "x"})
    assert asked["HostConfig"]["Mounts"][0] == {
        **{"Type": "bind", "Source": '/models/a,"b', "Target": '/models/a,"b', "ReadOnly": True}
    }


# ---- Finding it again

ID = "6f1c0e9d3b5a7c2e" * 4
# (id, arguments of a main process, program and container)
TEST_CLIENTS: list[tuple[str, list[str], tuple[str, str] | None]] = [
    ("ours", unit()["argv"], ("+/usr/bin/docker", "hy3-serve")),
    ("podman's", ["/usr/bin/podman", "run", "--name", "hy3-ray", "x"], ("/usr/bin/podman", "hy3-ray")),
    ("an engine", ["/opt/hy3/venv/bin/vllm", "serve", "/m", "--name", "x"], None),
    ("another command", ["/usr/bin/docker", "exec", "--name", "x"], None),
    ("without a name", ["/usr/bin/docker", "run", "x"], None),
    ("no value", ["/usr/bin/docker", "run", "--name"], None),
    ("nothing", [], None),
]


@pytest.mark.parametrize(("argv", "expected"), [row[1:] for row in TEST_CLIENTS], ids=[row[0] for row in TEST_CLIENTS])
def test_clients(argv: list[str], expected: tuple[str, str] | None) -> None:
    # systemd takes the + off.
    words = [argv[0].removeprefix("+"), *argv[1:]] if argv else []
    assert client_of(words) == ((expected[0].removeprefix("+"), expected[1]) if expected else None)


# (id, program, what it printed, what that is)
TEST_INSPECTED: list[tuple[str, str, str, Inside | None]] = [
    ("docker", "/usr/bin/docker", f"{ID} 812\n", Inside(f"docker-{ID}.scope", 812)),
    ("podman", "/usr/bin/podman", f"{ID} 812\n", Inside(f"libpod-{ID}.scope", 812)),
    ("not started", "/usr/bin/docker", f"{ID} 0\n", None),
    ("nothing", "/usr/bin/docker", "\n", None),
]


@pytest.mark.parametrize(
    ("program", "text", "expected"), [row[1:] for row in TEST_INSPECTED], ids=[row[0] for row in TEST_INSPECTED]
)
def test_inspected(program: str, text: str, expected: Inside | None) -> None:
    assert parse_inspect(program, text) == expected
    assert inspect_command(program, "x")[0] == program
