"""A server that answers every request with the same bytes, whatever they are."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def http(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    """An answer that says that it is as long as it is, or is to be."""
    num = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {num}\r\n\r\n".encode() + body


@contextmanager
def answering(answer: bytes, *, is_left_open: bool = False, pause_s: float = 0.0) -> Iterator[str]:
    """Serve it; the address.

    Args:
        answer: Head and body.
        is_left_open: Say nothing more, instead of closing the connection.
        pause_s: Before each byte of it, if it is not to come at once.
    """
    is_over = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            num = 0
            for line in iter(self.rfile.readline, b"\r\n"):
                name, _, value = line.decode().partition(":")
                if name.lower() == "content-length":
                    num = int(value)
            self.rfile.read(num)
            pieces = [answer[i : i + 1] for i in range(len(answer))] if pause_s else [answer]
            for piece in pieces:
                if is_over.wait(pause_s):
                    return
                with suppress(OSError):  # who asked has gone
                    self.wfile.write(piece)
            if is_left_open:
                is_over.wait(60.0)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with serving(server) as address:
        try:
            yield address
        finally:
            is_over.set()


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[str]:
    """Let it serve in a thread, and close it; the address."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
