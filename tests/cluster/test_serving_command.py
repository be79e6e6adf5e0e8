"""`python -m sola_sched.serving`: what it refuses, and what it passes on to `vllm serve`."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from command_help import assert_explained
from fake_replica import FakeReplica, output_of
from gateway_clients import until

from sola_sched.serving.cli import _by_name, main

REPLICA = ["gateway", "--replica", "http://localhost:8001"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gateway", "--replica", "localhost:8001"],
         "must be http://HOST:PORT without a path (got 'localhost:8001'); write "
         "http://localhost:8001"),
        (["gateway", "--replica", "http://h:1/v1"], "(got 'http://h:1/v1')"),
        (["gateway", "--replica", "http://h:1?key=v"], "(got 'http://h:1?key=v')"),
        (["gateway", "--replica", "http://me:s3cret@h:1"],
         "must be http://HOST:PORT without a user and password (got '...@h:1')"),
        (["gateway", "--replica", "me:s3c:// ret@h:1/v1"], "(got '...@h:1/v1')"),
        ([*REPLICA, "--port", "70000"], "must be a port, 0 to 65535 (got '70000')"),
        ([*REPLICA, "--patience-s", "nan"], "--patience-s: must be a number > 0 (got 'nan')"),
        ([*REPLICA, "--connect-s", "inf"], "--connect-s: must be finite (got 'inf')"),
        ([*REPLICA, "--stall-s", "-5"], "--stall-s: must be a number > 0 (got '-5')"),
        ([*REPLICA, "--max-failures", "0"], "--max-failures: must be a whole number >= 1 (got '0'"),
        ([*REPLICA, "--rooter", "single"],
         "every argument must be an option of 'gateway' (got --rooter single); correct it; see "
         "python -m sola_sched.serving gateway --help"),
        (["ray", "m", "--num-replicas", "0"], "must be a whole number >= 1 (got '0')"),
        (["ray", "m", "n"], "must begin with -- (got 'n')"),
        (["gateway", *REPLICA[1:], "--host", "a..b"], "must be free to listen on (got a..b:"),
        (["ray", "m", "--num-gpus", "-1"], "must be a finite number >= 0 (got '-1')"),
        (["ray", "m", "--num-gpus", "nan"], "must be a finite number >= 0 (got 'nan')"),
        (["ray", "m", "--avoid-s", "0"], "--avoid-s: must be a number > 0 (got '0')"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_with_rule_and_value(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.endswith("--help")


@pytest.mark.parametrize("command", ["gateway", "ray"])
def test_every_option_is_explained(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    assert ended.value.code == 0
    assert_explained(capsys.readouterr().out)


def test_a_port_that_is_taken_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main([*REPLICA, "--port", str(port)])

    assert ended.value.code == 2
    assert f"must be free to listen on (got 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_gateway_that_is_terminated_ends_its_streams_and_takes_no_new_ones(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")

    async def whole() -> None:
        async with asyncio.timeout(30), FakeReplica(token_s=0.02).running() as fake:
            command = ["-P", "-m", "sola_sched.serving", "gateway", "--host", host, "--port", "0"]
            gateway = await asyncio.create_subprocess_exec(
                *(sys.executable, *command, "--replica", fake.url), stdout=asyncio.subprocess.PIPE
            )
            assert gateway.stdout is not None
            url = (await gateway.stdout.readline()).decode().removeprefix("gateway: ").strip()
            body = {"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": True}
            async with aiohttp.ClientSession() as session:
                stream = asyncio.create_task(_text_of(session, url, body))
                await until(lambda: fake.bodies)

                gateway.terminate()

                while await _listens(session, url):
                    await asyncio.sleep(0.01)
                assert not stream.done()
                assert await stream == output_of("hello", 100)
            assert await gateway.wait() == 0

    asyncio.run(whole())


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def _listens(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health"):
            return True
    except aiohttp.ClientConnectorError:
        return False


async def _text_of(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> str:
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        raw = (await reply.read()).decode()
    assert raw.endswith("data: [DONE]\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in raw.split("\n\n")[:-2]]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.vllm
def test_arguments_of_vllm_serve_pass_through_whole() -> None:
    pytest.importorskip("vllm")
    from sola_sched.serving.arrivals import MIDDLEWARE
    from sola_sched.serving.engine import parse_arguments, to_arguments

    given = (
        "--max-num-seqs 8 --enforce-eager --enable-lora --lora-modules a=./a b=./b "
        "--middleware=x.Y --middleware=z.W --served-model-name m n"
    )
    options = {"model": "m", **_by_name(given.split()), "allowed_origins": ["http://here"]}

    args = parse_arguments(to_arguments(options))

    assert (args.max_num_seqs, args.enforce_eager) == (8, True)
    assert [(each.name, each.path) for each in args.lora_modules] == [("a", "./a"), ("b", "./b")]
    assert args.middleware == ["x.Y", "z.W", MIDDLEWARE]
    assert args.served_model_name == ["m", "n"]
    assert args.allowed_origins == ["http://here"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rooter", "single"], "vllm serve: error: unrecognized arguments: --rooter"),
        (["--enable-auto-tool-choice"], "error: arguments of `vllm serve` must be valid (got: "),
    ],
)
def test_what_vllm_serve_would_refuse_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(SystemExit) as ended:
        main(["ray", "model", *args])

    assert ended.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_the_gateway_starts_without_compiled_code_and_vllm() -> None:
    """Numba alone takes more memory than all the rest of a gateway."""
    code = (
        "import sys, sola_sched.serving.cli;"
        "print({'numba', 'torch', 'vllm', 'ray'} & sys.modules.keys() or 'none')"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "none"
