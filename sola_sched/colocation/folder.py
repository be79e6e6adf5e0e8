"""A folder that only this user can change, and the files in it.

Shared memory is a place where every user of a machine may make files, under any name that is free.
A file of somebody else's, or one that others may open, could hold a lock for ever or lead to
another file by a link. So each is looked at once it is open: what is looked at is what is used.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_CHANGED_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Folder:
    """An open folder. Files are made and opened below it whatever its path leads to meanwhile.

    Args:
        path: Made for this user alone, with its parents, if it is not there.

    Raises:
        OSError: It cannot be opened, is a link, or others can change it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(self._fd)
            if found.st_uid != os.geteuid() or found.st_mode & _CHANGED_BY_OTHERS:
                raise PermissionError(
                    f"{path} must be a folder of user {os.geteuid()} that nobody else may change, "
                    f"{_owner_and_mode(found)}; delete it, or correct it with chown and chmod 700"
                )
        except OSError:
            self.close()
            raise

    def __str__(self) -> str:
        return str(self.path)

    def close(self) -> None:
        """Give the folder back; files that are open stay open."""
        os.close(self._fd)

    def file(self, name: str) -> int:
        """Open a file to read and write it, made empty if it is not there.

        Raises:
            OSError: It cannot be opened, is no file or a link, or others may open it.
        """
        return self._checked(name, os.O_RDWR | os.O_CREAT, stat.S_IFREG, "file")

    def fifo(self, name: str, mode: int) -> int:
        """Open a FIFO, made if it is not there, that never waits.

        Raises:
            OSError: It cannot be opened, is no FIFO or a link, or others may open it.
        """
        with contextlib.suppress(FileExistsError):
            os.mkfifo(name, 0o600, dir_fd=self._fd)
        return self.there(name, mode)

    def there(self, name: str, mode: int) -> int:
        """As `fifo`, without making it."""
        return self._checked(name, mode, stat.S_IFIFO, "FIFO")

    def _checked(self, name: str, mode: int, kind: int, word: str) -> int:
        # Nothing is waited for: what is not as it should be may be a FIFO without another end.
        flags = mode | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            found = os.fstat(fd)
            if (
                stat.S_IFMT(found.st_mode) != kind
                or found.st_uid != os.geteuid()
                or found.st_mode & _FOR_OTHERS
                or found.st_nlink > 1
            ):
                raise PermissionError(
                    f"{self.path / name} must be a {word} of user {os.geteuid()} that nobody else "
                    f"may open, without another name, {_owner_and_mode(found)} and "
                    f"{found.st_nlink} names; delete it"
                )
        except OSError:
            os.close(fd)
            raise
        return fd


def _owner_and_mode(found: os.stat_result) -> str:
    return f"got one of user {found.st_uid} with mode {stat.filemode(found.st_mode)}"
