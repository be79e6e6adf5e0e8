"""A server on an address of its own: as many connections as it may have, and an end in time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from sola_sched.config.flags import is_loopback, not_free, port, url_of
from sola_sched.errors import ConfigError
from sola_sched.proxy.front import Front
from sola_sched.proxy.keys import Keys
from sola_sched.proxy.limits import END_S

ADMIN_HOST = "127.0.0.1"
_BACKLOG = 1024
#: A request may need a file for its client and one for its server; the process has some besides.
_FILES_EACH, _FILES_BESIDE = 2, 64
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
logger = logging.getLogger(__name__)


def add_admin(parser: argparse.ArgumentParser, what: str) -> None:
    """The options of the address that is for operators."""
    parser.add_argument(
        "--admin-host",
        default=ADMIN_HOST,
        help=f"the address for {what}, which are not for clients (default: %(default)s)",
    )
    parser.add_argument(
        "--admin-port",
        type=port,
        default=0,
        help="its port; 0 lets the system choose one, which is printed (default: %(default)s)",
    )


def warn_of(name: str, host: str, keys: Keys) -> None:
    """Say in the log that nothing protects an address that others reach."""
    if not keys and not is_loopback(host):
        logger.warning(
            "the %s listens on %s and asks for no key: whoever reaches that address can use it. "
            "Give keys, or put what checks them before it (docs/security.md).", name, host,
        )  # fmt: skip


@asynccontextmanager
async def listening(
    *listeners: tuple[Listener, tuple[str, int]],
) -> AsyncIterator[list[str]]:
    """Serve on several addresses; their URLs.

    Raises:
        ConfigError: An address is not free.
    """
    async with AsyncExitStack() as stack:
        urls = []
        for listener, (host, port) in listeners:
            try:
                urls.append(await listener.start(host, port))
            except (OSError, OverflowError, UnicodeError) as error:
                raise ConfigError(not_free(host, port, error)) from error
            stack.push_async_callback(listener.stop)
        yield urls


async def serve_until_ended(
    args: argparse.Namespace,
    front: Front,
    app: web.Application,
    admin_app: web.Application,
    *names: str,
) -> None:
    """Serve clients and operators until SIGTERM; print both URLs once they are served.

    Args:
        args: With `host` and `port`, and what `add_admin` adds.
        front: Of `app`.
        app: For clients.
        admin_app: For operators.
        names: What is printed before the URL of each.

    Raises:
        ConfigError: An address is not free.
    """
    listeners = (Listener(app, front), Listener(admin_app))
    addresses = ((args.host, args.port), (args.admin_host, args.admin_port))
    async with listening(*zip(listeners, addresses, strict=True)) as urls:
        for name, url in zip(names, urls, strict=True):
            print(f"{name} {url}", flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await ended.wait()


class Listener:
    """Serves an application.

    Args:
        app: Of `front`, or one for operators alone.
        front: Whose limits hold; None for no limit of connections.
    """

    def __init__(self, app: web.Application, front: Front | None = None) -> None:
        # Half of the time to end by themselves, half after they are told to.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=END_S / 2
        )
        self._front = front
        self._server: asyncio.Server | None = None
        self._max_connections = 0

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the URL.

        Raises:
            OSError, UnicodeError, OverflowError: The address is not one to listen on.
        """
        await self._runner.setup()
        if self._front is not None:
            self._max_connections = _connections_within_files(self._front.limits.max_connections)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._accept, host, port, backlog=_BACKLOG
            )
        except BaseException:
            await self._runner.cleanup()
            raise
        return url_of(host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Take nothing more, and let what is there end within `END_S`, whoever is connected."""
        if self._server is not None:
            self._server.close()
        connections = self._runner.server.connections if self._runner.server is not None else []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._runner.cleanup()
        for each in connections:
            if each.transport is not None:
                each.transport.abort()

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None:  # it has ended
            return _Full()
        connection = server()
        if self._front is not None:
            is_full = len(server.connections) >= self._max_connections
            if is_full and not self._front.make_room():
                return _Full()
            self._front.opened(connection)
        return connection


class _Full(asyncio.Protocol):
    """Says that there are too many connections."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


def _connections_within_files(wanted: int) -> int:
    """As many as are wanted, or as this process may have files for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_EACH * wanted + _FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = max(1, (soft - _FILES_BESIDE) // _FILES_EACH)
    logger.warning(
        "%d connections at most, since this process may have %d files (ulimit -n)", possible, soft
    )
    return possible
