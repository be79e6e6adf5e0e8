"""Says why a request was late, or what those that were late have in common.

    python -m sola_sched.explain http://localhost:8000                  the latest requests
    python -m sola_sched.explain http://localhost:8000 chatcmpl-8f2c    one of them
    python -m sola_sched.explain http://localhost:8000 --replay         the same minutes, otherwise

The server is vLLM's, with a scheduler of ours and statistics on; it remembers the last 4,096
requests. `--save FILE` keeps what it says, and FILE may stand where the URL does.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sola_sched.bench.backends import environment
from sola_sched.bench.report.page import require_report
from sola_sched.config.flags import LineParser, positive_float, positive_int
from sola_sched.config.output_file import require_writable
from sola_sched.errors import ConfigError
from sola_sched.explain import html, trace
from sola_sched.explain.replay import Replay, Way, cells, table
from sola_sched.explain.source import Window, find, read
from sola_sched.reports.fates import WAITED, engine_of, is_late
from sola_sched.reports.reasons import SHORT_OF, percent, remedies, story, verdict

EXIT_USAGE = 2
_MOST_SHOWN = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Explain from the command line; return the exit code, 2 where nothing could be explained."""
    args = _parser().parse_args(argv)
    environment.quiet()  # else a replay is lost in the log
    try:
        require_report(args.html)
        if args.trace:
            require_writable(args.trace, "--trace")
        if args.replay:
            environment.require_vllm("a replay", "see without '--replay' why requests were late")
        window = read(args.source)
        if args.save:
            Path(args.save).write_text(json.dumps(window.to_json()), encoding="utf-8")
        if window.left_out:
            print(window.left_out, file=sys.stderr)
        chosen = find(window, args.id, args.source) if args.id else []
        replayed = _replay(window, args) if args.replay else None
        if replayed is not None:
            print(f"{replayed[0]}\n\n{table(replayed[1])}")
        elif args.id:
            print("\n\n".join(of_one(fate, window) for fate in chosen))
        else:
            print(of_all(window))
        if args.html:
            print(f"\nReport {html.write(window, chosen, of_all(window), replayed, args.html)}.")
        if args.trace:
            path = trace.write(window.requests, args.trace)
            print(f"\nTimeline {path}: open it in https://ui.perfetto.dev.")
    except BrokenPipeError:  # nobody reads on
        raise
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _parser() -> LineParser:
    parser = LineParser(
        prog="python -m sola_sched.explain",
        description="Why a request was late, and what would have helped.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="http://HOST:PORT of the server, or a file of --save")
    add("id", metavar="ID", nargs="?", help="of one request, or a part of it")
    add("--save", metavar="FILE", help="write what the server says to a file")
    add(
        "--replay",
        action="store_true",
        help="serve the recorded requests again in virtual time: by stock vLLM, as they were, and "
        "with what the following options say",
    )
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a report that opens in a browser (needs the extra 'html'); with --replay "
        "its table is in it",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write a timeline of all recorded requests, which https://ui.perfetto.dev opens",
    )
    add("--ttft", type=positive_float, metavar="S", help="replay with this TTFT target, seconds")
    add("--tpot", type=positive_float, metavar="S", help="replay with this TPOT target, seconds")
    add("--max-num-seqs", type=positive_int, metavar="N", help="replay with so many slots")
    add(
        "--engines",
        type=positive_int,
        metavar="N",
        help="replay on so many engines (default: 2), of a data parallel server so many for each",
    )
    return parser


def of_one(fate: Mapping[str, Any], window: Window) -> str:
    """The whole story of one request."""
    known = window.beside(fate)
    lines = [f"{fate['request_id']} (class {window.place(fate)}). {verdict(fate)}", ""]
    lines += [f"- {line}" for line in story(fate, known)]
    helps = remedies(fate, known)
    if helps:
        lines += ["", "What would have helped:", *(f"- {line}" for line in helps)]
    return "\n".join(lines)


def of_all(window: Window) -> str:
    """How many were late, what they waited for, and the last of them."""
    late = [fate for fate in window.requests if is_late(fate)]
    lines = [f"{len(late):,} of the last {len(window.requests):,} requests missed a target."]
    if not late:
        return lines[0]
    missed = Counter(name for fate in late for name in fate["missed"])
    lines[0] += f" By target: {', '.join(f'{n.upper()} {k:,}' for n, k in missed.most_common())}."
    if len(window.by_engine) > 1:
        counts = Counter(map(engine_of, late))
        parts = [
            f"engine {rank} {counts[rank]:,} of {len(own.requests):,}"
            for rank, own in window.by_engine.items()
        ]
        lines.append(f"By engine: {', '.join(parts)}.")
    total_s = [sum(fate[name] for fate in late) for name in WAITED]
    if sum(total_s):
        shares = sorted(zip(total_s, SHORT_OF, strict=True), reverse=True)
        parts = [f"{what} {percent(seconds / sum(total_s))}" for seconds, what in shares if seconds]
        lines.append(f"What they waited for: {', '.join(parts)}.")
    lines += ["", "The last of them:"]
    for fate in late[:_MOST_SHOWN]:
        lines.append(f"  {fate['request_id']} ({window.place(fate)}): {verdict(fate)}")
    return "\n".join(lines)


def _replay(window: Window, args: Any) -> tuple[str, list[list[str]]]:
    """A sentence on what was served again, and the table."""
    replay = Replay(window)
    req_id = replay.id_of(args.id) if args.id else None
    replayed = {way.label: replay.run(way) for way in _ways(args, replay.num_engines)}
    left_out = ""
    if replay.num_left_out:
        left_out = f" ({replay.num_left_out:,} without a whole answer left out)"
    several = f" of {replay.num_engines} engines" if replay.num_engines > 1 else ""
    said = f"{replay.num_requests:,} recorded requests{several}{left_out}, in virtual time:"
    return said, cells(replayed, req_id)


def _ways(args: Any, num_recorded: int) -> list[Way]:
    ways = [Way("stock vLLM", "stock"), Way("sola_sched", "sola")]
    targets = {name: getattr(args, name) for name in ("ttft", "tpot") if getattr(args, name)}
    if targets:
        label = ", ".join(f"{name.upper()} {seconds:g} s" for name, seconds in targets.items())
        ways.append(Way(label, "sola", args.ttft, args.tpot))
    if args.max_num_seqs:
        more = {"max_num_seqs": args.max_num_seqs}
        ways.append(Way(f"{args.max_num_seqs:,} slots", "sola", engine_args=more))
    num_each = args.engines or 2
    ways.append(Way(f"{num_each * num_recorded} engines", "sola", num_engines=num_each))
    return ways
