"""Headers that belong to one HTTP connection, and are not passed on (RFC 9110, section 7.6.1)."""

OF_CONNECTION = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
