# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Rules about SGLang's own settings."""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._rules_ray import several_nodes
from ansible_collections.sparks.hy3.plugins.module_utils._situation import (
    ERROR,
    NOTE,
    WARNING,
    Rule,
    Situation,
    Unknown,
)

CARD = "seed 003 (vroomfondel W4A4, SGLang 0.5.14, four Sparks)"
WHEELS = "SGLang wheels 0.5.11 to 0.5.23, read"
# In the name of each kernel that is for capability family 100 only, with whatever before and after.
FAMILY_100 = ("trtllm", "cutedsl", "cute_dsl")
ATTENTION = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")


def too_old(s: Situation) -> str | None:
    return f"The engine is {s.named}"


def removed_flags(s: Situation) -> str | None:
    given = [name for name in ("cuda-graph-max-bs", "disable-piecewise-cuda-graph") if s.argument(name) is not None]
    return f"{' and '.join(given)} given to {s.named}" if given else None


def draft_unquantized(s: Situation) -> str | None:
    given = s.text("speculative-draft-model-quantization")
    return f"speculative-draft-model-quantization is {given}" if given == "unquant" else None


def backends(s: Situation) -> str | None:
    odd = [
        f"{name} is {s.text(name)}"
        for name in ("moe-runner-backend", "fp4-gemm-backend")
        if any(word in (s.text(name) or "") for word in FAMILY_100)
    ]
    return " and ".join(odd) if odd and s.gb10 else None


def cutlass_runner(s: Situation) -> str | None:
    return "moe-runner-backend is cutlass" if s.text("moe-runner-backend") == "cutlass" and s.gb10 else None


def cutlass_on_cpu(s: Situation) -> str | None:
    if s.text("device") != "cpu" or s.text("moe-runner-backend") != "flashinfer_cutlass":
        return None
    return "moe-runner-backend is flashinfer_cutlass on a CPU"


def attention(s: Situation) -> str | None:
    odd = [name for name in ATTENTION if s.text(name) == "flashinfer"]
    return f"{' and '.join(odd)} is flashinfer" if odd and s.gb10 else None


def attention_of_hopper(s: Situation) -> str | None:
    odd = [name for name in ATTENTION if s.text(name) == "fa3"]
    return f"{' and '.join(odd)} is fa3" if odd and s.gb10 else None


def attention_of_family_100(s: Situation) -> str | None:
    prefill = s.text("prefill-attention-backend") or s.text("attention-backend")
    return "The backend of the prefill is trtllm_mha" if prefill == "trtllm_mha" and s.gb10 else None


def one_node(s: Situation) -> str | None:
    if not several_nodes(s):
        return None
    nodes = s.count("nnodes")
    if nodes < 2:
        return f"nnodes is {nodes if s.number('nnodes') else 'not set'} on {s.nodes} nodes"
    return None if s.argument("dist-init-addr", "nccl-init-addr") else f"nnodes is {nodes} without dist-init-addr"


def finds_parser(s: Situation) -> bool:
    """Whether the parser ``auto`` knows Hy3's template: not in 0.5.14 and in 0.5.23; those between were not read."""
    if (0, 5, 14) < s.version < (0, 5, 23):
        raise Unknown("whether auto of this version finds Hy3's parser")
    return s.version >= (0, 5, 23)


def parser_name(s: Situation) -> str | None:
    given = {name: s.exact(name) for name in ("tool-call-parser", "reasoning-parser")}
    odd = [f"{name} is {value}" for name, value in given.items() if value not in ("", "hunyuan", "auto")]
    odd += [f"{name} is auto ({s.named})" for name, value in given.items() if value == "auto" and not finds_parser(s)]
    return " and ".join(odd) or None


def parser_suffix(s: Situation) -> str | None:
    if not (s.text("tool-call-parser") or s.text("reasoning-parser")):
        return None
    suffix = s.checkpoint("vocab_suffix", str)
    if not suffix or s.patched("P2"):
        return None
    return f"The checkpoint writes its marks with the suffix {suffix} ({s.named})"


def shared_experts(s: Situation) -> str | None:
    if not s.checkpoint("shared_experts_names", bool) or s.patched("P4"):
        return None
    return "Tensors are named mlp.shared_experts and patch P4 is not in place"


def nextn_quantized(s: Situation) -> str | None:
    if not s.mtp or s.checkpoint("method", str) != "modelopt" or not s.checkpoint("mtp_layer", bool):
        return None
    if s.checkpoint("mtp_quantized", bool) or s.patched("P5"):
        return None
    return f"The MTP layer is BF16 and patch P5 is not in place ({s.named})"


def nextn_norm(s: Situation) -> str | None:
    return f"Speculation is on and patch P6 is not in place ({s.named})" if s.mtp and not s.patched("P6") else None


def dotted_prefix(s: Situation) -> str | None:
    if s.checkpoint("method", str) != "modelopt" or not s.checkpoint("layer_wildcards", bool) or s.patched("P8"):
        return None
    return "The ignore list has wildcards that begin with model.layers and patch P8 is not in place"


def no_weight_only(s: Situation) -> str | None:
    return f"The checkpoint is weight-only NVFP4 ({s.named})"


def draft_loss(s: Situation) -> str | None:
    return f"speculative-algorithm is {s.text('speculative-algorithm')}" if s.mtp and s.gb10 else None


def host_address(s: Situation) -> str | None:
    if s.nodes < 2 or s.variable("SGLANG_HOST_IP"):
        return None
    return f"SGLANG_HOST_IP is not set on {s.nodes} nodes"


def top_k(s: Situation) -> str | None:
    return "generation_config.json has top_k 0" if s.checkpoint("top_k") == 0 else None


SGLANG_RULES: tuple[Rule, ...] = (
    Rule(
        "sglang-too-old",
        ERROR,
        too_old,
        about="any",
        what="Hy3 is in SGLang since 0.5.11",
        fix="install SGLang 0.5.16 or newer",
        source=WHEELS,
        engine="sglang",
        until="0.5.11",
    ),
    Rule(
        "sglang-removed-flags",
        ERROR,
        removed_flags,
        about="cuda-graph-max-bs or disable-piecewise-cuda-graph",
        what="both are gone since 0.5.20 and SGLang refuses its arguments",
        fix="write cuda-graph-max-bs-decode and disable-prefill-cuda-graph instead",
        source="SGLang 0.5.23, run; against seed 003",
        engine="sglang",
        since="0.5.20",
    ),
    Rule(
        "sglang-draft-unquant",
        WARNING,
        draft_unquantized,
        about="speculative-draft-model-quantization is unquant",
        what="SGLang makes None of it and finds modelopt_fp4 in the checkpoint again, so it does nothing",
        fix="take it out, and use patch P5 if the MTP layer is BF16",
        source=f"{CARD}; SGLang 0.5.14 and 0.5.23, run",
        engine="sglang",
    ),
    Rule(
        "sglang-family-100",
        ERROR,
        backends,
        about="GB10; moe-runner-backend or fp4-gemm-backend is a trtllm or cutedsl one",
        what="it is not supported on capability 12.1",
        fix="set it to flashinfer_cutlass",
        source=CARD,
        engine="sglang",
    ),
    Rule(
        "sglang-cutlass-runner",
        ERROR,
        cutlass_runner,
        about="GB10; moe-runner-backend is cutlass",
        what="this version has no usable cutlass MoE runner",
        fix="set it to flashinfer_cutlass",
        source=CARD,
        engine="sglang",
        since="0.5.14",
        until="0.5.15",
    ),
    Rule(
        "sglang-cutlass-on-cpu",
        ERROR,
        cutlass_on_cpu,
        about="device is cpu; moe-runner-backend is flashinfer_cutlass",
        what="it starts and computes wrong tokens",
        fix="leave moe-runner-backend out",
        source="SGLang 0.5.23 on a CPU, run",
        engine="sglang",
    ),
    Rule(
        "sglang-attention-flashinfer",
        WARNING,
        attention,
        about="GB10; an attention backend is flashinfer",
        what="it crashed on the head geometry of Hy3 with 0.5.14 (not tried again since the NaN of that time was "
        "found)",
        fix="set attention-backend to triton",
        source=CARD,
        engine="sglang",
    ),
    Rule(
        "sglang-attention-fa3",
        ERROR,
        attention_of_hopper,
        about="GB10; an attention backend is fa3",
        what="it asserts a GPU of capability 8 or 9 (FlashAttention v3 Backend requires SM>=80 and SM<=90)",
        fix="set attention-backend to triton",
        source="SGLang wheels 0.5.14 and 0.5.23, read",
        engine="sglang",
    ),
    Rule(
        "sglang-attention-trtllm",
        ERROR,
        attention_of_family_100,
        about="GB10; the attention backend of the prefill is trtllm_mha",
        what="this version takes it for the prefill on capability family 100 only (0.5.23 has a kernel for 12.x)",
        fix="set attention-backend to triton",
        source="SGLang wheels 0.5.14 and 0.5.23, read",
        engine="sglang",
        until="0.5.15",
    ),
    Rule(
        "sglang-one-node",
        ERROR,
        one_node,
        about="several nodes; nnodes or dist-init-addr is not set",
        what="SGLang then looks for all ranks' GPUs on one node, or its ranks wait for each other at no address",
        fix="set nnodes, node-rank and, on all nodes alike, dist-init-addr to an address of the first node and a port",
        source="roles/sglang_serve; SGLang wheels, read",
        engine="sglang",
    ),
    Rule(
        "sglang-parser",
        ERROR,
        parser_name,
        about="tool-call-parser or reasoning-parser is neither hunyuan nor auto of 0.5.23 and newer",
        what="SGLang's parsers for Hy3 are both named hunyuan, in lower case (hy_v3 is vLLM's name), and auto of older "
        "releases does not find them",
        fix="set it to hunyuan",
        source=WHEELS,
        engine="sglang",
    ),
    Rule(
        "sglang-parser-suffix",
        ERROR,
        parser_suffix,
        about="a parser is on; the vocabulary has suffixed marks; patch P2 is not in place",
        what="the parsers of this version know the bare marks only",
        fix="install SGLang 0.5.15 or newer, or leave the parsers out",
        source="SGLang pull request 29920",
        engine="sglang",
        since="0.5.11",
        until="0.5.15",
    ),
    Rule(
        "sglang-shared-experts",
        ERROR,
        shared_experts,
        about="tensors named mlp.shared_experts; patch P4 is not in place",
        what="SGLang skips them without a word and computes NaN; since 0.5.16 even chat answers 200, with empty text",
        fix="apply patch P4",
        source=f"{CARD}; SGLang 0.5.23, run; field case B90",
        engine="sglang",
        since="0.5.11",
    ),
    Rule(
        "sglang-nextn-quantized",
        ERROR,
        nextn_quantized,
        about="speculation; ModelOpt; the MTP layer is BF16; patch P5 is not in place",
        what="SGLang builds it in FP4 whatever the ignore list says and dies at load",
        fix="apply patch P5, or serve without speculation",
        source=f"{CARD}; SGLang 0.5.23, run; field case B91",
        engine="sglang",
        since="0.5.11",
        schemes=frozenset({"nvfp4"}),
    ),
    Rule(
        "sglang-nextn-norm",
        WARNING,
        nextn_norm,
        about="speculation; patch P6 is not in place",
        what="final_layernorm of the MTP layer goes nowhere and almost no draft is accepted",
        fix="install SGLang 0.5.16 or newer",
        source="SGLang pull request 30331",
        engine="sglang",
        since="0.5.11",
        until="0.5.16",
    ),
    Rule(
        "sglang-wildcards",
        ERROR,
        dotted_prefix,
        about="ModelOpt; ignore list with wildcards such as model.layers.0*; patch P8 is not in place",
        what="SGLang's names begin with a dot there, so these match nothing and BF16 layers are built in FP4",
        fix="apply patch P8",
        source="SGLang 0.5.14 to 0.5.23, run",
        engine="sglang",
        since="0.5.11",
    ),
    Rule(
        "sglang-w4a16",
        ERROR,
        no_weight_only,
        about="any",
        what="this version has no scheme for weight-only NVFP4 and crashes",
        fix="install SGLang 0.5.22 or newer, or serve it with vLLM",
        source=WHEELS,
        engine="sglang",
        until="0.5.22",
        schemes=frozenset({"w4a16"}),
    ),
    Rule(
        "sglang-speculation-loss",
        NOTE,
        draft_loss,
        about="GB10; speculation",
        what="with W4A4 it was 20 % slower for one request and about even for four (0.5.14, four Sparks)",
        fix="measure both",
        source=CARD,
        engine="sglang",
        schemes=frozenset({"nvfp4"}),
    ),
    Rule(
        "sglang-host-address",
        ERROR,
        host_address,
        about="several nodes; SGLANG_HOST_IP is not set",
        what="its message queue finds an address by itself and may advertise the Wi-Fi's",
        fix="set SGLANG_HOST_IP to the node's fabric address",
        source="field case B93",
        engine="sglang",
    ),
    Rule(
        "sglang-top-k",
        WARNING,
        top_k,
        about="generation_config.json has top_k 0",
        what="SGLang wants -1 for no limit",
        fix="set top_k to -1 in requests, or sampling-defaults to openai",
        source="dgxarley, Hy3 profile",
        engine="sglang",
    ),
)
