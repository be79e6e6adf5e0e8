"""For `argparse`: errors in one line, and types that say what is allowed and what was given."""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import urllib.parse
from typing import Any, NoReturn

from sola_sched.config.rules import shown

_MAX_DIGITS = 18
_MAX_PORT = 65535


class LineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage, and where the options are explained."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"error: {message.rstrip('.')}; see {self.prog} --help\n")


def positive_int(text: str) -> int:
    """A whole number >= 1, of at most 18 digits."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1 (got {shown(text)})")
    return int(text)


def natural_int(text: str) -> int:
    """A whole number >= 0, of at most 18 digits."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0 (got {shown(text)})")
    return int(text)


def port(text: str) -> int:
    """A port; 0 lets the system choose."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to {_MAX_PORT} (got {shown(text)})")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number > 0."""
    value = rate(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"must be finite (got {text!r})")
    return value


def natural_float(text: str) -> float:
    """A finite number >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number >= 0 (got {text!r})")
    return value


def rate(text: str) -> float:
    """A number > 0 or ``inf``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0 (got {text!r})")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be JSON (got {shown(text)}: {error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object (got {shown(text)})")
    return value


def server_url(text: str) -> str:
    """``http://HOST:PORT``, without a slash at its end.

    A user or a password is refused, and not shown: addresses of servers are written into logs and
    answers.
    """
    if "@" in text:
        raise argparse.ArgumentTypeError(
            f"must be http://HOST:PORT without a user and password (got {without_user(text)!r}); "
            "give keys in headers"
        )
    if not _is_server(text):
        is_short = "://" not in text and _is_server(f"http://{text}")
        advice = f"write http://{text}" if is_short else "correct it"
        raise argparse.ArgumentTypeError(
            f"must be http://HOST:PORT without a path (got {text!r}); {advice}"
        )
    return text.rstrip("/")


def without_user(text: str) -> str:
    """An address without what stands before its last ``@``."""
    return f"...{text[text.rindex('@') :]}" if "@" in text else text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def not_free(host: str, port: int, error: Exception) -> str:
    """What is wrong with an address that a server cannot listen on."""
    reason = getattr(error, "strerror", None) or error
    return (
        f"'--host' and '--port' must be free to listen on (got {host}:{port}: {reason}); "
        "choose others."
    )


def url_of(host: str, port: int) -> str:
    """Where a server listens; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_server(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        return False
    has_more = bool(parts.path.strip("/") or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and has_host and not has_more
