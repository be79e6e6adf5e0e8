"""Flags of `python -m sola_sched.plan`; those of requests and targets are the benchmark's."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from sola_sched.bench.args import Parser, dataset_group
from sola_sched.bench.values import natural_int, positive_float, positive_int, positive_number
from sola_sched.cluster.routers import ROUTERS
from sola_sched.errors import ConfigError
from sola_sched.simulator.steps.roofline import GPUS, MODELS

_DESCRIPTION = """\
Find the cheapest configuration that serves a load within its targets, before a GPU is rented.

A fast model of the engines searches; the answer is checked in virtual time with the real
schedulers inside, and the model's error on it is printed. Step times are computed from public
hardware figures (profiles of `sola_sched.simulator`), not measured.
"""


def build_parser() -> Parser:
    """The parser; it raises `ConfigError` instead of ending the process."""
    parser = Parser(
        prog="python -m sola_sched.plan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, choices=sorted(MODELS))
    add("--gpu", required=True, nargs="+", metavar="TYPE=PRICE",
        help=f"GPU types ({', '.join(GPUS)}) with prices per GPU and hour")  # fmt: skip
    add("--slo", required=True, nargs="+", metavar="METRIC:MS", help="e.g. ttft:1000 tpot:60")
    add("--slo-class", action="append", default=[], metavar="NAME:SHARE:TTFT_MS:TPOT_MS",
        help="as in the benchmark: a share of the requests with its own targets")  # fmt: skip
    add("--request-rate", type=positive_float, metavar="RPS", help="requests per second")
    add("--burstiness", type=positive_float, default=1.0)
    add("--self-timed", action="store_true",
        help="recorded arrival times, stretched to --request-rate if that is given")  # fmt: skip
    add("--attainment", type=positive_float, default=0.95,
        help="share of the requests that has to meet both targets (default: 0.95)")  # fmt: skip
    add("--schedulers", nargs="+", default=["sola", "stock:512", "stock:2048", "stock:8192"],
        metavar="SPEC", help="sola[:CHUNK] or stock[:CHUNK], what runs in the engines")  # fmt: skip
    add("--routers", nargs="+", choices=sorted(ROUTERS), metavar="NAME",
        default=["least-ttft", "shortest-queue", "round-robin"],
        help=f"of {', '.join(sorted(ROUTERS))}")  # fmt: skip
    add("--max-num-seqs", nargs="+", type=positive_int, default=[256])
    add("--tensor-parallel-size", nargs="+", type=positive_int, default=[1, 2, 4, 8])
    add("--max-gpus", type=positive_int, default=64, help="in all (default: 64)")
    add("--check", action=argparse.BooleanOptionalAction, default=True,
        help="check the answer with the real schedulers (default: yes)")  # fmt: skip
    add("--seed", type=natural_int, default=0)
    add("--output", type=Path, default=Path("plan.json"), help="JSON; a plot goes beside it")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    dataset_group(parser.add_argument_group("requests"))
    return parser


def parse_prices(items: list[str]) -> dict[str, float]:
    """Parse ``["a100=1.5", ...]``.

    Raises:
        ConfigError: A type is unknown or named twice, or a price is no number > 0.
    """
    prices: dict[str, float] = {}
    for item in items:
        name, _, price = item.partition("=")
        if name not in GPUS or name in prices:
            raise ConfigError(
                f"'--gpu' takes TYPE=PRICE with each of {', '.join(GPUS)} at most once "
                f"(got {item!r})."
            )
        prices[name] = positive_number(price, f"--gpu {item}")
    return prices


def check_args(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself.

    Raises:
        ConfigError: The message names the flag.
    """
    if not 0.0 < args.attainment <= 1.0:
        raise ConfigError(f"'--attainment' must be in (0, 1] (got {args.attainment:g}).")
    if args.request_rate is None and not args.self_timed:
        raise ConfigError(
            "'--request-rate' must be given (got none), or --self-timed with a trace that has "
            "arrival times."
        )
    if args.request_rate is not None and math.isinf(args.request_rate):
        raise ConfigError("'--request-rate' must be finite (got inf).")
