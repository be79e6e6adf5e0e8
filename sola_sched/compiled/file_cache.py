"""Numba's cache of compiled functions, by what the sources say, and safe against damaged files.

Numba's own goes by the path and the time of a source file, so that the same sources in another
virtualenv are compiled again. It raises where a file is empty or cut off, as a power failure leaves
it, and where a disk is full. Here the function is compiled instead, and a disk that takes nothing
is told of once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from sola_sched.compiled import kept_code

logger = logging.getLogger("vllm.sola_sched")


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Where the code of one function is kept, and for which source."""

    def __init__(self, function: Callable[..., object], source: str) -> None:
        self._folder = kept_code.folder() / function.__module__
        self._line = str(function.__code__.co_firstlineno)
        self._stamp = hashlib.sha256(Path(source).read_bytes()).hexdigest()

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return self._line

    @classmethod
    def from_function(cls, function: Callable[..., object], source: str) -> _Locator | None:
        """None where nothing can be kept."""
        try:
            locator = cls(function, source)
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class FileCache(FunctionCache):  # type: ignore[misc]
    """The kept machine code of one function.

    Raises:
        RuntimeError: There is nowhere to keep it.
    """

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is kept for arguments of these types, None where nothing can be used."""
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:  # it may be whole
            logger.warning("sola_sched: kept code cannot be read (%s); compiled anew", error)
        except Exception as error:
            path = self._damaged(sig, target_context)
            kept_code.is_damaged(path)
            logger.warning(
                "sola_sched: %s is damaged (%s: %s) and removed; compiled anew",
                path, type(error).__name__, error,
            )  # fmt: skip
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it, if that can be done."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            self.disable()
            if kept_code.cannot_keep(repr(self)):
                logger.warning(
                    "sola_sched: compiled code cannot be kept in %s (%s: %s); it is compiled at "
                    "each start",
                    self.cache_path, type(error).__name__, error,
                )  # fmt: skip

    def _damaged(self, sig: Any, target_context: Any) -> Path:
        """The file that could not be loaded: the index, or what it names for these types."""
        files = self._cache_file
        try:
            name = files._load_index()[self._index_key(sig, target_context.codegen())]
        except Exception:
            return Path(files._index_path)
        return Path(files._data_path(name))
