# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Blanks the machine code that one GPU does not use in CUDA's libraries, so that they pack to a tenth.

A library holds fat binaries: a header, and then entries, each with the same code for one architecture, as PTX or as an
ELF. What is blanked stays where it was, so nothing else in the library has to change.
"""

from __future__ import annotations

import struct
import typing as t
from pathlib import Path

MAGIC = 0xBA55ED50
# magic, version, size of this header, size of what follows
HEADER = struct.Struct("<IHHQ")
# kind, version, size of this header, size of the payload, 12 bytes of no interest, architecture
ENTRY = struct.Struct("<HHIQ12xI")
PTX, ELF = 1, 2


class Entry(t.NamedTuple):
    """Code for one architecture (90 is sm_90), ``size`` bytes from ``start`` on."""

    kind: int
    architecture: int
    start: int
    size: int


def fat_binaries(library: bytes) -> t.Iterator[list[Entry]]:
    """The entries of each fat binary in ``library``."""
    magic = struct.pack("<I", MAGIC)
    at = library.find(magic)
    while at >= 0:
        end = at + len(magic)
        if at + HEADER.size <= len(library):
            _magic, version, header, size = HEADER.unpack_from(library, at)
            # The same four bytes may stand anywhere.
            if version == 1 and header == HEADER.size and at + header + size <= len(library):
                end = at + header + size
                yield list(_entries(library, at + header, end))
        at = library.find(magic, end)


def _entries(library: bytes, at: int, end: int) -> t.Iterator[Entry]:
    while at + ENTRY.size <= end:
        kind, _version, header, size, architecture = ENTRY.unpack_from(library, at)
        if kind not in (PTX, ELF) or header < ENTRY.size or at + header + size > end:
            return
        yield Entry(kind, architecture, at + header, size)
        at += header + size


def wanted(entries: list[Entry], architecture: int) -> list[Entry]:
    """What the driver takes of one fat binary: an ELF of its generation, else the newest PTX that is old enough."""
    for kind in (ELF, PTX):
        fits = [
            entry.architecture
            for entry in entries
            if entry.kind == kind
            and entry.architecture <= architecture
            and (kind == PTX or entry.architecture // 10 == architecture // 10)
        ]
        if fits:
            return [entry for entry in entries if (entry.kind, entry.architecture) == (kind, max(fits))]
    return []


def blank(library: Path, target: Path, architecture: int) -> int:
    """Copy ``library`` to ``target`` with what a GPU of ``architecture`` does not use as zeros; how many bytes are."""
    content = bytearray(library.read_bytes())
    blanked = 0
    for entries in list(fat_binaries(bytes(content))):
        for entry in set(entries) - set(wanted(entries, architecture)):
            content[entry.start : entry.start + entry.size] = bytes(entry.size)
            blanked += entry.size
    target.write_bytes(content)
    return blanked
