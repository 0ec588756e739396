# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a node's kernel, its GPU driver and its guards of memory write when they end an engine or a node."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._failure import SUSPECT, Rule, rule

_LESS = "Lower what the engine may take of this node, or what else runs there"
_KERNEL = "the kernel's log"

_BUDGET = (
    "Lower gpu_memory_utilization, max_model_len or hy3_memory before the next start; a node that answers ping and no "
    "SSH comes back when the engine on the other nodes ends, else cut its power"
)

# Who kills for memory. None of them writes into the log of what it kills, which just seems to be gone.
GUARD_RULES: tuple[Rule, ...] = (
    rule(
        "oomd-kill",
        r"systemd-oomd(?:\[\d+\])?: Killed (?:\S*/)?(?P<unit>\S+) due to (?P<why>memory pressure|memory used|\S+)",
        "systemd-oomd killed {unit} ({why})",
        "Run the engine in a system unit, for a user's own systemd is watched for pressure (or set "
        "ManagedOOMMemoryPressure=auto), and drop the page cache before a load",
        "systemd-oomd, which leaves no kernel line; field case B41",
    ),
    rule(
        "earlyoom-kill",
        r"earlyoom(?:\[\d+\])?: .*?sending SIG(?:TERM|KILL) to process (?P<pid>\d+) (?:uid \d+ )?\"(?P<name>[^\"]*)\"",
        "earlyoom killed {name} (process {pid}), because the node was short of memory",
        _LESS,
        "earlyoom",
    ),
    rule(
        "oom-cap",
        r"oom-kill:constraint=CONSTRAINT_MEMCG\b.*?,task_memcg=(?:[^,]*/)?(?P<unit>[^,/]*),task=(?P<name>[^,]*),pid=",
        "The kernel killed {name} in {unit}, which had reached its memory limit",
        "Raise the cap of that unit if the node has the memory (hy3_memory), or lower what runs in it",
        _KERNEL,
    ),
    rule(
        "oom-node",
        r"oom-kill:constraint=.*?,task_memcg=(?:[^,]*/)?(?P<unit>[^,/]*),task=(?P<name>[^,]*),pid=",
        "The kernel killed {name} in {unit}, because the node had no memory left",
        _LESS,
        _KERNEL,
    ),
    rule(
        "oom-unit",
        r"\b(?P<unit>[\w@:.-]{1,120}\.(?:service|scope|slice)): "
        r"(?:A process of this unit has been killed by the OOM killer|Failed with result 'oom-kill')",
        "The kernel killed a process of {unit} for memory",
        _LESS,
        "systemd",
    ),
)

# The same kill in the words that older kernels and other logs have; the line above it names the control group.
OOM_PROCESS = rule(
    "oom-process",
    r"(?P<where>Memory cgroup out of memory|Out of memory)[^:]*: Kill(?:ed)? process (?P<pid>\d+),? "
    r"\((?P<name>[^)]*)\)",
    "The kernel killed {name} (process {pid}) for memory",
    _LESS,
    _KERNEL,
)


def _is_cause(groups: t.Mapping[str, str]) -> bool:
    # 43 and 45 are written when a process that used the GPU ends, for whatever reason.
    return groups["xid"] not in ("43", "45")


# What else ends a node or an engine. A name in them is a process, which counts only if it is an engine's.
NODE_RULES: tuple[Rule, ...] = (
    rule(
        "gpu-memory-wedge",
        r"NVRM: .*(?:NV_ERR_NO_MEMORY|_memdescAllocInternal)",
        "The GPU driver could not allocate memory: the memory that GPU and processes share was used up",
        _BUDGET + "; if it happens at each start with kernel 7.0.0-10xx, boot kernel 6.17 or with kho=off",
        "NVIDIA/open-gpu-kernel-modules issue 1358; field cases B117 and B34",
    ),
    rule(
        "gpu-lost",
        r"NVRM: .*(?:GPU has fallen off the bus|GPU is lost|RmInitAdapter failed|rm_init_adapter failed)",
        "The GPU does not answer its driver any more",
        "Reboot the node; if it comes again, take its power away for a minute",
        "NVIDIA driver; peers report cold power removal as the cure",
    ),
    rule(
        "gpu-xid",
        r"NVRM: Xid \([^)]*\): (?P<xid>\d+), (?P<text>.{0,120})",
        "The GPU reported Xid {xid} ({text})",
        "Look the number up in NVIDIA's list of Xid errors; reboot the node, and if it comes again take its power away",
        "NVIDIA driver",
        when=_is_cause,
    ),
    rule(
        "link-down",
        r"(?:mlx5_core|igb|r8127|atlantic)\S* \S+ (?P<interface>en\w+)(?:\([^)]*\))?: Link (?:is )?[Dd]own"
        r"|(?P<other>en\w+): (?:NIC )?Link (?:is )?[Dd]own",
        "The link on {interface}{other} went down",
        "Look at cable and port, compare `ethtool` on both ends, and start again when it is up",
        _KERNEL,
    ),
    rule(
        "nic-cable",
        r"mlx5_core .*Port module event\[error\]: module \d+, Cable error, (?P<why>[^,]+)",
        "The network adapter refused its cable or module: {why}",
        "Replace the cable or cool the adapter",
        _KERNEL,
    ),
    rule(
        "nic-error",
        r"mlx5_core .*(?:health compromised|assert_var\[|device's health compromised|[Ff]atal (?:error|sensor)|"
        r"Firmware over .* failed|driver is in error state|reached miss count)",
        "The network adapter failed",
        "Reboot the node; if it comes again, take its power away for a minute and update the adapter's firmware",
        _KERNEL,
    ),
    rule(
        "disk-error",
        r"I/O error, dev \w+|Buffer I/O error on dev|EXT4-fs error|XFS \([^)]*\): .*(?:[Cc]orruption|shutting down)|"
        r"Remounting filesystem read-only|nvme\w* .*(?:controller is down|I/O .*timeout)",
        "A disk or its file system reported an error",
        "Look at `smartctl -a` and the file system; verify the checkpoint before the next start",
        _KERNEL,
    ),
    rule(
        "process-crashed",
        r"(?:^|kernel: )(?:\[ *[\d.]+\] )?(?P<name>(?:(?!: )[^\[\]]){1,20}?)\[\d+\]: "
        r"(?:segfault at|unhandled .{1,40}fault)(?:.*(?P<library> in [^\s\[]+))?",
        "{name} crashed{library}",
        "Look for a library that does not belong to this engine or driver: compare the packages of the nodes, and "
        "reinstall the engine where they differ",
        _KERNEL,
    ),
    rule(
        "illegal-instruction",
        r"traps: (?P<name>.{1,30}?)\[\d+\] (?:trap )?invalid opcode"
        r"|(?<!\S)(?P<other>\S{1,30})\[\d+\]: undefined instruction",
        "{name}{other} ran an instruction that this processor does not have",
        "Install the engine's wheel for this machine",
        _KERNEL,
    ),
    rule(
        "hung-task",
        r"INFO: task (?P<name>.+?):\d+ blocked for more than (?P<seconds>\d+) seconds",
        "{name} was blocked for more than {seconds} s in the kernel: the node swapped, or its disk or driver hung",
        _BUDGET,
        _KERNEL,
        kind=SUSPECT,
    ),
    rule(
        "cpu-stall",
        r"soft lockup - CPU#\d+ stuck|rcu\w*:? .*(?:self-)?detected (?:expedited )?stall|hard LOCKUP",
        "A processor of the node did not run for many seconds",
        "Reboot the node and look at what the kernel wrote before",
        _KERNEL,
        kind=SUSPECT,
    ),
    rule(
        "overheated",
        r"critical temperature reached|[Tt]hermal shutdown|temperature above threshold, cpu clock throttled",
        "The node was too hot",
        "Give it air; a heat-soaked Spark slows down and may switch off under load",
        _KERNEL,
        kind=SUSPECT,
    ),
)
# Processes of an engine, as the kernel (15 characters), systemd or a guard of memory names them.
ENGINE = re.compile(
    r"hy3|vllm|sglang|raylet|gcs_server|EngineCore|pt_main_thread|\bray\b|\bray[-:_.]|^VLLM|^python3?$", re.IGNORECASE
)
