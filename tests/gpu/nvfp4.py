# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ModelOpt's NVFP4: 4-bit floats in blocks of 16, a scale of 8 bits for each block, and one of 32 bits for all.

    weight = E2M1[nibble] x E4M3[block's scale] x scale_2

Standard library only. A tiny checkpoint's noise has few different numbers, so each is rounded once for each scale.
"""

from __future__ import annotations

import bisect
import struct
import sys
import typing as t
from array import array

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# By code, without the sign and without the two codes that are no number: 0 to 448.
E4M3 = tuple(
    (code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(0x7F)
)
_MIDDLES = tuple((lower + upper) / 2 for lower, upper in zip(E2M1, E2M1[1:], strict=False))
_SIGN = 0x8000


class Quantized(t.NamedTuple):
    """Two nibbles a byte, the even column's low; the scale of each block as E4M3."""

    weight: bytes
    scales: bytes


def e2m1(value: float) -> int:
    """The code of the nearest number that there is, with the sign as bit 3."""
    return bisect.bisect_left(_MIDDLES, min(abs(value), E2M1[-1])) | (8 if value < 0 else 0)


def e4m3(value: float) -> int:
    """The code of the nearest number above 0 that there is: a block of zeros gets the smallest scale."""
    after = min(max(bisect.bisect_left(E4M3, value), 2), len(E4M3) - 1)
    return after if 2 * value > E4M3[after - 1] + E4M3[after] else after - 1


def bf16_values(data: bytes) -> array[int]:
    """The bits of each bfloat16."""
    values = array("H", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def bf16_float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return value


def largest(data: bytes) -> float:
    """The largest magnitude of bfloat16 numbers, whose bits are in the same order."""
    return bf16_float(max({bits & ~_SIGN for bits in bf16_values(data)}))


def scale_2_for(amax: float) -> float:
    """The one scale with which the largest number is the largest that can be written."""
    return amax / (E2M1[-1] * E4M3[-1])


def quantize(data: bytes, scale_2: float) -> Quantized:
    """Round bfloat16 numbers, rows of whole blocks."""
    values = bf16_values(data)
    scale_codes: dict[int, int] = {}
    nibbles: dict[int, dict[int, int]] = {}
    weight, scales = bytearray(), bytearray()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        amax = max([bits & ~_SIGN for bits in block])
        if amax not in scale_codes:
            scale_codes[amax] = e4m3(bf16_float(amax) / E2M1[-1] / scale_2)
        code = scale_codes[amax]
        known = nibbles.setdefault(code, {})
        for bits in set(block) - known.keys():
            known[bits] = e2m1(bf16_float(bits) / (E4M3[code] * scale_2))
        scales.append(code)
        weight += bytes([known[low] | known[high] << 4 for low, high in zip(block[::2], block[1::2], strict=True)])
    return Quantized(bytes(weight), bytes(scales))


def dequantize(quantized: Quantized, scale_2: float) -> list[float]:
    """What the engine computes with."""
    values = []
    for index, code in enumerate(quantized.scales):
        scale = E4M3[code] * scale_2
        for byte in quantized.weight[index * BLOCK // 2 : (index + 1) * BLOCK // 2]:
            values += [(-scale if nibble & 8 else scale) * E2M1[nibble & 7] for nibble in (byte & 15, byte >> 4)]
    return values
