# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Source patches for the engines: what state each is in, apply, revert.

The package is a program, too: it runs under the engine's own interpreter (``COMMAND``), because only that one is sure
to know the syntax of the engine's files and where its packages are. Its last argument is a JSON object, the
arguments of ``run()``; it prints the result, or ``{"error": "one sentence"}``, as the last line of its output.

States: ``absent`` (no such file or class), ``upstream_fixed`` (repaired, and not by us), ``defect``, ``applied``
(ours), ``partial`` (half repaired by someone) and ``unrecognised``. The last two refuse, unless the patch can add the
other half.
"""
# pylint: disable=ansible-bad-function  # the engine's interpreter runs this as a program, without Ansible

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch import _sglang, _vllm
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Finding, Patch, Source, alias_of
from ansible_collections.sparks.hy3.plugins.module_utils._patch._needs import (
    SUFFIX_KEY,
    TOKENIZER_CONFIG,
    Checkpoint,
    Need,
    needed_by,
    problems,
    read_checkpoint,
    with_suffix,
)
from ansible_collections.sparks.hy3.plugins.module_utils._patch._store import (
    Package,
    Record,
    Seen,
    find_package,
    find_version,
    replace_file,
    sha256,
)

Goal = Literal["present", "absent", "reported"]

# By id, each with one entry for every file that it changes.
CATALOGUE: dict[str, tuple[Patch, ...]] = {
    name: tuple(patch for patch in (*_vllm.PATCHES, *_sglang.PATCHES) if patch.id == name)
    for name in sorted({patch.id for patch in (*_vllm.PATCHES, *_sglang.PATCHES)})
}

# Once in place, it asks the checkpoint's own list, so it breaks none.
_CONDITIONAL = {"P5"}

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
    alias = alias_of(tree, seen.file)
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


def plan(
    seen: Seen, patches: list[Patch], goal: Goal, known: list[Patch], needs: Mapping[str, Need] = MappingProxyType({})
) -> Plan:
    """Decide about one file, of which ``known`` are all patches. For ``reported`` the plan is that of ``present``.

    A patch that ``needs`` calls harmful is not applied, and taken out where we applied it.
    """
    before = survey(seen, patches)
    if goal == "absent":
        wanted = set(seen.ours) - before.keys()
    else:
        lacking = {name for name, finding in before.items() if finding.state == "defect" or finding.rest}
        broken = harmful(needs)
        wanted = (set(seen.ours) - (broken - _CONDITIONAL)) | (lacking - broken)
    if seen.content is None or wanted == set(seen.ours):
        # A record whose original stands in the file is what a killed run left.
        stale = seen.record is not None and seen.record.original == seen.content
        return Plan(seen, before, seen.content, None if stale else seen.record, before)
    original = seen.record.original if seen.record and seen.ours else seen.content
    chosen = [patch for patch in known if patch.id in wanted]
    if unknown := wanted - {patch.id for patch in chosen}:
        raise Hy3Error(
            f"{seen.file} carries patch {', '.join(sorted(unknown))}, which this version of the "
            "collection does not know: use the version that made it, or reinstall the engine."
        )
    content = build(original, chosen)
    record = None
    if chosen:
        current = {sha256(seen.content): seen.ours} if seen.ours else {}
        record = Record(original, {**current, sha256(content): tuple(patch.id for patch in chosen)})
    return Plan(seen, before, content, record, survey(Seen(seen.file, content, record), patches))


def refuse(plans: list[Plan], package: Package, goal: Goal, needs: Mapping[str, Need]) -> None:
    """Raise Hy3Error for the first file that ``goal`` must not touch."""
    for item in plans:
        path = package.path(item.seen.file)
        if item.changed and path.is_symlink():
            raise Hy3Error(
                f"{path} is a symbolic link to {path.resolve()}, which others may use: install {package.name} with "
                "copies of its files (uv: --link-mode=copy); nothing was written."
            )
        for name, finding in item.before.items():
            state, why = finding.state, finding.why
            blocks = goal == "present" and _blocks(name, finding, needs)
            if blocks and state == "partial":
                raise Hy3Error(
                    f"{path} carries half of patch {name} ({why}): finish that edit by hand or reinstall "
                    f"{package.name}; nothing was written."
                )
            if blocks and state == "unrecognised":
                raise Hy3Error(
                    f"{path} does not have the code that patch {name} knows ({why}): leave {name} out if the "
                    f"checkpoint does not need it, or install a release of {package.name} that it knows; "
                    "nothing was written."
                )
            stays = state == "applied" and name not in item.seen.ours
            harm = (
                f" and would break this checkpoint ({needs[name].why})" if name in harmful(needs) - _CONDITIONAL else ""
            )
            if stays and (goal == "absent" or harm):
                raise Hy3Error(
                    f"{path} was changed by someone else after patch {name} was applied{harm}, so its original cannot "
                    f"be put back: reinstall {package.name}; nothing was written."
                )


def needs_of(checkpoint: Checkpoint, engine: str, ranks: int) -> dict[str, Need]:
    """What ``checkpoint`` needs of each patch of ``engine``, by id."""
    ours = [name for name, (patch, *_twins) in CATALOGUE.items() if patch.engine == engine]
    return {name: needed_by(checkpoint, name, ranks=ranks) for name in ours}


def harmful(needs: Mapping[str, Need]) -> set[str]:
    """Ids of the patches that the checkpoint must not be served with."""
    return {name for name, need in needs.items() if need.needed_by == "harmful"}


def _harm_from_elsewhere(plans: list[Plan], package: Package, needs: Mapping[str, Need]) -> list[str]:
    """Repairs that others made and that break the checkpoint. Sentences."""
    return [
        f"{package.path(item.seen.file)} has what patch {name} does, not by this collection, and that breaks this "
        f"checkpoint ({needs[name].why}): install a release of {package.name} without it, or another checkpoint."
        for item in plans
        for name, finding in item.before.items()
        if finding.state == "upstream_fixed" and name in harmful(needs)
    ]


def refuse_other_suffix(plans: list[Plan], package: Package, suffix: str) -> None:
    """Raise Hy3Error for the first file that somebody wrote another than the checkpoint's ``suffix`` into."""
    for item in plans:
        for written in {finding.suffix for finding in item.before.values()} - {None, suffix}:
            raise Hy3Error(
                f"{package.path(item.seen.file)} looks for special tokens with the suffix {written} and those of the "
                f"checkpoint have {suffix or 'none'}: reinstall {package.name}; nothing was written."
            )


def _blocks(name: str, finding: Finding, needs: Mapping[str, Need]) -> bool:
    """Whether patch ``name`` cannot be put in place and must be, as each must whose need nobody looked up."""
    unclear = finding.state in ("partial", "unrecognised") and not finding.rest
    return unclear and (name not in needs or needs[name].needed_by == "needed")


def choose(engine: str, asked: list[str] | None, goal: Goal, needs: Mapping[str, Need]) -> list[str]:
    """The ids to work on: those asked for and, to be present, those needed; without ``asked`` otherwise all of them.

    Raises Hy3Error for a patch of another engine, and for one that ``needs`` calls harmful, if it is to be present.
    """
    known = [name for name, (patch, *_twins) in CATALOGUE.items() if patch.engine == engine]
    if foreign := [name for name in asked or [] if name not in known]:
        raise Hy3Error(f"{engine} has no patch {foreign[0]}: it has {', '.join(known)}.")
    if asked is None and goal != "present":
        return known
    chosen = list(dict.fromkeys(asked or []))
    if goal == "present":
        for name in chosen:
            if name in needs and needs[name].needed_by == "harmful":
                raise Hy3Error(
                    f"Patch {name} would break this checkpoint ({needs[name].why}): take {name} out of the patches "
                    "asked for; nothing was written."
                )
        chosen += [name for name, need in needs.items() if need.needed_by == "needed" and name not in chosen]
    return chosen


def run(
    *,
    engine: str,
    patches: list[str] | None,
    state: Goal,
    check_mode: bool = False,
    package_path: str | None = None,
    checkpoint: str | None = None,
    tensor_parallel_size: int = 1,
    repair_token_suffix: bool = False,
) -> dict[str, Any]:
    """Bring ``patches`` (ids) of ``engine`` to ``state`` and return what RETURN of module engine_patch describes.

    Without ``package_path`` it is the package that the running interpreter would import. All files or none: every
    refusal (Hy3Error) comes before the first write, a failed write (OSError) takes the ones before it back, and the
    next run completes one that was killed between two files.
    """
    directory = Path(package_path) if package_path else find_package(engine)
    if directory.name != engine or not (directory / "__init__.py").is_file():
        raise Hy3Error(
            f"{directory} is not the directory of a package {engine}: give the one that holds its __init__.py."
        )
    if tensor_parallel_size < 1:
        raise Hy3Error(f"tensor_parallel_size is {tensor_parallel_size}: give the number of ranks, 1 or more.")
    read = read_checkpoint(Path(checkpoint)) if checkpoint else None
    ours = [patch for twins in CATALOGUE.values() for patch in twins if patch.engine == engine]
    needs = needs_of(read, engine, tensor_parallel_size) if read else {}
    chosen = choose(engine, patches, state, needs)
    if state == "present":
        # They may be in place from another time, or from somebody else.
        chosen += sorted(harmful(needs))
    version = find_version(engine, [str(directory.parent), *([] if package_path else sys.path)])
    package = Package(directory, version)
    places = {patch.file: package.resolve(patch.file) for patch in ours}
    wanted = [patch for name in chosen for patch in CATALOGUE[name]]
    plans = [
        plan(
            package.see(file),
            [patch for patch in wanted if places[patch.file] == file],
            state,
            [patch for patch in ours if places[patch.file] == file],
            needs,
        )
        for file in dict.fromkeys(places[patch.file] for patch in wanted)
    ]
    repairs = repair_token_suffix and engine == "vllm" and state == "present"
    key = missing_key(read, Path(checkpoint)) if read and checkpoint and repairs else None
    if state != "reported":
        refuse(plans, package, state, needs)
        if read and read.tokens and state == "present":
            refuse_other_suffix(plans, package, read.suffix)
        if not check_mode:
            carry_out(plans, package)
            if key:
                replace_file(key.path, key.new.encode(), like=key.path, room=key.path.parent)
    answer = report(plans, package, state, needs, check_mode=check_mode, files=sorted(set(places.values())))
    unsolved = [*problems(read, engine), *_harm_from_elsewhere(plans, package, needs)] if read else []
    if key:
        answer |= {"changed": True, "diff": [*answer["diff"], key.diff()]}
        unsolved = [problem for problem in unsolved if TOKENIZER_CONFIG not in problem]
    return {
        "package_path": str(directory),
        "engine_version": version,
        "checkpoint_problems": unsolved,
        **answer,
    }


class MissingKey(NamedTuple):
    """A tokenizer_config.json without the right key, and the text that it is to have."""

    path: Path
    old: str
    new: str

    def diff(self) -> dict[str, str]:
        """As Ansible shows it."""
        return _diff(str(self.path), self.old, self.new)


def missing_key(read: Checkpoint, directory: Path) -> MissingKey | None:
    """What to do about the key that vLLM 0.25 and newer look for; None if the checkpoint is right.

    Raises Hy3Error where the file is no place to write to.
    """
    path = directory / TOKENIZER_CONFIG
    if not read.wrong_suffix:
        return None
    if not path.is_file():
        raise Hy3Error(
            f"{directory} has no {TOKENIZER_CONFIG} to write {SUFFIX_KEY} into: fetch that file; nothing was written."
        )
    if path.is_symlink():
        raise Hy3Error(
            f"{path} is a symbolic link to {path.resolve()}, which others may use, as in a download cache: fetch the "
            f"checkpoint as files of its own to have {SUFFIX_KEY} written; nothing was written."
        )
    old = path.read_bytes().decode()
    return MissingKey(path, old, with_suffix(old, read.suffix))


def carry_out(plans: list[Plan], package: Package) -> None:
    """Do what the plans say; where one cannot be done (OSError), undo those before it."""
    done: list[Plan] = []
    try:
        for item in plans:
            done.append(item)
            if item.changed and item.content is not None:
                package.write(item.seen.file, item.content, item.record)
            elif item.record is None:
                package.forget(item.seen.file)
    except OSError:
        for item in done:
            if item.changed and item.seen.content is not None:
                with contextlib.suppress(OSError):  # the next run repairs what this one cannot
                    package.write(item.seen.file, item.seen.content, item.seen.record)
        raise


def report(
    plans: list[Plan],
    package: Package,
    goal: Goal,
    needs: Mapping[str, Need],
    *,
    check_mode: bool,
    files: Iterable[str],
) -> dict[str, Any]:
    """The return values about files; for ``reported``, the hashes and states are those found.

    ``files`` are all that a patch of the engine is about: those without one may differ between nodes, too.
    """
    entries, diffs, texts = [], [], []
    planned = {item.seen.file for item in plans}
    others = {file: package.path(file) for file in files if file not in planned}
    now = {file: _hash(path.read_bytes()) if path.is_file() else None for file, path in others.items()}
    refused = any(_blocks(name, finding, needs) for item in plans for name, finding in item.before.items())
    for item in plans:
        file, found = item.seen.file, item.seen.content
        content, after = (found, item.before) if goal == "reported" else (item.content, item.after)
        now[file] = _hash(content)
        # A process that runs today would have started before the write that check mode leaves out.
        foreseen = check_mode and goal != "reported" and item.changed
        written = time.time() if foreseen else package.written(file, now=time.time())
        for name, finding in item.before.items():
            need = needs.get(name)
            entries.append(
                {
                    "id": name,
                    "title": CATALOGUE[name][0].title,
                    "harm": CATALOGUE[name][0].harm,
                    "source": CATALOGUE[name][0].source,
                    "needed_by": need.needed_by if need else None,
                    "needed_why": need.why if need else None,
                    "file": file,
                    "state_before": finding.state,
                    "state": after[name].state,
                    "reason": after[name].why,
                    "sha256_before": _hash(found),
                    "sha256": now[file],
                    "written": written,
                }
            )
        if item.changed and not refused and found is not None and item.content is not None:
            old, new = Source(found).text, Source(item.content).text
            path = str(package.path(file))
            diffs.append(_diff(path, old, new))
            texts.append(unified_diff(file, old, new))
    return {
        "changed": goal != "reported" and bool(diffs),
        "patches": entries,
        "files": now,
        "digest": sha256(json.dumps(now, sort_keys=True).encode()),
        "diff": [] if goal == "reported" else diffs,
        "unified_diff": "".join(texts),
    }


def _diff(path: str, old: str, new: str) -> dict[str, str]:
    return {"before": old, "after": new, "before_header": path, "after_header": path}


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
