# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module against real rsync daemons on this machine: what it pulls, from where, and what it refuses."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.pull_nodes import (
    ODD_NAMES,
    SECRET,
    SHARDS,
    Daemon,
    arguments,
    content,
    free_port,
    manifest,
    write_tree,
)

Serve = t.Callable[..., Daemon]


def pull(dest: Path, files: list[dict[str, t.Any]], *sources: dict[str, t.Any], **others: t.Any) -> dict[str, t.Any]:
    return run_module("checkpoint_pull", **arguments(dest, files, *sources, **others))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a daemon over a directory."""
    daemons: list[Daemon] = []

    def start(name: str, directory: Path, **others: t.Any) -> Daemon:
        daemons.append(Daemon(name, directory, tmp_path, **others))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.kill()


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "he ad")


def test_check_mode_then_twice(head: Path, tmp_path: Path, serve: Serve) -> None:
    dest, files, source = tmp_path / "copies" / "a b", manifest(head), serve("head", head).source
    predicted = pull(dest, files, source, _ansible_check_mode=True)
    assert predicted["changed"]
    assert not dest.exists()
    done = pull(dest, files, source, streams=3)
    assert done["changed"], done
    assert done["pulled"] == predicted["pulled"]
    assert done["diff"] == predicted["diff"]
    assert done["pulled"][:SHARDS] == [f"model-{number}.safetensors" for number in reversed(range(SHARDS))]
    assert done["pulled"][-1] == "config.json"
    assert set(done["pulled"]) == {
        *(f"model-{number}.safetensors" for number in range(SHARDS)),
        *ODD_NAMES,
        "config.json",
    }
    assert content(dest) == content(head)
    assert done["pulled_bytes"] == sum(file["size"] for file in files) < done["received"]
    assert done["given"] == {"head": len(files)}
    assert (done["passed_over"], done["removed"], done.get("warnings", [])) == ([], [], [])
    assert not (dest / ".hy3-pull").exists()
    assert (dest / "config.json").stat().st_mtime == (head / "config.json").stat().st_mtime
    before = {path: path.stat().st_ctime_ns for path in dest.rglob("*")}
    again = pull(dest, files, source)
    assert (again["changed"], again["pulled"], again["received"], again["diff"]) == (False, [], 0, [])
    assert {path: path.stat().st_ctime_ns for path in dest.rglob("*")} == before


def test_what_is_there_is_hashed_and_only_the_rest_is_pulled(head: Path, tmp_path: Path, serve: Serve) -> None:
    """Field case B63: a file with its own name may be a half, and as new as can be."""
    dest = shutil.copytree(head, tmp_path / "dest")
    (dest / "model-1.safetensors").write_bytes(b"half")
    damaged = bytearray((dest / "model-2.safetensors").read_bytes())
    damaged[1000] ^= 1
    (dest / "model-2.safetensors").write_bytes(damaged)
    os.utime(dest / "model-2.safetensors", (head / "model-2.safetensors").stat()[7:9])
    (dest / ODD_NAMES[1]).unlink()
    done = pull(dest, manifest(head), serve("head", head).source)
    assert done["pulled"] == ["model-2.safetensors", "model-1.safetensors", ODD_NAMES[1], "config.json"]
    assert content(dest) == content(head)


def test_what_is_removed(head: Path, tmp_path: Path, serve: Serve) -> None:
    """What makes it another checkpoint goes; notes of the user's, other weights and what lies elsewhere stay."""
    dest, elsewhere = shutil.copytree(head, tmp_path / "dest"), tmp_path / "elsewhere"
    downloads = dest / ".cache/huggingface/download"
    downloads.mkdir(parents=True)
    for name in ("added_tokens.json", "model-9.safetensors.incomplete", "NOTES.txt", "other.safetensors", ".own.json"):
        (dest / name).touch()
    (downloads / "x.incomplete").touch()
    elsewhere.write_text("stays")
    (dest / "chat_template.jinja").symlink_to(elsewhere)
    done = pull(dest, manifest(head), serve("head", head).source)
    assert done["changed"]
    assert done["pulled"] == []
    assert sorted(done["removed"]) == [
        ".cache/huggingface/download/x.incomplete",
        "added_tokens.json",
        "chat_template.jinja",
        "model-9.safetensors.incomplete",
    ]
    assert elsewhere.read_text() == "stays"
    assert {path.name for path in dest.iterdir()} - {path.name for path in head.iterdir()} == {
        *("NOTES.txt", "other.safetensors", ".own.json", ".cache")
    }
    assert not pull(dest, manifest(head), serve("again", head).source)["changed"]


def test_cache_of_the_hub(head: Path, tmp_path: Path, serve: Serve) -> None:
    """Field case B62: links become files, wherever they lead; a link at the node is replaced, not written through."""
    repository = tmp_path / "hub/models--a--b"
    snapshot, blobs, shared = repository / "snapshots/abc", repository / "blobs", tmp_path / "hub/blobs"
    for folder in (snapshot, blobs, shared):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(head.glob("*.safetensors"))):
        blob = (blobs, shared)[number % 2] / str(number)
        shutil.copy(path, blob)
        target = os.path.relpath(blob, snapshot) if number % 3 else blob
        (snapshot / path.name).symlink_to(target)
    shutil.copy(head / "config.json", snapshot)
    dest, old = tmp_path / "dest", tmp_path / "old"
    dest.mkdir()
    old.write_text("stays")
    (dest / "model-0.safetensors").symlink_to(old)
    done = pull(dest, manifest(snapshot), serve("head", snapshot).source)
    assert done["changed"], done
    assert content(dest) == content(snapshot)
    assert not any(path.is_symlink() for path in dest.iterdir())
    assert old.read_text() == "stays"


def test_directory_of_the_head_is_a_link(head: Path, tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "link").symlink_to(head)
    pull(tmp_path / "dest", manifest(head), serve("head", tmp_path / "link").source)
    assert content(tmp_path / "dest") == content(head)


def test_half_of_a_file_goes_on(tmp_path: Path, serve: Serve) -> None:
    """From rsync's own name for it as a kill leaves it; what was lost of it is found by its hash."""
    head, dest = write_tree(tmp_path / "head", shards=2, size=4_000_000), tmp_path / "dest"
    files = dest / ".hy3-pull/files"
    files.mkdir(parents=True)
    whole = os.urandom(4_000_000)
    (head / "model-0.safetensors").write_bytes(whole)
    (files / ".model-0.safetensors.aB3dE6").write_bytes(whole[:3_000_000])
    (files / ".left.safetensors.aB3dE6").write_bytes(b"nobody's")
    done = pull(dest, manifest(head), serve("head", head).source)
    assert content(dest) == content(head)
    assert done["received"] < done["pulled_bytes"] - 2_900_000
    assert not (dest / ".hy3-pull").exists()


def test_chain_takes_from_the_first_that_has_it(head: Path, tmp_path: Path, serve: Serve) -> None:
    middle = shutil.copytree(head, tmp_path / "middle")
    files = manifest(head)
    sources = [serve("middle", middle).source, serve("head", head).source]
    assert pull(tmp_path / "dest", files, *sources)["given"] == {"middle": len(files)}
    assert content(tmp_path / "dest") == content(head)


def test_stale_and_damaged_files_of_a_neighbour_are_not_accepted(head: Path, tmp_path: Path, serve: Serve) -> None:
    middle = shutil.copytree(head, tmp_path / "middle")
    (middle / "model-1.safetensors").write_bytes(b"of another size")
    damaged = bytearray((middle / "model-2.safetensors").read_bytes())
    damaged[7] ^= 1
    (middle / "model-2.safetensors").write_bytes(damaged)
    files = manifest(head)
    sources = [serve("middle", middle).source, serve("head", head).source]
    done = pull(tmp_path / "dest", files, *sources, timeout=2)
    assert content(tmp_path / "dest") == content(head)
    # The configuration is the third: by then the neighbour is passed over.
    assert done["given"] == {"middle": len(files) - 3, "head": 3}
    assert done["passed_over"] == [{"name": "middle", "reason": "it has shown nothing new for 2 s"}]
    assert any(
        text.startswith("model-2.safetensors was not taken from middle (its sha256") for text in done["warnings"]
    )


def test_hidden_files_of_a_node_are_not_shown(head: Path, tmp_path: Path, serve: Serve) -> None:
    middle = shutil.copytree(head, tmp_path / "middle")
    shutil.copytree(head, middle / ".hy3-pull/files")
    daemon = serve("middle", middle)
    listing = subprocess.run(
        ["rsync", "--recursive", f"rsync://hy3@127.0.0.1:{daemon.port}/checkpoint/"],
        env={**os.environ, "RSYNC_PASSWORD": SECRET},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "config.json" in listing
    assert ".hy3-pull" not in listing


def test_dead_neighbour_is_passed_over(head: Path, tmp_path: Path, serve: Serve) -> None:
    dead = {"name": "middle", "address": "127.0.0.1", "port": free_port()}
    done = pull(tmp_path / "dest", manifest(head), dead, serve("head", head).source)
    assert content(tmp_path / "dest") == content(head)
    assert [source["name"] for source in done["passed_over"]] == ["middle"]
    assert "Connection refused" in done["passed_over"][0]["reason"]
    assert any(text.startswith("middle was passed over: rsync: ") for text in done["warnings"])


def flip(head: Path) -> None:
    shard = head / "model-3.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[12345] ^= 1
    times = shard.stat()
    shard.write_bytes(damaged)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace(head: Path) -> None:
    (head / "new").write_bytes(b"another revision")
    (head / "new").rename(head / "model-3.safetensors")


def remove(head: Path) -> None:
    (head / "model-3.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flip, "its sha256 is "),
        (replace, "it has 16 bytes there, not 300003"),
        (remove, "it has no such file there, not 300003"),
    ],
)
def test_source_that_is_not_the_manifest(
    head: Path, tmp_path: Path, serve: Serve, *, change: t.Callable[[Path], None], why: str
) -> None:
    """Field case B56 among them: the right size and time, and other content."""
    files, good = manifest(head), content(head)
    change(head)
    source = serve("head", head).source
    message = pull(tmp_path / "dest", files, source, streams=1)["msg"]
    assert message.startswith("model-3.safetensors on head is not the manifest's (")
    assert why in message
    assert "and only the rest is pulled." in message
    assert not (tmp_path / "dest/model-3.safetensors").exists()
    assert not (tmp_path / "dest/config.json").exists()
    (head / "model-3.safetensors").write_bytes(good["model-3.safetensors"])
    done = pull(tmp_path / "dest", files, source)
    assert content(tmp_path / "dest") == good
    if change is flip:
        assert "model-5.safetensors" not in done["pulled"]


def test_old_tree_is_none_that_loads_while_it_is_replaced(head: Path, tmp_path: Path, serve: Serve) -> None:
    """Old files stay until their successors are whole, but for the configuration."""
    dest, old = write_tree(tmp_path / "dest", seed=1), write_tree(tmp_path / "old", seed=1)
    files = manifest(head)
    flip(head)
    pull(dest, files, serve("head", head).source, streams=1)
    changed = {name for name, data in content(old).items() if content(dest).get(name) != data}
    assert changed == {"model-5.safetensors", "model-4.safetensors", "config.json"}
    assert not (dest / "config.json").exists()


def test_nothing_is_touched_until_something_has_come(head: Path, tmp_path: Path) -> None:
    dest, old = write_tree(tmp_path / "dest", seed=1), write_tree(tmp_path / "old", seed=1)
    pull(dest, manifest(head), {"name": "head", "address": "127.0.0.1", "port": free_port()}, timeout=1)
    assert content(dest) == content(old)


def test_wrong_secret_is_said_at_once(head: Path, tmp_path: Path, serve: Serve) -> None:
    source = serve("head", head).source
    message = run_module("checkpoint_pull", **{**arguments(tmp_path / "d", manifest(head), source), "password": "no"})[
        "msg"
    ]
    assert message.startswith("No source can be pulled from (head: @ERROR: auth failed")
    assert SECRET not in message


def test_nobody_there(head: Path, tmp_path: Path) -> None:
    source = {"name": "head", "address": "127.0.0.1", "port": free_port()}
    message = pull(tmp_path / "dest", manifest(head), source, timeout=1)["msg"]
    assert "Connection refused" in message
    assert "see that the daemons there run and the fabric's links are up" in message


def test_owner_and_mode(head: Path, tmp_path: Path, serve: Serve) -> None:
    pull(tmp_path / "dest", manifest(head), serve("head", head).source, owner="nobody")
    for path in [tmp_path / "dest", *(tmp_path / "dest").rglob("*")]:
        found = path.stat()
        assert found.st_uid != 0, path
        assert stat.S_IMODE(found.st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_too_little_room_is_said_before(head: Path, tmp_path: Path) -> None:
    files = [*manifest(head), {"name": "huge.safetensors", "size": 2**60, "sha256": "0" * 64}]
    source = {"name": "head", "address": "127.0.0.1", "port": 1}
    message = pull(tmp_path / "dest", files, source)["msg"]
    assert "needs 11529215" in message
    assert message.endswith("make room, or name a directory on a larger disk.")


def link_out(dest: Path) -> None:
    dest.mkdir()
    (dest / "sub").symlink_to(dest.parent)


@pytest.mark.parametrize(
    ("others", "prepare", "message"),
    [
        ({"streams": 0}, None, "streams is 0, which is not 1 to 32"),
        ({"timeout": 0}, None, "timeout is 0, which is not 1 to 86400"),
        ({"sources": []}, None, "sources is empty"),
        ({"manifest": []}, None, "The manifest has no config.json"),
        ({"manifest": [{"name": "../x", "size": 1}]}, None, "'../x' with 1 bytes, which is no file of a checkpoint"),
        ({"manifest": [{"name": ".x/y", "size": 1}]}, None, "'.x/y' with 1 bytes, which is no file of a checkpoint"),
        ({"owner": "no such"}, None, "The owner 'no such' is no user of this node"),
        ({}, link_out, "leads out of"),
        ({}, Path.touch, "is no directory; name another, or remove it."),
    ],
)
def test_bad_input(
    head: Path,
    tmp_path: Path,
    *,
    others: dict[str, t.Any],
    prepare: t.Callable[[Path], None] | None,
    message: str,
) -> None:
    dest = tmp_path / "dest"
    if prepare:
        prepare(dest)
    values = {**arguments(dest, manifest(head), {"name": "head", "address": "127.0.0.1", "port": 1}), **others}
    assert message in run_module("checkpoint_pull", **values)["msg"]
