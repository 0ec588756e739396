# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The data of a padded shard: pieces of the original, each followed by what is new, in a few MiB of memory."""

from __future__ import annotations

import errno
import math
import os
import typing as t
from collections.abc import Iterable

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._padding import Plan, pad_tensor
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import (
    DTYPE_BITS,
    LENGTH_BYTES,
    Header,
    render_header,
    tensor_bytes,
)

CHUNK = 8 * 1024**2
# copy_file_range refuses between some file systems and under some kernels, where reading and writing works.
CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class Piece(t.NamedTuple):
    """Bytes of the source from ``start`` in its data, ``repeats`` times ``length``, each followed by the tail.

    The tail is ``fill``, ``fills`` times.
    """

    start: int
    length: int
    repeats: int = 1
    fill: bytes = b""
    fills: int = 0

    @property
    def size(self) -> int:
        """Bytes of the target."""
        return self.repeats * (self.length + len(self.fill) * self.fills)


def shard_pieces(header: Header, plan: Plan) -> tuple[bytes, list[Piece], int]:
    """The bytes before the data of a padded shard, the pieces of its data, and how many tensors are padded.

    Neighbours that stay as they are make one piece. A header without padded tensors is kept as it is.
    """
    order = sorted(header.tensors, key=lambda name: (header.tensors[name].start, header.tensors[name].end))
    paddings = {
        name: padding
        for name in order
        if (padding := pad_tensor(name, header.tensors[name].dtype, header.tensors[name].shape, plan))
    }
    if not paddings:
        prefix = len(header.raw).to_bytes(LENGTH_BYTES, "little") + header.raw
        return prefix, [Piece(0, header.data_bytes)] if header.data_bytes else [], 0
    shapes = {name: (header.tensors[name].dtype, header.tensors[name].shape) for name in order}
    shapes |= {name: (shapes[name][0], padding.shape) for name, padding in paddings.items()}
    if not _aligned(shapes.values()):
        # As the reference writer: large elements first keeps every tensor at a multiple of its element's size.
        order.sort(key=lambda name: -DTYPE_BITS[shapes[name][0]])
        shapes = {name: shapes[name] for name in order}
    pieces: list[Piece] = []
    for name in order:
        dtype, shape, start, end = header.tensors[name]
        if name not in paddings:
            if pieces and not pieces[-1].fill and pieces[-1].start + pieces[-1].length == start:
                start = pieces.pop().start
            if end > start:
                pieces.append(Piece(start, end - start))
            continue
        axis, new_shape, fill = paddings[name]
        repeats = math.prod(shape[:axis])
        added = (tensor_bytes(dtype, new_shape) - (end - start)) // repeats
        pieces.append(Piece(start, (end - start) // repeats, repeats, fill, added // len(fill)))
    return render_header(shapes, header.metadata), pieces, len(paddings)


def _aligned(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> bool:
    offset = 0
    for dtype, shape in shapes:
        if offset % max(1, DTYPE_BITS[dtype] // 8):
            return False
        offset += tensor_bytes(dtype, shape)
    return True


def write_all(target: int, content: bytes | memoryview) -> None:
    """Write all of it at the descriptor's position."""
    left = memoryview(content)
    while left:
        left = left[os.write(target, left) :]


def write_piece(source: int, target: int, piece: Piece, *, offset: int) -> None:
    """Write a piece at the target's position. ``offset`` is where the source's data section begins, in bytes."""
    start = offset + piece.start
    if piece.repeats == 1:
        copy_range(source, target, start=start, length=piece.length)
        left = piece.fills
        while left:
            part = min(left, CHUNK // len(piece.fill))
            write_all(target, piece.fill * part)
            left -= part
        return
    tail = piece.fill * piece.fills
    rows = max(1, CHUNK // (piece.length + len(tail)))
    for first in range(0, piece.repeats, rows):
        wanted = min(rows, piece.repeats - first) * piece.length
        content = memoryview(_read(source, start + first * piece.length, wanted))
        parts = [content[at : at + piece.length] for at in range(0, wanted, piece.length)]
        write_all(target, tail.join([*parts, b""]))


def copy_range(source: int, target: int, *, start: int, length: int) -> None:
    """Copy within the kernel, which shares blocks where the file system can."""
    try:
        while length:
            copied = os.copy_file_range(source, target, length, start)
            if not copied:
                break
            start, length = start + copied, length - copied
    except OSError as error:
        if error.errno not in CANNOT_COPY:
            raise
    while length:
        part = _read(source, start, min(CHUNK, length))
        write_all(target, part)
        start, length = start + len(part), length - len(part)


def _read(source: int, start: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = os.pread(source, length, start)
        if not part:
            raise Hy3Error("A shard ended while it was read; wait until nothing changes it, then run again.")
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
