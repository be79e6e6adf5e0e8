"""A live view of servers in the terminal.

    pip install 'sola-sched[top]'
    python -m sola_sched.top http://one:8000 http://other:8000

Each is a vLLM server with a scheduler of ours. `--once` needs no `[top]`: it prints the servers and
their classes as text, what happened between two looks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence

from sola_sched.config.flags import LineParser, positive_float, server_url
from sola_sched.errors import ConfigError
from sola_sched.top.history import History
from sola_sched.top.metrics import fetch

EXIT_USAGE = 2
_MOST_S = 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Show servers from the command line; return the exit code, 2 where nothing can be shown."""
    parser = LineParser(
        prog="python -m sola_sched.top", description="A live view of servers in the terminal."
    )
    parser.add_argument(
        "urls", nargs="+", type=server_url, metavar="URL", help="http://HOST:PORT of a vLLM server"
    )
    parser.add_argument(
        "--every",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="between two looks (default: 2; at most a day)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print what happened between two looks, and end"
    )
    args = parser.parse_args(argv)
    urls = list(dict.fromkeys(args.urls))
    if args.once:
        return _print_once(urls, args.every)
    try:
        from sola_sched.top.screen import Top
    except ImportError as error:
        print(
            f"error: the view needs textual, which cannot be loaded ({error}); install it with "
            "`pip install 'sola-sched[top]'`, or give --once.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    Top(urls, args.every, fetch).run()
    return 0


def _seconds(text: str) -> float:
    seconds = positive_float(text)
    if seconds > _MOST_S:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST_S:g}, a day (got {text!r})")
    return seconds


def _print_once(urls: Sequence[str], every_s: float) -> int:
    histories = {url: History() for url in urls}
    problems: dict[str, str] = {}
    for is_second in (False, True):
        if is_second:
            time.sleep(every_s)
        for url, history in histories.items():
            try:
                history.add(time.monotonic(), fetch(url))
            except ConfigError as error:
                problems[url] = str(error)
    for url, history in histories.items():
        if url in problems:
            print(f"{url}: {problems[url]}")
            continue
        row = history.server()
        print(
            f"{url}: {_percent(row.in_time)} in time, {row.per_s:.1f} requests/s, {row.running:,} "
            f"running, {row.waiting:,} waiting, {row.held:,} held, {row.lost:,} lost, "
            f"{_slack(row.slack)}"
            f"{_percent(row.kv)} of the KV memory, {_percent(row.unplanned)} of the steps unplanned"
            f"{f' ({row.reason})' if row.reason else ''}"
        )
        for each in history.classes():
            print(f"    {each.name}: {_percent(each.in_time)} in time, {each.per_s:.1f} requests/s")
    return EXIT_USAGE if len(problems) == len(urls) else 0


def _slack(slack: tuple[int, int, int] | None) -> str:
    if slack is None:
        return ""
    late, soon, later = slack
    return f"deadlines: {late:,} passed, {soon:,} within 1 s, {later:,} later, "


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"
