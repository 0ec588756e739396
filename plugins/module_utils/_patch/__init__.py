# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Source patches for the engines: what state each is in, apply, revert.

The package is a program, too: it runs under the engine's own interpreter (``COMMAND``), because only that one is sure
to know the syntax of the engine's files and where its packages are. Its last argument is a JSON object, the
arguments of ``run()``; it prints the result, or ``{"error": "one sentence"}``, as the last line of its output.

States: ``absent`` (no such file or class), ``upstream_fixed`` (repaired, and not by us), ``defect``, ``applied``
(ours), ``partial`` (half repaired by hand) and ``unrecognised``. The last two refuse.
"""
# pylint: disable=ansible-bad-function  # the engine's interpreter runs this as a program, without Ansible

from __future__ import annotations

import ast
import difflib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch import _vllm
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Finding, Patch, Source, alias_of
from ansible_collections.sparks.hy3.plugins.module_utils._patch._store import (
    Package,
    Record,
    Seen,
    find_package,
    find_version,
    sha256,
)

Goal = Literal["present", "absent", "reported"]

CATALOGUE: dict[str, Patch] = {patch.id: patch for patch in _vllm.PATCHES}

# -I keeps the caller's directory and PYTHON* variables out, -B keeps bytecode out of this collection's directory. The
# path added is the directory, or under Ansible the zip archive, that holds ansible_collections.
COMMAND = (
    "-I",
    "-B",
    "-c",
    f"import sys; sys.path.insert(0, sys.argv[1]); from {__name__} import main; main()",
    str(Path(__file__).parents[len(__name__.split("."))]),
)


@dataclass(frozen=True)
class Plan:
    """What is to become of one file; ``content`` and ``record`` are what it will have."""

    seen: Seen
    before: dict[str, Finding]
    content: bytes | None
    record: Record | None
    after: dict[str, Finding]

    @property
    def changed(self) -> bool:
        """Whether the file's content changes."""
        return self.content != self.seen.content


def survey(seen: Seen, patches: list[Patch]) -> dict[str, Finding]:
    """The state of each of ``patches`` in one file, by patch id."""
    if seen.content is None:
        return {patch.id: Finding("absent", "there is no such file") for patch in patches}
    try:
        tree = Source(seen.content).tree
    except (SyntaxError, ValueError) as exc:
        return {patch.id: Finding("unrecognised", f"Python cannot read the file: {exc}") for patch in patches}
    alias = alias_of(tree)
    if alias is not None:
        return {patch.id: Finding("unrecognised", f"the file only stands for the module {alias}") for patch in patches}
    return {patch.id: _judge(seen, patch, tree) for patch in patches}


def _judge(seen: Seen, patch: Patch, tree: ast.Module) -> Finding:
    if patch.id in seen.ours:
        return Finding("applied")
    finding = patch.inspect(tree)
    if finding.state == "applied" and patch.id not in seen.claimed:
        return Finding("upstream_fixed", "the same edit is there, but this collection did not make it")
    return finding


def build(original: bytes, patches: list[Patch]) -> bytes:
    """``original`` with ``patches`` applied in order; Hy3Error unless it then compiles and shows each of them."""
    content = original
    for patch in patches:
        try:
            source = Source(content)
            content = source.edited(patch.edits(source))
            compile(content, patch.file, "exec", dont_inherit=True)
            state = patch.inspect(Source(content).tree).state
        except (SyntaxError, ValueError) as exc:
            raise Hy3Error(
                f"{patch.file} would not compile with patch {patch.id} ({exc}): please report this."
            ) from exc
        if state != "applied":
            raise Hy3Error(f"{patch.file} would be in state {state} with patch {patch.id}: please report this.")
    return content


def plan(seen: Seen, patches: list[Patch], goal: Goal) -> Plan:
    """Decide about one file. For ``reported`` the plan is that of ``present``."""
    before = survey(seen, patches)
    if goal == "absent":
        wanted = set(seen.ours) - before.keys()
    else:
        wanted = {*seen.ours, *(name for name, finding in before.items() if finding.state == "defect")}
    if seen.content is None or wanted == set(seen.ours):
        # A record whose original stands in the file is what a killed run left.
        stale = seen.record is not None and seen.record.original == seen.content
        return Plan(seen, before, seen.content, None if stale else seen.record, before)
    original = seen.record.original if seen.record and seen.ours else seen.content
    if wanted - CATALOGUE.keys():
        raise Hy3Error(
            f"{seen.file} carries patch {', '.join(sorted(wanted - CATALOGUE.keys()))}, which this version of the "
            "collection does not know: use the version that made it, or reinstall the engine."
        )
    chosen = [patch for name, patch in CATALOGUE.items() if name in wanted]
    content = build(original, chosen)
    record = None
    if chosen:
        current = {sha256(seen.content): seen.ours} if seen.ours else {}
        record = Record(original, {**current, sha256(content): tuple(patch.id for patch in chosen)})
    return Plan(seen, before, content, record, survey(Seen(seen.file, content, record), patches))


def refuse(plans: list[Plan], package: Package, goal: Goal) -> None:
    """Raise Hy3Error for the first file that ``goal`` must not touch."""
    for item in plans:
        path = package.path(item.seen.file)
        for name, (state, why) in item.before.items():
            if goal == "present" and state == "partial":
                raise Hy3Error(
                    f"{path} carries half of patch {name} ({why}): finish that edit by hand or reinstall "
                    f"{package.name}; nothing was written."
                )
            if goal == "present" and state == "unrecognised":
                raise Hy3Error(
                    f"{path} does not have the code that patch {name} knows ({why}): leave {name} out if the "
                    f"checkpoint does not need it, or install a release of {package.name} that it knows; "
                    "nothing was written."
                )
            if goal == "absent" and state == "applied" and name not in item.seen.ours:
                raise Hy3Error(
                    f"{path} was changed by someone else after patch {name} was applied, so its original cannot be put "
                    f"back: reinstall {package.name}; nothing was written."
                )


def run(
    *, engine: str, patches: list[str], state: Goal, check_mode: bool = False, package_path: str | None = None
) -> dict[str, Any]:
    """Bring ``patches`` (ids) of ``engine`` to ``state`` and return what RETURN of module engine_patch describes.

    Without ``package_path`` it is the package that the running interpreter would import. All files or none: every
    refusal (Hy3Error) comes before the first write, and the next run completes one that was killed between two files.
    """
    directory = Path(package_path) if package_path else find_package(engine)
    if directory.name != engine or not (directory / "__init__.py").is_file():
        raise Hy3Error(
            f"{directory} is not the directory of a package {engine}: give the one that holds its __init__.py."
        )
    package = Package(directory)
    groups: dict[str, list[Patch]] = {}
    for name in dict.fromkeys(patches):
        groups.setdefault(package.resolve(CATALOGUE[name].file), []).append(CATALOGUE[name])
    plans = [plan(package.see(file), group, state) for file, group in groups.items()]
    refuse(plans, package, state)
    if state != "reported" and not check_mode:
        for item in plans:
            carry_out(item, package)
    return {
        "package_path": str(directory),
        "engine_version": find_version(engine, [str(directory.parent)] if package_path else sys.path),
        **report(plans, package, state),
    }


def carry_out(item: Plan, package: Package) -> None:
    """Do what the plan says."""
    if item.changed and item.content is not None:
        package.write(item.seen.file, item.content, item.record)
    elif item.record is None:
        package.forget(item.seen.file)


def report(plans: list[Plan], package: Package, goal: Goal) -> dict[str, Any]:
    """The return values about files; for ``reported``, the hashes and states are those found."""
    entries, diffs, texts, now = [], [], [], {}
    refused = any(finding.state in ("partial", "unrecognised") for item in plans for finding in item.before.values())
    for item in plans:
        file, found = item.seen.file, item.seen.content
        content, after = (found, item.before) if goal == "reported" else (item.content, item.after)
        now[file] = _hash(content)
        for name, finding in item.before.items():
            entries.append(
                {
                    "id": name,
                    "title": CATALOGUE[name].title,
                    "harm": CATALOGUE[name].harm,
                    "file": file,
                    "state_before": finding.state,
                    "state": after[name].state,
                    "reason": after[name].why,
                    "sha256_before": _hash(found),
                    "sha256": now[file],
                }
            )
        if item.changed and not refused and found is not None and item.content is not None:
            old, new = Source(found).text, Source(item.content).text
            path = str(package.path(file))
            diffs.append({"before": old, "after": new, "before_header": path, "after_header": path})
            texts.append(unified_diff(file, old, new))
    return {
        "changed": goal != "reported" and bool(diffs),
        "patches": entries,
        "digest": sha256(json.dumps(now, sort_keys=True).encode()),
        "diff": [] if goal == "reported" else diffs,
        "unified_diff": "".join(texts),
    }


def _hash(content: bytes | None) -> str | None:
    return None if content is None else sha256(content)


def unified_diff(file: str, old: str, new: str) -> str:
    """The change as ``patch -p1`` and ``git apply`` read it; lines end only at a line feed, as they do for those."""
    lines = difflib.unified_diff(
        re.findall(r"[^\n]*\n|[^\n]+$", old), re.findall(r"[^\n]*\n|[^\n]+$", new), f"a/{file}", f"b/{file}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def main() -> None:
    """Run as a program."""
    try:
        result = run(**json.loads(sys.argv[2]))
    except Hy3Error as exc:
        result = {"error": str(exc)}
    except OSError as exc:
        result = {
            "error": f"{exc.filename or 'The file system'} cannot be used ({exc.strerror}): run as the user who owns "
            "the engine, where there is room to write."
        }
    print(json.dumps(result))
