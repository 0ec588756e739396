# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the part of /sys that describes HCAs, for tests without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

# index, GID, type (None: reading the file fails as it does for an empty slot), netdev
Row = tuple[int, str, "str | None", str]

# The kernel answers a read of this file with EINVAL, as it does for the type of an empty GID slot.
UNREADABLE = "/sys/class/net/lo/speed"


def make_sysfs(
    root: Path,
    ports: Mapping[str, Sequence[Row]],
    *,
    devices: Mapping[str, Sequence[str]] | None = None,
    down: Sequence[str] = (),
) -> Path:
    """Write GID tables by ``name:port`` and, for each netdev with a parent device, the HCAs behind it."""
    hcas = root / "class" / "infiniband"
    hcas.mkdir(parents=True)
    for label, rows in ports.items():
        name, _colon, number = label.partition(":")
        # As in the kernel's tree, a class directory holds links to the devices.
        base = root / "devices" / name / "ports" / number
        if not (hcas / name).is_symlink():
            (hcas / name).symlink_to(f"../../devices/{name}")
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        (base / "state").write_text("1: DOWN\n" if label in down else "4: ACTIVE\n")
        for index, gid, kind, ndev in rows:
            (base / "gids" / str(index)).write_text(f"{gid}\n")
            for path, text in (("types", kind), ("ndevs", ndev if kind is not None else None)):
                file = base / "gid_attrs" / path / str(index)
                if text is None:
                    file.symlink_to(UNREADABLE)
                else:
                    file.write_text(f"{text}\n")
    for netdev, names in (devices or {}).items():
        (root / "class" / "net" / netdev / "device").mkdir(parents=True)
        for hca in names:
            (root / "class" / "net" / netdev / "device" / "infiniband" / hca).mkdir(parents=True)
    return root


def v4(address: str) -> str:
    """Write an IPv4-mapped GID as sysfs does."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
