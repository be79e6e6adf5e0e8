"""The view: tables that are filled anew at each look."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Header, Static

from sola_sched.errors import ConfigError
from sola_sched.explain.source import late_of
from sola_sched.reports.fates import tpot_s, ttft_s
from sola_sched.top.history import ClassRow, History, ServerRow
from sola_sched.top.metrics import Metrics

SERVERS = (
    "server", "model", "in time", "req/s", "running", "waiting", "held", "lost",
    "late/<1 s/later", "KV", "unplanned",
)  # fmt: skip
CLASSES = ("server", "class", "in time", "req/s", "TTFT", "TPOT", "trend")
LATE = ("server", "request", "class", "end", "missed", "TTFT", "TPOT", "prompt", "output")
_NUM_LATE = 8
#: In time: green from the first on, yellow from the second on.
_GOOD, _FAIR = 0.95, 0.8

Look = Callable[[str], Metrics]
Late = Callable[[str], Sequence[Mapping[str, Any]]]


def late_requests(url: str) -> Sequence[Mapping[str, Any]]:
    """The last requests of a server that missed targets; none where it does not tell."""
    try:
        return late_of(url, _NUM_LATE)
    except ConfigError:
        return []


class Top(App[None]):
    """Shows servers until somebody leaves.

    Args:
        urls: Of the servers.
        every_s: Seconds between two looks.
        look: Reads the metrics of a server.
        late: Reads its late requests.
        clock: Time in seconds.
    """

    TITLE = "sola_sched"
    CSS = "DataTable { height: auto; } Static { padding: 1 1 0 1; text-style: bold; }"
    BINDINGS = [  # noqa: RUF012 - as textual asks for it
        Binding("q", "quit", "Quit"),
        Binding("space", "hold", "Hold / go on"),
        Binding("r", "look", "Look now"),
    ]

    def __init__(
        self,
        urls: Sequence[str],
        every_s: float,
        look: Look,
        late: Late = late_requests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._urls, self._every_s = list(urls), every_s
        self._look_at, self._late, self._clock = look, late, clock
        self._histories = {url: History() for url in urls}
        self.is_held = False

    def compose(self) -> ComposeResult:
        """The parts of the page."""
        yield Header()
        yield Static("Servers", id="window")
        yield DataTable(id="servers", cursor_type="none")
        yield Static("Classes: the trend is the share in time, the oldest first")
        yield DataTable(id="classes", cursor_type="none")
        yield Static("Late requests: `python -m sola_sched.explain URL ID` says why")
        yield DataTable(id="late", cursor_type="none")
        yield Footer()

    async def on_mount(self) -> None:
        """Begin to look."""
        for name, columns in (("servers", SERVERS), ("classes", CLASSES), ("late", LATE)):
            self.query_one(f"#{name}", DataTable).add_columns(*columns)
        self.set_interval(self._every_s, self._look_unless_held)
        await self.action_look()

    async def _look_unless_held(self) -> None:
        if not self.is_held:
            await self.action_look()

    def action_hold(self) -> None:
        """Leave the page as it is, or go on."""
        self.is_held = not self.is_held
        self.sub_title = "held" if self.is_held else ""

    async def action_look(self) -> None:
        """Look at all servers at once, and show what they say."""
        found = await asyncio.gather(*(asyncio.to_thread(self._ask, url) for url in self._urls))
        servers, classes, late = (
            self.query_one(f"#{name}", DataTable) for name in ("servers", "classes", "late")
        )
        for table in (servers, classes, late):
            table.clear()
        for url, (metrics, requests, problem) in zip(self._urls, found, strict=True):
            name = url.partition("://")[2]
            if metrics is None:
                servers.add_row(name, Text(problem, style="red"))
                continue
            history = self._histories[url]
            history.add(self._clock(), metrics)
            servers.add_row(name, *server_cells(history.server()))
            for row in history.classes():
                classes.add_row(name, *class_cells(row))
            for fate in requests:
                late.add_row(name, *late_cells(fate))
        window_s = max((history.window_s for history in self._histories.values()), default=0.0)
        self.query_one("#window", Static).update(f"Servers: the last {window_s:.0f} s")

    def _ask(self, url: str) -> tuple[Metrics | None, Sequence[Mapping[str, Any]], str]:
        try:
            return self._look_at(url), self._late(url), ""
        except ConfigError as error:
            return None, (), str(error)


def server_cells(row: ServerRow) -> list[Text]:
    """A server's row, without its name."""
    unplanned = _percent(row.unplanned) + (f" {row.reason}" if row.reason else "")
    cells = [
        Text(row.model), _in_time(row.in_time), Text(f"{row.per_s:.1f}"), Text(f"{row.running:,}"),
        Text(f"{row.waiting:,}"), Text(f"{row.held:,}"),
        Text(f"{row.lost:,}", style="red" if row.lost else ""), Text(_slack(row.slack)),
        Text(_percent(row.kv)),
        Text(unplanned, style="red" if row.reason in ("failed", "aside", "slow") else ""),
    ]  # fmt: skip
    return cells


def class_cells(row: ClassRow) -> list[Text]:
    """A class' row, without its server's name."""
    return [
        Text(row.name), _in_time(row.in_time), Text(f"{row.per_s:.1f}"), Text(_ms(row.ttft_s)),
        Text(_ms(row.tpot_s)), Text(row.trend),
    ]  # fmt: skip


def late_cells(fate: Mapping[str, Any]) -> list[Text]:
    """A late request's row, without its server's name."""
    return [
        Text(str(fate["request_id"])), Text(str(fate["slo_class"])), Text(str(fate["end"])),
        Text(" ".join(fate["missed"])), Text(_ms(ttft_s(fate))), Text(_ms(tpot_s(fate))),
        Text(f"{fate['num_prompt']:,}"), Text(f"{fate['num_output']:,}"),
    ]  # fmt: skip


def _in_time(share: float) -> Text:
    if math.isnan(share):
        return Text("-")
    style = "green" if share >= _GOOD else "yellow" if share >= _FAIR else "red"
    return Text(_percent(share), style=style)


def _slack(slack: tuple[int, int, int] | None) -> str:
    return "-" if slack is None else "/".join(f"{count:,}" for count in slack)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None or math.isnan(seconds) else f"{1e3 * seconds:,.0f} ms"
