# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small virtual machine with a real soft-RoCE GID table, cgroup v2 and PSI, made from Debian packages.

Its root is an initramfs with this Python, ``ip``, ``rdma`` and the collection's module_utils; its disk an ext4 file. It
runs ``guest.py`` or another program beside it and switches itself off; the answers come back over a second serial line,
one JSON object each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import typing as t
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# docs/vm.md says what each is for.
PACKAGES = ("busybox-static", "e2fsprogs", "iproute2", "openssh-server", "qemu-system-x86")
KERNEL = "linux-image-amd64"
# ext4 and rdma_rxe ask the kernel's crypto layer for the two checksums by name, so no module depends on them.
MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "crc32_generic", "rdma_rxe", "dummy", "8021q")
MEMORY_MIB, DISK_MIB = 768, 160
DISK_SPEED = 16 * 1024**2  # bytes written a second: dirty pages must be dirty for long enough to be seen
TIMEOUT = 300  # seconds; about 60 on a free core
# Parts of the standard library that are large, and that no module_util needs.
LEFT_OUT = (
    *("config-*", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"),
    *("tkinter", "turtledemo", "unittest", "*.opt-?.pyc", "*.a"),
)


def run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout


def install_packages() -> None:
    """Install what is missing of ``PACKAGES``."""
    state = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *PACKAGES],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    missing = [name for name in PACKAGES if f"{name} installed" not in state.splitlines()]
    if missing:
        run("apt-get", "update", "--quiet")
        run("apt-get", "install", "--quiet", "--yes", "--no-install-recommends", *missing)


def fetch_kernel(cache: Path) -> Path:
    """Return a directory with Debian's kernel and its modules, unpacked: this machine's own /boot is not touched."""
    if cached := next(cache.glob("linux-image-*"), None):
        return cached
    run("apt-get", "update", "--quiet")
    package = re.findall(r"Depends: (linux-image-\S+)", run("apt-cache", "depends", KERNEL))[0]
    unpacked = unpack(package, cache)
    run("busybox", "depmod", "-b", str(unpacked), next((unpacked / "lib/modules").iterdir()).name)
    return unpacked.rename(cache / package)


def fetch(package: str, cache: Path) -> Path:
    """Return a directory with a Debian package, unpacked: it is not installed, so none of its services starts here."""
    if not (cache / package).exists():
        run("apt-get", "update", "--quiet")
        unpack(package, cache).rename(cache / package)
    return cache / package


def unpack(package: str, cache: Path) -> Path:
    """Download a Debian package and return a new directory with its files."""
    unpacked = cache / "unpacked"
    shutil.rmtree(cache, ignore_errors=True)
    unpacked.mkdir(parents=True)
    run("apt-get", "download", "--quiet", "--option", "APT::Sandbox::User=root", package, cwd=unpacked)
    (archive,) = unpacked.glob("*.deb")
    run("dpkg-deb", "--extract", str(archive), str(unpacked))
    archive.unlink()
    return unpacked


def module_files(kernel: Path) -> Iterator[Path]:
    """Yield the files of ``MODULES`` and of what they depend on, in the order to load them."""
    (base,) = (kernel / "lib/modules").iterdir()
    needs = {}
    for line in (base / "modules.dep").read_text(encoding="ascii").splitlines():
        path, _colon, others = line.partition(":")
        needs[Path(path).stem] = [path, *others.split()]
    order = itertools.chain.from_iterable(reversed(needs[name]) for name in MODULES)
    yield from (base / path for path in dict.fromkeys(order))


def copy_with_libraries(programs: Iterable[Path], root: Path) -> None:
    """Copy programs and the shared libraries that they load to the same paths below a root."""
    paths = [str(path) for path in programs]
    copy_libraries(paths, root)
    for path in paths:
        shutil.copy2(path, place_of(path, root))


def copy_libraries(programs: Iterable[str | Path], root: Path) -> None:
    """Copy the shared libraries that programs load to the same paths below a root."""
    for path in dict.fromkeys(re.findall(r"(/\S+) \(0x", run("ldd", *map(str, programs)))):
        shutil.copy2(path, place_of(path, root))


def place_of(path: str, root: Path) -> Path:
    """Return where a file of this machine lies below a root, in a directory that is there."""
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def build_root(root: Path, kernel: Path) -> None:
    """Lay the files of the initramfs."""
    python = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, root / str(library).lstrip("/"), ignore=shutil.ignore_patterns(*LEFT_OUT))
    tools = [Path(t.cast("str", shutil.which(name))) for name in ("ip", "rdma")]
    copy_with_libraries([python, *tools, *library.glob("lib-dynload/*.so")], root)
    for name in ("bin", "dev", "proc", "sys", "run", "disk", "tmp"):
        (root / name).mkdir(exist_ok=True)
    shutil.copy2(t.cast("str", shutil.which("busybox")), root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    (root / "modules").mkdir()
    for number, path in enumerate(module_files(kernel)):
        shutil.copy2(path, root / "modules" / f"{number:02d}-{path.name}")
    collection = root / "ansible_collections/sparks/hy3"
    for folder in ("plugins/module_utils", "tests/vm"):
        shutil.copytree(ROOT / folder, collection / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "python").symlink_to(python)
    shutil.copy2(HERE / "init", root / "init")
    (root / "init").chmod(0o755)


def pack(root: Path, archive: Path) -> None:
    names = "\n".join(str(path.relative_to(root)) for path in [root, *sorted(root.rglob("*"))])
    with archive.open("wb") as file:
        subprocess.run(
            ["busybox", "cpio", "-o", "-H", "newc"],
            input=names.encode(),
            stdout=file,
            stderr=subprocess.DEVNULL,
            cwd=root,
            check=True,
        )


def boot(
    work: Path,
    guest: str = "guest",
    *,
    furnish: t.Callable[[Path], None] = lambda _root: None,
    options: t.Sequence[str] = (),
    timeout: int = TIMEOUT,
) -> dict[str, dict[str, t.Any]]:
    """Build the machine in an empty directory, let it run, and return the answers of its program by name.

    Args:
        work: The directory.
        guest: The program beside this file, without its suffix.
        furnish: Lays more files below the root that it is given, when the packages are there.
        options: More options of qemu.
        timeout: Seconds after which it is ended.
    """
    install_packages()
    kernel = fetch_kernel(ROOT / "tests/output/vm")
    build_root(work / "root", kernel)
    furnish(work / "root")
    pack(work / "root", work / "initramfs")
    with (work / "disk").open("wb") as disk:
        disk.truncate(DISK_MIB * 1024**2)
    run("mke2fs", "-q", "-t", "ext4", str(work / "disk"))
    console, answers = work / "console", work / "answers"
    command = [
        # Without a parent it must not go on.
        *("setpriv", "--pdeathsig", "KILL", "nice", "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max"),
        *("-m", str(MEMORY_MIB), "-nodefaults", "-display", "none", "-no-reboot"),
        *("-kernel", str(next((kernel / "boot").glob("vmlinuz-*"))), "-initrd", str(work / "initramfs")),
        # The last is none of the kernel's, which hands it to its first process.
        *("-append", f"console=ttyS0 psi=1 panic=-1 quiet guest={guest}"),
        *("-drive", f"file={work / 'disk'},if=virtio,format=raw,throttling.bps-write={DISK_SPEED}"),
        *("-serial", f"file:{console}", "-serial", f"file:{answers}", *options),
    ]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, check=True, timeout=timeout)
    whole_lines = answers.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    found = {answer["name"]: answer for answer in map(json.loads, whole_lines)}
    assert "end" in found, f"The machine did not finish; its console: {console.read_text(errors='replace')[-3000:]}"
    return found
