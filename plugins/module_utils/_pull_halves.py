# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Files that have not come whole, as rsync leaves them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

# How rsync names what it writes: a dot, the name, a dot and six letters or digits.
_TEMPORARY = re.compile(r"\.(.+)\.[A-Za-z0-9]{6}")


class Halves:
    """The files below a directory: under their own names, or under rsync's while it runs or once it was killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def sizes(self) -> dict[str, int]:
        """Bytes that have come of each file; rsync's own copy and an older half count once."""
        sizes: dict[str, int] = {}
        for path in self._paths():
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # renamed meanwhile
                continue
            name = str(_own_name(path).relative_to(self.directory))
            sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    def adopt(self, names: Collection[str]) -> None:
        """Give what a killed rsync left the names by which the next one goes on; remove what is not among ``names``.

        The directory is made if it is not there; nobody else may look in.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.parent.chmod(0o700)
        for path in self._paths():
            own = _own_name(path)
            if str(own.relative_to(self.directory)) not in names:
                path.unlink()
            elif own != path and (not own.exists() or own.stat().st_size < path.stat().st_size):
                path.rename(own)
            elif own != path:
                path.unlink()

    def _paths(self) -> list[Path]:
        return [Path(folder, name) for folder, _folders, names in os.walk(self.directory) for name in names]


def _own_name(path: Path) -> Path:
    match = _TEMPORARY.fullmatch(path.name)
    return path.with_name(match[1]) if match else path
