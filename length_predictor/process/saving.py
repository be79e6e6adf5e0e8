"""The file that a predictor's process writes: by one process at a time, and over nothing foreign.

Several engines may name one file, such as the ranks of a data-parallel server. The first that
starts saves, by a lock beside the file. The others ask for the lock whenever they would save: one
that has it, as the first has ended, goes on if the file is still as it was read. Where the first
has saved meanwhile, where a file system has no locks, and where a command has built the file anew,
the file itself shows it: it is not the one that was read or written here last, and stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

from sola_sched.length_predictor.storage import real_path, require_same_kind, save_predictor

logger = logging.getLogger(__name__)

_State = tuple[int, int, int]


class SavedFile:
    """A predictor file that is written every so often. Make it before the file is read.

    Args:
        path: The file; it need not be there yet.
        kind: Of the predictor that will be saved.

    Raises:
        PredictorFileError: There is a file of another kind.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = real_path(path), kind
        self._about: dict[str, Any] = {}
        if self._path.exists():
            self._about = require_same_kind(self._path, kind).get("about", {})
        self._lock = _Lock(self._path.with_name(f".{self._path.name}.lock"))
        self._has_lock = self._lock.acquire()
        self._known = self._state()
        self._has_lost = False  # the file, for good: another process has written it
        self._has_told = False  # that saving fails
        if not self._has_lock:
            self._tell(
                "another process saves what it learns there. This one does when that has ended, "
                "unless it has written the file by then. To save what several engines learn, give "
                "each a 'predictor_path' of its own."
            )

    def save(self, predictor: Any, num_learned: int) -> bool:
        """Write the predictor, which has learned so many requests; False where that fails.

        Predictions go on then, and a full disk or the like is tried again.
        """
        if self._has_lost:
            return False
        self._has_lock = self._has_lock or self._lock.acquire()
        if not self._has_lock:
            return False
        state = self._state()
        if state is not None and state != self._known:
            self._has_lost = True
            self.close()
            self._tell(
                "another process has written it since it was read or saved. A restart takes over "
                "what is there."
            )
            return False
        about = {
            **self._about,
            "num_prompts": self._about.get("num_prompts", 0) + num_learned,
            "num_live": self._about.get("num_live", 0) + num_learned,
        }
        try:
            save_predictor(self._path, predictor, about)
        except OSError as error:
            if not self._has_told:
                logger.warning(
                    "sola_sched: what the predictor has learned cannot be saved, which is tried "
                    "again: %s",
                    error,
                )
            self._has_told = True
            return False
        self._has_told = False
        self._known = self._state()
        return True

    def close(self) -> None:
        """Let another process save."""
        self._has_lock = False
        self._lock.release()

    def _tell(self, reason: str) -> None:
        logger.warning(
            "sola_sched: what this predictor learns is not saved to %s: %s",
            self._path,
            reason,
        )

    def _state(self) -> _State | None:
        """What changes whenever the file is written; None where there is none."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class _Lock:
    """An advisory lock on a file of its own, which it removes. It ends with its process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> bool:
        """False where another process has it; True also where files cannot be locked."""
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError:
                return True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            except OSError:
                os.close(handle)
                return True
            if self._is_at_path(handle):
                self._handle = handle
                return True
            os.close(handle)  # the one that had it removed this file meanwhile

    def release(self) -> None:
        """Harmless where it was not acquired."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._handle)
        self._handle = None

    def _is_at_path(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self._path.stat())
        except OSError:
            return False
