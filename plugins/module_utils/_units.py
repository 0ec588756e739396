# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""systemd units and their processes, as systemd and the kernel show them."""

from __future__ import annotations

import os
import re
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import parse_limits

PROPERTIES = (
    "Id",
    "Description",
    "LoadState",
    "UnitFileState",
    "Job",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "MainPID",
    "InvocationID",
    "NRestarts",
    "StartLimitBurst",
    "StartLimitIntervalUSec",
    "StatusText",
    "InactiveExitTimestamp",
    "ActiveEnterTimestamp",
    "MemoryCurrent",
    "MemoryMax",
)

# Flags whose value is a secret, for vLLM, SGLang, Ray and huggingface_hub: by the last word of their names, since
# --tokenizer and --max-tokens are none, and --api-k, which argparse takes for --api-key.
_SECRET_FLAG = re.compile(r"(?:.*-)?(?:api-k[ey]*|key|token|password|passwd|secret)", re.IGNORECASE)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
# Seconds: the slowest published first start of Hy3 takes 15 minutes.
_BOOT_WINDOW = 3600
_NEWEST_LINES = 2000
MASK = "********"


class Process(t.TypedDict):
    """One process of a unit; C(environment) holds only the variables that were asked for and are set, or is None.

    C(started) is in Unix seconds, or None for a process that has ended meanwhile.
    """

    pid: int
    title: str
    user: int
    started: float | None
    environment: dict[str, str] | None


def show_command(units: t.Sequence[str]) -> list[str]:
    """The command whose output :func:`parse_show` reads; times come as Unix seconds (systemd 251 and newer)."""
    return ["systemctl", "show", "--no-pager", "--timestamp=unix", f"--property={','.join(PROPERTIES)}", "--", *units]


def parse_show(text: str, units: t.Sequence[str]) -> dict[str, dict[str, str]]:
    """Properties by the unit name that was asked for.

    C(systemctl show) prints a block per unit, in the order asked, with empty lines between; its own C(Id) differs
    from the name asked when that is an alias, so the order decides.
    """
    blocks = [block for block in re.split(r"\n\s*\n", text.strip()) if block]
    if len(blocks) != len(units):
        raise Hy3Error(
            f"systemctl show answered for {len(blocks)} units of the {len(units)} asked ({', '.join(units)})"
        )
    return {
        unit: dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        for unit, block in zip(units, blocks)  # noqa: B905 - the lengths are equal, see above
    }


def number(value: str) -> int | None:
    """A systemd number or time (C(@SECONDS)) as int; None where it is unset, empty or infinite."""
    match = re.fullmatch(r"@?(\d+)", value.strip())
    # systemd writes "no value" of an unsigned property as 2^64-1 in some versions and as words in others.
    return int(match[1]) if match and int(match[1]) < 2**64 - 1 else None


def journal_commands(invocation: str, *, started: int | None, now: int) -> list[list[str]]:
    """The commands that print the log of one start (a unit's invocation), each line with its time.

    The log of a serving engine grows with every request, so of a start (Unix seconds) longer ago than the boot window
    only that window and the newest lines are read.
    """
    command = ["journalctl", "--no-pager", "--quiet", "--all", "--output=short-unix"]
    command.append(f"_SYSTEMD_INVOCATION_ID={invocation}")
    if started is None or now - started <= _BOOT_WINDOW:
        return [command]
    end = started + _BOOT_WINDOW
    return [[*command, f"--until=@{end}"], [*command, f"--since=@{end}", f"--lines={_NEWEST_LINES}"]]


def before_command(unit: str, *, started: int) -> list[str]:
    """The command that prints the newest lines of a unit from the boot window before this start (Unix seconds)."""
    command = ["journalctl", "--no-pager", "--quiet", "--all", "--output=short-unix", f"_SYSTEMD_UNIT={unit}"]
    return [*command, f"--since=@{started - _BOOT_WINDOW}", f"--until=@{started}", f"--lines={_NEWEST_LINES}"]


def refuse_secrets(names: t.Iterable[str]) -> None:
    """Raise for a variable name that looks like a secret: what is reported ends up in logs and reports."""
    for name in names:
        if _SECRET_NAME.search(name):
            raise Hy3Error(
                f"The variable {name} looks like a secret (KEY, TOKEN, SECRET or PASSW in its name) and is not "
                "reported; remove it from the list"
            )


def is_secret_name(name: str) -> bool:
    """Whether a variable's name looks like that of a secret."""
    return bool(_SECRET_NAME.search(name))


def is_secret_flag(flag: str) -> bool:
    """Whether an option's value is a secret, spelt with ``-`` or ``_`` and with or without dashes before it."""
    return bool(_SECRET_FLAG.fullmatch(flag.lstrip("-").replace("_", "-")))


def mask_argv(argv: t.Sequence[str]) -> list[str]:
    """The argument list with the values of key flags masked; everything else as it was given."""
    masked: list[str] = []
    secret = False
    for argument in argv:
        flag, separator, _value = argument.partition("=")
        if argument.startswith("-"):
            secret = is_secret_flag(flag)
            masked.append(f"{flag}={MASK}" if secret and separator else argument)
        else:
            masked.append(MASK if secret else argument)
    return masked


def of_another_cluster(
    units: t.Mapping[str, t.Mapping[str, t.Any]], cluster: str, *, enabled: bool = False, installed: bool = False
) -> t.Iterator[tuple[str, str, str]]:
    """Name, role and cluster of each unit that runs for another cluster than ``cluster``, by its description.

    With ``enabled`` also of one that rests, but would start with the node. With ``installed`` of any that rests, unless
    a unit is here for ``cluster``: then the node was taken over, and the other cluster's is what that one left.
    """
    # As the roles write it into the descriptions of their units.
    said = {name: unit["description"].partition(" of cluster ") for name, unit in units.items()}
    ours = cluster in [owner for _role, _named, owner in said.values()]
    for name, (role, named, owner) in said.items():
        unit = units[name]
        rests = unit["active_state"] in ("inactive", "failed")
        counts = not ours if installed else enabled and unit["enabled"]
        if named and owner != cluster and (not rests or counts):
            yield name, role, owner


class Starts(t.TypedDict):
    """How a unit starts: how often systemd started it again, by itself or with the node, and within which limit.

    C(start_limit) is None without a limit, C(waits_for) unless it waits before its main process starts.
    """

    n_restarts: int | None
    enabled: bool
    start_limit: str | None
    limit_reached: bool
    waits_for: str | None


def start_facts(shown: t.Mapping[str, str]) -> Starts:
    """The unit's starts, from what :func:`parse_show` returned."""
    burst, interval = number(shown.get("StartLimitBurst", "")), shown.get("StartLimitIntervalUSec", "")
    limited = bool(burst) and interval not in ("", "0", "infinity")
    waits, _colon, reason = shown.get("StatusText", "").partition(": ")
    return Starts(
        n_restarts=number(shown.get("NRestarts", "")),
        enabled=shown.get("UnitFileState") == "enabled",
        start_limit=f"{burst} starts within {interval}" if limited else None,
        limit_reached=shown.get("Result") == "start-limit-hit",
        # As the program until.py says it; a text stays behind where it was stopped meanwhile.
        waits_for=reason if waits == "waits" and shown["ActiveState"] == "activating" else None,
    )


def between_states(shown: t.Mapping[str, str]) -> bool:
    """Whether systemd has still to do what it was asked to with a unit, from what :func:`parse_show` returned."""
    return bool(number(shown.get("Job", "")))


def restarts_itself(sub_state: str) -> bool:
    """Whether a unit has ended and systemd will start it again; systemd 254 and newer have a second word for it."""
    return sub_state.startswith("auto-restart")


def remarks(name: str, unit: Starts) -> list[str]:
    """What a person should know of a unit's starts, each in one sentence: what it waits for, and how often it ended."""
    found = []
    log = f"`journalctl -u {name}`"
    if unit["limit_reached"]:
        found.append(
            f"{name} stays down after {unit['start_limit']}, as many as it may have, because every start that fails "
            f"may leave memory behind; read {log}, mend the cause and run serve_hy3, which starts it again."
        )
    elif unit["n_restarts"]:
        times = "once" if unit["n_restarts"] == 1 else f"{unit['n_restarts']} times"
        found.append(f"{name} has ended by itself and was started again {times}; {log} says why.")
    if unit["waits_for"]:
        found.append(f"{name} waits: {unit['waits_for']}.")
    return found


def unit_of_cgroup(text: str, unit: str) -> bool:
    """Whether C(/proc/PID/cgroup) (v1 or v2 form) places a process into the unit or below it."""
    return any(unit in line.split(":", 2)[-1].split("/") for line in text.splitlines())


def innermost_unit(text: str) -> str:
    """The service or scope that C(/proc/PID/cgroup) (v1 or v2 form) names last on a path, or an empty text."""
    paths = [line.split(":", 2)[-1] for line in text.splitlines()]
    units = [part for path in paths for part in path.split("/") if part.endswith((".service", ".scope"))]
    return units[-1] if units else ""


def boot_time(text: str) -> int:
    """The boot in Unix seconds, by today's clock and rounded down, from C(/proc/stat); 0 if it does not say."""
    match = re.search(r"^btime (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def ticks_since_boot(text: str) -> int | None:
    """When a process started, in clock ticks after the boot, from C(/proc/PID/stat); None if it has ended.

    Field 22 in proc_pid_stat(5). The second one is the program's name, which may hold spaces and parentheses.
    """
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


class Processes:
    """The processes of this machine, read from C(proc). A process that ends meanwhile is no error: it is left out."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = Path(proc)

    def _read(self, pid: int, name: str) -> bytes:
        try:
            return (self._proc / str(pid) / name).read_bytes()
        except OSError:
            return b""

    def argv(self, pid: int) -> list[str]:
        """The arguments as the kernel holds them; empty for a kernel thread or a process that has ended."""
        raw = self._read(pid, "cmdline")
        return [os.fsdecode(part) for part in raw.removesuffix(b"\0").split(b"\0")] if raw else []

    def environment(self, pid: int, names: t.Collection[str]) -> dict[str, str] | None:
        """What the process was *started* with; later changes by the process itself do not show here.

        None where the kernel has nothing to show: without permission, and for a process that has renamed itself
        (C(ray::RayWorkerProc), C(VLLM::Worker_TP0)), because the title is written over arguments and environment.
        """
        variables = self.variables(pid)
        return None if variables is None else {name: value for name, value in variables.items() if name in names}

    def variables(self, pid: int) -> dict[str, str] | None:
        """All variables that the process was started with; None as of :meth:`environment`. They may hold secrets."""
        raw = self._read(pid, "environ")
        if b"=" not in raw.split(b"\0", 1)[0]:
            return None
        pairs = (os.fsdecode(part).partition("=") for part in raw.split(b"\0") if part)
        return {name: value for name, _separator, value in pairs}

    def in_user_manager(self, pid: int) -> bool:
        """Whether the process runs below a user's own systemd, which ends with the user's last session."""
        return bool(re.search(r"/user@\d+\.service(?:/|$)", self._read(pid, "cgroup").decode(), re.MULTILINE))

    def unit(self, pid: int) -> str:
        """The unit that the process runs in, or an empty text."""
        return innermost_unit(self._read(pid, "cgroup").decode())

    def memlock(self, pid: int) -> int | None:
        """The soft limit of locked memory in bytes; None if unlimited or if the process has ended."""
        soft, _hard = parse_limits(self._read(pid, "limits").decode()).get("Max locked memory", (None, None))
        return soft

    def started(self, pid: int) -> float | None:
        """When the process started, in Unix seconds and up to a second early; None if it has ended.

        Counted from the boot, so it moves with a clock that is set: it says how old the process really is.
        """
        booted = boot_time((self._proc / "stat").read_text(encoding="ascii"))
        ticks = ticks_since_boot(self._read(pid, "stat").decode(errors="replace"))
        return booted + ticks / os.sysconf("SC_CLK_TCK") if booted and ticks is not None else None

    def of_unit(self, unit: str, names: t.Collection[str]) -> list[Process]:
        """All processes of the unit in the order of their ids, with the named variables."""
        found: list[Process] = []
        for pid in sorted(int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit()):
            if not unit_of_cgroup(self._read(pid, "cgroup").decode(), unit):
                continue
            argv = self.argv(pid)
            try:
                user = (self._proc / str(pid)).stat().st_uid
            except OSError:
                continue
            # A program that renames itself (VLLM::Worker_TP0) writes its title over the first argument.
            title = argv[0].strip() if argv else ""
            started, environment = self.started(pid), self.environment(pid, names)
            found.append(Process(pid=pid, title=title, user=user, started=started, environment=environment))
        return found
