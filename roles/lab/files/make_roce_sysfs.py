# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fabricate the part of /sys that describes one RoCE port, with decoys around the one right GID row.

A test double: this machine has no RDMA device. The rows are those of a ConnectX-7 port: link-local rows first, an
address that was removed and came back (so that index numbers drift), each address as RoCE v1 and v2, and another
port's address as RoCE v2.
"""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path

LINK_LOCAL = "fe80:0000:0000:0000:02aa:bbff:fe00:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def mapped(address: str) -> str:
    """The IPv4-mapped GID of ``address`` in the kernel's spelling."""
    return ipaddress.IPv6Address(f"::ffff:{address}").packed.hex(":", 2)


def rows(address: str, decoy: str, index: int, slots: int = 16) -> list[tuple[str, str | None]]:
    """``slots`` rows of (GID, type); the right one, ``address`` as RoCE v2, is at ``index`` (3 or more).

    ``address`` also stands at ``index - 1`` as RoCE v1, and ``decoy`` as RoCE v2 after it and in the rows before.
    An unused slot has no type: reading it fails on real hardware too.
    """
    table: list[tuple[str, str | None]] = [(EMPTY, None)] * slots
    table[0], table[1] = (LINK_LOCAL, V1), (LINK_LOCAL, V2)
    for position in range(3, index - 1):
        table[position] = (mapped(decoy), V2 if position % 2 else V1)
    table[index - 1], table[index] = (mapped(address), V1), (mapped(address), V2)
    table[index + 1] = (mapped(decoy), V2)
    return table


def write(root: Path, *, hca: str, netdev: str, table: list[tuple[str, str | None]]) -> bool:
    """Write the tree below ``root``; True when a file was new or differed."""
    port = root / "class/infiniband" / hca / "ports/1"
    files = {port / "state": "4: ACTIVE", port / "link_layer": "Ethernet", port / "rate": "200 Gb/sec (4X HDR)"}
    for number, (gid, kind) in enumerate(table):
        files[port / f"gids/{number}"] = gid
        if kind is not None:
            files[port / f"gid_attrs/types/{number}"] = kind
            files[port / f"gid_attrs/ndevs/{number}"] = netdev
    changed = False
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text + "\n":
            path.write_text(text + "\n")
            changed = True
    device = root / "class/net" / netdev / "device/infiniband" / hca
    device.mkdir(parents=True, exist_ok=True)
    return changed


def main() -> None:
    """Command line; prints ``changed`` or ``unchanged``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--decoy", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--hca", default="rocep1s0f1")
    parser.add_argument("--netdev", default="enp1s0f1np1")
    args = parser.parse_args()
    table = rows(args.address, args.decoy, args.index)
    print("changed" if write(args.root, hca=args.hca, netdev=args.netdev, table=table) else "unchanged")


if __name__ == "__main__":
    main()
