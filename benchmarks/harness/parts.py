"""Which parts of an experiment run; beside `setup`, on whose source stored rows depend."""

from __future__ import annotations

from collections.abc import Iterable

from harness.setup import Setup


def chosen(setup: Setup, known: Iterable[str]) -> list[str]:
    """The parts that ``--only`` leaves, in the order of `known`.

    Raises:
        ConfigError: It names one that is not known.
    """
    names = list(known)
    setup.check_only(names)
    return [name for name in names if not setup.only or name in setup.only]
