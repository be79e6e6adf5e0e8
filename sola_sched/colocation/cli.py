"""`python -m sola_sched.colocation`: a door before services that sleep; shared KV memory."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Sequence

import aiohttp

from sola_sched.colocation.door import Door
from sola_sched.colocation.sleeping import SleepOptions
from sola_sched.config.flags import LineParser, port, positive_int, server_url, without_user
from sola_sched.errors import ConfigError
from sola_sched.proxy.keys import add_keys, keys_of
from sola_sched.proxy.limits import add_limits, limits_of
from sola_sched.proxy.listener import add_admin, serve_until_ended, warn_of


def named_server(text: str) -> tuple[str, str]:
    """The name and the URL of `NAME=URL`."""
    name, _, url = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(
            f"must be NAME=URL (got {without_user(text)!r}); write a name before the ="
        )
    return name, server_url(url)


def make_parser() -> LineParser:
    """The command line."""
    parser = LineParser(prog="python -m sola_sched.colocation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    door = commands.add_parser(
        "door", help="one address before vLLM servers that sleep while nobody asks for them"
    )
    door.add_argument(
        "--service", action="append", required=True, type=named_server, metavar="NAME=URL",
        help="the name that requests give as `model`, and the server; once for each",
    )  # fmt: skip
    door.add_argument("--host", default="127.0.0.1",
        help="the address that the door listens on (default: %(default)s)")  # fmt: skip
    door.add_argument("--port", type=port, default=8000,
        help="its port; 0 lets the system choose one (default: %(default)s)")  # fmt: skip
    door.add_argument("--idle-s", type=float, default=SleepOptions.idle_s,
        help="a service sleeps after so many seconds without a request "
        "(default: %(default)s)")  # fmt: skip
    door.add_argument("--max-awake", type=positive_int, default=None,
        help="services that fit into the GPU's memory together (default: all)")  # fmt: skip
    door.add_argument("--least-s", type=float, default=SleepOptions.least_s,
        help="a service that has woken keeps its place for so many seconds although others wait "
        "for it (default: %(default)s)")  # fmt: skip
    add_limits(door)
    add_keys(door)
    add_admin(door, "/services")
    commands.add_parser("memory", help="whether engines here can share KV memory (kvcached)")
    return parser


async def _run_door(args: argparse.Namespace, door: Door) -> None:
    await serve_until_ended(
        args, door.front, door.app(), door.admin_app(), "Running on", "/services:"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.prog += f" {args.command}"  # whose options an error from here on is about
    if args.command == "memory":
        from sola_sched.colocation.elastic_kv import status

        found = status()
        print(found)
        return 0 if found.is_usable else 1
    urls = dict(args.service)
    if len(urls) < len(args.service):
        names = ", ".join(name for name, _ in args.service)
        parser.error(f"--service must have each NAME once (got {names})")
    for flag, value in (("--idle-s", args.idle_s), ("--least-s", args.least_s)):
        if not 0.0 <= value < math.inf:
            parser.error(f"{flag} must be finite and >= 0 (got {value})")
    options = SleepOptions(args.idle_s, args.max_awake, args.least_s)
    try:
        keys, limits = keys_of(args.api_key, args.api_key_file), limits_of(args)
        warn_of("door", args.host, keys)
        asyncio.run(_run_door(args, Door(urls, options, limits=limits, keys=keys)))
    except (aiohttp.ClientError, RuntimeError) as error:
        parser.error(f"every server must run and be able to sleep (got: {error}); start it first")
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        pass
    return 0
