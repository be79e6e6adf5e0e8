"""API keys: who may send requests to a gateway or a door."""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from pathlib import Path

from sola_sched.errors import ConfigError
from sola_sched.proxy.errors import RefusedError

ENVIRONMENT = "SOLA_API_KEY"
_BEARER = "bearer "


class Keys:
    """Keys that are admitted; without any, everybody is.

    Args:
        keys: As clients send them; only their digests are kept.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._digests)

    def check(self, headers: Mapping[str, str]) -> None:
        """As `Authorization: Bearer KEY`, or as Anthropic's clients send it, `x-api-key: KEY`.

        Raises:
            RefusedError: None of the keys was given.
        """
        if not self._digests:
            return
        given = headers.get("Authorization", "")
        key = given[len(_BEARER) :] if given.lower().startswith(_BEARER) else ""
        digests = [_digest(each) for each in (key, headers.get("x-api-key", "")) if each]
        found = [secrets.compare_digest(one, other) for one in digests for other in self._digests]
        if not any(found):
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "a valid API key must be given, as 'Authorization: Bearer KEY'.",
                {"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def add_key_file(parser: argparse.ArgumentParser) -> None:
    """The option of a file with keys."""
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="a file with keys, one a line, of which clients must send one; empty lines and those "
        "that begin with # are left out",
    )  # fmt: skip


def add_keys(parser: argparse.ArgumentParser) -> None:
    """The options of keys."""
    add_key_file(parser)
    parser.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="a key that clients must send as 'Authorization: Bearer KEY'; once for each. Whoever "
        "is on this machine can see it in the list of processes: --api-key-file, or the variable "
        f"{ENVIRONMENT}, is better",
    )  # fmt: skip


def keys_of(given: Iterable[str] | None, file: Path | None) -> Keys:
    """All that there are: those given, those of the file, and that of the environment.

    Raises:
        ConfigError: A key is empty, or the file cannot be read or has none.
    """
    keys = list(given or ())
    if (of_environment := os.environ.get(ENVIRONMENT)) is not None:
        keys.append(of_environment)
    if file is not None:
        keys += _in_file(file)
    if not all(key and key.strip() == key for key in keys):
        raise ConfigError(
            "an API key must not be empty, nor begin or end with a space; correct --api-key, "
            f"--api-key-file or {ENVIRONMENT}."
        )
    return Keys(keys)


def _in_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"'--api-key-file' must be a readable text file ({error}).") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"'--api-key-file' must have a key in it (got {path}, which has none).")
    return keys
