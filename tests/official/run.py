# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The official checks of a collection, on what the last commit would release, with two versions of ansible-core.

`make sanity` runs this. Virtual environments are kept in .venv-*, everything else in .cache/official.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import typing as t
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".cache/official"
# A home, since ansible-test keeps its virtual environments there, and ansible its caches.
HOME = WORK / "home"
COLLECTIONS = WORK / "collections"
TREE = COLLECTIONS / "ansible_collections/sparks/hy3"
REQUIREMENTS = ROOT / "requirements"

# A Python for each version of ansible-core that requirements/controller.txt names: the first that is found.
CORES = {"2.19": ("3.11",), "2.21": ("3.13", "3.12")}
# Those that the modules may run on; ansible-test compiles and imports with each that is found.
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# The pip that each ansible-core has its stand-in install.
PIPS = ("24_2", "25_2")
# The project has no public address yet, and Galaxy takes no collection without one.
REPOSITORY = "\nrepository: https://example.org/sparks.hy3\n"


class Check(t.NamedTuple):
    """A command with the programs of one virtual environment, and what its output must contain."""

    name: str
    programs: Path
    command: list[str]
    directory: Path
    expect: tuple[str, ...] = ()


def interpreter(version: str) -> Path | None:
    """A real Python of this version, not a shim of pyenv's: from PATH, else one that pyenv has installed."""
    name = f"python{version}"
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in [shutil.which(name), *sorted(root.glob(f"versions/{version}.*/bin/{name}"))]:
        command = [str(path), "-c", "import ensurepip, sys; print(sys.executable)"]
        done = subprocess.run(command, capture_output=True, text=True, check=False) if path else None
        if done and done.returncode == 0:
            return Path(done.stdout.strip())
    return None


def virtual_environment(core: str, found: dict[str, Path]) -> Path:
    """Programs of a virtual environment with this ansible-core, made anew when a requirement changed."""
    wanted = "".join(path.read_text() for path in sorted(REQUIREMENTS.glob("*.txt")))
    version = next((version for version in CORES[core] if version in found), None)
    if version is None:
        names = " or ".join(f"python{version}" for version in CORES[core])
        sys.exit(f"No {names} with ensurepip is on PATH or in pyenv, which ansible-core {core} needs: install it.")
    venv = ROOT / f".venv-{core}"
    stamp = venv / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([found[version], "-m", "venv", "--clear", venv], check=True)
        pip = [venv / "bin/pip", "install", "--quiet", "--requirement", REQUIREMENTS / "official.txt"]
        subprocess.run(pip, check=True)
        stamp.write_text(wanted)
    return venv / "bin"


def export(tree: Path) -> None:
    """The last commit's files, without the link to themselves that a checkout has, as a repository of their own."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    git = ["git", "-c", f"safe.directory={ROOT}", "archive", "HEAD", "--", ".", ":!.collections"]
    archive = subprocess.run(git, cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    # ansible-test asks git which files there are.
    for arguments in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *arguments], cwd=tree, check=True)


def prepare_home() -> None:
    cache = HOME / ".ansible/test/cache"
    cache.mkdir(parents=True, exist_ok=True)
    for pip in PIPS:
        shutil.copy(Path(__file__).with_name("get_pip.py"), cache / f"get_pip_{pip}.py")
    # ansible-test passes no variable on to pip.
    pip_config = Path.home() / ".config/pip"
    if pip_config.exists() and not (HOME / ".config/pip").exists():
        (HOME / ".config").mkdir(exist_ok=True)
        (HOME / ".config/pip").symlink_to(pip_config)


def documented(programs: Path) -> Iterator[Check]:
    """Everything that has documentation, each with the title of its text: ansible-doc may pass over what it lacks."""
    kinds = {
        "module": ("plugins/modules/*.py", "> MODULE {} "),
        "filter": ("plugins/filter/*.py", "> FILTER {} "),
        "role": ("roles/*", "> ROLE: *{}* "),
    }
    for kind, (files, title) in kinds.items():
        names = sorted(f"sparks.hy3.{path.stem}" for path in TREE.glob(files))
        titles = tuple(title.format(name) for name in names)
        yield Check(f"ansible-doc, {len(names)} {kind}s", programs, ["ansible-doc", "-t", kind, *names], WORK, titles)


def checks(programs: dict[str, Path]) -> Iterator[Check]:
    for core, path in programs.items():
        (python,) = (version for version in CORES[core] if (path / f"python{version}").exists())
        units = ["ansible-test", "units", "--local", "--python", python, "--num-workers", "1", "--color", "no"]
        yield Check(f"sanity {core}", path, ["ansible-test", "sanity", "--local", "--color", "no"], TREE)
        yield Check(f"units {core}", path, units, TREE)
    path = list(programs.values())[-1]
    yield from documented(path)
    lint = ["lint-collection-docs", "--plugin-docs", "--validate-collection-refs", "all", "."]
    yield Check("antsibull-docs", path, ["antsibull-docs", *lint], TREE)
    yield Check("antsibull-changelog", path, ["antsibull-changelog", "lint"], TREE)
    site = WORK / "site"
    # Lenient, or each link into another project's site is an error where that site cannot be reached.
    init = ["sphinx-init", "--use-current", "--squash-hierarchy", "--lenient", "--dest-dir", str(site), "sparks.hy3"]
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(mode=0o700)
    yield Check("docs site, sources", path, ["antsibull-docs", *init], WORK)
    yield Check("docs site", path, [str(site / "build.sh")], site)
    source, archive = WORK / "source", WORK / "archive"
    shutil.rmtree(archive, ignore_errors=True)
    export(source)
    with (source / "galaxy.yml").open("a") as galaxy:
        galaxy.write(REPOSITORY)
    yield Check(
        "build", path, ["ansible-galaxy", "collection", "build", "--output-path", str(archive), str(source)], WORK
    )
    # By now it is.
    built = [str(found) for found in archive.glob("*.tar.gz")]
    yield Check("galaxy-importer", path, [str(path / "python"), "-m", "galaxy_importer.main", *built], archive)


def passes(check: Check, environment: dict[str, str]) -> bool:
    """Run one check and print a line about it, after its output if it failed."""
    started = time.monotonic()
    path = os.pathsep.join([str(check.programs), environment["PATH"]])
    done = subprocess.run(
        check.command,
        cwd=check.directory,
        env={**environment, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    missing = [text for text in check.expect if text not in done.stdout]
    passed = done.returncode == 0 and not missing
    if not passed:
        print(done.stdout, *(f"No {text!r} in this output." for text in missing), sep="\n")
    print(f"{'passed' if passed else 'FAILED'} {time.monotonic() - started:5.0f} s  {check.name}", flush=True)
    return passed


def main() -> int:
    WORK.mkdir(parents=True, exist_ok=True)
    found = {version: path for version in PYTHONS if (path := interpreter(version))}
    programs = {core: virtual_environment(core, found) for core in CORES}
    prepare_home()
    export(TREE)
    others = [path for path in os.environ["PATH"].split(os.pathsep) if not path.endswith("shims")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")} | {
        "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS),
        "ANSIBLE_NOCOLOR": "true",
        "HOME": str(HOME),
        "LC_ALL": "C.UTF-8",
        "PATH": os.pathsep.join([*(str(path.parent) for path in found.values()), *others]),
    }
    results = [passes(check, environment) for check in checks(programs)]
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
