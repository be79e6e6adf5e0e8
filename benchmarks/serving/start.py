"""How long `vllm serve` takes until it answers, beside stock vLLM.

Is compiling the policy in the way of a start? Servers are started one after the other, in
one order and back, so that other work on the machine falls on all alike; what is compared is a
variant and stock vLLM in the same round.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from serving.cost import STOCK, Variant
from serving.served import Served

_FIRST_TOKENS = 5


@dataclass(frozen=True)
class Start:
    """A server that is started.

    Attributes:
        options: Of `sola_sched`; None for vLLM's own scheduler.
        keeps: Where compiled code is kept: ``usual``, with what is there; ``fresh``, a folder
            without any; ``temporary``, since the user's cache cannot be written, and there is none.
        beside: The start of stock vLLM that it is compared with.
    """

    options: Mapping[str, Any] | None
    keeps: str = "usual"
    beside: str = STOCK

    def environment(self, folder: Path) -> dict[str, str]:
        """Of its process; vLLM's own caches stay where they are."""
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        chosen = {
            "usual": {},
            "fresh": {"XDG_CACHE_HOME": str(folder)},
            "temporary": {"XDG_CACHE_HOME": os.devnull, "TMPDIR": str(folder)},
        }[self.keeps]
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "torchinductor"),
            "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT") or f"{home}/vllm",
            **chosen,
        }


STOCK_READ_ONLY = "vLLM, home read-only"
STARTS: Mapping[str, Start] = {
    STOCK: Start(None),
    "compiled before": Start({}),
    "nothing compiled yet": Start({}, "fresh"),
    STOCK_READ_ONLY: Start(None, "temporary", STOCK_READ_ONLY),
    "the same, home read-only": Start({}, "temporary", STOCK_READ_ONLY),
}


def start(setup: Setup) -> Outcome:
    """Measure, or take the rows that are stored; the table is of the last run."""
    rows = setup.last_run(_measured(setup))
    return Outcome(rows, table(rows))


def _measured(setup: Setup) -> Iterator[Row]:
    """A row for each start; a first start of stock vLLM fills its own caches and is not kept."""
    from sola_sched.bench.backends.model import TINY_SHAPE, cached_model

    model_dir = cached_model(TINY_SHAPE)
    _started(STARTS[STOCK], model_dir)
    _started(STARTS["compiled before"], model_dir)
    run = int(time.time())
    for number in range(setup.options["num_rounds"]):
        for name in list(STARTS) if number % 2 == 0 else list(STARTS)[::-1]:
            ready_s, first_s = _started(STARTS[name], model_dir)
            yield {
                "run": run, "round": number, "variant": name,
                "ready_s": round(ready_s, 2), "first_s": round(first_s, 3),
            }  # fmt: skip


def _started(chosen: Start, model_dir: Path) -> tuple[float, float]:
    """Seconds until a server is up, and what its first request then takes."""
    arguments = Variant(chosen.options).arguments
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        environment = chosen.environment(Path(name))
        start_s = time.perf_counter()
        with Served(model_dir, arguments, environment) as server:
            server.wait()
            ready_s = time.perf_counter()
            server.answer(1, _FIRST_TOKENS, 0)
            return ready_s - start_s, time.perf_counter() - ready_s


def table(rows: Sequence[Row]) -> str:
    """A line for each variant: medians over rounds."""
    lines = []
    for name in STARTS:
        own = _by_round(rows, name)
        stock = _by_round(rows, STARTS[name].beside)
        ready_s = [row["ready_s"] for row in own.values()]
        added_s = [row["ready_s"] - stock[number]["ready_s"] for number, row in own.items()]
        first_s = statistics.median(row["first_s"] for row in own.values())
        added = "" if name == STARTS[name].beside else (
            f"{statistics.median(added_s):+.1f} ({min(added_s):+.1f} to {max(added_s):+.1f})"
        )  # fmt: skip
        lines.append([name, str(len(own)), f"{statistics.median(ready_s):.1f}", added,
                      f"{first_s:.2f}"])  # fmt: skip
    first = rows[0]
    return (
        f"vLLM {first['vllm']}, {first['cpu']}, {first['num_cores']} cores. Medians over rounds; "
        "added: to stock vLLM in the same round, and from least to most. First answer: "
        f"{_FIRST_TOKENS} tokens, asked as soon as the server is up.\n\n"
        + markdown(
            ("variant", "starts", "s until up", "added, s", "first answer, s"), lines, num_left=1
        )
    )


def _by_round(rows: Sequence[Row], name: str) -> dict[int, Row]:
    return {row["round"]: row for row in rows if row["variant"] == name}
