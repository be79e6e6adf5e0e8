"""Requests that have ended, as a server of ours tells them or a file holds them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sola_sched.errors import ConfigError
from sola_sched.reports.fate_form import problem_of
from sola_sched.reports.fates import engine_of

#: Where a server of ours tells them.
PATH = "/sola/requests"
_TIMEOUT_S = 10.0
_MOST = 100_000


@dataclass(frozen=True)
class Window:
    """Requests that ended one after another on a server.

    Attributes:
        requests: As in `reports.fates.fate_of`, the last to end first. Those of a data parallel
            server have the rank of their `engine`; each engine has a clock of its own.
        engine: As in `reports.fates.engine_facts`, of the first; None where the server has not
            told it.
        engines: The same by rank; empty where there is but one.
        left_out: A sentence on those that could not be read; empty where all could.
    """

    requests: Sequence[Mapping[str, Any]]
    engine: Mapping[str, Any] | None
    engines: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    left_out: str = ""

    @cached_property
    def by_engine(self) -> Mapping[int, Window]:
        """The requests of each engine that has some, by rank."""
        requests: dict[int, list[Mapping[str, Any]]] = {}
        for fate in self.requests:
            requests.setdefault(engine_of(fate), []).append(fate)
        return {
            rank: Window(requests[rank], self.engines.get(rank) if self.engines else self.engine)
            for rank in sorted(requests)
        }

    def beside(self, fate: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """All known requests of the engine that it ran on, itself among them."""
        own = self.by_engine.get(engine_of(fate))
        return () if own is None else own.requests

    def place(self, fate: Mapping[str, Any]) -> str:
        """Its class, and its engine where there are several."""
        name = str(fate["slo_class"])
        return name if len(self.by_engine) < 2 else f"{name}, engine {engine_of(fate)}"

    def to_json(self) -> dict[str, Any]:
        """The form of the server's answer and of a file."""
        engines = {str(rank): facts for rank, facts in self.engines.items()}
        return {"requests": list(self.requests), "engine": self.engine, "engines": engines}


def late_of(url: str, most: int) -> Sequence[Mapping[str, Any]]:
    """The last requests of a server that missed targets, so many at most.

    Raises:
        ConfigError: It does not tell.
    """
    query = f"?missed&limit={most}"
    return _window(_fetched(f"{url.rstrip('/')}{PATH}{query}"), url).requests


def read(source: str) -> Window:
    """The last requests to end.

    Args:
        source: `http://HOST:PORT` of a vLLM server with a scheduler of ours, or a file that was
            saved from one.

    Raises:
        ConfigError: The source cannot be read.
    """
    if source.startswith(("http://", "https://")):
        return _window(_fetched(f"{source.rstrip('/')}{PATH}?limit={_MOST}"), source)
    try:
        return _window(json.loads(Path(source).read_text(encoding="utf-8")), source)
    except OSError as error:
        raise ConfigError(
            f"'SOURCE' must be the URL of a server or a file ({source!r}: {error.strerror})."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{source!r} must be a file that --save has written ({error})."
        ) from error


def find(window: Window, req_id: str, source: str) -> list[Mapping[str, Any]]:
    """The request of this id, or all whose ids contain it.

    Raises:
        ConfigError: There is none.
    """
    found = [fate for fate in window.requests if fate["request_id"] == req_id]
    found = found or [fate for fate in window.requests if req_id in fate["request_id"]]
    if not found:
        raise ConfigError(
            f"'ID' must be that of a request in {source} (none of the "
            f"{len(window.requests):,} has {req_id!r}); a request is known a moment after it has "
            "ended, and until some thousand others have."
        )
    return found


def _fetched(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise ConfigError(_told(error)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(
            f"{url.partition(PATH)[0]} must be a vLLM server with --scheduler-cls "
            f"sola_sched.Scheduler ({error})."
        ) from error


def _told(error: urllib.error.HTTPError) -> str:
    """What our page says, or that there is none."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return (
            f"the server must have a scheduler of ours and its statistics on (it answers "
            f"HTTP {error.code} at {PATH})."
        )


def _window(document: Any, source: str) -> Window:
    requests = document.get("requests") if isinstance(document, dict) else None
    if not isinstance(requests, list):
        raise ConfigError(f"{source!r} must hold the answer of {PATH} (it holds something else).")
    problems = [problem_of(each) for each in requests]
    right = [each for each, problem in zip(requests, problems, strict=True) if problem is None]
    wrong = [f"of request {n} {problem}" for n, problem in enumerate(problems, 1) if problem]
    if wrong and not right:
        raise ConfigError(f"{source!r} must hold the answer of {PATH} ({wrong[0]}).")
    left_out = ""
    if wrong:
        left_out = f"{len(wrong):,} of {len(requests):,} requests are left out ({wrong[0]})."
    engine, engines = document.get("engine"), document.get("engines") or {}
    facts = [engine or {}, *(engines.values() if isinstance(engines, dict) else (None,))]
    if not all(isinstance(each, dict) for each in facts) or not all(map(str.isdecimal, engines)):
        raise ConfigError(
            f"{source!r} must hold the answer of {PATH} ('engine' and 'engines' are something "
            "else)."
        )
    by_rank = {int(rank): each for rank, each in engines.items()}
    return Window(right, engine, by_rank, left_out)
