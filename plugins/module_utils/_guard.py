# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Who ends an engine before its node runs out of memory: systemd-oomd, the user's earlyoom, or the kernel alone."""

from __future__ import annotations

import getopt
import os
import re
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import format_gib, parse_meminfo
from ansible_collections.sparks.hy3.plugins.module_utils._units import Processes, parse_show

SLICE = "hy3.slice"
CHOICES = ("auto", "oomd", "earlyoom", "none")
# Debian and Ubuntu say ssh.service, others sshd.service; where one is an alias, systemd shows the same Id for both.
SSH_UNITS = ("ssh.service", "sshd.service")
OOMD, SYSTEM = "systemd-oomd.service", "system.slice"
_SHOWN = ("Id", "LoadState", "ActiveState", "MainPID", "ControlGroup", "NeedDaemonReload", "ManagedOOMMemoryPressure")

# The kernel's names of processes, of which earlyoom sees 15 bytes. OpenSSH 9.8 and 10.0 split sshd.
_SSHD = ("sshd", "sshd-session", "sshd-auth")
_DRIVERS = ("vllm", "VLLM::EngineCore")
_WORKERS = ("ray::RayWorkerProc", "VLLM::Worker_TP", "sglang::scheduler")
_NAME_BYTES = 15
# What earlyoom adds to an oom_score for --prefer, and takes off for --avoid (kill.c). A process that it prefers is
# taken even with an oom_score_adj of -1000 (its manual, "Bugs").
_BIAS = 300
_DEFAULT_SHARE = 10.0  # percent, of memory and of swap
_SHORT = "m:s:M:S:kidvr:pw:nN:P:gh"
_LONG = ["prefer=", "avoid=", "ignore=", "dryrun", "sort-by-rss", "ignore-root-user", "syslog", "debug", "help"]
# From here on its share is one of MemAvailable + AnonPages, which nobody knows before the engine runs.
_USER_MEMORY = (1, 8)

Run = t.Callable[[list[str]], "str | None"]


class Earlyoom(t.NamedTuple):
    """A running earlyoom: when it acts (bytes available, bytes of swap free; None is not known) and whom it takes."""

    memory: int | None = None
    swap: int = 0
    prefer: str = ""
    avoid: str = ""
    ignore: str = ""
    dry_run: bool = False
    readable: bool = True


class Host(t.NamedTuple):
    """What a node is to a guard. ``oomd`` is ``missing``, ``masked`` or systemd's ActiveState; sizes in bytes."""

    cgroup2: bool
    psi: bool
    swap_total: int
    oomd: str
    earlyoom: Earlyoom | None
    sshd: str
    sshd_score: int | None


class Seen(t.NamedTuple):
    """What is in force; None is what has no control group yet, and so cannot be watched or have memory.

    ``monitored`` is whether systemd-oomd watches the slice, ``sshd_min`` what the kernel keeps for sshd, in bytes.
    """

    reload: bool
    pressure: str
    monitored: bool | None
    sshd_min: int | None
    sshd_omitted: bool


class Decision(t.NamedTuple):
    """The one killer (``oomd``, ``earlyoom`` or ``none``), whether sshd's unit gets ours, and sentences."""

    killer: str
    protect: bool
    refused: list[str]
    says: list[str]


# ---- earlyoom


def parse_earlyoom(argv: t.Sequence[str], *, mem_total: int, swap_total: int, version: str = "") -> Earlyoom:
    """Read the arguments of a running earlyoom as its own getopt does; sizes in bytes.

    A newer one may have options that are not known here: then ``readable`` is false, and nothing is said of it.
    """
    try:
        pairs, _rest = getopt.gnu_getopt(list(argv[1:]), _SHORT, _LONG)
    except getopt.GetoptError:
        return Earlyoom(readable=False)
    options = {name.lstrip("-"): value for name, value in pairs}
    memory = _threshold(options, "m", "M", mem_total)
    return Earlyoom(
        memory=None if _release(version) >= _USER_MEMORY else memory,
        # Its -S counts for nothing on a node without swap, where the condition always holds.
        swap=_threshold(options, "s", "S", swap_total) if swap_total else 0,
        prefer=options.get("prefer", ""),
        avoid=options.get("avoid", ""),
        ignore=options.get("ignore", ""),
        dry_run="dryrun" in options,
    )


def _threshold(options: t.Mapping[str, str], share: str, size: str, total: int) -> int:
    """Of a share in percent and a size in KiB the lower counts; the second number of each is when it sends SIGKILL."""
    given = [_number(options[share]) * total / 100] if share in options else []
    given += [_number(options[size]) * 1024] if size in options else []
    return int(min(given, default=_DEFAULT_SHARE * total / 100))


def _number(text: str) -> float:
    match = re.match(r"\s*(\d{1,15}(?:\.\d{1,15})?)", text)
    return float(match[1]) if match else 0.0


def _release(version: str) -> tuple[int, ...]:
    match = re.search(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(match[1]), int(match[2])) if match else (0,)


def bias(guard: Earlyoom, name: str) -> float:
    """What earlyoom adds to the score of a process of this name; minus infinity for one that it never takes."""
    if _matches(guard.ignore, name):
        return float("-inf")
    return _BIAS * (_matches(guard.prefer, name) - _matches(guard.avoid, name))


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern of earlyoom's finds the name; one that Python does not understand finds nothing."""
    try:
        return bool(pattern) and bool(re.search(pattern, name[:_NAME_BYTES]))
    except (re.error, RecursionError):
        return False


def _taken_first(guard: Earlyoom) -> list[str]:
    """What is wrong with whom earlyoom takes first: sshd."""
    names = [name for name in _SSHD if bias(guard, name) > 0]
    if not names:
        return []
    return [
        f"earlyoom runs with --prefer {guard.prefer!r}, which finds {names[0]} and takes it even with an oom_score_adj "
        "of -1000: take it out of that pattern, or set hy3_guard to none to go on with it"
    ]


def _of_earlyoom(guard: Earlyoom, spare: int | None) -> list[str]:
    if not guard.readable:
        return ["The options of this earlyoom are newer than what is known of it here, so nothing is said of them."]
    says = []
    if max(bias(guard, name) for name in _DRIVERS) > max(bias(guard, name) for name in _WORKERS):
        says.append(
            "This earlyoom takes the driver before the workers, which hold the memory and end with it later, by its "
            f"--prefer {guard.prefer!r}, --avoid {guard.avoid!r} and --ignore {guard.ignore!r}."
        )
    if guard.memory is not None and spare is not None and guard.memory >= spare:
        says.append(
            f"This earlyoom acts when {format_gib(guard.memory)} are available and {format_gib(guard.swap)} of swap "
            f"are free, and an engine as planned leaves {format_gib(spare)} at the most, so that it ends a healthy one "
            f"{'as soon as the swap is full' if guard.swap else 'at once'}: give it a smaller -m, such as -m 2."
        )
    return says


# ---- The decision


def why_no_oomd(host: Host) -> list[tuple[str, str]]:
    """Each reason why systemd-oomd cannot guard this node, with the way out."""
    faults = []
    if not host.cgroup2:
        faults.append(("its memory controller is not on cgroup v2", "boot it with systemd.unified_cgroup_hierarchy=1"))
    if not host.psi:
        faults.append(("its kernel tells no memory pressure (PSI)", "boot it with psi=1"))
    if host.oomd == "missing":
        faults.append(("systemd-oomd is not installed", "install the package systemd-oomd"))
    if host.oomd == "masked":
        faults.append(("systemd-oomd is masked", "`systemctl unmask systemd-oomd`"))
    return faults


def _unguarded(host: Host) -> str:
    faults, ways = zip(*why_no_oomd(host))  # noqa: B905 - pairs
    return f"because {' and '.join(faults)}; {' and '.join(ways)}"


def decide(host: Host, wanted: str = "auto", *, spare: int | None = None) -> Decision:
    """Choose the one killer of a node, and say what a person should know of it.

    Args:
        host: The node.
        wanted: One of ``CHOICES``. What is asked for by name is refused where it cannot be; ``auto`` takes the user's
            earlyoom where one runs, else systemd-oomd where that can be had, else nobody.
        spare: Bytes that a planned engine leaves available at the most; None where that is not known.
    """
    running = host.earlyoom if host.earlyoom and not host.earlyoom.dry_run else None
    killer, refused, says = _choose(host, wanted, running)
    protect = host.cgroup2 and wanted != "none" and bool(host.sshd)
    if killer == "earlyoom" and running:
        refused += _taken_first(running)
        says += _of_earlyoom(running, spare)
        if host.oomd == "active":
            says.append("systemd-oomd runs as well, and is told nothing of hy3.slice; disable one of the two.")
    if killer == "oomd" and not host.swap_total:
        says.append("This node has no swap, and memory can then run out faster than systemd-oomd acts (its manual).")
    if wanted != "none":
        says += _of_sshd(host)
    return Decision(killer, protect, refused, says)


def _choose(host: Host, wanted: str, running: Earlyoom | None) -> tuple[str, list[str], list[str]]:
    """Killer, refusals and what to say of the choice."""
    if wanted == "none":
        also = " earlyoom acts all the same." if running else ""
        return "none", [], [f"hy3_guard is none: only the limits of its units guard hy3.slice.{also}"]
    refused = _refused(host, wanted, running)
    if refused:
        return "none", [refused], []
    if running:
        return "earlyoom", [], ["Guard: the earlyoom that runs here."]
    rehearses = ["earlyoom runs with --dryrun and ends nothing."] if host.earlyoom else []
    if why_no_oomd(host):
        return "none", [], [*rehearses, f"Nothing but the limits of its units guards hy3.slice, {_unguarded(host)}."]
    return "oomd", [], [*rehearses, "Guard: systemd-oomd on hy3.slice."]


def _refused(host: Host, wanted: str, running: Earlyoom | None) -> str:
    """Why what is asked for by name cannot be; empty if it can."""
    if wanted == "earlyoom" and not running:
        why = "it runs with --dryrun" if host.earlyoom else "none runs here"
        return f"hy3_guard is earlyoom, and {why}: start it, or set hy3_guard to oomd"
    if wanted == "oomd" and running:
        return "hy3_guard is oomd, and earlyoom runs here: stop that, or set hy3_guard to earlyoom"
    if wanted == "oomd" and why_no_oomd(host):
        return f"hy3_guard is oomd, and this node cannot have it {_unguarded(host)}, or set it to auto"
    return ""


def _of_sshd(host: Host) -> list[str]:
    if not host.cgroup2:
        return []
    if not host.sshd:
        return [f"Neither {' nor '.join(SSH_UNITS)} is here, so whatever lets people in is not protected."]
    if host.sshd_score is not None and host.sshd_score > -1000:
        return [
            f"The process of {host.sshd} has an oom_score_adj of {host.sshd_score}, where sshd gives itself -1000: the "
            "kernel may take it."
        ]
    return []


def unapplied(decision: Decision, host: Host, seen: Seen) -> list[str]:
    """One sentence for each thing that was decided and that systemd or the kernel does not show yet."""
    found = []
    if decision.killer == "oomd":
        if seen.pressure != "kill":
            found.append(f"systemd has ManagedOOMMemoryPressure={seen.pressure} for {SLICE} instead of kill")
        if host.oomd != "active":
            found.append(f"systemd-oomd is {host.oomd} instead of active")
        elif seen.monitored is False:
            found.append(f"systemd-oomd does not watch {SLICE}, which is active")
    if decision.protect and seen.sshd_min is not None:
        if not seen.sshd_min:
            found.append(f"the kernel keeps no memory for {host.sshd} (memory.min is 0)")
        if not seen.sshd_omitted:
            found.append(f"the control group of {host.sshd} is not marked for systemd-oomd to spare")
    return found


def watched(text: str) -> list[str]:
    """The control groups in what ``oomctl`` prints that systemd-oomd watches for memory pressure."""
    _before, _heading, after = text.partition("Memory Pressure Monitored CGroups:")
    return re.findall(r"^\s+Path: (\S+)$", after, re.MULTILINE)


# ---- The node


class Node:
    """One node, below ``root``; ``run`` returns what a command prints, or None where it cannot be run."""

    def __init__(self, run: Run, root: str = "/") -> None:
        self._run = run
        self._root = Path(root)
        self._processes = Processes(str(self._root / "proc"))
        names = [SLICE, SYSTEM, OOMD, *SSH_UNITS]
        command = ["systemctl", "show", "--no-pager", f"--property={','.join(_SHOWN)}", "--", *names]
        shown = run(command)
        if "LoadState=" not in (shown or ""):
            raise Hy3Error(f"`systemctl show` says {shown!r} on this node instead of units: it needs a running systemd")
        self._units = parse_show(shown or "", names)
        here = [unit for unit in (self._units[name] for name in SSH_UNITS) if unit.get("LoadState") == "loaded"]
        self._ssh = next(iter(sorted(here, key=lambda unit: unit.get("ActiveState") != "active")), {})

    def host(self) -> Host:
        """What the node is."""
        memory = parse_meminfo(self._text("proc/meminfo"))
        pid = self._ssh.get("MainPID", "0")
        score = self._text(f"proc/{pid}/oom_score_adj").strip() if pid != "0" else ""
        return Host(
            cgroup2="memory" in self._text("sys/fs/cgroup/cgroup.controllers").split(),
            psi="full " in self._text("proc/pressure/memory"),
            swap_total=memory.get("SwapTotal", 0),
            oomd=self._state(OOMD),
            earlyoom=self._earlyoom(memory),
            sshd=self._ssh.get("Id", ""),
            sshd_score=int(score) if re.fullmatch(r"-?\d{1,4}", score) else None,
        )

    def seen(self) -> Seen:
        """What is in force."""
        unit = self._units[SLICE]
        active = unit.get("ActiveState") == "active" and bool(unit.get("ControlGroup"))
        ask = active and self._state(OOMD) == "active"
        printed = self._run(["oomctl"]) if ask else None
        group = self._ssh.get("ControlGroup", "").lstrip("/")
        kept = self._text(f"sys/fs/cgroup/{group}/memory.min").strip()
        return Seen(
            reload=any(one.get("NeedDaemonReload") == "yes" for one in self._units.values()),
            pressure=unit.get("ManagedOOMMemoryPressure", ""),
            monitored=None if printed is None else f"/{SLICE}" in watched(printed),
            sshd_min=(int(kept) if kept.isdecimal() else 0) if group else None,
            sshd_omitted=bool(group) and self._is_omitted(group),
        )

    def _state(self, name: str) -> str:
        unit = self._units[name]
        loaded = {"not-found": "missing", "masked": "masked"}
        return loaded.get(unit.get("LoadState", ""), unit.get("ActiveState", "inactive"))

    def _earlyoom(self, memory: t.Mapping[str, int]) -> Earlyoom | None:
        """The earlyoom that can reach our processes; one in a container of its own cannot."""
        own = self._namespace("self")
        for path in sorted((self._root / "proc").glob("[0-9]*/comm")):
            pid = path.parent.name
            if self._text(f"proc/{pid}/comm").strip() != "earlyoom" or self._namespace(pid) != own:
                continue
            argv = self._processes.argv(int(pid))
            if argv:
                return parse_earlyoom(
                    argv,
                    mem_total=memory["MemTotal"],
                    swap_total=memory.get("SwapTotal", 0),
                    version=self._run(["earlyoom", "-v"]) or "",
                )
        return None

    def _namespace(self, pid: str) -> str:
        try:
            return os.readlink(self._root / f"proc/{pid}/ns/pid")
        except OSError:
            return ""

    def _is_omitted(self, group: str) -> bool:
        """Whether systemd set the attribute of ManagedOOMPreference=omit; a file system without such has none."""
        try:
            return os.getxattr(self._root / f"sys/fs/cgroup/{group}", "user.oomd_omit") == b"1"
        except OSError:
            return False

    def _text(self, name: str) -> str:
        try:
            return (self._root / name).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return ""
