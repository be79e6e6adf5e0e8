"""Progress bars are tqdm's, which only the extra 'bench' brings."""

from __future__ import annotations

from typing import Any

from sola_sched.errors import ConfigError


def tqdm_class() -> Any:
    """The class of tqdm's bars.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        raise ConfigError(
            "a progress bar needs tqdm, which is not installed; pip install 'sola-sched[bench]'."
        ) from None
    return tqdm
