"""What engines have served since the last look, from their counters."""

from __future__ import annotations

import json

from sola_sched.adaptive_placement.observe import Observed, Observer, counts


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

    observer = Observer(fetch)
    assert counts(pages["http://one/metrics"])["attained"] == 9
    first = observer.since_last({"chat": "http://gate", "gone": "http://away"})
    pages["http://one/metrics"] = text(16, 12)
    del pages["http://two/metrics"]
    second = observer.since_last({"chat": "http://gate"})
    pages["http://two/metrics"] = text(6, 5)
    third = observer.since_last({"chat": "http://gate"})
    gate = pages.pop("http://gate/replicas")
    assert observer.since_last({"chat": "http://gate"}) == {}
    pages["http://gate/replicas"] = gate
    pages["http://one/metrics"] = text(17, 13)
    fourth = observer.since_last({"chat": "http://gate"})
    pages["http://one/metrics"] = text(3, 2)
    fifth = observer.since_last({"chat": "http://gate"})

    assert first == {"chat": Observed(14, 13, 14, 100.0, 20.0)}
    assert second == {}  # what one engine counted is not the service's load
    assert third == {"chat": Observed(2, 1, 2, 100.0, 20.0)}
    assert fourth == {"chat": Observed(1, 1, 1, 100.0, 20.0)}  # no engine is new
    assert fifth == {"chat": Observed(3, 2, 3, 100.0, 20.0)}  # at an address that is known


def test_what_an_engine_counted_before_it_could_be_read_is_no_load_of_an_interval() -> None:
    pages = {"http://gate/replicas": json.dumps([{"url": "http://one"}])}

    def fetch(url: str) -> str:
        if url not in pages:
            raise OSError(url)
        return pages[url]

    def count(num: int) -> None:
        pages["http://one/metrics"] = f"vllm:request_prompt_tokens_count {num}\n"

    observer = Observer(fetch)
    assert observer.since_last({"chat": "http://gate"}) == {}  # silent at the baseline
    count(100_000)
    assert observer.since_last({"chat": "http://gate"}) == {"chat": Observed()}
    count(100_003)
    assert observer.since_last({"chat": "http://gate"}) == {"chat": Observed(3)}
