# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What went wrong, from an engine's log: the known failure lines as data, and the choice among those that match."""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import phase_of, without_repeat

_RECIPE = "recipe LibertAIDAI/Hy3-NVFP4 on two Sparks, troubleshooting"
_MEMORY_DOCS = "https://docs.vllm.ai/en/latest/configuration/conserving_memory/"
_RAY_MONITOR = "Ray's memory monitor; field case B30"
_RAY_MONITOR_FIX = (
    "Set RAY_memory_monitor_refresh_ms=0 in the environment of every `ray start` (hy3_engine_env; the raylet reads it, "
    "not the driver), and start again"
)

# A lower number is nearer to the root. Peers of a failed rank report a lost connection, louder than the rank itself.
ROOT, CONSEQUENCE, UNKNOWN, GENERIC = range(4)

_DRAFTER = re.compile(r"Loading drafter model")


class Failure(t.TypedDict):
    """A diagnosis in sentences, the log line that it stands on, and whether the engine cannot come up any more."""

    cause: str
    fix: str
    source: str
    line: str
    fatal: bool


@dataclass(frozen=True)
class Rule:
    """A known failure line. C(cause) and C(fix) may name the pattern's groups in braces.

    C(fatal) means that the engine never recovers after this line; C(drafter) restricts the rule to lines after
    (True) or before (False) the drafter's load began.
    """

    pattern: re.Pattern[str]
    cause: str
    fix: str
    source: str
    fatal: bool = True
    drafter: bool | None = None
    depth: int = ROOT


def _rule(pattern: str, cause: str, fix: str, source: str, **more: t.Any) -> Rule:
    return Rule(re.compile(pattern), cause, fix, source, **more)


# Who kills for memory. None of them writes into the log of what it kills, which just seems to be gone.
GUARD_RULES: tuple[Rule, ...] = (
    _rule(
        r"systemd-oomd(?:\[\d+\])?: Killed (?:\S*/)?(?P<unit>\S+) due to (?P<why>memory pressure|memory used|\S+)",
        "systemd-oomd killed {unit} ({why})",
        "Run the engine in a system unit, for a user's own systemd is watched for pressure (or set "
        "ManagedOOMMemoryPressure=auto), and drop the page cache before a load",
        "systemd-oomd, which leaves no kernel line; field case B41",
    ),
    _rule(
        r"earlyoom(?:\[\d+\])?: .*?sending SIG(?:TERM|KILL) to process (?P<pid>\d+) (?:uid \d+ )?\"(?P<name>[^\"]*)\"",
        "earlyoom killed {name} (process {pid}), because the node was short of memory",
        "Lower what the engine may take of this node, or what else runs there",
        "earlyoom",
    ),
    _rule(
        r"oom-kill:constraint=CONSTRAINT_MEMCG\b.*?,task_memcg=(?:[^,]*/)?(?P<unit>[^,/]*),task=(?P<name>[^,]*),pid=",
        "The kernel killed {name} in {unit}, which had reached its memory limit",
        "Raise the cap of that unit if the node has the memory (hy3_memory), or lower what runs in it",
        "the kernel's log",
    ),
    _rule(
        r"oom-kill:constraint=.*?,task_memcg=(?:[^,]*/)?(?P<unit>[^,/]*),task=(?P<name>[^,]*),pid=",
        "The kernel killed {name} in {unit}, because the node had no memory left",
        "Lower what the engine may take of this node, or what else runs there",
        "the kernel's log",
    ),
)
# Of journalctl: who writes such lines.
_GUARDS = ("SYSLOG_IDENTIFIER=systemd-oomd", "SYSLOG_IDENTIFIER=earlyoom", "_TRANSPORT=kernel")
_NEWEST_LINES = 5000
# A control group or a process of an engine: what guards kill besides is no concern.
_ENGINE = re.compile(r"hy3|vllm|sglang|raylet|gcs_server|EngineCore|pt_main_thread|\bray\b|\bray[-:_.]", re.IGNORECASE)

# The first rule that matches a line speaks for it, so the special ones stand before the general ones.
RULES: tuple[Rule, ...] = (
    *GUARD_RULES,
    _rule(
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        "The drafter's head was built {a} wide for a weight that is {b} wide: vLLM quantized the MTP head although the "
        "checkpoint keeps lm_head unquantized",
        "Apply patch P1 on every node (tag patch) and start again",
        f"{_RECIPE}; vLLM pull request 42124 made the defect active in 0.23.0",
        drafter=True,
    ),
    _rule(
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        "A layer of the main model was built {a} wide for a weight that is {b} wide, before the drafter was loaded: "
        "the checkpoint's ignore list most likely lacks lm_head",
        "Compare quantization_config.ignore in config.json (exclude_modules in hf_quant_config.json) with the "
        "checkpoint's source; patch P1 cannot cure this",
        "vLLM 0.24.0, ModelOpt loader, reproduced",
        drafter=False,
    ),
    _rule(
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than .*?"
        r"(?P<want>[\d.]+) GiB",
        "Only {free} of {all} GiB are free on a node, and gpu_memory_utilization asks for {want} GiB",
        "End what else uses memory there (a worker of an earlier start?), or lower gpu_memory_utilization below "
        "{free}/{all}",
        "vLLM request_memory; on a Spark it compares with MemAvailable",
    ),
    _rule(
        r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than .*?"
        r"(?P<want>[\d.]+) GiB",
        "Only {free} of {all} GiB are free on a node, and gpu_memory_utilization asks for {want} GiB",
        "End what else uses memory there, lower gpu_memory_utilization, or set VLLM_CPU_KVCACHE_SPACE",
        "vLLM CPU worker",
    ),
    _rule(
        r"max seq len \((?P<length>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed.*?\((?P<have>[\d.]+) GiB\)\."
        r".*estimated maximum model length is (?P<fits>\d+)",
        "One request of {length} tokens needs {need} GiB of KV cache and {have} GiB are left for it",
        "Set max_model_len to at most {fits} (the engine's estimate) or free memory on the nodes",
        _MEMORY_DOCS,
    ),
    _rule(
        r"max seq len \((?P<length>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed.*?\((?P<have>[\d.]+) GiB\)",
        "One request of {length} tokens needs {need} GiB of KV cache and {have} GiB are left for it",
        "Lower max_model_len or free memory on the nodes",
        _MEMORY_DOCS,
    ),
    _rule(
        r"max seq len \((?P<length>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache "
        r"\((?P<fits>\d+)\)",
        "The KV pool holds {fits} tokens and one request may have {length}",
        "Set max_model_len to at most {fits} or free memory on the nodes",
        _MEMORY_DOCS,
    ),
    _rule(
        r"No available memory for the cache blocks|Available KV cache memory: (?P<have>-[\d.]+) GiB",
        "Weights and activations leave no memory for the KV pool",
        "Free memory on the nodes or lower max_num_batched_tokens; a higher gpu_memory_utilization only helps if the "
        "node's memory budget allows it",
        _MEMORY_DOCS,
    ),
    _rule(
        r"cudaErrorNoKernelImageForDevice|no kernel image is available for execution",
        "A kernel was not built for this GPU: flashinfer and CUTLASS FP4 MoE kernels have no code for sm_121",
        "Serve with moe_backend marlin",
        _RECIPE,
    ),
    _rule(
        r"cudaErrorUnsupportedPtxVersion|PTX was compiled with an unsupported toolchain",
        "The CUDA toolkit that compiled a kernel is newer than the driver",
        "Match them: CUDA 13.0 with driver 580 is known to work",
        _RECIPE,
    ),
    _rule(
        r"ptxas\S* fatal\s*: Value '(?P<arch>sm_\w+)' is not defined",
        "The ptxas that compiled a kernel does not know {arch}; Triton older than 3.6 brings one of CUDA 12.8",
        "Set TRITON_PTXAS_PATH to /usr/local/cuda/bin/ptxas of CUDA 13.0 on every node (hy3_engine_env), or install an "
        "engine whose torch brings Triton 3.6 or newer",
        "Triton issue 8539; Triton wheels 3.5.1 and 3.6.0, read",
    ),
    _rule(
        r"b12x fused MoE requires CUDA 13",
        "The b12x MoE backend refuses a CUDA 12 build, and hangs in its compiler on CUDA 13 builds of that time",
        "Serve with moe_backend marlin on a CUDA 13 build of vLLM",
        _RECIPE,
    ),
    _rule(
        r"moe_backend='(?P<backend>\w+)' is not supported for unquantized MoE",
        "moe_backend {backend} was applied to an MoE layer that is not quantized, most likely the drafter's",
        'Give the drafter its own: speculative_config {{"method": "mtp", "num_speculative_tokens": 1, '
        '"moe_backend": "triton"}}',
        "vLLM map_unquantized_backend, all versions",
    ),
    _rule(
        r"(?P<kind>\w+) MoE backend '?(?P<backend>\w+)'? does not support",
        "MoE backend {backend} ({kind}) does not support this GPU or this configuration",
        "Serve with moe_backend marlin on a Spark: the flashinfer ones are gated to data-centre GPUs",
        _RECIPE,
    ),
    _rule(
        r"connectFullMesh.*127\.0\.0\.1",
        "Gloo of one node offered 127.0.0.1 to the others",
        "Set GLOO_SOCKET_IFNAME to the fabric interface and VLLM_HOST_IP to the node's fabric address on every node",
        _RECIPE,
    ),
    _rule(
        r"unhandled system error",
        "NCCL could not open its RDMA connection; a GID index that is not this node's RoCE v2 row is the usual reason",
        "Compare NCCL_IB_GID_INDEX and NCCL_IB_HCA of the workers with each node's GID table (sparks.hy3.roce_gid)",
        _RECIPE,
    ),
    _rule(
        r"Cannot provide a placement group|Required number of devices: |Current node has no GPU available",
        "Ray has fewer GPUs to give than the tensor parallel size asks for",
        "Check that every node has joined by its fabric address and that no earlier engine still holds its GPU",
        "vLLM ray_utils",
    ),
    _rule(
        r"The number of required \w+ exceeds the total number of available|Waiting for creating a placement group",
        "Ray has fewer free GPUs than the tensor parallel size asks for, and vLLM waits for them",
        "Check that every node has joined by its fabric address and that no earlier engine still holds its GPU",
        "vLLM ray_utils",
        fatal=False,
        # vLLM goes on when the node joins late, so a later line tells more.
        depth=CONSEQUENCE,
    ),
    _rule(
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<tp>\d+)\)",
        "{heads} attention heads cannot be divided by {tp} ranks",
        "Use 2 or 4 nodes, or a checkpoint that is padded for {tp}",
        "vLLM ModelConfig.verify_with_parallel_config",
    ),
    _rule(
        r"AssertionError: (?P<size>\d+) is not divisible by (?P<tp>\d+)",
        "A dimension of {size} (120832 is the vocabulary) cannot be divided by {tp} ranks",
        "Use 2 or 4 nodes, or a padded checkpoint and patch P3 for {tp}",
        "vLLM pad_vocab_size, 0.19.1 to 0.33.0",
    ),
    _rule(
        r"\[Errno 98\]|error while attempting to bind on address",
        "The API port is taken by another process on the head",
        "Stop that process or set hy3_api_port",
        "uvicorn",
    ),
    _rule(
        r"parser could not locate .*tokens? in the tokenizer",
        "The parser's tokens are not in the tokenizer: this checkpoint writes them with a suffix",
        'vLLM 0.25.0 and newer: set "token_suffix" in tokenizer_config.json; older: apply patch P2',
        "vLLM hy_v3 parsers, 0.20.0 to 0.33.0",
    ),
    _rule(
        r"KeyError: '(?P<name>[^']*shared_(?:experts|mlp)[^']*)'",
        "The engine has no parameter for the shared expert's tensor {name}",
        "A checkpoint with shared_experts names needs a rename; one whose ignore list names shared_mlp needs "
        "vLLM 0.29.0 or newer, or patch P7",
        "vLLM pull request 48682",
    ),
    _rule(
        r"Ignore import error when loading \S*(?:hunyuan_v3|hy_v3)\S*: (?P<why>.*)",
        "The engine's Hy3 model file cannot be imported: {why}",
        "Revert the patches of that file (sparks.hy3.engine_patch) or reinstall the engine",
        "model registries of SGLang and vLLM hide this error",
    ),
    _rule(
        r"Model architectures .*HYV3.* are not supported",
        "This engine does not know Hy3",
        "Install vLLM 0.20.0 or newer",
        "vLLM 0.20.0 is the first with HYV3ForCausalLM",
    ),
    _rule(
        r"ModuleNotFoundError: No module named 'flashinfer",
        "vLLM's sampler wants flashinfer, which is not installed",
        "Install flashinfer or set VLLM_USE_FLASHINFER_SAMPLER=0 (hy3_engine_env)",
        "vLLM 0.24.0, reproduced",
    ),
    # Ray's word for what its monitor did is the same class name as torch's.
    _rule(
        r"Memory on the node \(IP: (?P<node>[^,)\s]+)[^)]*\).*?was (?P<used>[\d.]+ ?GB) / (?P<all>[\d.]+ ?GB)",
        "Ray's memory monitor killed a worker on {node} at {used} of {all}, page cache and GPU memory counted; the GPU "
        "did not run out",
        _RAY_MONITOR_FIX,
        _RAY_MONITOR,
    ),
    _rule(
        r"ray\.exceptions\.OutOfMemoryError|killed due to (?:the )?node running (?:low on|out of) memory"
        r"|[Kk]illed due to memory pressure \(OOM\)",
        "Ray's memory monitor killed a worker, because the node's memory with page cache and GPU memory passed its "
        "threshold; the GPU did not run out",
        _RAY_MONITOR_FIX,
        _RAY_MONITOR,
    ),
    _rule(
        r"CUDA out of memory|OutOfMemoryError",
        "A rank ran out of GPU memory",
        "Lower gpu_memory_utilization, max_model_len or max_num_batched_tokens, or free memory on that node",
        _MEMORY_DOCS,
    ),
    _rule(
        r"Could not find any running Ray instance",
        "The engine could not reach the Ray cluster",
        "Check hy3-ray.service on the head and RAY_ADDRESS of the engine",
        "Ray",
    ),
    _rule(
        r"RuntimeError: cancelled",
        "The head lost a worker",
        "Look at the memory and the log of the other nodes; a worker that ran out of memory is the usual reason: lower "
        "max_model_len or the KV budget",
        _RECIPE,
        depth=CONSEQUENCE,
    ),
    _rule(
        r"Connection closed by (?:remote )?peer|ActorDiedError|EngineDeadError|EngineCore died",
        "A worker or the engine core ended, and the rest noticed",
        "Look at the unit's log and the memory of the other nodes",
        "vLLM and Ray",
        depth=CONSEQUENCE,
    ),
    _rule(
        r"Engine core initialization failed",
        "The engine core failed to start, and the log names no reason that is known here",
        "Read the log above this line for the first error",
        "vLLM",
        depth=GENERIC,
    ),
    _rule(
        # At a line's start or after a log prefix only: "Failed to import … ImportError(…)" notes are harmless.
        r"(?:^|[\])] )(?P<error>(?:\w+\.)*\w+(?:Error|Exception)): (?P<text>.+)",
        "The engine raised {error}: {text}",
        "Read the log around this line",
        "no rule of this collection knows it",
        fatal=False,
        depth=UNKNOWN,
    ),
)


def guards_command(since: int) -> list[str]:
    """The command that prints what the guards of a node's memory wrote since then, in Unix seconds."""
    command = ["journalctl", "--no-pager", "--quiet", "--all", "--output=short", f"--since=@{since}"]
    return [*command, f"--lines={_NEWEST_LINES}", *" + ".join(_GUARDS).split()]


def kills_of_engines(lines: t.Iterable[str]) -> list[str]:
    """Those of the guards' lines whose victim has an engine's name."""
    return [line for line, victim in _kills(lines) if _ENGINE.search(victim)]


def find_kills(lines: t.Iterable[str]) -> list[Failure]:
    """A diagnosis for each victim of the guards that may have been an engine, each once.

    systemd-oomd names a control group only, and an engine that was started by hand may be in one of any name.
    """
    may_be = [line for line, victim in _kills(lines) if _ENGINE.search(victim) or "systemd-oomd" in victim]
    found = [find_failure([line], stopped=True) for line in may_be]
    return list({one["cause"]: one for one in found if one}.values())


def _kills(lines: t.Iterable[str]) -> list[tuple[str, str]]:
    """The lines that tell of a kill, and what each says from the guard's name on."""
    found = [(line, next(filter(None, (rule.pattern.search(line) for rule in GUARD_RULES)), None)) for line in lines]
    return [(line, line[match.start() :]) for line, match in found if match]


def find_failure(lines: t.Sequence[str], *, stopped: bool) -> Failure | None:
    """The diagnosis of one start, or None.

    While the engine runs, only fatal lines count, and none once it is ready (a request's error is not the engine's).
    C(stopped) says that it ended by itself: then every match counts. Of several matches the one nearest to the root
    is chosen, of those the earliest.
    """
    if not stopped and phase_of(lines) == "ready":
        return None
    matches: list[tuple[int, int, Rule, re.Match[str]]] = []
    drafter = False
    for index, line in enumerate(lines):
        drafter = drafter or bool(_DRAFTER.search(line))
        for rule in RULES:
            if rule.drafter in (None, drafter) and (match := rule.pattern.search(line)):
                matches.append((rule.depth, index, rule, match))
                break
    fatal = any(rule.fatal for _depth, _index, rule, _match in matches)
    if not matches or not (fatal or stopped):
        return None
    _depth, index, rule, match = min(matches, key=lambda found: found[:2])
    return Failure(
        cause=without_repeat(rule.cause.format(**match.groupdict())),
        fix=rule.fix.format(**match.groupdict()),
        source=rule.source,
        line=without_repeat(lines[index]).strip(),
        fatal=fatal,
    )
