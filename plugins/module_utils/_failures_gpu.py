# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Failures of kernels, backends, compilers and the GPU's driver."""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._failure import RECIPE, SGLANG_RECIPE, Rule, rule

_MARLIN = "Serve with moe_backend marlin"
_MATCH = "Match them: CUDA 13.0 with driver 580 is known to work"
_POWER = "Reboot the node; if it comes again, take its power away for a minute"
_COMPILER = "a kernel is compiled at its first use"

BACKEND_RULES: tuple[Rule, ...] = (
    rule(
        "no-kernel-image",
        r"cudaErrorNoKernelImageForDevice|no kernel image is available for execution|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|cudaErrorSymbolNotFound|named symbol not found",
        "A kernel was not built for this GPU: flashinfer and CUTLASS FP4 MoE kernels have no code for sm_121",
        _MARLIN,
        RECIPE,
    ),
    rule(
        "cutlass-arch",
        r"Arch conditional MMA instruction used without targeting",
        "CUTLASS's FP4 kernel was compiled for another architecture than sm_121a and stops itself",
        _MARLIN,
        RECIPE + "; NVIDIA/cutlass issue 3096",
    ),
    rule(
        "cutlass-fp4",
        r"Failed to (?:initialize|run|implement) (?:cutlass )?(?:TMA WS grouped gemm|FP4 gemm|GEMM)"
        r"|\[FP4 gemm Runner\]|cutlass_fp4_group_mm.*(?:failed|[Ee]rror)",
        "CUTLASS's FP4 kernel cannot run on this GPU",
        _MARLIN,
        RECIPE + "; flashinfer issue 2077",
        fatal=False,
    ),
    rule(
        "cute-dsl-arch",
        r"expects arch to be one of (?P<known>\[[^\]]*\]), but got (?P<arch>\S+)",
        "The CuTe DSL kernel of this backend knows {known} and not {arch}: it is made for data-centre GPUs",
        _MARLIN,
        RECIPE + " (cutedsl is gated to family 100); flashinfer issue 3170",
    ),
    rule(
        "flashinfer-arch",
        r"No supported CUDA architectures found for major versions (?P<known>\[[^\]]*\])",
        "This flashinfer kernel is built for GPUs of generation {known} only, and a Spark's is 12",
        "Serve with moe_backend marlin (vLLM), with attention-backend triton and flashinfer_cutlass (SGLang)",
        RECIPE + "; " + SGLANG_RECIPE,
    ),
    rule(
        "flashinfer-backend",
        r"\b(?P<what>\w{1,40}) does not support backend '(?P<backend>[\w-]+)' with capability (?P<capability>\d+)",
        "flashinfer's {what} has no backend {backend} for capability {capability}",
        "SGLang: set fp4-gemm-backend and moe-runner-backend to flashinfer_cutlass; vLLM: " + _MARLIN.lower(),
        SGLANG_RECIPE + "; flashinfer pull request 3113",
    ),
    rule(
        "b12x-cuda-12",
        r"b12x\b.{0,60}requires CUDA 13",
        "The b12x MoE backend refuses a CUDA 12 build, and hangs in its compiler on CUDA 13 builds of that time",
        "Serve with moe_backend marlin on a CUDA 13 build of vLLM",
        RECIPE,
    ),
    rule(
        "b12x-ptx",
        r"ptxas.*(?:_mma\.block_scale|kind::mxf4nvf4|'?_mma'?)|(?:_mma\.block_scale|Unknown modifier "
        r"'\.kind::mxf4).*ptxas"
        r"|(?:NVVM|Ptxas|ptxas) .*(?:compilation|assembl\w+) fail\w*.*(?:mxf4|block_scale)",
        "The CuTe DSL compiler made PTX for the b12x kernel that ptxas does not know: nvidia-cutlass-dsl 4.5.0 and "
        "4.5.2, "
        "or its CUDA 12 part, which pip laid over that of CUDA 13",
        "Serve with moe_backend marlin",
        RECIPE + "; NVIDIA/cutlass issue 3227; TensorRT-LLM issue 15853",
    ),
    rule(
        "unsupported-ptx",
        r"cudaErrorUnsupportedPtxVersion|CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
        r"|PTX was compiled with an unsupported toolchain",
        "The CUDA toolkit that compiled a kernel is newer than the driver",
        _MATCH,
        RECIPE + "; field case B128",
    ),
    rule(
        "ptxas-arch",
        r"ptxas\S* fatal\s*: Value '(?P<arch>sm_\w+)' is not defined",
        "The ptxas that compiled a kernel does not know {arch}; Triton older than 3.6 brings one of CUDA 12.8",
        "Set TRITON_PTXAS_PATH to /usr/local/cuda/bin/ptxas of CUDA 13.0 on every node (hy3_engine_env), or install an "
        "engine whose torch brings Triton 3.6 or newer",
        "Triton issue 8539; Triton wheels 3.5.1 and 3.6.0, read; field case B128",
    ),
    rule(
        "nvcc-arch",
        r"nvcc fatal\s*: Unsupported gpu architecture '(?P<arch>\w+)'",
        "The nvcc that compiled a kernel does not know {arch}",
        "Point CUDA_HOME to CUDA 13.0 on every node (hy3_engine_env); 12.9 is the first that knows sm_121",
        "field case B128",
    ),
    rule(
        "ptxas-path",
        r"Cannot find ptxas|(?:No such file or directory|not found|cannot execute).*ptxas"
        r"|ptxas.*(?:No such file|not found|Permission denied)",
        "Triton finds no ptxas where TRITON_PTXAS_PATH points, or none at all",
        "Set TRITON_PTXAS_PATH to the ptxas of CUDA 13.0, usually /usr/local/cuda/bin/ptxas (hy3_engine_env)",
        "Triton; field case B128",
        fatal=False,
    ),
    rule(
        "no-nvcc",
        r"Could not find nvcc|CUDA_HOME environment variable is not set|nvcc.{0,20}(?:not found|No such file)"
        r"|Failed to find nvcc",
        "There is no CUDA compiler on the node, and " + _COMPILER,
        "Install CUDA 13.0's toolkit and set CUDA_HOME (hy3_engine_env)",
        "flashinfer and torch",
        fatal=False,
    ),
    rule(
        "no-compiler",
        r"Failed to find C compiler|Python\.h: No such file|Ninja is required to load C\+\+ extensions"
        r"|(?:ninja|gcc|g\+\+|cc1plus)\b.{0,30}(?:not found|No such file or directory)"
        r"|No such file or directory: '(?:\S*/)?(?:ninja|gcc|g\+\+|nvcc)'|cannot find -lcuda\b",
        "A compiler, ninja, or the header files of Python are missing on the node, and " + _COMPILER,
        "Install build-essential, python3-dev and ninja on every node",
        "Triton, torch and flashinfer",
        fatal=False,
    ),
    rule(
        "moe-unquantized",
        r"moe_backend='(?P<backend>\w+)' is not supported for unquantized MoE",
        "moe_backend {backend} was applied to an MoE layer that is not quantized, most likely the drafter's",
        'Give the drafter its own: speculative_config {{"method": "mtp", "num_speculative_tokens": 1, '
        '"moe_backend": "triton"}}',
        "vLLM map_unquantized_backend, all versions",
    ),
    rule(
        "moe-kind",
        r"moe_backend='(?P<backend>\w+)' is not supported for (?P<kind>\w+) MoE",
        "moe_backend {backend} has no kernels for {kind} experts",
        "Set moe_backend to marlin for NVFP4 experts on a Spark",
        "vLLM's choice of MoE kernels, 0.20 to 0.33",
    ),
    rule(
        "moe-none",
        r"No (?P<kind>\w+) MoE backend supports",
        "No MoE backend for {kind} experts supports this GPU and this configuration",
        "Serve with moe_backend marlin on a Spark, and see that vLLM is a CUDA 13 build",
        RECIPE + "; field case B84",
    ),
    rule(
        "moe-refused",
        r"\b(?P<kind>\w{1,30}) MoE backend '?(?P<backend>\w+)'? does not support",
        "MoE backend {backend} ({kind}) does not support this GPU or this configuration",
        "Serve with moe_backend marlin on a Spark: the flashinfer ones are gated to data-centre GPUs",
        RECIPE + "; field case B84",
    ),
    rule(
        "attention-fa3",
        r"FlashAttention v3 Backend requires SM|'fa3' backend is not supported on Blackwell",
        "Attention backend fa3 is for GPUs of capability 8 and 9",
        "Set attention-backend to triton",
        "SGLang wheels 0.5.14 and 0.5.23, read",
    ),
    rule(
        "attention-flashinfer",
        r"Batch(?:Prefill|Decode|Attention)\w*.{0,80}(?:failed|[Uu]nsupported|[Ii]nvalid)"
        r"|(?:flashinfer|FlashInfer).{0,80}(?:[Uu]nsupported|[Ii]nvalid).{0,20}(?:head|group_size|qk_head)",
        "flashinfer's attention does not take Hy3's heads",
        "Set attention-backend to triton",
        SGLANG_RECIPE,
        fatal=False,
    ),
    rule(
        "nvfp4-platform",
        r"Current platform does not support NVFP4",
        "SGLang has no NVFP4 kernel for what it runs on",
        "See that the GPU and its driver are found, and that SGLang is built for sm_121; a CPU has none",
        "SGLang 0.5.23, run",
    ),
    rule(
        "no-scheme",
        r"No compressed-tensors compatible scheme was found",
        "This SGLang has no scheme for the checkpoint's quantization, most likely weight-only NVFP4",
        "Install SGLang 0.5.22 or newer, or serve the checkpoint with vLLM",
        "SGLang wheels 0.5.11 to 0.5.23, read",
    ),
    rule(
        "quantization-capability",
        r"(?:quantization method (?P<method>\S+) is|Quantization scheme is) not supported for the current GPU"
        r"(?:.*?Minimum capability: (?P<least>\d+).*?Current capability: (?P<now>\d+))?",
        "Quantization {method} needs a GPU of capability {least}, and this one has {now}",
        "Serve a checkpoint that this GPU can compute",
        "vLLM VllmConfig",
    ),
)

DRIVER_RULES: tuple[Rule, ...] = (
    rule(
        "driver-old",
        r"CUDA driver version is insufficient for CUDA runtime|NVIDIA driver on your system is too old"
        r"|cudaErrorInsufficientDriver|unsatisfied condition: cuda>=",
        "The NVIDIA driver is older than the CUDA that torch is built for",
        "Install driver 580 or newer, which CUDA 13 needs, and reboot",
        "CUDA; seed 000",
    ),
    rule(
        "driver-mismatch",
        r"Driver/library version mismatch|cudaErrorSystemDriverMismatch|unsupported display driver / cuda driver"
        r"|API mismatch: the client has the version",
        "The driver's kernel module and its libraries are of different releases: it was upgraded without a reboot",
        "Reboot the node",
        "NVIDIA driver",
    ),
    rule(
        "no-driver",
        r"Found no NVIDIA driver|libcuda\.so\.1: cannot open shared object|couldn't communicate with the NVIDIA driver",
        "There is no NVIDIA driver on the node, or its kernel module is not loaded",
        "Install driver 580 or newer, see that `nvidia-smi` works there, and reboot",
        "NVIDIA driver",
        unless=r"Failed to import|ImportError\(|WARNING",
    ),
    rule(
        "no-gpu",
        r"no CUDA-capable device is detected|No CUDA GPUs are available|cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE"
        r"|No accelerator \(CUDA.*\) is available|Failed to infer device type",
        "The driver shows no GPU to the engine",
        "See that `nvidia-smi` lists it and that CUDA_VISIBLE_DEVICES does not hide it; reboot the node",
        "CUDA; peers report that a plain reboot cures cuInit 100",
    ),
    rule(
        "gpu-not-ready",
        r"system not yet initialized|cudaErrorSystemNotReady|CUDA unknown error - this may be due to an incorrectly",
        "The GPU's driver is not ready",
        "Wait a minute after boot; if it stays, reboot the node",
        "CUDA",
    ),
    rule(
        "cpu-torch",
        r"Torch not compiled with CUDA enabled",
        "torch is built without CUDA (on aarch64 a plain install may pick that build)",
        "Install the CUDA 13 build of torch that belongs to the engine",
        "torch",
    ),
    rule(
        "gpu-memory-fault",
        r"an illegal memory access was encountered|cudaErrorIllegalAddress|misaligned address|an illegal instruction "
        r"was encountered",
        "A kernel read or wrote memory that it must not",
        "Serve with moe_backend marlin and enforce_eager true; if that is set, take the node's power away for a "
        "minute: a "
        "GPU whose clock is stuck does this, too",
        "eugr/spark-vllm-docker issue 334",
    ),
    rule(
        "gpu-kernel-failed",
        r"device-side assert triggered|unspecified launch failure|cudaErrorLaunchFailure|cudaErrorLaunchTimeout"
        r"|uncorrectable (?:ECC|NVLink) error|cudaErrorECCUncorrectable|GPU is lost",
        "A kernel failed on the GPU",
        _POWER + "; read the kernel's log for Xid",
        "CUDA",
    ),
    rule(
        "gpu-system-call",
        r"OS call failed or operation not supported on this OS|cudaErrorOperatingSystem",
        "CUDA could not use something of the system, often locked or shared memory",
        "See that LimitMEMLOCK is infinity for the raylet and that /dev/shm has room",
        "CUDA",
        fatal=False,
    ),
    rule(
        "crash",
        r"Fatal Python error: (?P<why>Segmentation fault|Bus error)|\*\*\* (?P<signal>SIG(?:SEGV|BUS)) received"
        r"|(?:^|[:\s])(?P<shell>Segmentation fault|Bus error)(?:\s|$)",
        "A process crashed ({why}{signal}{shell})",
        "Of a bus error: see that /dev/shm has room and the checkpoint is whole; else compare the packages of the "
        "nodes and reinstall the engine where they differ",
        "Python and Ray",
        fatal=False,
    ),
    rule(
        "illegal-instruction-text",
        r"(?:^|[:\s])Illegal instruction(?:\s|$)",
        "A library is built for another processor than the node's",
        "Install the engine's wheel for this machine",
        "vLLM's CPU builds, run",
        fatal=False,
    ),
)
