# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The life of a patched file: applied, extended, reverted, reinstalled, changed by hand, killed at every step."""

from __future__ import annotations

import ast
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Edit, Finding, Patch, Source

FILE = "vllm/models/numbers.py"
OTHER = "vllm/models/letters.py"
ORIGINAL = b"A = 1\r\nB = 1  # \xc3\xa9\r\n"
WITH_A = ORIGINAL.replace(b"A = 1", b"A = 2")
WITH_B = ORIGINAL.replace(b"B = 1", b"B = 2")
WITH_BOTH = WITH_A.replace(b"B = 1", b"B = 2")

# What the value of a variable says about the patch that is to make it 2.
STATES: dict[Any, Finding] = {
    1: Finding("defect"),
    2: Finding("applied"),
    3: Finding("upstream_fixed", "it is 3"),
    4: Finding("partial", "it is 4"),
    5: Finding("partial", "it is 5", rest=True),
}


def value_of(tree: ast.Module, variable: str) -> ast.expr | None:
    return next(
        (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == variable), None
    )


def patch_of(variable: str, file: str = FILE, new: str = "2") -> Patch:
    def inspect(tree: ast.Module) -> Finding:
        value = value_of(tree, variable)
        if value is None:
            return Finding("absent", "it is not there")
        known = STATES.get(value.value) if isinstance(value, ast.Constant) else None
        return known or Finding("unrecognised", f"it is {ast.unparse(value)}")

    def edits(source: Source) -> list[Edit]:
        value = value_of(source.tree, variable)
        assert value is not None
        return [Edit(source.start(value), source.start(value) + 1, new)]

    return Patch(
        f"T{variable}", "vllm", file, "title", "what goes wrong without it", "a test", inspect=inspect, edits=edits
    )


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in (patch_of("A"), patch_of("B"), patch_of("C", OTHER)):
        monkeypatch.setitem(_patch.CATALOGUE, patch.id, (patch,))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "site-packages" / "vllm"
    (root / "models").mkdir(parents=True)
    (root / "__init__.py").write_bytes(b"raise SystemExit('imported')\n")
    (root.parent / FILE).write_bytes(ORIGINAL)
    (root.parent / OTHER).write_bytes(b"C = 1\n")
    return root


def run(package: Path, state: str, *patches: str, check_mode: bool = False) -> dict[str, Any]:
    return _patch.run(
        engine="vllm", patches=list(patches), state=state, check_mode=check_mode, package_path=str(package)
    )


def states(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(entry["state_before"], entry["state"]) for entry in result["patches"]]


def content(package: Path, file: str = FILE) -> bytes:
    return (package.parent / file).read_bytes()


def listing(package: Path) -> dict[str, bytes]:
    return {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*") if path.is_file()}


def test_present_then_absent_is_a_round_trip(package: Path) -> None:
    before = listing(package)
    first, second = run(package, "present", "TA"), run(package, "present", "TA")
    assert content(package) == WITH_A
    assert (first["changed"], states(first)) == (True, [("defect", "applied")])
    assert (second["changed"], states(second), second["diff"]) == (False, [("applied", "applied")], [])
    third, fourth = run(package, "absent", "TA"), run(package, "absent", "TA")
    assert (third["changed"], states(third)) == (True, [("applied", "defect")])
    assert (fourth["changed"], states(fourth)) == (False, [("defect", "defect")])
    assert listing(package) == before


# (patches and state of each run in turn, the content at the end)
TEST_SEQUENCES: list[tuple[str, list[tuple[str, list[str]]], bytes]] = [
    ("both-at-once", [("present", ["TA", "TB"])], WITH_BOTH),
    ("one-then-other", [("present", ["TB"]), ("present", ["TA"])], WITH_BOTH),
    ("named-twice", [("present", ["TA", "TA"])], WITH_A),
    ("first-out", [("present", ["TA", "TB"]), ("absent", ["TA"])], WITH_B),
    ("last-out", [("present", ["TA", "TB"]), ("absent", ["TB"])], WITH_A),
    ("out-one-by-one", [("present", ["TA", "TB"]), ("absent", ["TB"]), ("absent", ["TA"])], ORIGINAL),
    ("out-together", [("present", ["TB"]), ("present", ["TA"]), ("absent", ["TA", "TB"])], ORIGINAL),
    ("other-out", [("present", ["TA"]), ("absent", ["TB"])], WITH_A),
    ("reported", [("reported", ["TA"])], ORIGINAL),
]


@pytest.mark.parametrize(("steps", "end"), [row[1:] for row in TEST_SEQUENCES], ids=[row[0] for row in TEST_SEQUENCES])
def test_sequences(package: Path, steps: list[tuple[str, list[str]]], end: bytes) -> None:
    for state, patches in steps:
        predicted = run(package, state, *patches, check_mode=True)
        done = run(package, state, *patches)
        for entry, foreseen in zip(done["patches"], predicted["patches"], strict=True):
            assert foreseen.pop("written") <= entry.pop("written")
        assert done == predicted
        assert done["patches"][0]["sha256"] == _patch.sha256(content(package))
        assert run(package, state, *patches)["changed"] is False
    assert content(package) == end


@pytest.mark.parametrize("state", ["present", "absent", "reported"])
@pytest.mark.parametrize("patched", [False, True], ids=["original", "patched"])
def test_check_mode_and_reported_write_nothing(package: Path, state: str, patched: bool) -> None:
    if patched:
        run(package, "present", "TA")
    before = listing(package)
    run(package, state, "TA", check_mode=True)
    run(package, "reported", "TA")
    assert listing(package) == before


def test_differences_are_exact_and_apply(package: Path, tmp_path: Path) -> None:
    reported = run(package, "reported", "TA")
    assert (reported["changed"], states(reported), reported["diff"]) == (False, [("defect", "defect")], [])
    (tmp_path / "p.diff").write_bytes(reported["unified_diff"].encode())
    result = run(package, "present", "TA")
    (diff,) = result["diff"]
    assert (diff["before"].encode(), diff["after"].encode()) == (ORIGINAL, WITH_A)
    assert diff["before_header"] == diff["after_header"] == str(package.parent / FILE)
    assert result["unified_diff"] == reported["unified_diff"]
    (package.parent / FILE).write_bytes(ORIGINAL)
    subprocess.run(["git", "apply", "-p1", str(tmp_path / "p.diff")], cwd=package.parent, check=True)  # noqa: S607
    assert content(package) == WITH_A


def test_unified_diff_without_a_last_line_end() -> None:
    assert _patch.unified_diff("f", "a\nb", "a\nc").splitlines()[3:] == [
        " a",
        "-b",
        "\\ No newline at end of file",
        "+c",
        "\\ No newline at end of file",
    ]


# Content of the file, and for present: the state (None if refused), for absent: whether it is refused.
TEST_FOUND: list[tuple[str, bytes, str | None]] = [
    ("upstream-fixed", b"A = 3\n", "upstream_fixed"),
    ("same-edit-not-ours", b"A = 2\n", "upstream_fixed"),
    ("class-not-there", b"Z = 1\n", "absent"),
    ("partial", b"A = 4\n", None),
    ("unrecognised", b"A = 6\n", None),
    ("not-python", b"A = (\n", None),
    ("not-utf-8", b"A = 1 # \xff\n", None),
    ("alias-of-nothing", b"import sys\nimport vllm.gone as m\nsys.modules[__name__] = m\n", None),
]


@pytest.mark.parametrize(("found", "state"), [row[1:] for row in TEST_FOUND], ids=[row[0] for row in TEST_FOUND])
def test_what_is_not_ours_stays(package: Path, found: bytes, state: str | None) -> None:
    (package.parent / FILE).write_bytes(found)
    before = listing(package)
    if state is None:
        with pytest.raises(Hy3Error, match=r"numbers\.py .* nothing was written\.$"):
            run(package, "present", "TC", "TA")
    else:
        assert states(run(package, "present", "TA")) == [(state, state)]
    assert run(package, "absent", "TA")["changed"] is False
    assert run(package, "reported", "TA")["unified_diff"] == ""
    assert listing(package) == before


def test_reported_shows_nothing_where_present_would_refuse(package: Path) -> None:
    (package.parent / FILE).write_bytes(b"A = 4\n")
    result = run(package, "reported", "TC", "TA")
    assert (states(result), result["unified_diff"]) == ([("defect", "defect"), ("partial", "partial")], "")


def test_half_a_patch_that_can_be_finished(package: Path) -> None:
    (package.parent / FILE).write_bytes(b"A = 5\n")
    assert run(package, "reported", "TA")["unified_diff"] != ""
    assert states(run(package, "present", "TA")) == [("partial", "applied")]
    assert content(package) == b"A = 2\n"
    run(package, "absent", "TA")
    assert content(package) == b"A = 5\n"


@pytest.mark.parametrize("check_mode", [True, False])
def test_symbolic_link_is_refused(package: Path, tmp_path: Path, check_mode: bool) -> None:
    (tmp_path / "shared.py").write_bytes(ORIGINAL)
    (package.parent / FILE).unlink()
    (package.parent / FILE).symlink_to(tmp_path / "shared.py")
    with pytest.raises(Hy3Error, match=r"numbers\.py is a symbolic link to /.*/shared\.py, which .* was written\.$"):
        run(package, "present", "TC", "TA", check_mode=check_mode)
    assert (content(package), content(package, OTHER)) == (ORIGINAL, b"C = 1\n")
    assert states(run(package, "reported", "TA")) == [("defect", "defect")]


def test_failed_write_takes_the_ones_before_it_back(package: Path) -> None:
    sealed = package / "sealed"
    sealed.mkdir()
    (package.parent / FILE).rename(sealed / "numbers.py")
    (package.parent / FILE).write_bytes(b"import sys\nimport vllm.sealed.numbers as m\nsys.modules[__name__] = m\n")
    before = listing(package)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", failing_for("numbers.py", os.replace))
        with pytest.raises(OSError, match="No space left"):
            run(package, "present", "TC", "TA")
    assert content(package, OTHER) == b"C = 1\n"
    run(package, "absent", "TC", "TA")
    assert listing(package) == before


def failing_for(name: str, replace: Callable[..., None]) -> Callable[..., None]:
    def replace_or_fail(old: str, new: Path) -> None:
        if Path(new).name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(new))
        replace(old, new)

    return replace_or_fail


def test_owner_mode_and_bytecode(package: Path) -> None:
    path = package.parent / FILE
    path.chmod(0o640)
    os.chown(path, 1234, 2345)
    cache = path.parent / "__pycache__"
    cache.mkdir()
    for name in ("numbers.cpython-311.pyc", "numbers.cpython-312.opt-1.pyc", "letters.cpython-311.pyc"):
        (cache / name).write_bytes(b"old")
    run(package, "present", "TA")
    found = path.stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o640, 1234, 2345)
    assert [left.name for left in cache.iterdir()] == ["letters.cpython-311.pyc"]


def test_sidecar_has_both_hashes(package: Path) -> None:
    run(package, "present", "TA")
    (sidecar,) = (package / ".hy3-patch").iterdir()
    record = json.loads(sidecar.read_text())
    assert record["sha256_original"] == _patch.sha256(ORIGINAL)
    assert record["written"] == {_patch.sha256(WITH_A): ["TA"]}


def test_no_file(package: Path) -> None:
    (package.parent / FILE).unlink()
    result = run(package, "present", "TA")
    assert (result["changed"], states(result)) == (False, [("absent", "absent")])
    assert result["patches"][0]["sha256"] is None


def test_reinstall_makes_the_record_void(package: Path) -> None:
    run(package, "present", "TA")
    newer = b"# newer release\nA = 1\n"
    (package.parent / FILE).write_bytes(newer)
    assert run(package, "absent", "TA")["changed"] is False
    assert states(run(package, "present", "TA")) == [("defect", "applied")]
    run(package, "absent", "TA")
    assert content(package) == newer


def test_upgrade_to_a_repaired_release(package: Path) -> None:
    run(package, "present", "TA")
    (package.parent / FILE).write_bytes(b"A = 3\n")
    assert states(run(package, "present", "TA")) == [("upstream_fixed", "upstream_fixed")]
    assert run(package, "absent", "TA")["changed"] is False


def test_upgrade_to_a_release_with_our_own_edit(package: Path) -> None:
    metadata = package.parent / "vllm-1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: vllm\nVersion: 0.28.0\n")
    run(package, "present", "TA")
    metadata.write_text("Name: vllm\nVersion: 0.29.0\n")
    (package.parent / FILE).write_bytes(b"# 0.29.0\nA = 2\n")
    assert states(run(package, "reported", "TA")) == [("upstream_fixed", "upstream_fixed")]
    assert run(package, "absent", "TA")["changed"] is False
    assert not (package / ".hy3-patch").exists()


def test_changed_by_hand_after_patching(package: Path) -> None:
    run(package, "present", "TA")
    (package.parent / FILE).write_bytes(WITH_A + b"# mine\n")
    assert states(run(package, "present", "TA")) == [("applied", "applied")]
    with pytest.raises(Hy3Error, match="was changed by someone else after patch TA was applied"):
        run(package, "absent", "TA")
    assert content(package) == WITH_A + b"# mine\n"


def test_patch_of_another_version_of_the_collection(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(package, "present", "TA")
    monkeypatch.delitem(_patch.CATALOGUE, "TA")
    with pytest.raises(Hy3Error, match="carries patch TA, which this version of the collection does not know"):
        run(package, "present", "TB")


# Field case B80, and a patch whose edit does not do what it says.
@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("(", "would not compile with patch TA"),
        ("2; return", "would not compile with patch TA"),
        ("3", "would be in state upstream_fixed with"),
    ],
    ids=["syntax", "parses-only", "other-state"],
)
def test_bad_patch_writes_nothing(package: Path, monkeypatch: pytest.MonkeyPatch, new: str, message: str) -> None:
    monkeypatch.setitem(_patch.CATALOGUE, "TA", (patch_of("A", new=new),))
    before = listing(package)
    with pytest.raises(Hy3Error, match=message):
        run(package, "present", "TA")
    assert listing(package) == before


def test_alias_is_followed(package: Path) -> None:
    """Field case B78: the code moved, the old path only points at it."""
    shim = b"import sys\nfrom vllm.new.place import numbers as m\nsys.modules[__name__] = m\n"
    (package.parent / FILE).write_bytes(shim)
    (package / "new" / "place").mkdir(parents=True)
    (package / "new" / "place" / "numbers.py").write_bytes(ORIGINAL)
    result = run(package, "present", "TA")
    assert result["patches"][0]["file"] == "vllm/new/place/numbers.py"
    assert (content(package), content(package, "vllm/new/place/numbers.py")) == (shim, WITH_A)


def test_digest_tells_nodes_with_different_code_apart(package: Path) -> None:
    """Field case B83."""
    plain = run(package, "reported", "TA")["digest"]
    patched = run(package, "present", "TA")["digest"]
    (package.parent / FILE).write_bytes(ORIGINAL + b"# another build\n")
    other = run(package, "present", "TA")["digest"]
    assert len({plain, patched, other}) == 3
    (package.parent / FILE).write_bytes(WITH_A)
    assert run(package, "reported", "TA")["digest"] == patched


def test_digest_covers_files_that_nobody_asked_for(package: Path) -> None:
    """Field case B83: the worker's hy_v3.py differed, which no needed patch was about."""
    run(package, "present", "TA")
    before = run(package, "present", "TA")
    assert before["files"][OTHER] == _patch.sha256(b"C = 1\n")
    (package.parent / OTHER).write_bytes(b"C = 3\n")
    after = run(package, "present", "TA")
    assert (after["changed"], after["patches"]) == (False, before["patches"])
    assert after["digest"] != before["digest"]
    assert {file for file in after["files"] if after["files"][file] != before["files"][file]} == {OTHER}
    assert run(package, "present")["digest"] == after["digest"]
    (package.parent / OTHER).unlink()
    assert run(package, "present", "TA")["files"][OTHER] is None


@pytest.mark.parametrize("path", ["", "models", "../sglang"], ids=["parent", "inner", "other"])
def test_package_path_must_be_the_package(package: Path, path: str) -> None:
    wrong = package.parent if not path else package / path
    with pytest.raises(Hy3Error, match="is not the directory of a package vllm"):
        run(wrong, "reported", "TA")


def in_child(action: Callable[[], object], *, kill_at: int | None = None) -> int:
    """Start ``action`` in a forked process that kills itself at audit event number ``kill_at`` (open, rename, …)."""
    child = os.fork()
    if child == 0:
        events = iter(range(1, sys.maxsize))

        def hook(_event: str, _args: object) -> None:
            if next(events) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        finally:
            os._exit(0)
    return child


TEST_KILLED: list[tuple[str, list[str], tuple[str, list[str]], bytes, bytes]] = [
    ("apply", [], ("present", ["TA"]), ORIGINAL, WITH_A),
    ("revert", ["TA"], ("absent", ["TA"]), WITH_A, ORIGINAL),
    ("add-another", ["TA"], ("present", ["TB"]), WITH_A, WITH_BOTH),
    ("take-one-out", ["TA", "TB"], ("absent", ["TA"]), WITH_BOTH, WITH_B),
]


@pytest.mark.parametrize(
    ("setup", "step", "old", "new"), [row[1:] for row in TEST_KILLED], ids=[row[0] for row in TEST_KILLED]
)
def test_killed_at_every_step(
    package: Path, setup: list[str], step: tuple[str, list[str]], old: bytes, new: bytes
) -> None:
    before = listing(package)
    seen, number, killed = set(), 0, True
    while killed:
        number += 1
        if setup:
            run(package, "present", *setup)
        _pid, status = os.waitpid(in_child(lambda: run(package, step[0], *step[1]), kill_at=number), 0)
        killed = os.WIFSIGNALED(status)
        seen.add(content(package))
        assert sorted(path.name for path in (package / "models").iterdir()) == ["letters.py", "numbers.py"]
        run(package, step[0], *step[1])
        assert content(package) == new
        assert not list(package.rglob("*.new"))
        run(package, "absent", "TA", "TB")
        assert listing(package) == before
    assert seen == {old, new}
    assert number > 20


def test_killed_at_any_time(package: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    chance = random.Random(seed)  # noqa: S311
    before = listing(package)

    def back_and_forth() -> None:
        while True:
            run(package, "present", "TA", "TC")
            run(package, "absent", "TA", "TC")

    for _turn in range(150):
        child = in_child(back_and_forth)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert content(package) in (ORIGINAL, WITH_A)
        assert content(package, OTHER) in (b"C = 1\n", b"C = 2\n")
        if chance.random() < 0.5:
            run(package, "present", "TA", "TC")
            assert (content(package), content(package, OTHER)) == (WITH_A, b"C = 2\n")
        run(package, "absent", "TA", "TC")
        assert listing(package) == before


@pytest.mark.parametrize(("inner", "key"), [("", "patches"), ("models", "error")], ids=["result", "error"])
def test_program_answers_in_json(package: Path, inner: str, key: str) -> None:
    request = {"engine": "vllm", "patches": ["P1"], "state": "present", "package_path": str(package / inner)}
    command = [sys.executable, *_patch.COMMAND, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert key in json.loads(done.stdout)


def test_program_says_what_it_cannot_write(package: Path) -> None:
    (package.parent / _patch.CATALOGUE["P1"][0].file).parent.mkdir(parents=True)
    (package.parent / _patch.CATALOGUE["P1"][0].file).mkdir()
    request = {"engine": "vllm", "patches": ["P1"], "state": "present", "package_path": str(package)}
    command = [sys.executable, *_patch.COMMAND, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert json.loads(done.stdout)["error"] == (
        f"{package}/model_executor/models/hy_v3_mtp.py cannot be used (Is a directory): run as the user who owns the "
        "engine, where there is room to write."
    )


def test_patch_of_another_engine(package: Path) -> None:
    with pytest.raises(Hy3Error, match=r"^vllm has no patch P5: it has P1, P2, P3, P7"):
        run(package, "present", "P5")


def test_without_ids_everything_is_taken_out(package: Path) -> None:
    run(package, "present", "TA", "TC")
    result = _patch.run(engine="vllm", patches=None, state="absent", package_path=str(package))
    assert result["changed"] is True
    assert (content(package), content(package, OTHER)) == (ORIGINAL, b"C = 1\n")


def test_every_entry_of_the_catalogue_is_told_apart() -> None:
    entries = [patch for twins in _patch.CATALOGUE.values() for patch in twins if not patch.id.startswith("T")]
    assert {patch.id for patch in entries} == {f"P{number}" for number in range(1, 9)}
    assert len({(patch.id, patch.file) for patch in entries}) == len(entries) == 10
    assert all(patch.file.startswith(f"{patch.engine}/") for patch in entries)
    assert all(patch.title and patch.harm and patch.source for patch in entries)


# The field cases of source_patch, by the test that has them.
FIELD_CASES = {
    "B74": "test__sglang.test_inspect",
    "B75": "test_what_is_not_ours_stays, test_sequences",
    "B77": "test__vllm.test_inspect",
    "B78": "test_alias_is_followed",
    "B80": "test_bad_patch_writes_nothing",
    "B81": "test_the_code_decides_in_any_version",
    "B83": "test_digest_tells_nodes_with_different_code_apart, test_digest_covers_files_that_nobody_asked_for",
}


@pytest.mark.parametrize("version", ["0.19.0", "0.24.0", "0.33.0", "1.0.dev1", ""])
@pytest.mark.parametrize(("code", "state"), [(b"A = 1\n", "applied"), (b"A = 3\n", "upstream_fixed")])
def test_the_code_decides_in_any_version(package: Path, version: str, code: bytes, state: str) -> None:
    """Field case B81, which decides by ranges of versions: a repaired file is never repaired back."""
    if version:
        info = package.parent / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (package.parent / FILE).write_bytes(code)
    result = run(package, "present", "TA")
    assert (result["engine_version"], result["patches"][0]["state"]) == (version or None, state)
    assert run(package, "present", "TA")["changed"] is False


@pytest.mark.parametrize("case", FIELD_CASES)
def test_field_case_has_its_tests(case: str) -> None:
    for name in FIELD_CASES[case].split(", "):
        module, _dot, test = name.rpartition(".")
        text = (Path(__file__).with_name(f"{module}.py") if module else Path(__file__)).read_text()
        assert f"\ndef {test}(" in text


def test_field_cases_are_all_placed() -> None:
    assert set(FIELD_CASES) == {"B74", "B75", "B77", "B78", "B80", "B81", "B83"}
