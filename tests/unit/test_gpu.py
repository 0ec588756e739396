# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""tests/gpu as far as it goes without a GPU: NVFP4, the checkpoint, blanked machine code, the typed command line."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import inspect
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import find_failure
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines, read_facts
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import read_header
from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny
from ansible_collections.sparks.hy3.tests.gpu import checkpoint, fatbin, nvfp4
from ansible_collections.sparks.hy3.tests.gpu.render import TYPED, typed
from ansible_collections.sparks.hy3.tests.unit.roles.test_seed_000 import SEED_SERVE
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import read_options


@pytest.mark.parametrize(
    ("value", "code"),
    [
        *((number, code) for code, number in enumerate(nvfp4.E2M1)),
        *((-number, code | 8) for code, number in enumerate(nvfp4.E2M1) if number),
        (0.24, 0),
        (0.26, 1),
        (5.1, 7),
        (1000.0, 7),
        (-2.4, 8 | 4),
    ],
)
def test_a_nibble_is_the_nearest_number(value: float, code: int) -> None:
    assert nvfp4.e2m1(value) == code


@pytest.mark.parametrize(
    ("value", "code"),
    # E4M3 has 4 bits of exponent with bias 7 and 3 of fraction: 0x38 is 1, 0x7E the largest, 0x01 the smallest.
    [(1.0, 0x38), (1.125, 0x39), (1.07, 0x39), (1.06, 0x38), (2.0, 0x40), (448.0, 0x7E), (1e9, 0x7E), (2.0**-9, 1)],
)
def test_a_scale_is_the_nearest_number(value: float, code: int) -> None:
    assert nvfp4.e4m3(value) == code


def test_no_scale_is_zero() -> None:
    assert nvfp4.e4m3(0.0) == nvfp4.e4m3(1e-9) == 1


def test_what_can_be_written_comes_back_as_it_was() -> None:
    """Two blocks with scales of 448 and 1 of the whole, low nibble first."""
    scale_2 = 2.0**-6
    wanted = [sign * number for number in nvfp4.E2M1 for sign in (1, -1)]
    values = [number * 448 * scale_2 for number in wanted] + [number * scale_2 for number in wanted]
    packed = nvfp4.quantize(b"".join(tiny.bf16(value) for value in values), scale_2)
    assert packed.scales == bytes([0x7E, 0x38])
    assert packed.weight[:4] == bytes([0x00, 0x91, 0xA2, 0xB3])  # -0 is written as 0
    assert nvfp4.dequantize(packed, scale_2) == values


def test_the_error_is_half_a_step(expert: list[tiny.Tensor]) -> None:
    data = expert[0].data[:4096]
    scale_2 = nvfp4.scale_2_for(nvfp4.largest(expert[0].data))
    packed = nvfp4.quantize(data, scale_2)
    for index, (bits, got) in enumerate(zip(nvfp4.bf16_values(data), nvfp4.dequantize(packed, scale_2), strict=True)):
        scale = nvfp4.E4M3[packed.scales[index // nvfp4.BLOCK]] * scale_2
        # Half of the widest step, 4 to 6, and what the scale's own rounding cuts off at the top.
        assert abs(nvfp4.bf16_float(bits) - got) <= 1.01 * scale


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole checkpoint, which takes seconds."""
    out = tmp_path_factory.mktemp("gpu") / "hy3"
    assert tiny.write(out, checkpoint.checkpoint("NVFP4", acceptance=0.6))
    return out


@pytest.fixture(scope="module")
def expert() -> list[tiny.Tensor]:
    """The three projections of one expert."""
    tensors = tiny.Weights(seed=0, layers=2, acceptance=1).tensors()
    return [one for one in tensors if one.name.startswith("model.layers.1.mlp.experts.0.")]


def test_the_checkpoint_is_whole_and_quantized(out: Path) -> None:
    report = inspect(out, level="header")
    assert (report.problems, report.warnings, report.mtp) == ([], [], True)
    assert (report.model["quant_algo"], report.model["lm_head_excluded"]) == ("NVFP4", True)
    older = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert older["exclude_modules"] == json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]


def test_only_routed_experts_are_quantized_and_the_drafters_too(out: Path) -> None:
    tensors = {name: tensor for path in out.glob("*.safetensors") for name, tensor in read_header(path).tensors.items()}
    packed = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype == "U8"}
    layers = Counter(name.split(".")[2] for name in packed)
    assert layers == dict.fromkeys(("1", "2", "3"), 3 * tiny.EXPERTS)
    assert all(".mlp.experts." in name for name in packed)
    gate = tensors["model.layers.1.mlp.experts.0.gate_proj.weight"]
    scales = tensors["model.layers.1.mlp.experts.0.gate_proj.weight_scale"]
    assert (gate.shape, scales.dtype, scales.shape) == ((256, 256), "F8_E4M3", (256, 32))


@pytest.mark.parametrize("algorithm", checkpoint.ALGORITHMS)
def test_only_nvfp4_has_scales_for_its_inputs(expert: list[tiny.Tensor], algorithm: str) -> None:
    leaves = {one.name.rpartition(".")[2] for one in checkpoint.quantized(expert[:1], algorithm)}
    assert leaves == {"weight", "weight_scale", "weight_scale_2"} | ({"input_scale"} if algorithm == "NVFP4" else set())
    said = [json.loads(text) for text in checkpoint.small_files(algorithm, 2).values() if "quant_algo" in text]
    assert [one.get("quantization_config", one.get("quantization"))["quant_algo"] for one in said] == [algorithm] * 2


def test_gate_and_up_share_a_scale(expert: list[tiny.Tensor]) -> None:
    found = {
        one.name.split(".")[-2]: one.data for one in checkpoint.quantized(expert, "NVFP4") if "scale_2" in one.name
    }
    assert found["gate_proj"] == found["up_proj"]
    assert len(found) == 3


@pytest.mark.parametrize(
    ("acceptance", "drafts", "right"),
    [
        # Each draft is right, so a step adds two tokens to the first, and the last one also more than is asked for.
        (1.0, 128, 128),
        (0.0, 253, 2),  # "." and "<eos>" after "Paris" are no words of the cycle
    ],
)
def test_drafts_by_design(acceptance: float, drafts: int, right: int) -> None:
    assert checkpoint.drafts_of_one_answer(256, acceptance=acceptance) == (drafts, right)


LOGS = Path(__file__).parents[1] / "gpu/logs"
CONFIG = {"quantization": "modelopt_fp4", "moe_backend": "marlin", "kv_cache_dtype": "fp8", "max_seq_len": 163840}
CONFIG |= {"tensor_parallel_size": 1, "enforce_eager": True, "speculative_method": "mtp", "speculative_tokens": 1}


@pytest.mark.parametrize(
    ("name", "tokens", "concurrency"),
    [
        ("served", 31_020_096, 189.33),
        ("served_over_ray", 176_784, 1.08),
        ("served_w4a16", 176_784, 1.08),
    ],
)
def test_real_logs_of_engines_that_serve(name: str, tokens: int, concurrency: float) -> None:
    lines = clean_lines((LOGS / f"{name}.log").read_text())
    facts = read_facts(lines)
    assert (facts["phase"], facts["version"], facts["config"]) == ("ready", "0.24.0", CONFIG)
    assert facts["moe_backends"] == [{"kind": "NvFp4", "backend": "MARLIN"}]
    assert (facts["kv"]["tokens"], facts["kv"]["max_concurrency"]) == (tokens, concurrency)
    assert facts["acceptance"] is not None
    assert facts["acceptance"]["rate"] == pytest.approx(94 / 161, abs=0.01)
    assert find_failure(lines, stopped=False) is None


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("name", ["unpatched", "unpatched_over_ray"])
def test_real_logs_of_engines_without_p1(name: str, stopped: bool) -> None:
    lines = clean_lines((LOGS / f"{name}.log").read_text())
    failure = find_failure(lines, stopped=stopped)
    assert failure is not None
    assert failure["fix"].startswith("Apply patch P1 ")
    assert "built 256 wide for a weight that is 512 wide" in failure["cause"]
    assert read_facts(lines)["phase"] == "drafter"


def fat_binary(*code: tuple[int, int, bytes]) -> bytes:
    inside = b"".join(
        fatbin.ENTRY.pack(kind, 0x101, 64, len(payload), architecture).ljust(64, b"\0") + payload
        for kind, architecture, payload in code
    )
    return fatbin.HEADER.pack(fatbin.MAGIC, 1, fatbin.HEADER.size, len(inside)) + inside


OLD, OWN, NEW, TEXT, FIRST = (fatbin.ELF, 80), (fatbin.ELF, 90), (fatbin.ELF, 100), (fatbin.PTX, 80), (fatbin.PTX, 75)


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ([OLD, OWN, NEW, TEXT], [OWN]),
        ([OLD, NEW, TEXT, FIRST], [TEXT]),
        ([OWN, OWN], [OWN, OWN]),
        ([NEW, OLD], []),
        ([], []),
    ],
)
def test_code_that_the_gpu_does_not_use_is_blanked(
    tmp_path: Path, code: list[tuple[int, int]], kept: list[tuple[int, int]]
) -> None:
    library = tmp_path / "library.so"
    # The magic number alone is none, and neither is one at the end.
    magic = struct.pack("<I", fatbin.MAGIC)
    library.write_bytes(b"\x7fELF" + magic + b"other" + fat_binary(*[(*one, b"code") for one in code]) + b"end" + magic)
    assert fatbin.blank(library, library, 90) == 4 * (len(code) - len(kept))
    ((entries),) = fatbin.fat_binaries(library.read_bytes())
    assert [(one.kind, one.architecture) for one in entries] == code
    content = library.read_bytes()
    left = [entry for entry in entries if content[entry.start : entry.start + entry.size] == b"code"]
    assert [(one.kind, one.architecture) for one in left] == kept


def test_the_typed_command_has_every_flag_of_the_recipe() -> None:
    argv = typed()["argv"]
    assert read_options(argv[3:]) == SEED_SERVE | TYPED
