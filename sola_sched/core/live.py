"""What an engine itself knows of its requests."""

from __future__ import annotations

from dataclasses import dataclass

from sola_sched.config.slo import DEFAULT_CLASS, SloTarget


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """What an engine itself knows of an unfinished request; see `StateMonitor.rebuild`.

    Attributes:
        req_id, num_prompt_tokens, max_tokens, slo, slo_class, priority: As in `StateMonitor.add`.
        arrival_s: When it arrived, where nothing better is known, on the monitor's clock.
        holds_slot: Whether it runs.
        num_computed: Tokens whose KV exists or is being computed.
        num_tokens: Its prompt and output tokens, those in flight included.
        num_output: Output tokens delivered.
        num_in_flight: Output tokens in flight.
        num_preemptions: Times it lost its KV.
    """

    req_id: str
    num_prompt_tokens: int
    max_tokens: int
    slo: SloTarget
    arrival_s: float
    slo_class: str = DEFAULT_CLASS
    priority: int = 0
    holds_slot: bool = False
    num_computed: int = 0
    num_tokens: int = 0
    num_output: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0
