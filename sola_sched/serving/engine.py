"""vLLM's own server, started inside another process: what `vllm serve` serves, on a free port."""

from __future__ import annotations

import asyncio
import json
import socket
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import uvicorn
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

try:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
except ImportError:  # before 0.29
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # before 0.33
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:  # before 0.29
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args

from sola_sched.config.flags import url_of
from sola_sched.serving import arrivals

#: Seconds between two reports of the load, where the configuration says nothing of it.
LOAD_INTERVAL_S = 0.1
_SCHEDULER = "sola_sched.Scheduler"
#: Lists that `vllm serve` takes as JSON, and those whose flag comes once for each value.
_JSON_LISTS = ("allowed-origins", "allowed-methods", "allowed-headers")
_REPEATED = ("middleware",)


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Arguments of `vllm serve`; our scheduler and its reports unless they say otherwise.

    What comes to the server is counted in `arrivals.ARRIVALS`.

    Args:
        arguments: As on the command line, `--model` among them.
    """
    parser = FlexibleArgumentParser(prog="vllm serve", usage="vllm serve MODEL [options]")
    args = make_arg_parser(parser).parse_args(list(arguments))
    args.scheduler_cls = args.scheduler_cls or _SCHEDULER
    if args.scheduler_cls == _SCHEDULER:
        additional = dict(args.additional_config or {})
        ours = additional.get("sola_sched", {})
        if isinstance(ours, dict):  # the scheduler refuses what else it may be
            additional["sola_sched"] = {"load_interval_s": LOAD_INTERVAL_S, **ours}
        args.additional_config = additional
    args.middleware = [*args.middleware, arrivals.MIDDLEWARE]
    args.model = getattr(args, "model_tag", None) or args.model
    validate_parsed_serve_args(args)
    return args


class EngineServer:
    """One engine with vLLM's HTTP application.

    Attributes:
        client: vLLM's front end.
        app: The ASGI application.
        url: Where it is served, after `serve`.
    """

    def __init__(self, client: AsyncLLM, app: Any) -> None:
        self.client, self.app, self.url = client, app, ""
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> EngineServer:
        """Start the engine; takes as long as loading the model does."""
        args = parse_arguments(arguments)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        vllm_config = engine_args.create_engine_config()
        client = AsyncLLM.from_vllm_config(vllm_config)
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        return cls(client, app)

    async def serve(self, host: str) -> str:
        """Serve on a free port of `host`; returns the URL."""
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.bind(address)
        config = uvicorn.Config(
            self.app, log_level="warning", access_log=False, lifespan="on", timeout_keep_alive=600
        )
        self._server = uvicorn.Server(config)
        # Its own handlers would take the signals of the process that it is a guest of.
        self._server.capture_signals = _no_signals
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        self.url = url_of(host, listening.getsockname()[1])
        return self.url

    async def check(self) -> None:
        """Raise if the engine is dead."""
        await self.client.check_health()

    async def stop(self) -> None:
        """End the server and the engine's processes."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        self.client.shutdown()


class _no_signals:
    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, *_: object) -> None:
        """Nothing."""


def to_arguments(options: dict[str, Any]) -> list[str]:
    """Options by name as command-line arguments: `max_num_seqs: 8` is `--max-num-seqs 8`.

    A value of true is a flag, false its `--no-` form; objects become JSON, lists several values.
    """
    arguments = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, list) and flag in _REPEATED:
            arguments += [part for each in value for part in (f"--{flag}", str(each))]
            continue
        if isinstance(value, list) and flag not in _JSON_LISTS:
            arguments += [f"--{flag}", *map(str, value)]
            continue
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict | list):
            arguments += [f"--{flag}", json.dumps(value)]
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments
