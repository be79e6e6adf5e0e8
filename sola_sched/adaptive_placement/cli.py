"""Places services on the GPUs of a Ray cluster, and anew as they and their load change.

    python -m sola_sched.adaptive_placement --services services.json --gpu a100 --num-gpus 8

The file holds what `python -m sola_sched.plan --services` takes. It is read again while this runs:
add, remove or change a service there. What is deployed is kept by Serve, so this may be ended and
started again at any time.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sola_sched.adaptive_placement.follow import Follower
from sola_sched.adaptive_placement.search import Options
from sola_sched.adaptive_placement.serve_api import ServeApi
from sola_sched.bench.args import Parser
from sola_sched.bench.values import positive_number
from sola_sched.cluster.sharing.placement import Cluster
from sola_sched.config.flags import natural_int, port, positive_int, server_url
from sola_sched.errors import ConfigError, InfeasibleError
from sola_sched.plan.outputs.deploy import FIRST_PORT, LOOPBACK
from sola_sched.simulator.sharing.hardware import GPUS


def make_follower(argv: Sequence[str]) -> Follower:
    """The loop that the command line describes.

    Raises:
        ConfigError: An argument cannot be used.
        InfeasibleError: The GPUs fill no nodes.
    """
    args = _parser().parse_args(list(argv))
    path: Path = args.services
    if not path.is_file():
        raise ConfigError(f"'--services' must be a file (got {path}).")
    cluster = Cluster.of(args.num_gpus, args.gpus_per_node)
    options = Options(
        args.gpu, cluster, args.most_sharing, args.workers, args.seed, args.first_port, args.host
    )
    return Follower(
        ServeApi(args.address),
        lambda: path.read_text(encoding="utf-8"),
        options,
        interval_s=positive_number(args.interval_s, "--interval-s"),
        limit_s=positive_number(args.start_limit_s, "--start-limit-s"),
    )


def _parser() -> Parser:
    parser = Parser(
        prog="python -m sola_sched.adaptive_placement",
        description=__doc__,
    )
    add = parser.add_argument
    add("--services", required=True, type=Path, metavar="FILE", help="JSON: a list of services")
    add("--gpu", required=True, choices=sorted(GPUS))
    add("--num-gpus", required=True, type=positive_int)
    add("--gpus-per-node", type=positive_int, default=8)
    add("--address", default="http://127.0.0.1:8265", type=server_url, help="of Ray's dashboard")
    add("--interval-s", default="600", help="the first interval (default: 600)")
    add("--start-limit-s", default="1800", help="most that an engine may take to start")
    add("--most-sharing", type=positive_int, default=2, help="services of a group (default: 2)")
    add("--workers", type=positive_int, default=1, help="processes of the search (default: 1)")
    add("--seed", type=natural_int, default=0)
    add("--first-port", type=port, default=FIRST_PORT,
        help="of the services' gateways, each of which has one (default: %(default)s)")  # fmt: skip
    add("--host", default=LOOPBACK,
        help="the address that these listen on, at sola_node_0 (default: %(default)s)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run until interrupted or terminated; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        follower = make_follower(sys.argv[1:] if argv is None else argv)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        follower.run()
    except (ConfigError, InfeasibleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0
