# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules of this collection that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._rules import IDS

ROOT = Path(__file__).parents[3]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
PROFILES = sorted((ROOT / "roles/profile/files/profiles").glob("*.yml"))
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    if name and (ROOT / name).is_file()
]

# The roles whose variables a user sets, and how those begin.
OWNERS = {"profile": "hy3_", "lab": "hy3_lab_"}
# What a role publishes for the ones after it.
FACTS = {
    "profile": {"hy3_plan"},
    "preflight": {"hy3_node"},
    "checkpoint": {"hy3_checkpoint"},
    "engine": {"hy3_engine", "hy3_container"},
    "engine_patch": {"hy3_patches"},
    "bench": {"hy3_bench"},
    "report": {"hy3_report", "hy3_failure"},
}
# Stated per host, for role lab, which runs on the controller.
HOST_VARIABLES = {"hy3_lab_gid_index"}
PUBLISHED: set[str] = set().union(*FACTS.values())

each_role = pytest.mark.parametrize("role", ROLES)
Node = t.Any


def load(path: Path) -> Node:
    return yaml.safe_load(path.read_text()) if path.exists() else None


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files_of(role: str, *folders: str) -> list[Path]:
    return [path for path in TRACKED if any(path.is_relative_to(ROOT / "roles" / role / folder) for folder in folders)]


def tasks_of(path: Path) -> Iterator[dict[str, Node]]:
    """Every task of a file, those in blocks included, and the blocks themselves."""
    waiting = list(load(path) or [])
    while waiting:
        task = waiting.pop(0)
        yield task
        for part in ("block", "rescue", "always"):
            waiting += task.get(part) or []


def argument_specs(role: str) -> dict[str, Node]:
    specs = load(ROOT / "roles" / role / "meta/argument_specs.yml")
    return t.cast(dict[str, Node], specs["argument_specs"]) if specs else {}


# ---- Arguments


@each_role
def test_has_the_readme_that_galaxy_asks_for(role: str) -> None:
    assert f"docs/{role}.md" in (ROOT / "roles" / role / "README.md").read_text()


@each_role
def test_has_a_page_with_its_decisions(role: str) -> None:
    assert "\n## Decisions\n" in (ROOT / "docs" / f"{role}.md").read_text()


def asked_entry_points() -> set[tuple[str, str]]:
    """Role and file of tasks, for each place that asks for one by name."""
    files = [path for role in ROLES for path in files_of(role, "tasks")] + PLAYBOOKS
    asked = re.findall(
        r"(?:name: *sparks\.hy3\.(\w+),? *\n? *tasks_from: *(\w+))", "\n".join(path.read_text() for path in files)
    )
    return set(asked)


@each_role
def test_each_entry_point_states_its_arguments(role: str) -> None:
    entry_points = {file for name, file in asked_entry_points() if name == role}
    entry_points |= {"main"} if (ROOT / "roles" / role / "tasks/main.yml").exists() else set()
    assert entry_points == set(argument_specs(role)), f"roles/{role}/meta/argument_specs.yml"


@each_role
def test_defaults_are_what_the_argument_specs_say(role: str) -> None:
    options = argument_specs(role).get("main", {}).get("options", {})
    stated = {name: option["default"] for name, option in options.items() if "default" in option}
    assert (load(ROOT / "roles" / role / "defaults/main.yml") or {}) == stated
    unstated = {name for name in options if name not in stated}
    assert unstated - PUBLISHED - HOST_VARIABLES == {
        name for name, option in options.items() if option.get("required") and name not in PUBLISHED
    }


# ---- Names

PUBLIC = HOST_VARIABLES.union(PUBLISHED, *(argument_specs(role)["main"]["options"] for role in OWNERS))


def test_every_public_name_is_in_some_argument_specs() -> None:
    """Else role profile would refuse it as misspelt."""
    asked = {
        name
        for role in ROLES
        for spec in argument_specs(role).values()
        for name in spec.get("options", {})
        if name.startswith("hy3_")
    }
    assert asked == PUBLIC


def test_rules_that_may_be_broken_are_known_to_the_profile() -> None:
    choices = argument_specs("profile")["main"]["options"]["hy3_allow"]["choices"]
    text = (ROOT / "roles/systemd_unit/tasks/run.yml").read_text()
    assert set(re.findall(r"- rule: (\S+)", text)) <= set(IDS)
    assert choices == sorted(IDS)


def given_names(role: str) -> Iterator[tuple[str, str]]:
    """Each name that a role's tasks and vars give a value, and where."""
    for path in files_of(role, "vars"):
        yield from ((name, relative(path)) for name in load(path))
    for path in files_of(role, "tasks"):
        for task in tasks_of(path):
            names = [task["register"]] if "register" in task else []
            names += task.get("ansible.builtin.set_fact", {})
            names += task.get("vars", {})
            names += [task["loop_control"]["loop_var"]] if "loop_var" in task.get("loop_control", {}) else []
            if "name" in task.get("ansible.builtin.include_vars", {}):
                names.append(task["ansible.builtin.include_vars"]["name"])
            asked = task.get("ansible.builtin.include_role") or task.get("ansible.builtin.import_role")
            # What a role is asked with is that role's own.
            prefix = f"__hy3_{asked['name'].rpartition('.')[2]}" if asked else None
            yield from ((name, relative(path)) for name in names if not (prefix and name.startswith(prefix)))


@each_role
def test_names_are_private_or_published(role: str) -> None:
    strange = {
        (name, place)
        for name, place in given_names(role)
        if not name.startswith(f"__hy3_{role}_") and name not in FACTS.get(role, set())
    }
    assert strange == set()


@each_role
def test_only_owners_have_public_variables(role: str) -> None:
    """Another role may ask for a fact or for an owner's variable, but gives it no value of its own."""
    options = {
        name: option for spec in argument_specs(role).values() for name, option in spec.get("options", {}).items()
    }
    if role in OWNERS:
        assert {name for name in options if not name.startswith(OWNERS[role])} == set()
        assert {name for name in options if role != "lab" and name.startswith(OWNERS["lab"])} == set()
    else:
        valued = {name for name, option in options.items() if name.startswith("hy3_") and "default" in option}
        assert valued == set()
        assert {name for name in options if not name.startswith(f"__hy3_{role}")} <= PUBLIC


def test_every_public_name_that_is_used_is_known() -> None:
    used: dict[str, str] = {}
    files = [path for role in ROLES for path in files_of(role, "tasks", "vars", "defaults", "templates")]
    for path in files + PLAYBOOKS:
        # Neither a part of another name nor a file's name.
        for name in re.findall(r"(?<![\w/-])hy3_\w+(?!\w|\.yml|-)", path.read_text()):
            used.setdefault(name, relative(path))
    assert {name: place for name, place in used.items() if name not in PUBLIC} == {}


def inventory_names(path: Path) -> set[str]:
    content = load(path)
    if {"group_vars", "host_vars"} & set(path.parts):
        return set(content)
    hosts = [host or {} for group in content.values() for host in group["hosts"].values()]
    return set().union(*hosts)


@pytest.mark.parametrize("inventory", sorted((ROOT / "inventories").iterdir()), ids=lambda path: path.name)
def test_inventories_state_known_names(inventory: Path) -> None:
    names = set().union(*(inventory_names(path) for path in inventory.rglob("*.yml")))
    assert {name for name in names if not name.startswith("ansible_")} - PUBLIC == set()


# ---- Boundaries


@each_role
def test_no_role_knows_an_inventory_group(role: str) -> None:
    """A role takes its hosts from a variable, so that it serves any inventory."""
    pattern = re.compile(r"\bgroups\s*[\[.]|\bgroup_names\b")
    assert [relative(path) for path in files_of(role, ".") if pattern.search(path.read_text())] == []


@each_role
def test_no_role_but_the_lab_knows_the_lab(role: str) -> None:
    """What differs from a Spark is in inventories/lab and roles/lab, and nowhere else."""
    allowed = {f"roles/profile/files/profiles/{name}.yml" for name in ("tiny_lab", "tiny_lab_tp1", "tiny_lab_tp3")}
    known = {
        relative(path)
        for path in files_of(role, ".")
        if role != "lab" and re.search(r"(?<![a-z])lab(?![a-z])", path.read_text(), re.IGNORECASE)
    }
    assert known - allowed == set()


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_playbooks_are_short(playbook: Path) -> None:
    """Hosts and roles, nothing else."""
    assert len(playbook.read_text().splitlines()) <= 40


# ---- Profiles

REQUIRED: dict[str, set[str]] = {
    "": {
        *("title", "source", "engine", "executor", "nodes", "checkpoint", "patches", "served_model_name"),
        *("engine_args", "engine_env", "ray_args", "memory", "smoke", "readback", "expected"),
    },
    "checkpoint": {"directory"},
    "engine_args": {"tensor-parallel-size", "pipeline-parallel-size", "max-model-len"},
    "ray_args": {"object-store-memory"},
    "memory": {"os_reserve", "head", "worker"},
    "memory.head": {"ray", "serve"},
    "memory.worker": {"ray"},
    "smoke": {"question", "expect"},
    "readback": {"quantization"},
    "expected": {"conditions"},
}
# SGLang has another name for the context, and no Ray.
SGLANG: dict[str, set[str]] = {
    "engine_args": {"tensor-parallel-size", "pipeline-parallel-size", "context-length"},
    "ray_args": set(),
    "memory.head": {"serve"},
    "memory.worker": {"serve"},
}
# Keys that not every profile has, where all others are a slip of the pen.
OPTIONAL = {
    "": {"packages", "image", "notice", "speculative_args"},
    "checkpoint": {"repository", "shards", "size_gb"},
    "memory": {"needs", "engine_overhead", "floor"},
}
CLOSED = ("", "checkpoint", "memory", "memory.head", "memory.worker", "smoke", "readback")


@pytest.mark.parametrize("place", REQUIRED, ids=lambda place: place or "profile")
@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_have_the_same_keys(path: Path, place: str) -> None:
    profile = part = load(path)
    required = (REQUIRED | SGLANG if profile["engine"] == "sglang" else REQUIRED)[place]
    for name in place.split(".") if place else []:
        part = part[name]
    assert required - set(part) == set()
    if place in CLOSED:
        assert set(part) - required - OPTIONAL.get(place, set()) == set()


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profile_has_a_node_for_each_rank(path: Path) -> None:
    profile = load(path)
    args = profile["engine_args"]
    assert args["tensor-parallel-size"] * args["pipeline-parallel-size"] == profile["nodes"]


# On PyPI, for aarch64 as well. Seed 001 ran 0.23.1, which is not among them.
VLLM_RELEASES = [
    *("0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0"),
    *("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
]


# SGLang for a Spark is the user's own build.
INSTALLED = [path for path in PROFILES if not path.stem.startswith("tiny") and load(path)["engine"] == "vllm"]


@pytest.mark.parametrize("path", INSTALLED, ids=lambda p: p.stem)
def test_profile_names_releases_that_exist(path: Path) -> None:
    pins = dict(pin.split("==") for pin in load(path)["packages"])
    assert pins.keys() == {"vllm", "ray"}
    assert pins["vllm"] in VLLM_RELEASES
    assert pins["ray"] == "2.60.0"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "inventories").glob("*/group_vars/sparks.yml")), ids=lambda p: p.parts[-3]
)
def test_inventory_installs_what_its_profile_names(path: Path) -> None:
    variables = load(path)
    profile = load(ROOT / f"roles/profile/files/profiles/{variables['hy3_profile']}.yml")
    assert variables.get("hy3_engine_packages") in (None, profile.get("packages"))
    assert Path(variables["hy3_checkpoint_dir"]).name == profile["checkpoint"]["directory"]


# ---- Source files

# Copied to the nodes by a role, and run there by a bare interpreter.
ON_THE_NODES = ["_roce", "_port", "_memory", "_api_guard"]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("name", ON_THE_NODES)
def test_programs_of_the_nodes_need_the_standard_library_only(name: str) -> None:
    tree = ast.parse((ROOT / f"plugins/module_utils/{name}.py").read_text())
    assert [name for name in imports(tree) if name.partition(".")[0] not in sys.stdlib_module_names] == []


def test_what_a_role_copies_to_the_nodes_is_such_a_program() -> None:
    copied = {
        f"_{item.removesuffix('.py')}"
        for role in ROLES
        for path in files_of(role, "tasks")
        for task in tasks_of(path)
        if "plugins/module_utils/" in str(task.get("ansible.builtin.copy", {}).get("src"))
        for item in task["loop"]
    }
    assert copied
    assert copied - set(ON_THE_NODES) == set()


HEADER = """\
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""
PRIVATE = "# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.\n"
PYTHON = [path for path in TRACKED if path.suffix == ".py"]


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_header(path: Path) -> None:
    text = path.read_text()
    if path.is_relative_to(ROOT / "plugins/modules"):
        assert text.startswith("#!/usr/bin/python\n")
    text = re.sub(r"\A#!.*\n", "", text)
    assert text.startswith(HEADER)
    if path.is_relative_to(ROOT / "plugins/module_utils"):
        assert text.removeprefix(HEADER).startswith(PRIVATE)


# Written so that they do not find themselves.
CODE = r"[\w:-]+(?:\[[\w-]+\])?"
BARE = re.compile(
    r"#\s*(?:(?:ruff:\s*)?no[q]a|type:\s*ignor[e]|pylint:\s*disabl[e]|yamllint\s+disabl[e]|nose[c])"
    rf"(?:[-\w]*[:=]?\s*\[?{CODE}(?:,\s*{CODE})*\]?)?\s*$",
    re.MULTILINE,
)


@pytest.mark.parametrize(
    ("line", "bare"),
    [
        ("x  # no" + "qa", True),
        ("x  # no" + "qa: S603", True),
        ("x  # no" + "qa: S603, S607", True),
        ("x  # no" + "qa: S603 - the command is ours", False),
        ("# ruff: no" + "qa: PLR0917", True),
        ("# ruff: no" + "qa: PLR0917  SGLang's order", False),
        ("x  # type: igno" + "re", True),
        ("x  # type: igno" + "re[arg-type]", True),
        ("x  # type: igno" + "re[arg-type]  # wrong on purpose", False),
        ("x  # no" + "qa: S603 - ours  # type: igno" + "re[arg-type]", True),
        ("# pylint: disa" + "ble=ansible-bad-function", True),
        ("# pylint: disa" + "ble=ansible-bad-function  # runs without Ansible", False),
        ("x: y  # no" + "qa: var-naming[read-only]", True),
        ("x: y  # no" + "qa: var-naming[read-only]  # as in the role", False),
        ("# yamllint disa" + "ble rule:line-length", True),
    ],
)
def test_what_is_bare(line: str, bare: bool) -> None:
    assert bool(BARE.search(line)) == bare


@pytest.mark.parametrize(
    "path", [path for path in TRACKED if path.suffix in {".py", ".yml", ".toml", ".txt", ""}], ids=relative
)
def test_what_a_linter_may_not_say_has_its_reason_on_the_line(path: Path) -> None:
    text = path.read_text()
    assert [f"{relative(path)}: {match[0]}" for match in BARE.finditer(text)] == []


def test_nothing_but_python_is_a_plugin() -> None:
    assert {relative(path) for path in TRACKED if path.is_relative_to(ROOT / "plugins")} <= set(map(relative, PYTHON))


# Written so that they do not find themselves.
START = r"(?<![\w.}-])"  # a path from the root of the file system
FOREIGN = {
    "a home directory": START + r"/(?:home|User[s])/[a-z][\w.-]*/",
    "root's home": START + r"/roo[t]/",
    "a working directory of somebody's": START + r"/(?:wor[k]|var/tm[p])/",
    "a package registry": r"\b[\w-]*(?:pyp[i]|pythonhoste[d]|artifactor[y]|nexu[s]|jfro[g])[\w-]*\.[a-z]+\b",
    "an index of packages": r"--(?:extra-)?index-ur[l]|find-link[s]",
}


@pytest.mark.parametrize("pattern", FOREIGN.values(), ids=FOREIGN)
def test_no_tracked_file_names(pattern: str) -> None:
    found = {
        f"{relative(path)}: {match[0]}"
        for path in TRACKED
        for match in re.finditer(pattern, path.read_bytes().decode("utf-8", errors="replace"))
    }
    assert found == set()
