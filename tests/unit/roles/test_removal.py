# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever a role puts on a node, remove_hy3 takes away, or docs/remove.md says why it stays.

Both sides are read from the tasks and templates of the roles, and evaluated by Ansible for the inventory `sparks`.
"""

from __future__ import annotations

import json
import re
import sys
import typing as t
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT, run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.systemctl import Tasks, changes, install, moved
from ansible_collections.sparks.hy3.tests.unit.roles.test_stop import STOPPED

Node = t.Any
# Of the lab, which takes itself down, nothing is on a node that somebody else has.
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.name != "lab")

# ---- What roles make


def destination(args: Node) -> list[str]:
    return [args["dest"]]


def file_or_directory(args: Node) -> list[str]:
    return [] if args.get("state", "file") in ("absent", "file") else [args["path"]]


def documented_path(args: Node) -> list[str]:
    return [args.get("path", "/run/hy3/lease.json")]


def patches(args: Node) -> list[str]:
    return [f"patches in {args['venv']}"] if args.get("state", "present") == "present" else []


def enabled(args: Node) -> list[str]:
    unit = args.get("name", "")
    starts = args.get("enabled") and args.get("state") != "stopped"
    return [f"/etc/systemd/system/multi-user.target.wants/{unit}"] if starts else []


# What each module makes. One that is neither here nor below fails the test: say here what it makes.
MAKES: dict[str, Callable[[Node], list[str]]] = {
    "ansible.builtin.copy": destination,
    "ansible.builtin.template": destination,
    "ansible.builtin.file": file_or_directory,
    "ansible.builtin.systemd_service": enabled,
    "sparks.hy3.checkpoint_download": destination,
    "sparks.hy3.checkpoint_pad": destination,
    "sparks.hy3.checkpoint_pull": destination,
    "sparks.hy3.cluster_lease": documented_path,
    "sparks.hy3.engine_patch": patches,
}
MAKES_NOTHING = {
    *("ansible.builtin.assert", "ansible.builtin.debug", "ansible.builtin.fail", "ansible.builtin.find"),
    *("ansible.builtin.getent", "ansible.builtin.import_role", "ansible.builtin.import_tasks", "ansible.builtin.meta"),
    *("ansible.builtin.include_role", "ansible.builtin.include_tasks", "ansible.builtin.include_vars"),
    *("ansible.builtin.ping", "ansible.builtin.set_fact", "ansible.builtin.slurp", "ansible.builtin.stat"),
    *("ansible.builtin.uri", "ansible.builtin.wait_for", "ansible.builtin.wait_for_connection"),
    # They wait, ask or measure; what they write meanwhile they take away themselves.
    *("sparks.hy3.chat_smoke", "sparks.hy3.engine_bench", "sparks.hy3.page_cache", "sparks.hy3.paths_absent"),
    *("sparks.hy3.engine_orphans", "sparks.hy3.serve_wait", "sparks.hy3.ssh_probe", "sparks.hy3.transfer_wait"),
}
# Of a command that changes something, by how it begins.
COMMANDS: dict[str, list[str]] = {
    "loginctl enable-linger": ["/var/lib/systemd/linger/{{ hy3_plan.user }}"],
    "nft delete": [],
    "rmdir": [],
    "loginctl disable-linger": [],
    "systemd-run --unit=hy3-checkpoint-": [],  # transient: it ends by itself, and absent of role checkpoint stops it
    "{{ __hy3_engine_as_user + ['python3', '-m', 'venv'": ["{{ hy3_plan.venv }}"],
    "{{ __hy3_engine_as_user + ['flock', __hy3_engine_unfinished": ["{{ hy3_plan.venv }}"],  # pip
}
# Where systemd makes the directories that a unit names.
DIRECTORIES = {
    "Runtime": "/run",
    "State": "/var/lib",
    "Cache": "/var/cache",
    "Logs": "/var/log",
    "Configuration": "/etc",
}

# What stays, by the roles' own words, and where docs/remove.md says so.
STAYS = {
    "{{ hy3_plan.checkpoint_path }}": "checkpoints",
    "{{ __hy3_checkpoint_pad_to }}": "checkpoints",
}


# What goes although no role makes it here, and why.
MADE_BY_NONE = {
    "/run/hy3-firewall": "all units go by one rule, and this one has no runtime directory",
    "/etc/systemd/system/sshd.service.d": "sshd has one of two names, and both are looked for",
    "/etc/systemd/system/sshd.service.d/50-hy3-guard.conf": "the same",
}


class Made(t.NamedTuple):
    """A path as a role states it, and the task that does."""

    path: str
    task: str


def only_reads(module: str) -> bool:
    """Whether a module of ours says of itself that it only reads."""
    path = ROOT / "plugins/modules" / f"{module.rpartition('.')[2]}.py"
    return module.startswith("sparks.hy3.") and "sparks.hy3._attributes.info" in path.read_text()


def tasks_in(content: Node, inherited: Node = None) -> Iterator[Node]:
    """Each task with what its blocks say."""
    for task in content or []:
        merged = {**(inherited or {}), **task}
        blocks = [name for name in ("block", "rescue", "always") if name in task]
        rest = {name: value for name, value in merged.items() if name not in ("block", "rescue", "always", "name")}
        for name in blocks:
            yield from tasks_in(task[name], rest)
        if not blocks:
            yield merged


def module_of(task: Node) -> tuple[str, Node]:
    (found,) = [name for name in task if name.count(".") == 2]
    return found, task[found]


def inner(value: Node) -> str:
    """A value of YAML as an expression of Jinja's."""
    match = re.fullmatch(r"\{\{(.*)\}\}", value, re.DOTALL) if isinstance(value, str) else None
    return match[1] if match else json.dumps(value)


def each_item(task: Node, paths: list[str]) -> list[str]:
    """The paths with every item of a loop in its place, or as templates that print them in lines."""
    variable = task.get("loop_control", {}).get("loop_var", "item")
    if not any(re.search(rf"\{{\{{.*\b{variable}\b", path) for path in paths):
        return paths
    loop = task["loop"]
    if isinstance(loop, str):
        return [f"{{% for {variable} in {inner(loop)} %}}{path}\n{{% endfor %}}" for path in paths]
    return [re.sub(rf"\{{\{{ {variable} \}}\}}", str(item), path) for path in paths for item in loop]


def made_by_command(task: Node, args: Node) -> list[str]:
    if task.get("changed_when") is False:
        return []
    argv = args["argv"]
    words = argv if isinstance(argv, str) else " ".join(str(word) for word in argv)
    known = [made for beginning, made in COMMANDS.items() if words.startswith(beginning)]
    assert known, f"{task['name']}: say in COMMANDS what `{words}` makes"
    return known[0]


def made_by(task: Node) -> list[str]:
    module, args = module_of(task)
    if task.get("delegate_to") == "localhost" or module in MAKES_NOTHING or only_reads(module):
        return []
    if module == "ansible.builtin.command":
        return made_by_command(task, args)
    assert module in MAKES, f"{task['name']}: say in MAKES what {module} makes"
    return each_item(task, MAKES[module](args))


def files(role: str, folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / "roles" / role / folder).glob("*") if path.is_file())


def directories_of_units(role: str) -> Iterator[Made]:
    """What systemd makes for a unit, by the templates."""
    for path in files(role, "templates"):
        for kind, value in re.findall(r"^(\w+)Directory=(.*)$", path.read_text(), re.MULTILINE):
            if kind in DIRECTORIES:
                stated = re.sub(r"\{\{ (.*?) \}\}", r"{{ \1 | default('') }}", value)
                yield Made(f"{DIRECTORIES[kind]}/{stated}", f"{role}: {path.name}, {kind}Directory=")


def made_in(role: str) -> Iterator[Made]:
    for path in files(role, "tasks"):
        for task in tasks_in(yaml.safe_load(path.read_text())):
            yield from (Made(made, f"{role}: {task.get('name')}") for made in made_by(task))
    yield from directories_of_units(role)


# ---- What removal takes


def reached(role: str, file: str) -> Iterator[tuple[Node, str]]:
    """Each task of a file and of those that it includes, with what the including ones set, as Jinja says it."""
    path = ROOT / "roles" / role / "tasks" / file
    for task in tasks_in(yaml.safe_load(path.read_text()) if path.exists() else []):
        module, args = module_of(task)
        yield task, ""
        if module in ("ansible.builtin.include_tasks", "ansible.builtin.import_tasks"):
            given = "".join(f"{{% set {name} = {inner(value)} %}}" for name, value in task.get("vars", {}).items())
            yield from ((further, given + before) for further, before in reached(role, args))


def absent_tasks() -> Iterator[tuple[Node, str]]:
    for role in ROLES:
        yield from reached(role, "absent.yml")


def removing() -> dict[str, list[Node]]:
    """Expressions of paths, patterns and emptied directories, and patches, in all the roles."""
    found: dict[str, list[Node]] = {"paths": [], "patterns": [], "directories": [], "patches": []}
    for task, given in absent_tasks():
        module, args = module_of(task)
        if module == "sparks.hy3.paths_absent":
            for kind in ("paths", "patterns", "directories"):
                found[kind].append(args.get(kind, []))
        elif module == "ansible.builtin.file" and args.get("state") == "absent":
            found["paths"].append([given + path for path in each_item(task, [args["path"]])])
        elif module == "ansible.builtin.command" and args["argv"][0] == "rmdir":
            found["directories"].append([given + path for path in each_item(task, [args["argv"][-1]])])
        elif module == "sparks.hy3.engine_patch" and args["state"] == "absent":
            found["patches"].append([f"patches in {args['venv']}"])
    return found


UNITS = sorted(
    name
    for role in ROLES
    if (ROOT / "roles" / role / "vars/main.yml").exists()
    for name, value in yaml.safe_load((ROOT / "roles" / role / "vars/main.yml").read_text()).items()
    if isinstance(value, dict) and {"name", "argv", "cap"} <= value.keys()
)


def removed_units() -> list[str]:
    return sorted(
        task["vars"]["__hy3_systemd_unit_name"]
        for task, _given in absent_tasks()
        if "__hy3_systemd_unit_name" in task.get("vars", {})
    )


def for_each_unit(expression: Node, names: list[str], variable: str) -> list[Node]:
    """The expression with each of the names in place of the variable, or as it is."""
    text = json.dumps(expression)
    pattern = rf"\b{variable}\b"
    if not re.search(pattern, text):
        return [expression]
    return [json.loads(re.sub(pattern, name, text)) for name in names]


class Evaluated(t.NamedTuple):
    """Paths on a node: what is made; what goes with all that is in it, by name and by pattern; what goes if empty."""

    made: list[Made]
    trees: list[str]
    patterns: list[str]
    directories: list[str]


def evaluate(home: Path) -> Evaluated:
    made = [one for role in ROLES for one in made_in(role) if one.path not in STAYS]
    made = [Made(path, one.task) for one in made for path in for_each_unit(one.path, UNITS, "__hy3_systemd_unit")]
    going = {
        kind: [
            one
            for expression in expressions
            for one in for_each_unit(expression, [f"'{name}'" for name in removed_units()], "__hy3_systemd_unit_name")
        ]
        for kind, expressions in removing().items()
    }
    roles = [role for role in ROLES if (ROOT / "roles" / role / "vars/main.yml").exists()]
    variables = {
        "removal_dir": str(home),
        "removal_roles": roles,
        "removal_expressions": {"made": [one.path for one in made], **going},
    }
    done = run_playbook("removal", home, variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    said = json.loads((home / "spark-1.json").read_text())
    flat = {kind: [line for paths in said[kind] for path in paths for line in path.splitlines()] for kind in going}
    lines = [
        (line.rstrip("/"), one.task) for path, one in zip(said["made"], made, strict=True) for line in path.split("\n")
    ]
    # Alone it is where a unit names no directory.
    there = [Made(line, task) for line, task in lines if line and line not in DIRECTORIES.values()]
    return Evaluated(there, flat["paths"] + flat["patches"], flat["patterns"], flat["directories"])


def goes(path: str, evaluated: Evaluated) -> bool:
    places = [path, *map(str, Path(path).parents)]
    named = [place for place in places if place in evaluated.trees]
    matched = [place for place in places for pattern in evaluated.patterns if fnmatch(place, pattern)]
    return bool(named or matched or path in evaluated.directories)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return evaluate(tmp_path_factory.mktemp("removal"))


def test_what_roles_make_goes(evaluated: Evaluated) -> None:
    paths = {one.path for one in evaluated.made}
    # Or it has read nothing.
    assert {"/etc/hy3/hy3.nft", "/run/hy3-serve", "/var/lib/hy3/ray", "/etc/systemd/system/hy3-ray.service"} <= paths
    assert {"/usr/local/lib/hy3/api/api_guard.py", "/var/lib/systemd/linger/hy3", "/run/hy3/lease.json"} <= paths
    assert [one for one in evaluated.made if not goes(one.path, evaluated)] == []


def test_nothing_of_others_goes(evaluated: Evaluated) -> None:
    """Each path that goes is one that a role makes, lies in it, or holds nothing else."""
    made = {one.path for one in evaluated.made}
    strange = {
        path
        for path in evaluated.trees + evaluated.directories
        if not any(one == path or one.startswith(f"{path}/") for one in made)
    }
    assert strange - MADE_BY_NONE.keys() == set()
    assert [pattern for pattern in evaluated.patterns if "hy3" not in pattern] == []


@pytest.mark.parametrize(("path", "where"), STAYS.items(), ids=STAYS)
def test_what_stays_is_made_and_said(path: str, where: str) -> None:
    assert path in {one.path for role in ROLES for one in made_in(role)}
    _before, _heading, stays = (ROOT / "docs/remove.md").read_text().partition("## What stays")
    assert where in stays


def asked_by(content: Node) -> set[str]:
    """The roles of which a playbook or a file of tasks asks for `absent`."""
    asked = [
        task[keyword]
        for task in tasks_in(content)
        for keyword in ("ansible.builtin.import_role", "ansible.builtin.include_role")
        if keyword in task
    ]
    return {role["name"].rpartition(".")[2] for role in asked if role.get("tasks_from") == "absent"}


def test_the_playbook_asks_every_role_that_can() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/remove_hy3.yml").read_text())
    asked = {role for play in plays for role in asked_by(play.get("tasks"))}
    asked |= {role for task, _given in absent_tasks() for role in asked_by([task])}
    assert asked == {role for role in ROLES if (ROOT / "roles" / role / "tasks/absent.yml").exists()}


# ---- On whose nodes

# What the units of a node say, whether they run, and what is stopped.
NODES: dict[str, tuple[str, str, Tasks]] = {
    "of this cluster": ("Hy3: Ray head of cluster sparks", "active", STOPPED),
    "of another one that runs": ("Hy3: Ray head of cluster east", "active", []),
    "of another one that was stopped": ("Hy3: Ray head of cluster east", "inactive", []),
}


@pytest.mark.parametrize(("description", "state", "stopped"), NODES.values(), ids=NODES)
def test_a_node_of_another_cluster_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, description: str, state: str, stopped: Tasks
) -> None:
    install(tmp_path, monkeypatch, state, description=description)
    here = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    done = run_playbook("../../../playbooks/remove_hy3", tmp_path, here, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert moved(changes(done.stdout)) == stopped
    names = [name for name, _hosts in changes(done.stdout)]
    went_on = "Remove the lease" in names
    assert went_on is bool(stopped)
    if went_on:
        # All units of all nodes first.
        assert names.index("Unit | Of the others, stop hy3-firewall") < names.index("Absent | Remove hy3-serve")
    else:
        for node in ("spark-1", "spark-2"):
            assert f"{node}: hy3-serve.service is installed here as" in done.stdout
