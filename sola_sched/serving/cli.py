"""`python -m sola_sched.serving`: the gateway alone, or the whole on Ray Serve."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from sola_sched.config.flags import (
    LineParser,
    natural_float,
    port,
    positive_float,
    positive_int,
    server_url,
)
from sola_sched.errors import ConfigError
from sola_sched.proxy.keys import add_key_file, add_keys, keys_of
from sola_sched.proxy.limits import add_limits, as_arguments, limits_of
from sola_sched.proxy.listener import add_admin, serve_until_ended, warn_of
from sola_sched.serving.gateway import Gateway
from sola_sched.serving.options import GatewayOptions
from sola_sched.serving.policies import DEFAULT, NAMES, make_router
from sola_sched.serving.slo_headers import ClientRules

_APPLICATION = "sola"
#: Seconds that requests have to end when the whole on Ray Serve is ended.
_DRAIN_S = 30.0
#: What each of the gateway's options is for.
_HELP = {
    "stall_s": "a replica that has requests and computes nothing for so many seconds has stalled: "
    "its requests go on elsewhere",
    "patience_s": "seconds that a request waits for a replica while none can be reached",
    "avoid_s": "seconds for which a replica gets nothing after a connection to it has failed, or "
    "three requests in a row with HTTP 500, 502 or 504",
    "connect_s": "most seconds that a connection to a replica may take",
    "max_failures": "a request that has failed so many times is given up: it may be what kills "
    "the replicas",
}


def make_parser() -> LineParser:
    """The command line."""
    parser = LineParser(prog="python -m sola_sched.serving", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gateway = commands.add_parser("gateway", help="a gateway before vLLM servers that run already")
    gateway.add_argument(
        "--replica", action="append", required=True, type=server_url, metavar="URL",
        help="a vLLM server, as http://HOST:PORT; once for each",
    )  # fmt: skip
    add_keys(gateway)
    whole = commands.add_parser(
        "ray", help="engines and gateway on Ray Serve; further arguments are those of `vllm serve`"
    )
    whole.add_argument("model", help="the model, as `vllm serve` takes it")
    whole.add_argument("--num-replicas", type=positive_int, default=2,
        help="engines, each with a server of its own (default: %(default)s)")  # fmt: skip
    whole.add_argument("--num-gpus", type=natural_float,
        help="of each replica (default: 1 where Ray has GPUs, else 0)")  # fmt: skip
    whole.add_argument("--engine-host", metavar="HOST",
        help="the address that each engine listens on; 'node' is its node's own, which a cluster "
        "of several nodes needs (default: that of --host, 'node' for 0.0.0.0)")  # fmt: skip
    whole.add_argument("--address", help="of a Ray cluster; a local one is started without")
    add_key_file(whole)
    for each in (gateway, whole):
        each.add_argument("--host", default="127.0.0.1",
            help="the address that the gateway listens on (default: %(default)s)")  # fmt: skip
        each.add_argument("--port", type=port, default=8000,
            help="its port; 0 lets the system choose one (default: %(default)s)")  # fmt: skip
        each.add_argument("--router", choices=NAMES, default=DEFAULT,
            help="the rule by which a request gets its replica (default: %(default)s)")  # fmt: skip
        for field in dataclasses.fields(GatewayOptions):
            name = "--" + field.name.replace("_", "-")
            kind = positive_int if field.name == "max_failures" else positive_float
            each.add_argument(name, type=kind, default=field.default,
                help=f"{_HELP[field.name]} (default: %(default)s)")  # fmt: skip
        add_limits(each)
        add_admin(each, "/metrics and /replicas")
        each.add_argument(
            "--drop-client-targets",
            action="store_true",
            help="targets and classes that clients ask for are dropped: the servers' own hold",
        )
        each.add_argument("--behind-gateway", action="store_true",
            help="clients are gateways of ours: what they say of a request's time elsewhere is "
            "believed, and else dropped")  # fmt: skip
    return parser


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The gateway's options as they were given."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(GatewayOptions)}


def rules_of(args: argparse.Namespace) -> ClientRules:
    """What clients may say, as it was given."""
    return ClientRules(args.behind_gateway, args.drop_client_targets)


async def _run_gateway(args: argparse.Namespace) -> None:
    keys = keys_of(args.api_key, args.api_key_file)
    gateway = Gateway(
        make_router(args.router),
        GatewayOptions(**options_of(args)),
        limits=limits_of(args),
        keys=keys,
        rules=rules_of(args),
    )
    gateway.sync({url: url for url in args.replica})
    warn_of("gateway", args.host, keys)
    await serve_until_ended(
        args, gateway.front, gateway.app(), gateway.admin_app(), "gateway:", "/metrics, /replicas:"
    )


def _run_on_ray(args: argparse.Namespace, options: dict[str, Any]) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _check_options({"model": args.model, **options})
    import ray
    from ray import serve

    from sola_sched.serving.ray_app import build

    ray.init(address=args.address, ignore_reinit_error=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(proxy_location="Disabled")
        num_gpus = args.num_gpus
        if num_gpus is None:
            num_gpus = float(ray.cluster_resources().get("GPU", 0.0) > 0.0)
        group = {"num_replicas": args.num_replicas, "num_gpus": num_gpus, "drain_s": _DRAIN_S}
        cluster = {
            "model": args.model,
            "options": options,
            "engines": [group],
            "router": args.router,
            "host": args.host,
            "port": args.port,
            "gateway": options_of(args),
            "limits": as_arguments(limits_of(args)),
            "rules": dataclasses.asdict(rules_of(args)),
            "api_key_file": None if args.api_key_file is None else str(args.api_key_file),
            "admin_host": args.admin_host,
            "admin_port": args.admin_port,
        }
        if args.engine_host is not None:
            cluster["engine_host"] = None if args.engine_host == "node" else args.engine_host
        gateway = serve.run(build(cluster), name=_APPLICATION, route_prefix=None)
        print(f"gateway: {gateway.url.remote().result()}", flush=True)
        print(f"/metrics, /replicas: {gateway.admin_url.remote().result()}", flush=True)
        while True:
            time.sleep(3600)
    except RuntimeError as error:
        raise ConfigError(f"Ray Serve must be able to start the application ({error})") from error
    finally:  # what else runs on a cluster of others stays
        with contextlib.suppress(TimeoutError):
            serve.delete(_APPLICATION)
        if args.address is None:
            serve.shutdown()
        ray.shutdown()


def _check_options(options: dict[str, Any]) -> None:
    """What `vllm serve` refuses is refused here, before anything starts."""
    if importlib.util.find_spec("vllm") is None:
        return
    from sola_sched.serving.engine import parse_arguments, to_arguments

    try:
        parse_arguments(to_arguments(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"arguments of `vllm serve` must be valid (got: {error})") from error


def _by_name(arguments: Sequence[str]) -> dict[str, Any]:
    """`--max-num-seqs 8 --enforce-eager --lora-modules a=x b=y` as options by name."""
    found: dict[str, list[str]] = {}
    name = ""
    for each in arguments:
        if each.startswith("--"):
            name, sign, value = each[2:].partition("=")
            found.setdefault(name, []).extend([value] if sign else [])
        elif name:
            found[name].append(each)
        else:
            raise ConfigError(f"arguments of `vllm serve` must begin with -- (got {each!r}).")
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    parser = make_parser()
    args, more = parser.parse_known_args(argv)
    parser.prog += f" {args.command}"  # whose options an error from here on is about
    if more and args.command == "gateway":
        parser.error(
            f"every argument must be an option of 'gateway' (got {' '.join(more)}); correct it"
        )
    try:
        GatewayOptions(**options_of(args))
        limits_of(args)
        keys_of(None, args.api_key_file)
        if args.command == "ray":
            _run_on_ray(args, _by_name(more))
        else:
            asyncio.run(_run_gateway(args))
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return
