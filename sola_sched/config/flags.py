"""For `argparse`: errors in one line, and types that say what is allowed and what was given."""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import urllib.parse
from typing import Any, NoReturn

from sola_sched.config.rules import shown
from sola_sched.errors import ConfigError

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
    """``http://HOST:PORT``, without a slash at its end; with a user it is refused."""
    return _url(text, "http://HOST:PORT", may_have_path=False)


def base_url(text: str) -> str:
    """``http://HOST:PORT/PATH``, without a slash at its end; with a user it is refused."""
    return _url(text, "http://HOST:PORT/PATH", may_have_path=True)


def refuse_user(text: str, rule: str) -> None:
    """Refuse an address with a user or a password.

    Addresses of servers are written into logs and answers.

    Args:
        text: The address.
        rule: How the message begins, e.g. "URLs must be".

    Raises:
        ConfigError: There is one, which the message does not show.
    """
    if "@" in text:
        raise ConfigError(
            f"{rule} without a user and password (got {without_user(text)!r}); give keys in headers"
        )


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


def _url(text: str, form: str, *, may_have_path: bool) -> str:
    try:
        refuse_user(text, f"must be {form}")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not _is_server(text, may_have_path):
        is_short = "://" not in text and _is_server(f"http://{text}", may_have_path)
        advice = f"write http://{text}" if is_short else "correct it"
        without = "" if may_have_path else " without a path"
        raise argparse.ArgumentTypeError(f"must be {form}{without} (got {text!r}); {advice}")
    return text.rstrip("/")


def _is_server(text: str, may_have_path: bool) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        return False
    has_more = bool(parts.query or parts.fragment)
    has_more |= not may_have_path and bool(parts.path.strip("/"))
    return parts.scheme in ("http", "https") and has_host and not has_more
