"""What a client may take of a server, and its options on a command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sola_sched.config.flags import positive_float, positive_int
from sola_sched.errors import ConfigError

#: Seconds that requests have to end when a server ends; nobody who is connected prolongs them.
END_S = 120.0


@dataclass(frozen=True)
class Limits:
    """Limits of one server.

    Attributes:
        max_body_bytes: Of one request's body, after it was inflated.
        max_held_bytes: Of the bodies of all requests that are there.
        max_connections: Clients' connections. Where there are as many, one without a request is
            closed for a new one.
        head_s: A connection on which no request is complete for so long is closed; also how long
            one may be idle.
        body_s: From a request's head to the end of its body.
        write_s: A client that takes nothing of its answer for so long is left.
        first_byte_s: From a request to the beginning of its answer.
        whole_s: From a request to the end of its answer.
        pass_paths: Paths of servers that pass beside those of `paths`, for instance of a plug-in.
    """

    max_body_bytes: int = 16 * 2**20
    max_held_bytes: int = 2**30
    max_connections: int = 4096
    head_s: float = 75.0
    body_s: float = 60.0
    write_s: float = 60.0
    first_byte_s: float = 3600.0
    whole_s: float = 6 * 3600.0
    pass_paths: frozenset[str] = frozenset()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """From what JSON can hold.

        Raises:
            ConfigError: A name is unknown, or a value breaks its rule.
        """
        unknown = sorted(arguments.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(f"limits must be fields of 'Limits' (got {', '.join(unknown)}).")
        paths = frozenset(arguments.get("pass_paths", ()))
        return cls(**{**arguments, "pass_paths": paths})

    def __post_init__(self) -> None:
        if not all(path.startswith("/") and not path.endswith("/") for path in self.pass_paths):
            raise ConfigError(
                f"a path that passes must begin, and not end, with a slash (got "
                f"{sorted(self.pass_paths)}); correct it."
            )
        for field in _numbers():
            value = getattr(self, field.name)
            if not 0 < value < math.inf or (_is_count(field) and int(value) != value):
                rule = "a whole number >= 1" if _is_count(field) else "finite and > 0"
                raise ConfigError(f"'{field.name}' must be {rule} (got {value!r}); correct it.")


_HELP = {
    "max_body_bytes": "most bytes of a request's body; longer ones get HTTP 413",
    "max_held_bytes": "most bytes of the bodies of all requests together; beyond, HTTP 503",
    "max_connections": "most connections of clients; one without a request is closed for a new one",
    "head_s": "a connection on which no request is complete for so many seconds is closed",
    "body_s": "most seconds that the body of a request may take to come",
    "write_s": "a client that takes nothing of its answer for so many seconds is left",
    "first_byte_s": "most seconds from a request to the beginning of its answer",
    "whole_s": "most seconds from a request to the end of its answer",
}


def add_limits(parser: argparse.ArgumentParser) -> None:
    """The options."""
    for field in _numbers():
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=positive_int if _is_count(field) else positive_float,
            default=field.default,
            help=f"{_HELP[field.name]} (default: %(default)s)",
        )
    parser.add_argument(
        "--pass-path", action="append", default=[], metavar="PATH",
        help="a path of the servers that clients reach beside those of docs/security.md, for "
        "instance of a plug-in; once for each",
    )  # fmt: skip


def limits_of(args: argparse.Namespace) -> Limits:
    """As they were given."""
    numbers = {field.name: getattr(args, field.name) for field in _numbers()}
    return Limits(**numbers, pass_paths=frozenset(args.pass_path))


def as_arguments(limits: Limits) -> dict[str, Any]:
    """For JSON, and back by `Limits.of`."""
    return dataclasses.asdict(limits) | {"pass_paths": sorted(limits.pass_paths)}


def _numbers() -> list[dataclasses.Field[object]]:
    return [field for field in dataclasses.fields(Limits) if field.name != "pass_paths"]


def _is_count(field: dataclasses.Field[object]) -> bool:
    return field.name.startswith("max_")
