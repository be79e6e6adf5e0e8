"""`python -m sola_sched.top`: what a server says, what happened between looks, and the view."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from command_help import assert_explained

from sola_sched.errors import ConfigError
from sola_sched.front_end.fates_http import PATH, answer
from sola_sched.reports.fates import FateBook, to_report
from sola_sched.top.cli import main
from sola_sched.top.history import NUM_COLUMNS, History
from sola_sched.top.metrics import Metrics, fetch


def text_of(
    attained: int = 0,
    missed: int = 0,
    *,
    planned: int = 100,
    aside: int = 0,
    lost: int = 0,
    slo_class: str = "chat",
    by_slack: Sequence[int] = (),
) -> str:
    at = 'engine="0",model_name="m"'
    kinds = zip(("late", "0.1s", "1s", "10s", "later", "none"), by_slack, strict=False)
    slack = "".join(f'sola_requests_by_slack{{{at},slack="{k}"}} {n}\n' for k, n in kinds)
    return f"""# HELP sola_requests_total Requests that have ended.
# TYPE sola_requests_total counter
sola_requests_total{{{at},outcome="attained",slo_class="{slo_class}"}} {attained}
sola_requests_total{{{at},outcome="missed",slo_class="{slo_class}"}} {missed}
sola_requests_total{{{at},outcome="aborted",slo_class="{slo_class}"}} 1e3
sola_steps_planned_total{{{at}}} {planned}.0
sola_steps_unplanned_total{{{at},reason="aside"}} {aside}
sola_requests_held{{{at}}} 3.0
sola_requests_lost{{{at}}} {lost}
sola_ttft_seconds_sum{{{at},slo_class="{slo_class}"}} {0.25 * (attained + missed)}
sola_ttft_seconds_count{{{at},slo_class="{slo_class}"}} {attained + missed}
{slack}vllm:num_requests_running{{{at}}} 12.0 1700000000000
vllm:num_requests_waiting{{{at}}} 4.0
vllm:kv_cache_usage_perc{{{at}}} 0.5
python_gc_objects{{generation="0"}} 7
sola_step_model_error{{{at}}} broken
"""


def history_of(*texts: str, every_s: float = 2.0) -> History:
    history = History()
    for place, text in enumerate(texts):
        history.add(every_s * place, Metrics.of(text))
    return history


def test_metrics_are_read_with_their_labels() -> None:
    metrics = Metrics.of('sola_x{a="1",b="a \\"b\\" \\\\ \\n"} 2\nsola_x{a="2"} 3.5\nother 1\n')
    assert metrics.total("sola_x") == 5.5
    assert metrics.total("sola_x", a="2") == 3.5
    assert metrics.by("sola_x", "b") == {'a "b" \\ \n': 2.0, "": 3.5}
    assert metrics.most("sola_x") == 3.5
    assert metrics.total("sola_y") == metrics.most("sola_y") == 0.0
    assert "other" not in metrics.samples


def test_a_server_is_told_by_what_is_new() -> None:
    row = history_of(text_of(100, 50), text_of(109, 51, planned=130, aside=10, lost=2)).server()
    assert (row.model, row.in_time, row.per_s) == ("m", 0.9, 5.0)
    assert (row.running, row.waiting, row.held, row.lost, row.kv) == (12, 4, 3, 2, 0.5)
    assert (row.unplanned, row.reason) == (0.25, "aside")


def test_what_is_not_finite_is_left_out() -> None:
    text = text_of(100, 50)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        text += f'vllm:{name}{{engine="1"}} NaN\nvllm:{name}{{engine="2"}} +Inf\n'
    row = history_of(text_of(90, 50), f"{text}sola_requests_lost NaN\n").server()
    assert (row.running, row.waiting, row.lost, row.kv) == (12, 4, 0, 0.5)


def test_the_time_between_looks_has_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["http://127.0.0.1:9", "--once", "--every", "1e11"])
    assert ended.value.code == 2
    assert "--every: must be at most 86400, a day (got '1e11')" in capsys.readouterr().err


def test_requests_are_told_by_their_deadlines() -> None:
    assert history_of(text_of(1, 1)).server().slack is None
    row = history_of(text_of(1, 1, by_slack=(2, 3, 4, 5, 6, 7))).server()
    assert row.slack == (2, 7, 11)


def test_after_one_look_nothing_has_happened() -> None:
    history = history_of(text_of(100, 50))
    row = history.server()
    assert math.isnan(row.in_time)
    assert row.per_s == 0.0
    assert (math.isnan(row.unplanned), row.reason) == (True, "")
    assert history.classes()[0].trend == ""


def test_classes_have_a_trend() -> None:
    texts = [text_of(10 * n, 0, planned=n) for n in range(4)]
    texts += [text_of(30, 10, planned=5), text_of(30, 10, planned=6), text_of(35, 15, planned=7)]
    (row,) = history_of(*texts).classes()
    assert row.name == "chat"
    assert row.trend == "███▁·▅"
    assert row.in_time == pytest.approx(35 / 50)
    assert row.ttft_s == pytest.approx(0.25)
    assert math.isnan(row.tpot_s)


def test_a_long_history_fits() -> None:
    texts = [text_of(n, 0, planned=n) for n in range(200)]
    history = history_of(*texts)
    assert history.window_s == 120.0
    assert len(history.classes()[0].trend) == NUM_COLUMNS


def test_a_server_that_starts_anew_begins_a_new_history() -> None:
    history = history_of(text_of(100, 50, planned=900), text_of(2, 2, planned=10))
    assert history.window_s == 0.0
    history.add(4.0, Metrics.of(text_of(5, 3, planned=20)))
    assert history.server().in_time == 0.75


class Fake:
    """A server that answers with these texts, one after another, the last for ever."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.book: FateBook | None = None
        self.queries: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = (fake.texts.pop(0) if len(fake.texts) > 1 else fake.texts[0]).encode()
                is_metrics = self.path == "/metrics"
                status: int = 200 if is_metrics else 404
                path, _, query = self.path.partition("?")
                if fake.book is not None and path == PATH:
                    fake.queries.append(query)
                    status, told = answer(path, query, fake.book)
                    body, is_metrics = json.dumps(told).encode(), True
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if is_metrics else b"")

            def log_message(self, *_: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake(text_of(100, 50), text_of(109, 51, planned=130, aside=10))
    yield fake
    fake.close()


@pytest.fixture
def nobody() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_once_prints_what_happened(
    fake: Fake, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([fake.url, nobody, "--once", "--every", "0.1"]) == 0
    text = capsys.readouterr().out
    assert f"{fake.url}: 90.0% in time" in text
    assert "25.0% of the steps unplanned (aside)" in text
    assert "    chat: 90.0% in time" in text
    assert f"{nobody}: cannot be reached" in text


def test_nothing_to_show_is_an_error(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([nobody, "--once", "--every", "0.01"]) == 2
    assert "cannot be reached" in capsys.readouterr().out


def test_a_server_without_our_metrics_says_so() -> None:
    fake = Fake("vllm:num_requests_running 1\n")
    try:
        with pytest.raises(ConfigError, match="has no metrics of sola_sched"):
            fetch(fake.url)
    finally:
        fake.close()


def test_the_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert_explained(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["ftp://x"])
    assert "must be http://HOST:PORT" in capsys.readouterr().err


def cells(app: Any, name: str) -> list[list[str]]:
    table = app.query_one(f"#{name}")
    return [[str(cell) for cell in table.get_row_at(place)] for place in range(table.row_count)]


def test_a_server_is_asked_for_the_late_requests_that_are_shown_and_no_more(fake: Fake) -> None:
    pytest.importorskip("textual")
    from fates import ended, record_of

    from sola_sched.top.screen import late_requests

    fake.book = FateBook()
    ends = ("missed", "attained", "aborted", "rejected") * 10
    fake.book.add(to_report(ended(*(record_of(end=end) for end in ends))))

    shown = late_requests(fake.url)

    assert [fate["request_id"] for fate in shown] == [
        "r39", "r36", "r35", "r32", "r31", "r28", "r27", "r24",
    ]  # fmt: skip
    assert fake.queries == ["missed&limit=8"]


def test_the_view_shows_servers_classes_and_late_requests(fake: Fake, nobody: str) -> None:
    pytest.importorskip("textual")
    import asyncio

    from fates import a_fate

    from sola_sched.top.screen import Top

    now_s = 0.0

    def clock() -> float:
        return now_s

    def late(url: str) -> Sequence[Any]:
        return [a_fate("chatcmpl-7", "chat", end="missed", first_token_s=14.0)]

    async def view() -> None:
        nonlocal now_s
        app = Top([fake.url, nobody], 3600.0, fetch, late, clock)
        async with app.run_test(size=(140, 40)) as pilot:
            now_s = 2.0
            await pilot.press("r")
            await pilot.pause()
            served, gone = cells(app, "servers")
            assert served[:4] == [fake.url.partition("://")[2], "m", "90.0%", "5.0"]
            assert served[-1] == "25.0% aside"
            assert "cannot be reached" in gone[1]
            (row,) = cells(app, "classes")
            assert row[1:5] == ["chat", "90.0%", "5.0", "250 ms"]
            (request,) = cells(app, "late")
            assert request[1:5] == ["chatcmpl-7", "chat", "missed", "ttft"]
            await pilot.press("space")
            assert app.is_held
            await pilot.press("space")
            assert not app.is_held
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(view())
