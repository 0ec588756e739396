# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Files and directories that go for good, next to others that must stay."""

from __future__ import annotations

import errno
import glob
import os
import typing as t
from pathlib import PurePosixPath

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What the kernel says of a name that is no directory; ELOOP is a symbolic link.
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)


def refuse_shallow(paths: t.Iterable[str]) -> None:
    """Raise for a path that no role of ours can mean, as one with a part that turned out empty would be."""
    for path in paths:
        parts = PurePosixPath(path).parts
        if not path.startswith("/") or ".." in parts or len(parts) < 3:
            raise Hy3Error(
                f"'{path}' is to be removed, and only an absolute path without '..' that lies below a directory of the "
                "system may be; name one such as /etc/hy3."
            )


def expand(patterns: t.Iterable[str]) -> list[str]:
    """The paths that match the shell patterns now, each once and in their order."""
    return sorted({path for pattern in patterns for path in glob.glob(pattern)})


class Remover:
    """Removes trees and keeps account; with ``write`` false it only does the latter.

    Nothing is followed: symbolic links go themselves. A tree may belong to a user who changes it meanwhile, so each
    step goes by the descriptor of the directory that was looked at. What is mounted in a tree stays.
    """

    def __init__(self, *, write: bool, keep: t.Sequence[str] = ()) -> None:
        self._write = write
        self._keep = keep
        self.removed: list[str] = []
        self.kept: list[str] = []

    def tree(self, path: str) -> None:
        """Remove ``path``, an absolute one, and all in it but what the patterns keep. Raises OSError."""
        place, name = os.path.split(path.rstrip("/"))
        try:
            # Not O_NOFOLLOW: links on the way to it are the administrator's.
            parent = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            if _exists(name, parent):
                self.removed += self._remove(parent, name, f"{place}/{name}")
        finally:
            os.close(parent)

    def directory(self, path: str) -> None:
        """Remove the directory ``path`` if nothing is in it, or nothing but what was removed before. Raises OSError."""
        if os.path.islink(path) or not os.path.isdir(path):
            return
        others = [f"{path}/{name}" for name in sorted(os.listdir(path)) if f"{path}/{name}" not in self.removed]
        self.kept += [other for other in others if other not in self.kept]
        if not others:
            if self._write:
                os.rmdir(path)
            self.removed.append(path)

    def _remove(self, parent: int, name: str, path: str) -> list[str]:
        """The paths that are gone: ``path`` alone if nothing of it is left."""
        if any(PurePosixPath(path).match(pattern) for pattern in self._keep):
            self.kept.append(path)
            return []
        try:
            return self._remove_directory(parent, name, path)
        except FileNotFoundError:  # somebody else was faster
            return [path]
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise _placed(error, path) from error
        try:
            if self._write:
                os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _placed(error, path) from error
        return [path]

    def _remove_directory(self, parent: int, name: str, path: str) -> list[str]:
        opened = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
        try:
            if os.fstat(opened).st_dev != os.fstat(parent).st_dev:
                self.kept.append(path)
                return []
            below = {f"{path}/{child}": child for child in sorted(os.listdir(opened))}
            gone = [one for place, child in below.items() for one in self._remove(opened, child, place)]
        finally:
            os.close(opened)
        if gone != list(below):
            return gone
        if self._write:
            os.rmdir(name, dir_fd=parent)
        return [path]


def _placed(error: OSError, path: str) -> OSError:
    """The same with the whole path, where a descriptor of a directory stood for its beginning."""
    whole = str(error.filename or "").startswith("/")
    return error if whole else OSError(error.errno, error.strerror, path)


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
