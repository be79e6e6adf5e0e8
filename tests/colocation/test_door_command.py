"""`python -m sola_sched.colocation door`: what it refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("aiohttp")

from command_help import assert_explained

from sola_sched.colocation.cli import main

SERVICE = ["door", "--service", "a=http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["door", "--service", "=http://b:1"], "--service: must be NAME=URL (got '=http://b:1')"),
        (
            ["door", "--service", "a=here:1"],
            "must be http://HOST:PORT without a path (got 'here:1')",
        ),
        (["door", "--service", "a=http://me:s3cret@b:1"], "without a user and password (got '...@"),
        (["door", "--service", "=http://me:s3cret@b:1"], "(got '...@b:1')"),
        (["door", "--service", "a=http://b:x"], "must be http://HOST:PORT without a path"),
        (["door", "--service", "a=http://b:1/v1"], "must be http://HOST:PORT without a path"),
        ([*SERVICE, "--service", "a=http://b:1"], "must have each NAME once (got a, a)"),
        ([*SERVICE, "--level", "2"], "unrecognized arguments: --level 2"),
        ([*SERVICE, "--max-awake", "0"], "--max-awake: must be a whole number >= 1 (got '0')"),
        ([*SERVICE, "--idle-s", "nan"], "--idle-s must be finite and >= 0 (got nan)"),
        ([*SERVICE, "--least-s", "-1"], "--least-s must be finite and >= 0 (got -1.0)"),
        (SERVICE, "every server must run"),
        (["door", "--service", "a=http://a..b:1"], "every server must run"),
    ],
)
def test_bad_arguments_and_servers_that_do_not_run_end_with_2(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.endswith("--help")


def test_every_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["door", "--help"])

    assert ended.value.code == 0
    assert_explained(capsys.readouterr().out)


def test_a_port_that_is_taken_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with awake_server() as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main(["door", "--service", f"a={server}", "--port", str(port)])

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'--host' and '--port' must be free to listen on" in line
    assert f"(got 127.0.0.1:{port}: " in line
    assert "choose others" in line


def test_a_host_that_is_no_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with awake_server() as server, pytest.raises(SystemExit) as ended:
        main(["door", "--service", f"a={server}", "--host", "a..b", "--port", "0"])

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'--host' and '--port' must be free to listen on (got a..b:0: " in line
    assert "choose others" in line


@contextmanager
def awake_server() -> Iterator[str]:
    """The URL of a server that says that it is awake."""

    class Awake(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"is_sleeping": false}'
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Awake) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
