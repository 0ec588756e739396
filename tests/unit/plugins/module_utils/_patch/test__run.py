# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a checkpoint makes of a run: what is applied, what is refused, and what does not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils._patch.test__vllm_parsers import (
    THINK,
    WIRED,
    suffixed,
)


def checkpoint(place: Path, tensors: list[str], **files: Any) -> str:
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "vocab_size": 120832, **files}))
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a")}))
    return str(place)


PAD_FILE = "vllm/model_executor/layers/vocab_parallel_embedding.py"
PAD = b"def pad_vocab_size(vocab_size, pad_to=64):\n    return (vocab_size + pad_to - 1) // pad_to * pad_to\n"
# Ranks, patches asked for, content of the file of P3, its state after present, None if refused, "-" if not looked at.
TEST_NEEDED: list[tuple[str, int, list[str] | None, bytes, str | None]] = [
    ("needed", 3, None, PAD, "applied"),
    ("needed-and-more", 3, ["P1"], PAD, "applied"),
    ("not-needed", 2, None, PAD, "-"),
    ("asked-for", 2, ["P3"], PAD, "applied"),
    ("needed-fixed", 3, [], PAD.replace(b"    return", b"    pad_to *= tp_size\n    return"), "upstream_fixed"),
    ("needed-unknown", 3, None, PAD.replace(b"- 1", b""), None),
    ("unknown-and-not-needed", 2, ["P3"], PAD.replace(b"- 1", b""), "unrecognised"),
]


@pytest.mark.parametrize(
    ("ranks", "asked", "code", "state"), [row[1:] for row in TEST_NEEDED], ids=[row[0] for row in TEST_NEEDED]
)
def test_checkpoint_decides(
    tmp_path: Path, ranks: int, asked: list[str] | None, code: bytes, state: str | None
) -> None:
    package = tmp_path / "vllm"
    path = package.parent / PAD_FILE
    path.parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    path.write_bytes(code)
    arguments: dict[str, Any] = {
        "engine": "vllm",
        "package_path": str(package),
        "checkpoint": checkpoint(tmp_path / "c", ["lm_head.weight"]),
        "tensor_parallel_size": ranks,
        "patches": asked,
    }
    if state is None:
        with pytest.raises(Hy3Error, match="does not have the code that patch P3 knows"):
            _patch.run(**arguments, state="present")
        assert path.read_bytes() == code
        return
    result = _patch.run(**arguments, state="present")
    found = {entry["id"]: (entry["state"], entry["needed_by"]) for entry in result["patches"]}
    wanted = (state, "needed" if ranks == 3 else "not_needed")
    assert found.get("P3") == (None if state == "-" else wanted)
    reported = _patch.run(**{**arguments, "patches": None}, state="reported")
    assert {entry["id"] for entry in reported["patches"]} >= {"P1", "P2", "P3", "P7"}
    assert all(entry["needed_why"] for entry in reported["patches"])


def test_harmful_patch_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    experts = "model.layers.2.mlp.experts.0.gate_proj"
    arguments: dict[str, Any] = {
        "engine": "sglang",
        "package_path": str(package),
        "checkpoint": checkpoint(tmp_path / "c", [f"{experts}.weight", f"{experts}.weight_scale"]),
    }
    with pytest.raises(Hy3Error, match="Patch P5 would break this checkpoint .* is stored quantized"):
        _patch.run(**arguments, patches=["P5"], state="present")
    _patch.run(**arguments, patches=["P5"], state="absent")
    assert "P5" not in in_place(_patch.run(**arguments, patches=None, state="present"))


def in_place(result: dict[str, Any]) -> set[str]:
    return {entry["id"] for entry in result["patches"] if entry["state"] in ("applied", "upstream_fixed")}


SHARED_FILE = "vllm/model_executor/models/hy_v3.py"
SHARED = b"""class HYV3MoEFused:
    def __init__(self, quant_config=None, prefix=""):
        self.shared_mlp = HYV3FeedForward(quant_config=quant_config, prefix=f"{prefix}", reduce_results=False)
"""
SHARED_NAMED = SHARED.replace(b"{prefix}", b"{prefix}.shared_mlp")
NEXTN_FILE = "sglang/srt/models/hunyuan_v3_nextn.py"
NEXTN = b"""class HYV3ModelNextN:
    def __init__(self, config, quant_config=None):
        self.decoder = HYV3DecoderLayer(config=config, quant_config=quant_config)


class HYV3ForCausalLMNextN:
    def __init__(self, config, quant_config=None):
        self.model = HYV3ModelNextN(config, quant_config)
"""
NEXTN_NEVER = NEXTN.replace(b"=quant_config)", b"=None)")
DOWN = "model.layers.1.mlp.shared_mlp.down_proj.weight"
DRAFTER = "model.layers.2.mlp.experts.0.gate_proj.weight"
# By the file: tensors and exclude list of a checkpoint that needs its patch, and of one that it breaks.
CHECKPOINTS: dict[str, tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]]] = {
    SHARED_FILE: (([DOWN], ["*.shared_mlp.*"]), ([DOWN], ["model.layers.1.mlp.down_proj"])),
    NEXTN_FILE: (([DRAFTER], ["model.layers.2*"]), ([DRAFTER, f"{DRAFTER}_scale"], [])),
}
# What, file, content, what somebody adds after our patch (None: it was never applied), content after present or the
# refusal, a part of the problem.
TEST_HARMFUL: list[tuple[str, str, bytes, bytes | None, bytes | str, str]] = [
    ("not-there", SHARED_FILE, SHARED, None, SHARED, ""),
    ("ours", SHARED_FILE, SHARED, b"", SHARED, ""),
    (
        "ours-edited",
        SHARED_FILE,
        SHARED,
        b"A = 1\n",
        "changed by someone else after patch P7 .* break this checkpoint",
        "",
    ),
    ("upstream", SHARED_FILE, SHARED_NAMED, None, SHARED_NAMED, "hy_v3.py has what patch P7 does"),
    ("conditional-not-there", NEXTN_FILE, NEXTN, None, NEXTN, ""),
    ("conditional-ours", NEXTN_FILE, NEXTN, b"", b"is_layer_excluded", ""),
    ("unconditional", NEXTN_FILE, NEXTN_NEVER, None, NEXTN_NEVER, "hunyuan_v3_nextn.py has what patch P5 does"),
]


@pytest.mark.parametrize(
    ("file", "code", "added", "after", "problem"),
    [row[1:] for row in TEST_HARMFUL],
    ids=[row[0] for row in TEST_HARMFUL],
)
def test_harmful_patch_does_not_stay(  # noqa: PLR0917 (a row)
    tmp_path: Path, file: str, code: bytes, added: bytes | None, after: bytes | str, problem: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    engine = file.partition("/")[0]
    (tmp_path / engine / "__init__.py").touch()
    path.write_bytes(code)
    needed, broken = (
        checkpoint(tmp_path / name, tensors, quantization_config={"quant_method": "modelopt", "ignore": ignored})
        for name, (tensors, ignored) in zip("nb", CHECKPOINTS[file], strict=True)
    )

    def run(place: str, state: str = "present") -> dict[str, Any]:
        return _patch.run(
            engine=engine, package_path=str(tmp_path / engine), checkpoint=place, patches=None, state=state
        )

    if added is not None:
        assert run(needed)["changed"] is True
        path.write_bytes(path.read_bytes() + added)
    before = path.read_bytes()
    if isinstance(after, str):
        with pytest.raises(Hy3Error, match=after):
            run(broken)
        assert path.read_bytes() == before
        return
    reported = run(broken, "reported")
    result = run(broken)
    assert path.read_bytes() == after if after.count(b"\n") else after in path.read_bytes()
    assert result["changed"] == (before != path.read_bytes()) == bool(reported["unified_diff"])
    for found in (reported["checkpoint_problems"], result["checkpoint_problems"]):
        harms = [sentence for sentence in found if "has what patch" in sentence]
        assert len(harms) == bool(problem)
        assert problem in "".join(harms)
    assert run(broken)["changed"] is False


@pytest.mark.parametrize(
    ("name", "message"), [("", "has no tokenizer_config.json to write"), ("blob", "symbolic link to")]
)
def test_key_has_no_place(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    place = Path(checkpoint(tmp_path / "c", ["lm_head.weight"]))
    (place / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<think:a>"}]}))
    if name:
        (tmp_path / name).write_text("{}")
        (place / "tokenizer_config.json").symlink_to(tmp_path / name)
    arguments: dict[str, Any] = {"engine": "vllm", "package_path": str(tmp_path / "vllm"), "checkpoint": str(place)}
    with pytest.raises(Hy3Error, match=message):
        _patch.run(**arguments, patches=None, state="present", repair_token_suffix=True)
    assert (place / "tokenizer_config.json").is_symlink() == bool(name)
    assert len(_patch.run(**arguments, patches=None, state="present")["checkpoint_problems"]) == 1


# The tokens in the vocabulary, and what is said of a vLLM 0.24 into which somebody wrote :a.
TEST_WRITTEN = [
    ("same", ["<think:a>"], None),
    ("other", ["<think:b>"], "with the suffix :a and those of the checkpoint have :b: reinstall vllm"),
    ("bare", ["<think>"], "with the suffix :a and those of the checkpoint have none: reinstall vllm"),
    ("no-tokens", [], None),
]


@pytest.mark.parametrize(("tokens", "said"), [row[1:] for row in TEST_WRITTEN], ids=[row[0] for row in TEST_WRITTEN])
def test_suffix_that_somebody_wrote(tmp_path: Path, tokens: list[str], said: str | None) -> None:
    package = tmp_path / "vllm"
    (package / "reasoning").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "reasoning/hy_v3_reasoning_parser.py").write_text(suffixed(THINK, by=WIRED).replace("opensource", "a"))
    place = Path(checkpoint(tmp_path / "c", ["lm_head.weight"]))
    (place / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": token} for token in tokens]}))

    def run(state: str) -> dict[str, Any]:
        return _patch.run(engine="vllm", package_path=str(package), patches=["P2"], state=state, checkpoint=str(place))

    assert run("reported")["patches"][0]["state"] == "upstream_fixed"
    if said:
        with pytest.raises(Hy3Error, match=f"hy_v3_reasoning_parser.py looks for special tokens {said}"):
            run("present")
    else:
        assert run("present")["changed"] is False


# Text before, text after; the tokens end in :a.
TEST_KEY: list[tuple[str, str, str]] = [
    ("indented", '{\n  "x": "é"\n}\n', '{\n  "token_suffix": ":a",\n  "x": "é"\n}\n'),
    ("one-line", '{"x": 1}', '{"token_suffix": ":a","x": 1}'),
    ("crlf", '{\r\n\t"x": 1\r\n}', '{\r\n\t"token_suffix": ":a",\r\n\t"x": 1\r\n}'),
    ("bom", '\ufeff{"x": 1}', '\ufeff{"token_suffix": ":a","x": 1}'),
    ("empty", "{\n}", '{"token_suffix": ":a"\n}'),
    ("wrong", '{"token_suffix": ":b", "x": "é"}', '{\n  "token_suffix": ":a",\n  "x": "é"\n}\n'),
    ("right", '{"token_suffix": ":a"}', '{"token_suffix": ":a"}'),
]


@pytest.mark.parametrize(("before", "after"), [row[1:] for row in TEST_KEY], ids=[row[0] for row in TEST_KEY])
def test_key_is_repaired_on_request(tmp_path: Path, before: str, after: str) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    place = Path(checkpoint(tmp_path / "c", ["lm_head.weight"]))
    (place / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<think:a>"}]}))
    file = place / "tokenizer_config.json"
    file.write_bytes(before.encode())
    file.chmod(0o640)

    def run(*, repair: bool = True, check_mode: bool = False, state: str = "present") -> dict[str, Any]:
        return _patch.run(
            engine="vllm",
            package_path=str(package),
            patches=None,
            state=state,
            checkpoint=str(place),
            repair_token_suffix=repair,
            check_mode=check_mode,
        )

    assert (run(repair=False)["changed"], len(run(repair=False)["checkpoint_problems"])) == (False, before != after)
    assert run(state="reported")["changed"] is run(state="absent")["changed"] is False
    predicted = run(check_mode=True)
    assert file.read_bytes() == before.encode()
    done = run()
    assert done == predicted
    assert (done["changed"], done["checkpoint_problems"]) == (before != after, [])
    assert file.read_bytes() == after.encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert run()["changed"] is False
    assert sorted(path.name for path in place.iterdir()) == [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
