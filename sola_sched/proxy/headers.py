"""Which headers of a request or an answer go on, and which belong to one connection alone."""

from __future__ import annotations

from collections.abc import Set

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

#: Headers that are never passed on (RFC 9110, section 7.6.1), beside those that `Connection` names.
OF_CONNECTION = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
#: What the server of an answer to a client writes itself.
_OF_SERVER = frozenset(("date", "server"))
_OF_SERVER_AND_LENGTH = _OF_SERVER | {"content-length"}
FORWARDED_FOR = "X-Forwarded-For"


def passed_on(headers: MultiMapping[str], without: Set[str] = frozenset()) -> CIMultiDict[str]:
    """Headers for the next hop, repeated ones as often as they came.

    Args:
        without: Further names that stay behind, in lower case.
    """
    named = {
        name.strip().lower()
        for value in headers.getall("Connection", ())
        for name in value.split(",")
    }
    passed: CIMultiDict[str] = CIMultiDict()
    spelled: dict[str, str] = {}  # of two spellings, aiohttp's client sends the last value alone
    for name, value in headers.items():
        lower = name.lower()
        if lower not in OF_CONNECTION and lower not in without and lower not in named:
            value = value if value.isascii() else _in_utf8(value)
            passed.add(spelled.setdefault(lower, name), value)
    return passed


def _in_utf8(value: str) -> str:
    """A value whose bytes are no UTF-8, which is all that aiohttp writes, read as Latin-1."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode(errors="surrogateescape").decode("latin-1")
    return value


def passed_back(
    headers: CIMultiDictProxy[str], url: str, *, keeps_length: bool
) -> CIMultiDict[str]:
    """Headers of a server's answer, for the client.

    Args:
        url: Of the server; a `Location` there becomes a path, so that no client learns the address.
        keeps_length: Whether the client gets the body as it is.
    """
    passed = passed_on(headers, _OF_SERVER if keeps_length else _OF_SERVER_AND_LENGTH)
    place = passed.get("Location")
    if place is not None and place.startswith(url):
        passed["Location"] = place.removeprefix(url) or "/"
    return passed


def for_pages(headers: MultiMapping[str]) -> dict[str, str]:
    """Lets the page of another origin that has sent these headers read an error of ours.

    A browser hides what does not say so, and its user would see a network error. What servers
    answer says itself who may read it.
    """
    return {"Access-Control-Allow-Origin": "*"} if "Origin" in headers else {}


def forwarded_for(headers: MultiMapping[str], peer: str | None) -> str:
    """The value of `X-Forwarded-For` with who has sent the request at its end."""
    return ", ".join([*headers.getall(FORWARDED_FOR, ()), *([peer] if peer else [])])
