"""What engines have served since the last look, from their counters."""

from __future__ import annotations

import json

import pytest
from placed_world import CHAT

from sola_sched.adaptive_placement.observe import Observed, Observer, counts
from sola_sched.adaptive_placement.search import _as_observed


def test_counters_of_engines_are_read_and_differences_taken() -> None:
    def text(num: int, met: int) -> str:
        return (
            "# TYPE vllm:request_prompt_tokens histogram\n"
            f'vllm:request_prompt_tokens_count{{engine="0"}} {num}\n'
            f'vllm:request_prompt_tokens_sum{{engine="0"}} {100 * num}\n'
            "# TYPE vllm:request_generation_tokens histogram\n"
            f'vllm:request_generation_tokens_sum{{engine="0"}} {20 * num}\n'
            "# TYPE sola_requests counter\n"
            f'sola_requests_total{{outcome="attained",slo_class="default"}} {met}\n'
            f'sola_requests_total{{outcome="missed",slo_class="default"}} {num - met}\n'
            f'sola_requests_total{{outcome="aborted",slo_class="default"}} 3\n'
        )

    pages = {
        "http://gate/replicas": json.dumps([{"url": "http://one"}, {"url": "http://two"}]),
        "http://one/metrics": text(10, 9),
        "http://two/metrics": text(4, 4),
    }

    def fetch(url: str) -> str:
        if url not in pages:
            raise OSError(url)
        return pages[url]

    now_s = 0.0
    observer = Observer(fetch, clock=lambda: now_s)
    assert counts(pages["http://one/metrics"])["attained"] == 9
    first = observer.since_last({"chat": "http://gate", "gone": "http://away"})
    pages["http://one/metrics"] = text(16, 12)
    del pages["http://two/metrics"]
    now_s = 10.0
    second = observer.since_last({"chat": "http://gate"})
    pages["http://two/metrics"] = text(6, 5)
    now_s = 20.0
    third = observer.since_last({"chat": "http://gate"})
    gate = pages.pop("http://gate/replicas")
    assert observer.since_last({"chat": "http://gate"}) == {}
    pages["http://gate/replicas"] = gate
    pages["http://one/metrics"] = text(17, 13)
    now_s = 40.0
    fourth = observer.since_last({"chat": "http://gate"})
    pages["http://one/metrics"] = text(3, 2)
    now_s = 50.0
    fifth = observer.since_last({"chat": "http://gate"})

    assert first == {"chat": Observed(14, 13, 14, 100.0, 20.0)}
    assert second == {}  # what one engine counted is not the service's load
    # Of all engines, since the reading before the one that failed.
    assert third == {"chat": Observed(8, 4, 8, 100.0, 20.0, 20.0)}
    assert fourth == {"chat": Observed(1, 1, 1, 100.0, 20.0, 20.0)}  # no engine is new
    assert fifth == {"chat": Observed(3, 2, 3, 100.0, 20.0, 10.0)}  # at an address that is known


@pytest.mark.parametrize("is_gateway_silent", [False, True])
def test_what_an_engine_counted_before_it_could_be_read_is_no_load_of_an_interval(
    is_gateway_silent: bool,
) -> None:
    pages = {"http://gate/replicas": json.dumps([{"url": "http://one"}])}

    def fetch(url: str) -> str:
        if url not in pages:
            raise OSError(url)
        return pages[url]

    def count(num: int) -> None:
        pages["http://one/metrics"] = f"vllm:request_prompt_tokens_count {num}\n"

    now_s = 0.0
    observer = Observer(fetch, clock=lambda: now_s)
    if is_gateway_silent:
        gate = pages.pop("http://gate/replicas")
    assert observer.since_last({"chat": "http://gate"}) == {}  # silent at the baseline
    observer.begin(["chat"])
    if is_gateway_silent:
        pages["http://gate/replicas"] = gate
    count(100_000)
    now_s = 10.0
    assert observer.since_last({"chat": "http://gate"}) == {}  # nothing to compare with
    count(100_003)
    now_s = 30.0
    assert observer.since_last({"chat": "http://gate"}) == {"chat": Observed(3, span_s=20.0)}


@pytest.mark.parametrize("is_all", [True, False])
def test_an_interval_that_could_not_be_read_adds_no_load_to_the_next(is_all: bool) -> None:
    num, silent = 0, set()

    def fetch(url: str) -> str:
        if url in silent:
            raise OSError(url)
        if url.endswith("/replicas"):
            return json.dumps([{"url": "http://one"}, {"url": "http://two"}])
        return f"vllm:request_prompt_tokens_count {num}\n"

    now_s, rates = 0.0, []
    observer = Observer(fetch, clock=lambda: now_s)
    observer.since_last({"chat": "http://gate"})
    for interval in range(5):
        num += 300  # of each engine, in 600 s
        now_s += 600.0
        silent = {"http://gate/replicas" if is_all else "http://two/metrics"} - (
            set() if interval == 1 else {"http://gate/replicas", "http://two/metrics"}
        )
        seen = observer.since_last({"chat": "http://gate"}).get("chat")
        rates.append(_as_observed(CHAT | {"rate": 1.0}, seen, 600.0)["rate"])

    assert rates == pytest.approx([1.0] * 5)


def test_a_service_that_has_begun_within_the_interval_is_counted_from_then_on() -> None:
    pages = {"http://gate/replicas": json.dumps([{"url": "http://one"}])}
    pages["http://one/metrics"] = "vllm:request_prompt_tokens_count 20\n"
    now_s = 590.0
    observer = Observer(pages.__getitem__, clock=lambda: now_s)

    observer.begin(["chat"])
    now_s = 600.0

    assert observer.since_last({"chat": "http://gate"}) == {"chat": Observed(20, span_s=10.0)}
