# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs inside the machine as root: does something to its kernel, and prints what the collection's own code says of it.

One JSON object a line for each scenario; ``test_vm.py`` knows what they should say.
"""

from __future__ import annotations

import contextlib
import errno
import io
import ipaddress
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils import _memory, _page_cache, _roce

Answer = dict[str, t.Any]

MIB = 1024**2
CGROUPS = Path("/sys/fs/cgroup")
DISK = Path("/disk")
NOBODY = 65534


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def until(condition: t.Callable[[], bool], seconds: float = 10) -> None:
    """Wait for what the kernel does in its own time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


# --- RoCE


def make_hca(hca: str, netdev: str) -> None:
    run("ip", "link", "add", netdev, "type", "dummy")
    run("ip", "link", "set", netdev, "up")
    run("rdma", "link", "add", hca, "type", "rxe", "netdev", netdev)


def slots(hca: str, kind: str) -> list[Path]:
    """Return the files of the first slots of a table; there are 1024, and each read takes a millisecond here."""
    return [Path("/sys/class/infiniband", hca, "ports/1", kind, str(index)) for index in range(16)]


def address(verb: str, text: str, netdev: str, hca: str = "rocep1s0f1") -> None:
    """Add or remove an address, and wait until the GID table shows it."""
    wanted = ipaddress.IPv6Address(f"::ffff:{text}").exploded

    def rows() -> int:
        return [path.read_text().strip() for path in slots(hca, "gids")].count(wanted)

    before = rows()
    run("ip", "addr", verb, f"{text}/24", "dev", netdev)
    until(lambda: rows() != before)


def table(hca: str) -> list[list[t.Any]]:
    rows = _roce.Sysfs("/sys").table(_roce.Port(hca, 1))
    return [
        [row.index, f"::ffff:{row.gid.ipv4_mapped}" if row.is_v4_mapped else str(row.gid), row.type, row.ndev]
        for row in rows
    ]


def type_errors(hca: str) -> list[str | None]:
    """Return what reading the type of each of the first slots says: None or the name of the error."""
    found: list[str | None] = []
    for path in slots(hca, "gid_attrs/types"):
        try:
            path.read_text()
            found.append(None)
        except OSError as exc:
            found.append(errno.errorcode[exc.errno or 0])
    return found


def resolve(wanted: str, *options: str, standalone: bool = False) -> Answer:
    """Run the node-side program over the answer of an earlier start; ``standalone`` as systemd does, but slower."""
    output = Path("/run/roce.env")
    output.write_text("NCCL_IB_GID_INDEX=99\n")
    arguments = ["--address", wanted, "--output", str(output), *options]
    said = io.StringIO()
    if standalone:
        done = subprocess.run([sys.executable, "-I", _roce.__file__, *arguments], check=False, stdout=sys.stderr)
        code = done.returncode
    else:
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(said):
            code = _roce.main(arguments)
    env = dict(line.split("=", 1) for line in output.read_text().splitlines()) if output.exists() else None
    return {"rc": code, "env": env, "said": said.getvalue()}


def roce() -> Answer:
    """Several addresses, a VLAN, a second HCA; a row that goes and comes back elsewhere; an address on two netdevs."""
    make_hca("rocep1s0f0", "enp1s0f0np0")
    make_hca("rocep1s0f1", "enp1s0f1np1")
    address("add", "192.168.200.1", "enp1s0f0np0", "rocep1s0f0")
    for text in ("10.0.0.1", "192.168.100.1", "192.168.100.11"):
        address("add", text, "enp1s0f1np1")
    run("ip", "link", "add", "link", "enp1s0f1np1", "name", "enp1s0f1np1.40", "type", "vlan", "id", "40")
    run("ip", "link", "set", "enp1s0f1np1.40", "up")
    address("add", "192.168.140.1", "enp1s0f1np1.40")
    answer: Answer = {
        "table": table("rocep1s0f1"),
        "type_errors": type_errors("rocep1s0f1"),
        "port": resolve("192.168.100.11", standalone=True),
        "vlan": resolve("192.168.140.1"),
        "foreign": resolve("192.168.100.77"),
    }
    address("del", "10.0.0.1", "enp1s0f1np1")
    answer["while_gone"] = resolve("10.0.0.1")
    address("add", "172.31.0.9", "enp1s0f1np1")
    address("add", "10.0.0.1", "enp1s0f1np1")
    answer |= {"newcomer": slots("rocep1s0f1", "gids")[1].read_text(), "back": resolve("10.0.0.1")}
    address("add", "192.168.100.11", "enp1s0f1np1.40")
    return answer | {"shared": resolve("192.168.100.11", "--interface", "enp1s0f1np1.40")}


# --- control groups


def make_group(name: str, **files: str) -> Path:
    group = CGROUPS / name
    group.mkdir()
    for file, text in files.items():
        (group / file.replace("_", ".", 1)).write_text(text)
    return group


def start_in(group: Path, work: t.Callable[[], None]) -> int:
    """Do something in a process of its own in a group; return its id when it has begun."""
    begun, begins = os.pipe()
    pid = os.fork()
    if pid:
        os.close(begins)
        os.read(begun, 1)
        os.close(begun)
        return pid
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        os.write(begins, b"x")
        work()
    finally:
        os._exit(0)


def hold(mebibytes: int) -> None:
    """Have that much memory, touched, until killed."""
    held = b"x" * (mebibytes * MIB)
    while held:
        signal.pause()


def end(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def count(group: Path, event: str) -> int:
    """Return how often something happened to a group itself: it met its ``max``, was out of memory, lost a process."""
    events = (group / "memory.events.local").read_text()
    return int(re.findall(rf"^{event} (\d+)$", events, re.MULTILINE)[0])


def current(group: Path) -> int:
    return int((group / "memory.current").read_text())


def caps() -> Answer:
    """One unit over its own cap; then two units below theirs, and over their slice's."""
    Path(CGROUPS, "cgroup.subtree_control").write_text("+memory")
    whole = make_group("hy3.slice", memory_max=str(80 * MIB), cgroup_subtree_control="+memory")
    ray, serve = (
        make_group(f"hy3.slice/{name}.service", memory_max=str(64 * MIB)) for name in ("hy3-ray", "hy3-serve")
    )
    over = start_in(ray, lambda: hold(100))
    limit = _memory.memory_limit(over)
    until(lambda: count(ray, "oom_kill") > 0)
    answer: Answer = {
        "limit": limit._asdict(),
        "over_cap": {"kills": count(ray, "oom_kill"), "signal": os.WTERMSIG(os.waitpid(over, 0)[1])},
        "self": _memory.memory_limit("self")._asdict(),
    }
    pair = [start_in(ray, lambda: hold(50))]
    until(lambda: current(ray) > 50 * MIB)
    pair.append(start_in(serve, lambda: hold(50)))
    until(lambda: count(ray, "oom_kill") + count(serve, "oom_kill") > 1)
    end(*pair)
    return answer | {
        "over_slice": {
            "kills": count(ray, "oom_kill") + count(serve, "oom_kill") - 1,
            "slice_oom": count(whole, "oom"),
            "serve_oom": count(serve, "oom"),
        }
    }


def stalled() -> dict[str, int]:
    """Return how long some and all tasks have waited for memory since boot, in microseconds."""
    text = Path("/proc/pressure/memory").read_text()
    return {kind: int(total) for kind, total in re.findall(r"^(some|full) .*total=(\d+)$", text, re.MULTILINE)}


def psi() -> Answer:
    """A process whose working set is larger than its group may keep."""
    group = make_group("thrash", memory_high=str(16 * MIB), memory_max=str(64 * MIB))
    path = DISK / "working-set"
    path.write_bytes(os.urandom(MIB) * 32)
    _page_cache.purge([str(path)])

    def thrash() -> None:
        while True:
            path.read_bytes()

    before = stalled()
    began = time.monotonic()
    pid = start_in(group, thrash)
    until(lambda: stalled()["some"] - before["some"] > 200_000, 30)
    after = stalled()
    end(pid)
    path.unlink()
    return {"seconds": time.monotonic() - began} | {kind: after[kind] - before[kind] for kind in before}


# --- page cache


def cached(path: Path) -> int:
    with path.open("rb") as file:
        return _page_cache.resident(file.fileno())


def purge(*paths: Path) -> Answer:
    outcome = _page_cache.purge(map(str, paths))
    return {
        name: getattr(outcome, name)
        for name in ("resident_before", "resident_after", "released", "files", "skipped", "failed", "kept")
    }


def advise(path: Path) -> int:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached(path)


def dirty() -> Answer:
    """Field case B44 on this kernel, and the same with our own order."""
    path = DISK / "dirty"
    path.write_bytes(os.urandom(8 * MIB))
    steps = [cached(path), advise(path)]
    with path.open("rb") as file:
        os.fsync(file.fileno())
    steps += [cached(path), advise(path)]
    path.write_bytes(os.urandom(8 * MIB))
    return {"steps": steps, "purge": purge(path)}


def tree() -> Answer:
    """A Hugging Face cache with a hard link, a sparse file, a FIFO, an unreadable file and a mapped one."""
    cache = DISK / "hub"
    for name in ("blobs", "snapshots/a", "snapshots/b"):
        (cache / name).mkdir(parents=True)
    for name in ("mapped", "free"):
        (cache / "blobs" / name).write_bytes(os.urandom(MIB))
        for snapshot in ("a", "b"):
            (cache / "snapshots" / snapshot / f"{name}.safetensors").symlink_to(f"../../blobs/{name}")
    os.link(cache / "blobs/free", cache / "blobs/hard")
    with (cache / "blobs/sparse").open("wb") as file:
        os.pwrite(file.fileno(), b"x" * 4096, 40 * MIB)
    os.mkfifo(cache / "blobs/fifo")
    (cache / "blobs/secret").touch(mode=0)
    pid = start_in(CGROUPS, lambda: hold_mapped(cache / "blobs/mapped"))
    until(lambda: str(cache / "blobs/mapped") in Path(f"/proc/{pid}/maps").read_text())
    time.sleep(0.5)
    answer: Answer = {"purge": purge(cache)}
    mappers = _page_cache.mapped_by(kept[0] for kept in answer["purge"]["kept"])
    answer |= {"mappers": [[mapper.pid == pid, mapper.paths] for mapper in mappers]}
    end(pid)
    answer["again"] = purge(cache)
    os.seteuid(NOBODY)
    answer["stranger"] = purge(cache / "blobs/secret", cache / "blobs/free")
    os.seteuid(0)
    return answer


def hold_mapped(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        while pages[:]:
            signal.pause()


def drop_caches() -> Answer:
    path = DISK / "other"
    path.write_bytes(os.urandom(8 * MIB))
    before = cached(path)
    _page_cache.drop_all()
    return {"before": before, "after": cached(path)}


def main() -> None:
    for scenario in (roce, caps, psi, dirty, tree, drop_caches):
        began = time.monotonic()
        try:
            answer = scenario()
        except Exception:  # noqa: BLE001  # a test shows it
            answer = {"error": traceback.format_exc()}
        print(json.dumps({"name": scenario.__name__, "took": time.monotonic() - began, **answer}), flush=True)
    print(json.dumps({"name": "end"}), flush=True)


if __name__ == "__main__":
    main()
