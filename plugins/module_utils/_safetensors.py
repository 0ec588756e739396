# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The safetensors file format: the only place that knows it.

A file is 8 bytes of little-endian header length N, N bytes of JSON (name -> dtype, shape, data_offsets), then the data,
which the offsets must cover exactly. Source: the format section of https://github.com/safetensors/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

LENGTH_BYTES = 8
# The limit of the reference implementation, which refuses longer headers.
MAX_HEADER_BYTES = 100_000_000
# The reference implementation counts elements and bits in 64 bits.
MAX_SIZE = 2**64
# Bits of one element. Source: `Dtype` in safetensors/src/tensor.rs, release 0.8.0.
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
METADATA_KEY = "__metadata__"


class Tensor(NamedTuple):
    """Where one tensor lies. ``start`` and ``end`` are bytes from the beginning of the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """A valid header. ``raw`` is its JSON text as stored, padding included."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    raw: bytes

    @property
    def data_bytes(self) -> int:
        """Size of the data section in bytes."""
        return max((tensor.end for tensor in self.tensors.values()), default=0)


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Size in bytes of a tensor of this safetensors dtype and shape.

    Raises Hy3Error for an unknown dtype and for elements that do not fill whole bytes.
    """
    if dtype not in DTYPE_BITS:
        raise Hy3Error(f"dtype {dtype!r} is none of the format's ({', '.join(DTYPE_BITS)})")
    bits = DTYPE_BITS[dtype]
    for dimension in shape:
        bits *= dimension
        if bits >= MAX_SIZE:
            raise Hy3Error(f"{dtype} {list(shape)} has more elements than the format can count")
    if bits % 8:
        raise Hy3Error(f"{bits} bits of {dtype} do not fill whole bytes")
    return bits // 8


def parse_header(raw: bytes) -> Header:
    """Parse and check the JSON text of a header, without looking at the file's size.

    Raises Hy3Error with the broken rule, as a clause to stand after the file's name.
    """
    if not raw.startswith(b"{"):
        raise Hy3Error(f"the header begins with {raw[:4]!r} instead of '{{'")
    try:
        text = raw.decode("utf-8")
        entries = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
        if "\\ud" in text.lower():
            # Half of a pair, which is no character, and which Python alone accepts.
            " ".join(entries).encode()
    except (ValueError, RecursionError) as error:
        raise Hy3Error(f"the header is no valid JSON ({error})") from error
    metadata = entries.pop(METADATA_KEY, None)
    if metadata is None:  # written as null by some
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Hy3Error(f"{METADATA_KEY} in the header must map names to strings")
    tensors = {name: _parse_tensor(name, entry) for name, entry in entries.items()}
    _check_coverage(tensors)
    return Header(tensors, metadata, raw)


def read_header(path: Path) -> Header:
    """Read the header of a file and check that header and data make up its size exactly. The data is not read.

    Raises Hy3Error with one sentence that names the file, and OSError when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            raw = file.read(_header_length(file.read(LENGTH_BYTES), size))
        header = parse_header(raw)
        expected = LENGTH_BYTES + len(raw) + header.data_bytes
        if size < expected:
            raise Hy3Error(f"{size} bytes are {expected - size} fewer than its header describes")
        if size > expected:
            raise Hy3Error(f"{size} bytes are {size - expected} more than its header describes")
    except Hy3Error as error:
        raise Hy3Error(f"{path.name} is no whole safetensors file: {error}; fetch it again.") from error
    return header


def render_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data section, length included, for tensors stored in the order given.

    ``tensors`` maps a name to its dtype and shape. The header is padded with spaces so that the data begins at a
    multiple of 8 bytes, as the reference writer does. Raises Hy3Error for an unknown dtype.
    """
    entries: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _header_length(prefix: bytes, size: int) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise Hy3Error(f"{size} bytes are too few for the {LENGTH_BYTES} of a header length")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise Hy3Error(f"a header of {length} bytes is over the format's limit of {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > size:
        raise Hy3Error(f"a header of {length} bytes does not fit into {size} bytes")
    if length == 0:
        raise Hy3Error("the header length is 0")
    return length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parse_tensor(name: str, entry: Any) -> Tensor:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise Hy3Error(f"tensor {name} in the header lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise Hy3Error(f"tensor {name} in the header has a dtype, shape or data_offsets of the wrong kind")
    start, end = offsets
    try:
        needed = tensor_bytes(dtype, shape)
    except Hy3Error as error:
        raise Hy3Error(f"tensor {name}: {error}") from error
    if end - start != needed:
        raise Hy3Error(f"tensor {name} of {dtype} {shape} needs {needed} bytes and has {end - start}")
    return Tensor(dtype, tuple(shape), start, end)


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(map(_is_size, numbers))


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < MAX_SIZE


def _check_coverage(tensors: dict[str, Tensor]) -> None:
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start > position:
            raise Hy3Error(f"a hole of {tensor.start - position} bytes lies before tensor {name}")
        if tensor.start < position:
            raise Hy3Error(f"tensor {name} overlaps the one before it by {position - tensor.start} bytes")
        position = tensor.end
