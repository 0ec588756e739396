# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Headers whole, odd and broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import (
    parse_header,
    read_header,
    render_header,
    tensor_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def entry(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def shard(header: Any, data: bytes = bytes(16)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


WHOLE = {"a": entry(0, 8), "b": entry(8, 16)}

VALID: list[Any] = [
    pytest.param(shard(WHOLE), {"a", "b"}, id="plain"),
    pytest.param(shard(json.dumps(WHOLE).encode() + b"   "), {"a", "b"}, id="trailing-spaces"),
    pytest.param(shard({"b": entry(8, 16), "a": entry(0, 8)}), {"a", "b"}, id="offsets-not-in-key-order"),
    pytest.param(shard({"__metadata__": {"format": "pt"}, **WHOLE}), {"a", "b"}, id="metadata"),
    pytest.param(shard({"__metadata__": None, **WHOLE}), {"a", "b"}, id="metadata-null"),
    pytest.param(shard({"": entry(0, 16)}), {""}, id="name-empty"),
    pytest.param(shard({"\U0001f600": entry(0, 16)}), {"\U0001f600"}, id="pair-of-surrogates"),
    pytest.param(shard({"e": entry(8, 8), **WHOLE}), {"a", "b", "e"}, id="zero-size-in-the-middle"),
    pytest.param(shard({**WHOLE, "e": entry(16, 16, "F32", [0, 4])}), {"a", "b", "e"}, id="zero-size-at-the-end"),
    pytest.param(shard({"s": entry(0, 4, "F32", [])}, bytes(4)), {"s"}, id="scalar"),
    pytest.param(shard({"f": entry(0, 4, "F4", [2, 4])}, bytes(4)), {"f"}, id="half-bytes"),
    pytest.param(shard({"f": entry(0, 4, "F8_E4M3", [4])}, bytes(4)), {"f"}, id="fp8"),
    pytest.param(shard({"a": {**entry(0, 16), "note": 1}}), {"a"}, id="unknown-field"),
    pytest.param(shard({}, b""), set(), id="no-tensors"),
]


@pytest.mark.parametrize(("content", "names"), VALID)
def test_valid(tmp_path: Path, content: bytes, names: set[str]) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(content)
    assert set(read_header(path).tensors) == names


BROKEN: list[Any] = [
    pytest.param(shard(WHOLE) + b"x", "1 more than its header describes", id="trailing-byte"),
    pytest.param(shard(WHOLE)[:-1], "1 fewer than its header describes", id="truncated"),
    pytest.param(shard({"a": entry(0, 8), "b": entry(9, 17)}, bytes(17)), "a hole of 1 bytes", id="hole"),
    pytest.param(shard({"a": entry(1, 16)}), "a hole of 1 bytes", id="hole-at-the-start"),
    pytest.param(shard({"a": entry(0, 8), "b": entry(4, 12)}), "overlaps the one before it by 4", id="overlap"),
    pytest.param(b"", "0 bytes are too few", id="empty-file"),
    pytest.param(b"\x10\0\0", "3 bytes are too few", id="three-bytes"),
    pytest.param(struct.pack("<Q", 2**63) + bytes(16), "over the format's limit", id="length-2^63"),
    pytest.param(struct.pack("<Q", 5000) + bytes(16), "5000 bytes does not fit into 24", id="length-over-file"),
    pytest.param(bytes(4096), "length is 0", id="zeros"),
    pytest.param(shard({"a": entry(0, 8, "F32", [3])}, bytes(8)), "needs 12 bytes and has 8", id="shape-mismatch"),
    pytest.param(shard({"__metadata__": {"n": 1}, **WHOLE}), "must map names to strings", id="metadata-int"),
    pytest.param(shard({"a": entry(0, 16, "F7")}), "dtype 'F7' is none of", id="unknown-dtype"),
    pytest.param(shard(b"\xef\xbb\xbf" + json.dumps(WHOLE).encode()), "begins with b'\\xef\\xbb\\xbf{'", id="bom"),
    pytest.param(shard(b"{" + b" " * 9), "no valid JSON", id="no-json"),
    pytest.param(shard(b'{"\xff": 1}'), "no valid JSON", id="no-utf8"),
    pytest.param(shard(b'{"a":' * 99999), "no valid JSON", id="deep"),
    pytest.param(shard(b'{"a": 1, "a": 2}'), "a name occurs twice", id="duplicate-name"),
    pytest.param(shard({"__metadata__": [], **WHOLE}), "must map names to strings", id="metadata-list"),
    pytest.param(shard(b'{"\\uD800": 1}'), "no valid JSON", id="half-of-a-pair"),
    pytest.param(shard(b'{"a": NaN}'), "NaN is no number of JSON", id="nan"),
    pytest.param(shard({"a": entry(0, 0, shape=[0, 2**64])}), "of the wrong kind", id="size-over-64-bits"),
    pytest.param(shard({"a": entry(0, 0, shape=[2**40, 2**40, 0])}), "more elements than", id="product-over-64-bits"),
    pytest.param(shard({"z": entry(4, 4), **WHOLE}), "overlaps the one before it by 4", id="empty-inside-another"),
    pytest.param(shard({"a": 5}), "lacks dtype, shape or data_offsets", id="entry-no-object"),
    pytest.param(shard({"a": entry(0, 16, shape=[True])}), "of the wrong kind", id="bool-in-shape"),
    pytest.param(shard({"a": {**entry(0, 16), "data_offsets": [0, 1, 2]}}), "of the wrong kind", id="three-offsets"),
    pytest.param(shard({"a": entry(0, -8)}), "of the wrong kind", id="negative"),
    pytest.param(shard({"a": entry(0, 2, "F4", [3])}, bytes(2)), "12 bits of F4 do not fill", id="odd-half-bytes"),
]


@pytest.mark.parametrize(("content", "reason"), BROKEN)
def test_broken(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(content)
    with pytest.raises(Hy3Error) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith("s.safetensors is no whole safetensors file: ")
    assert reason in message
    assert message.endswith("; fetch it again.")


SIZES: list[tuple[str, tuple[int, ...], int]] = [
    ("BF16", (3, 5), 30),
    ("F8_E5M2", (7,), 7),
    ("F4", (2, 3), 3),
    ("F6_E2M3", (4,), 3),
    ("C64", (2,), 16),
    ("F32", (), 4),
    ("I64", (0, 9), 0),
]


@pytest.mark.parametrize(("dtype", "shape", "expected"), SIZES, ids=[row[0] for row in SIZES])
def test_tensor_bytes(dtype: str, shape: tuple[int, ...], expected: int) -> None:
    assert tensor_bytes(dtype, shape) == expected


def test_written_header_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    before_data = render_header({"z": ("BF16", (2, 2)), "ä": ("U8", (3,))}, {"format": "pt"})
    assert len(before_data) % 8 == 0
    path.write_bytes(before_data + bytes(11))
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.tensors["z"] == ("BF16", (2, 2), 0, 8)
    assert header.tensors["ä"] == ("U8", (3,), 8, 11)
    assert header.data_bytes == 11
    assert len(header.raw) + 8 == len(before_data)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F4", "BF16", "X"]) | st.none(),
        "shape": st.lists(st.integers(-1, 3) | st.just(2**63), max_size=3) | st.floats(),
        "data_offsets": st.tuples(st.integers(0, 9), st.integers(0, 9)) | st.text(max_size=3),
    }
)
HEADER = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ENTRY | st.none() | st.integers(), max_size=3)


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=40) | HEADER.map(lambda header: json.dumps(header).encode()))
def test_any_header_is_read_or_refused_in_a_clause(raw: bytes) -> None:
    try:
        header = parse_header(raw)
    except Hy3Error as error:
        assert str(error)
    else:
        assert sum(tensor.end - tensor.start for tensor in header.tensors.values()) == header.data_bytes
