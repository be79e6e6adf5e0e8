"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/sola_sched``, by default under ``~/.cache``.

    Raises:
        FileNotFoundError: The user has no home folder either.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given or Path.home() / ".cache") / "sola_sched"
    except RuntimeError as error:  # neither HOME nor an entry in the list of users
        message = f"XDG_CACHE_HOME or HOME must be set, user {os.getuid()} has no home folder."
        raise FileNotFoundError(message) from error
