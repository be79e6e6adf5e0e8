"""Flags of `python -m sola_sched.plan`; those of requests and targets are the benchmark's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence
from pathlib import Path

from sola_sched.bench.args import Parser, dataset_group
from sola_sched.bench.values import positive_number
from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.config import rules
from sola_sched.config.flags import natural_int, positive_float, positive_int
from sola_sched.errors import ConfigError
from sola_sched.simulator.steps.gpus import ALL_GPUS, MORE_GPUS
from sola_sched.simulator.steps.roofline import MODELS

_DESCRIPTION = """\
Find the cheapest configuration that serves a load within its targets, before a GPU is rented.

A fast model of the engines searches; the answer is checked in virtual time with the real
schedulers inside, and the model's error on it is printed. Step times are put together of measured
kernels where there are such, else computed from public hardware figures; a line says which.

For several services that share GPUs: `--service ... --help`.
"""
#: Routers that do nothing else on equal instances, or use one of them alone.
_OF_UNEQUAL = ("weighted-round-robin", "single")
#: Of a GPU and hour, in any unit: sums and shares of such prices are exact enough.
_HIGHEST_PRICE = 1e9
#: The first is tried everywhere, the others where it matters.
_FIRST = "least-ttft"
_ROUTERS = [_FIRST, *sorted(set(ALL_ROUTERS) - {_FIRST, *_OF_UNEQUAL})]


def build_parser() -> Parser:
    """The parser; it raises `ConfigError` instead of ending the process."""
    parser = Parser(
        prog="python -m sola_sched.plan",
        description=_DESCRIPTION,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME_OR_FILE",
        help=f"{', '.join(sorted(MODELS))}; or a config.json, its folder, or a name in the local "
        "Hugging Face cache, whose sizes are read")  # fmt: skip
    add("--max-model-len", type=positive_int, metavar="N",
        help="longest prompt + output, tokens (default: the model's own limit)")  # fmt: skip
    add("--profile", action="append", default=[], metavar="GPU[:DEGREE]=FILE",
        help="step times that `python -m sola_sched.profile` measured on this kind of GPU, "
        "in place of computed ones; repeat for more")  # fmt: skip
    add_gpus(parser)
    add("--slo", required=True, nargs="+", metavar="METRIC:MS",
        help="targets in milliseconds: ttft, tpot and e2e, e.g. ttft:1000 tpot:60")  # fmt: skip
    add("--slo-class", action="append", default=[],
        metavar="NAME:SHARE:TTFT_MS:TPOT_MS[:E2E_MS[:WEIGHT]]",
        help="a share of the requests with its own targets, e.g. chat:0.7:500:50; repeat for "
        "more")  # fmt: skip
    add("--request-rate", type=positive_float, metavar="RPS", help="requests per second")
    add("--burstiness", type=positive_float, default=1.0,
        help="1: Poisson arrivals; less: bursts; more: even gaps (default: 1)")  # fmt: skip
    add("--self-timed", action="store_true",
        help="recorded arrival times, of the first 2,000 requests unless --num-prompts says "
        "otherwise, stretched to --request-rate if that is given")  # fmt: skip
    add("--attainment", type=positive_float, default=0.95,
        help="share of the requests that has to meet all targets (default: 0.95)")  # fmt: skip
    add("--schedulers", nargs="+", metavar="SPEC",
        default=["sola", "sola:2048", "stock:512", "stock:2048", "stock:8192"],
        help="sola[:CHUNK] or stock[:CHUNK], what runs in the engines; the first is tried "
        "everywhere, the others where it comes near to the cheapest")  # fmt: skip
    add("--routers", nargs="+", choices=sorted(ALL_ROUTERS), metavar="NAME", default=_ROUTERS,
        help="rules by which a gateway shares requests out; the first is tried everywhere "
        f"(default: {' '.join(_ROUTERS)}; {' and '.join(_OF_UNEQUAL)} do nothing of their "
        "own before equal instances)")  # fmt: skip
    add("--pools", action=argparse.BooleanOptionalAction, default=True,
        help="try prefill and decode pools too (default: yes)")  # fmt: skip
    add("--max-num-seqs", nargs="+", type=positive_int, default=[256, 128, 512],
        help="slots; the first is tried everywhere (default: 256 128 512)")  # fmt: skip
    add("--tensor-parallel-size", nargs="+", type=positive_int, default=[1, 2, 4, 8],
        help="GPUs of an engine (default: 1 2 4 8)")  # fmt: skip
    add("--max-gpus", type=positive_int, default=64,
        help="most GPUs of a configuration, in all (default: 64)")  # fmt: skip
    add("--check", action=argparse.BooleanOptionalAction, default=True,
        help="check the answer with the real schedulers (default: yes)")  # fmt: skip
    add("--seed", type=natural_int, default=0,
        help="of lengths, arrivals and routers (default: 0)")  # fmt: skip
    add("--output", type=Path, default=Path("plan.json"),
        help="JSON; a plot goes beside it (default: plan.json)")  # fmt: skip
    add("--html", type=Path, metavar="FILE",
        help="also write a report that opens in a browser (needs the extra 'html')")  # fmt: skip
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--tokenizer", help="folder or name, for a log of texts (default: the model's own)")
    dataset_group(
        parser.add_argument_group("requests"),
        "requests that are served (default: a minute of them, 400 to 2,000)",
    )
    return parser


def add_gpus(parser: Parser, known: Collection[str] = ALL_GPUS) -> None:
    """Types of GPUs, of those that there are, and prices; `parse_prices` reads them."""
    parser.add_argument("--gpu", required=True, nargs="+", metavar="TYPE=PRICE",
        help=f"GPU types ({', '.join(known)}) with prices per GPU and hour; "
        f"of {', '.join(MORE_GPUS)} nothing was measured, all is computed")  # fmt: skip


def parse_prices(items: Sequence[str], known: Collection[str] = ALL_GPUS) -> dict[str, float]:
    """Parse ``["a100=1.5", ...]``.

    Args:
        known: Types that there are.

    Raises:
        ConfigError: A type is unknown or named twice, or a price is no number > 0.
    """
    prices: dict[str, float] = {}
    for item in items:
        name, _, price = item.partition("=")
        if name not in known or name in prices:
            near = None if name in known else rules.nearest(name, known)
            raise ConfigError(
                f"'--gpu' must be TYPE=PRICE with each of {', '.join(known)} at most once "
                f"(got {item!r}); {f'write {near}=PRICE' if near else 'correct it'}."
            )
        if not price:
            raise ConfigError(
                f"'--gpu' must be TYPE=PRICE, the price of a GPU and hour (got {item!r}); "
                f"write for example {name}=1.5."
            )
        value = positive_number(price, f"--gpu {item}")
        if not 1.0 / _HIGHEST_PRICE <= value <= _HIGHEST_PRICE:
            raise ConfigError(
                f"prices of '--gpu' must be between {1.0 / _HIGHEST_PRICE:g} and "
                f"{_HIGHEST_PRICE:g} (got {item!r}); give them in a larger or smaller unit."
            )
        prices[name] = value
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
