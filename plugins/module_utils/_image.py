# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""An engine's image on a node: whether it can be run there, what is in it, and copies of the few files that are read
or patched. Pure first, then one class that runs docker or podman."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._container import inspecting_argv
from ansible_collections.sparks.hy3.plugins.module_utils._durable import sync_directory
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._node_facts import PACKAGES
from ansible_collections.sparks.hy3.plugins.module_utils._patch import CATALOGUE
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Source, alias_of

# Asks the image's own Python, without an import of the engine.
_PROGRAM = """\
import glob, importlib.util, json, os, platform, sys
spec = importlib.util.find_spec(sys.argv[1])
print(json.dumps({
    "python": platform.python_version(),
    "package": os.path.dirname(spec.origin) if spec and spec.origin else None,
    "infos": [info for place in sys.path for info in sorted(glob.glob(place + "/*.dist-info"))],
}))
"""
_DIST_INFO = re.compile(r"([^/]+?)-(\d[^-/]*)\.dist-info$")
# What docker and podman say of a path that a container does not have.
_NO_FILE = re.compile(r"could not find|no such file|not found", re.IGNORECASE)

Run = t.Callable[[list[str]], tuple[int, str, str]]


class Image(t.NamedTuple):
    """``reference`` names exactly this image, by its registry's digest where it has one; ``id`` is the node's own."""

    reference: str
    id: str


class Content(t.NamedTuple):
    """``packages`` are versions by normal name, ``infos`` their directories; ``package`` is the engine's, or None."""

    python: str
    package: str | None
    packages: dict[str, str]
    infos: dict[str, str]


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def server_problem(program: str, rc: int, stdout: str, stderr: str) -> str | None:
    """Why ``docker info`` or ``podman info`` says that no container can run as ours must, None if it can."""
    if rc != 0:
        if "permission denied" in stderr.lower():
            return (
                f"{program} does not let this user in ({_last(stderr)}), and hy3_launch is {program}; run the play as "
                "root (become), or set hy3_launch to venv"
            )
        return (
            f"{program} does not answer ({_last(stderr)}), and hy3_launch is {program}; start its daemon "
            "(`systemctl enable --now docker`), or set hy3_launch to venv"
        )
    try:
        info = json.loads(stdout)
        host = info["host"] if program == "podman" else info
        if program == "podman":
            driver, version, rootless = host["cgroupManager"], host["cgroupVersion"], host["security"]["rootless"]
        else:
            driver, version = host["CgroupDriver"], host["CgroupVersion"]
            rootless = any("rootless" in option for option in host["SecurityOptions"] or [])
    except (ValueError, KeyError, TypeError):
        return f"{program} answers {stdout[:80]!r}, which is no description of its host; update it"
    if rootless:
        return f"{program} runs rootless, whose containers hy3.slice cannot hold; use the daemon of root"
    if driver != "systemd" or str(version).lstrip("v") != "2":
        return (
            f"{program} manages control groups of version {str(version).lstrip('v')} by {driver}, and hy3.slice, which "
            "bounds the memory, holds only those of version 2 by systemd; boot with cgroup v2, and set the option "
            "native.cgroupdriver=systemd (podman: cgroup_manager)"
        )
    return None


def read_image(wanted: str, stdout: str) -> Image:
    """The image from what ``image inspect`` printed as JSON; of several digests that of the repository asked for."""
    found = json.loads(stdout)
    found = found[0] if isinstance(found, list) else found
    number = found["Id"] if ":" in found["Id"] else f"sha256:{found['Id']}"
    digests: list[str] = found.get("RepoDigests") or []
    repository = re.sub(r"(@.*|:[^/:]*)$", "", wanted)
    exact = [wanted] if wanted in digests else []
    ours = [name for name in digests if name.partition("@")[0].endswith(repository)]
    return Image(next(iter([*exact, *ours, *digests]), number), number)


def read_content(stdout: str) -> Content:
    """What the program printed on its last line; the first of two distributions of a name is the one that counts."""
    answer = json.loads(_last(stdout))
    packages: dict[str, str] = {}
    infos: dict[str, str] = {}
    for path in answer["infos"]:
        match = _DIST_INFO.search(path)
        name = re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
        if match and name not in packages:
            packages[name], infos[name] = match[2], path
    return Content(answer["python"], answer["package"], packages, infos)


def engine_files(engine: str) -> list[str]:
    """Files that a patch of the engine is about, and the one that makes its directory a package."""
    files = {patch.file for twins in CATALOGUE.values() for patch in twins if patch.engine == engine}
    return [f"{engine}/__init__.py", *sorted(files)]


def directory_of(image: Image, engine: str) -> str:
    """The name of the directory with the image's copies; another one where other files are to be copied."""
    files = json.dumps([engine_files(engine), PACKAGES])
    return f"{image.id.rpartition(':')[2][:12]}-{hashlib.sha256(files.encode()).hexdigest()[:8]}"


def place_of_copies(content: Content) -> str:
    """Where a venv with the image's Python would have the packages, below its prefix."""
    return f"lib/python{'.'.join(content.python.split('.')[:2])}/site-packages"


def _moved(path: Path, file: str) -> str | None:
    """The file that ``file`` only stands for, since the engine has moved it."""
    try:
        alias = alias_of(Source(path.read_bytes()).tree, file)
    except (SyntaxError, ValueError):  # newer than this Python; the patch will say so
        return None
    return f"{alias.replace('.', '/')}.py" if alias else None


def _complete(directory: Path) -> None:
    """Let everybody read a small tree, as a venv's, and have all of it on the disk before it gets its name."""
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
            sync_directory(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


class Images:
    """Asks ``program`` (docker or podman), which lies at ``path``, by ``run``, which returns exit status and output."""

    def __init__(self, program: str, path: str | None, run: Run) -> None:
        if path is None:
            raise Hy3Error(
                f"This node has no {program}, and hy3_launch is {program}; install it, or set hy3_launch to venv"
            )
        self._program, self._path, self._run = program, path, run

    def _ask(self, *words: str) -> tuple[int, str, str]:
        return self._run([self._path, *words])

    def check(self) -> None:
        """Raise Hy3Error where no container of ours can run."""
        problem = server_problem(self._program, *self._ask("info", "--format", "{{json .}}"))
        if problem:
            raise Hy3Error(problem)

    def look(self, image: str) -> Image:
        """The image; Hy3Error if it is not on this node, for nothing here fetches one."""
        rc, stdout, stderr = self._ask("image", "inspect", image)
        if rc != 0:
            raise Hy3Error(
                f"hy3_image is {image}, which {self._program} does not have here ({_last(stderr)}); fetch it on every "
                f"node with `sudo {self._program} pull {image}`"
            )
        try:
            return read_image(image, stdout)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Hy3Error(
                f"{self._program} describes {image} as {stdout[:80]!r}, which names no image; update it"
            ) from error

    def content(self, image: Image, engine: str, user: str) -> Content:
        """What is in it, asked as the engine will run: as ``user`` (UID:GID), with the GPUs."""
        argv = inspecting_argv(["python3", "-I", "-c", _PROGRAM, engine], self._path, image=image.reference, user=user)
        rc, stdout, stderr = self._run(argv)
        if rc != 0:
            raise Hy3Error(
                f"{self._program} cannot run python3 of {image.reference} with the GPUs as user {user} "
                f"({_last(stderr)}); see that the NVIDIA container toolkit is set up and the image is one of "
                f"{engine} for this machine"
            )
        try:
            return read_content(stdout)
        except (ValueError, KeyError, TypeError) as error:
            raise Hy3Error(
                f"python3 of {image.reference} answers {_last(stdout)[:80]!r} when asked what is installed; use an "
                f"image of {engine}"
            ) from error

    def copy(self, image: Image, engine: str, content: Content, prefix: Path) -> None:
        """Copies below ``prefix`` of the engine's files, and of what the rules read. All or nothing."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        prefix.parent.chmod(0o755)
        unfinished = Path(tempfile.mkdtemp(prefix=".new-", dir=prefix.parent))
        rc, stdout, stderr = self._ask("create", "--pull", "never", image.reference, "true")
        try:
            if rc != 0:
                raise Hy3Error(f"{self._program} cannot open {image.reference} ({_last(stderr)}); fetch it again")
            self._copy_all(stdout.split()[-1], engine, content, unfinished / place_of_copies(content))
            _complete(unfinished)
            os.rename(unfinished, prefix)
            sync_directory(prefix.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            if rc == 0:
                self._ask("rm", stdout.split()[-1])

    def _copy_all(self, box: str, engine: str, content: Content, target: Path) -> None:
        if content.package is None:
            return
        site = os.path.dirname(content.package)
        waiting = engine_files(engine)
        for file in waiting:
            if not self._copy_one(box, f"{site}/{file}", target / file):
                continue
            moved = _moved(target / file, file)
            waiting += [moved] if moved and moved not in waiting else []
        for name in PACKAGES:
            if name in content.infos:
                info = content.infos[name]
                self._copy_one(box, info, target / os.path.basename(info))
        if "torch" in content.infos:
            self._copy_one(
                box, f"{os.path.dirname(content.infos['torch'])}/torch/version.py", target / "torch/version.py"
            )

    def _copy_one(self, box: str, source: str, target: Path) -> bool:
        """Whether the image has it."""
        target.parent.mkdir(parents=True, exist_ok=True)
        rc, _stdout, stderr = self._ask("cp", f"{box}:{source}", str(target))
        if rc == 0:
            return True
        if _NO_FILE.search(stderr):
            return False
        raise Hy3Error(
            f"{self._program} cannot copy {source} out of the image ({_last(stderr)}); make room, and try again"
        )
