"""Finds before a long run what would keep its result from being written."""

from __future__ import annotations

from pathlib import Path

from sola_sched.errors import ConfigError

_TRIAL = ".sola-sched-trial"


def require_writable(path: Path, flag: str) -> None:
    """Make the folder of a file and try to open the file; what is in it stays.

    Raises:
        ConfigError: That fails; the message names the flag.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"'{flag}' must name a file that can be written (got {path}: "
            f"{error.strerror or error}); name another one."
        ) from error


def require_writable_folder(path: Path, flag: str) -> None:
    """Make a folder and try to write into it.

    Raises:
        ConfigError: That fails; the message names the flag.
    """
    trial = path / _TRIAL
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"'{flag}' must name a folder that can be written (got {path}: "
            f"{error.strerror or error}); name another one."
        ) from error
