# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Rules about vLLM's MoE backends: which exist, which take the checkpoint's experts, which run on GB10."""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._situation import (
    ERROR,
    FP4,
    WARNING,
    Rule,
    Situation,
    Unknown,
    release_of,
)

RECIPE = "seed 000 (LibertAI, vLLM 0.24.0, two Sparks)"
FORUM = "seed 001 (kodelow W4A16, vLLM 0.23.1, two Sparks)"
WHEELS = "vLLM wheels 0.20.0 to 0.33.0, read"

# vllm/config/kernel.py, MoEBackend: the release that added each, and the one that dropped it.
BACKENDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            *("auto", "triton", "deep_gemm", "deep_gemm_mega_moe", "cutlass", "flashinfer_trtllm"),
            *("flashinfer_cutlass", "flashinfer_cutedsl", "marlin", "aiter", "emulation"),
        ),
        ("0.20", ""),
    ),
    **dict.fromkeys(("flashinfer_b12x", "humming", "triton_unfused"), ("0.22", "")),
    "flydsl": ("0.24", ""),
    "hpc": ("0.25", ""),
    "batched_triton": ("0.27", ""),
    **dict.fromkeys(("b12x", "flashinfer_moe_ep_mega_deep_gemm"), ("0.29", "")),
    "flashinfer_moe_ep_mega_cutedsl": ("0.29", "0.32"),
    **dict.fromkeys(("aiter_triton_mxfp4_bf16", "rdna3"), ("0.30", "")),
    **dict.fromkeys(("flashinfer_moe_ep_cutedsl", "aiter_mega_moe"), ("0.32", "")),
    "aiter_triton_mxfp4_mxfp4": ("0.33", ""),
}
# Those that take NVFP4 experts, and from which release on.
NVFP4_BACKENDS: dict[str, str] = {
    **dict.fromkeys(
        ("auto", "cutlass", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "marlin", "emulation"),
        "0.20",
    ),
    **{"flashinfer_b12x": "0.24", "humming": "0.26", "b12x": "0.30", "flashinfer_moe_ep_cutedsl": "0.33"},
}
# Kernels of datacenter Blackwell, capability family 10.x. The check is on the family, and 12.1 is another.
FAMILY_100 = {
    "flashinfer_trtllm",
    *("flashinfer_cutedsl", "flashinfer_cutedsl_batched", "flashinfer_moe_ep_cutedsl"),
    *("flashinfer_moe_ep_mega_cutedsl", "deep_gemm_mega_moe", "flashinfer_moe_ep_mega_deep_gemm"),
}
B12X = {"b12x", "flashinfer_b12x"}


def backend_of(s: Situation) -> str:
    return s.text("moe-backend") or "auto"


def _one_of(s: Situation, backends: set[str]) -> str | None:
    backend = backend_of(s)
    return f"moe-backend is {backend}" if backend in backends and s.gb10 else None


def unknown_backend(s: Situation) -> str | None:
    since, until = BACKENDS.get(backend_of(s), ("", ""))
    if since and s.version >= release_of(since) and not (until and s.version >= release_of(until)):
        return None
    # Newer than any wheel that was read.
    if s.version >= (0, 34):
        raise Unknown("the MoE backends of this version")
    return f"moe-backend is {backend_of(s)}, which {s.named} does not have"


def not_for_nvfp4(s: Situation) -> str | None:
    backend = backend_of(s)
    if backend not in BACKENDS:
        return None  # moe-backend-unknown says that
    since = NVFP4_BACKENDS.get(backend)
    return None if since and s.version >= release_of(since) else f"moe-backend is {backend} ({s.named})"


def marlin_without_quantization(s: Situation) -> str | None:
    if backend_of(s) != "marlin" or s.scheme != "none":
        return None
    return "moe-backend is marlin and the checkpoint's experts are not quantized"


def marlin_drafter(s: Situation) -> str | None:
    if not s.mtp or backend_of(s) != "marlin" or s.speculative.get("moe_backend"):
        return None
    if s.scheme == "none" or not s.checkpoint("mtp_layer", bool) or s.checkpoint("mtp_quantized", bool):
        return None
    return "moe-backend is marlin, speculative-config has no moe_backend and the MTP layer's experts are BF16"


def auto_backend(s: Situation) -> str | None:
    if backend_of(s) != "auto" or not s.gb10:
        return None
    return f"moe-backend is {'auto' if s.text('moe-backend') else 'not set'}"


def w4a16_backend(s: Situation) -> str | None:
    backend = backend_of(s)
    return f"moe-backend is {backend}" if backend not in ("auto", "marlin", "humming", "emulation") else None


def b12x_on_cuda_12(s: Situation) -> str | None:
    if backend_of(s) not in B12X or not s.torch_cuda or release_of(s.torch_cuda) >= (13,):
        return None
    return f"moe-backend is {backend_of(s)} on a build for CUDA {s.torch_cuda}"


def b12x_with_cutlass(s: Situation) -> str | None:
    if backend_of(s) not in B12X or not s.gb10:
        return None
    cutlass = s.package("nvidia-cutlass-dsl")
    if not cutlass or release_of(cutlass)[:2] != (4, 5):
        return None
    return f"moe-backend is {backend_of(s)} with nvidia-cutlass-dsl {cutlass}"


MOE_RULES: tuple[Rule, ...] = (
    Rule(
        "moe-backend-unknown",
        ERROR,
        unknown_backend,
        about="moe-backend is no choice of this version",
        what="vLLM refuses its arguments",
        fix="set moe-backend to marlin for NVFP4 experts on a Spark",
        source=WHEELS,
        engine="vllm",
        since="0.20",
    ),
    Rule(
        "moe-not-for-nvfp4",
        ERROR,
        not_for_nvfp4,
        about="moe-backend is one that takes no NVFP4 experts in this version",
        what="no NVFP4 kernel is behind that name, so the engine core dies at load",
        fix="set moe-backend to marlin",
        source=WHEELS,
        engine="vllm",
        since="0.20",
        schemes=FP4,
    ),
    Rule(
        "moe-family-100",
        ERROR,
        lambda s: _one_of(s, FAMILY_100),
        about="GB10; moe-backend is flashinfer_trtllm, a cutedsl one or a mega_moe one",
        what="that kernel is gated to capability family 100, and GB10 is 12.1",
        fix="set moe-backend to marlin",
        source=f"{RECIPE}; field case B84",
        engine="vllm",
    ),
    Rule(
        "moe-flashinfer-cutlass",
        WARNING,
        lambda s: _one_of(s, {"flashinfer_cutlass", "cutlass"}),
        about="GB10; moe-backend is flashinfer_cutlass or cutlass",
        what=(
            "with vLLM 0.24.0 it died on sm_121 of cudaErrorNoKernelImageForDevice, because flashinfer ships no cubins "
            "for it (disputed: a vLLM recipe has it faster than marlin for another model, and SGLang 0.5.14 serves "
            "W4A4 with its own)"
        ),
        fix="set moe-backend to marlin, or try it and compare the text that it writes",
        source=f"{RECIPE}; vLLM recipes pull request 632; seed 003; field case B84",
        engine="vllm",
        schemes=frozenset({"nvfp4"}),
    ),
    Rule(
        "moe-auto",
        WARNING,
        auto_backend,
        about="GB10; moe-backend is auto or not set",
        what="the automatic order for NVFP4 tries flashinfer's kernels before marlin, and one of them may claim sm_121",
        fix="set moe-backend to marlin",
        source=f"{RECIPE}; {WHEELS}",
        engine="vllm",
        schemes=frozenset({"nvfp4"}),
    ),
    Rule(
        "moe-w4a16-not-marlin",
        ERROR,
        w4a16_backend,
        about="moe-backend is none of auto, marlin, humming and emulation",
        what="weight-only NVFP4 has no activation scales for it, and flashinfer's FP4 path froze GB10s",
        fix="set moe-backend to marlin",
        source=FORUM,
        engine="vllm",
        schemes=frozenset({"w4a16"}),
    ),
    Rule(
        "moe-b12x-cuda-12",
        ERROR,
        b12x_on_cuda_12,
        about="moe-backend is b12x or flashinfer_b12x; torch is built for CUDA 12",
        what="b12x fused MoE requires CUDA 13",
        fix="set moe-backend to marlin and install a CUDA 13 build",
        source=RECIPE,
        engine="vllm",
    ),
    Rule(
        "moe-b12x-cutlass-dsl",
        ERROR,
        b12x_with_cutlass,
        about="GB10; moe-backend is b12x or flashinfer_b12x; nvidia-cutlass-dsl is 4.5.x",
        what="its compiler breaks PTX for sm_121 and the engine livelocks (4.4.2 breaks the import of flashinfer)",
        fix="set moe-backend to marlin",
        source=RECIPE,
        engine="vllm",
    ),
    Rule(
        "moe-b12x",
        WARNING,
        lambda s: _one_of(s, B12X),
        about="GB10; moe-backend is b12x or flashinfer_b12x",
        what="nobody has reported it to serve Hy3 on GB10, and vLLM itself takes it only when asked",
        fix="set moe-backend to marlin",
        source=f"{RECIPE}; field case B84",
        engine="vllm",
    ),
    Rule(
        "moe-marlin-bf16",
        ERROR,
        marlin_without_quantization,
        about="moe-backend is marlin; the experts are not quantized",
        what="vLLM refuses it (moe_backend='marlin' is not supported for unquantized MoE)",
        fix="leave moe-backend out",
        source=WHEELS,
        engine="vllm",
        since="0.20",
    ),
    Rule(
        "mtp-marlin-bf16",
        ERROR,
        marlin_drafter,
        about="MTP; moe-backend is marlin; the MTP layer's experts are not quantized; the drafter has no moe_backend",
        what="the drafter inherits marlin, which vLLM refuses for unquantized experts",
        fix='give the drafter its own: speculative-config {"method": "mtp", "num_speculative_tokens": 1, '
        '"moe_backend": "triton"}',
        source=WHEELS,
        engine="vllm",
        since="0.20",
    ),
)
