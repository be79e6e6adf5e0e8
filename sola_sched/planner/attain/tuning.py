"""The constants of `policy="attain"`, each with where it comes from and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttainTuning:
    """What decides a plan and is no option of the operator.

    "Insensitive" means: half or twice the value moves attainment by less than half a point on the
    loads of `docs/decisions/attain-mechanisms.md`.

    Attributes:
        decode_margin, prefill_margin: A decode is lost only if a bare step is longer than it bears
            by more than 1 / this, a prefill only if its time misses its deadline by as much:
            predicted step times are a few per cent off.
        can_wait: Decodes that sustain steps so many times longer can wait for minutes: those that
            have no target, or an end that is hours away. A TPOT target is never so long.
        near: TPOT is tight where bare steps at its pace take this share of the time; insensitive
            (0.4).
        num_examined: Prefills among which those on time are chosen, by deadline; bounds the time of
            a plan. Those that come later cannot be on time while so many are in front of them.
        catching_up: A decode behind its schedule catches up by steps that are so far from bare
            ones to what it sustains.
        leads, holds, lends, lends_past_lost, ends_with_first, serves_lost_together: Mechanisms
            that `python benchmarks/run.py mechanisms` leaves out, one at a time: those on time are
            so a step early; decodes sit out for prompts; decodes lend of their later time, and do
            so where somebody is lost already; a step ends before the deadline of its first prefill;
            short prompts of the lost share a step.
        num_spare_offers: Waiting requests offered beyond the chunk, for prefix-cache hits.
        memory_threshold: Use of KV memory above which the peak is predicted (SOLA 6.4).
        planned_memory: Share of the KV memory that the peak of the expected need may take. Above 1:
            a displacement now and then costs less than memory that waits for a peak. 0.97 costs 17
            points where memory is what is short.
        tight: No decode takes part where a step with all takes this share of a TTFT target.
        for_lost: Prompts of the lost lengthen steps by this share of what TPOT leaves, where
            decodes take less than `near` of the time; half of it is insensitive, 0.25 costs up to
            1.3 points near saturation.
        num_gaps: By all that TPOT leaves where nobody has come for so many mean gaps between
            arrivals: else what is left of a load takes a quarter longer.
        spare_steps: Prompts of the lost are computed on credit while those that are on time can
            wait for so many steps, or once there is `most_saved_s` of it. 0, at any time, costs up
            to 1 point past saturation; 2 as much where memory is short.
        most_saved_s, small_share: Over `share` it is how long the lost may wait for their share. Of
            a share above this one nothing is saved: who sets aside so much wants it spent.
        most_credit_s: Bound of the account of the lost, seconds: the longest burst of them.
        many_tiles, sub_tile: Chunks of fewer tiles come in these smaller multiples, tokens: what
            rounding down to a tile leaves out would be a large share of them.
        refused_in_a_row: Requests of a kind that `overload: reject` refuses by predictions, while
            none of it is computed, before it serves one: that shows whether they are right.
        num_lost: Lost prefills looked at in a step, by arrival; bounds the time of a plan.
    """

    decode_margin: float = 0.9
    prefill_margin: float = 0.95
    can_wait: float = 1e3
    near: float = 0.5
    num_examined: int = 64
    catching_up: float = 0.5
    leads: bool = True
    holds: bool = True
    lends: bool = True
    lends_past_lost: bool = True
    ends_with_first: bool = True
    serves_lost_together: bool = True
    num_spare_offers: int = 16
    memory_threshold: float = 0.5
    planned_memory: float = 1.1
    tight: float = 0.35
    for_lost: float = 0.1
    num_gaps: float = 10.0
    spare_steps: float = 1.0
    most_saved_s: float = 0.25
    small_share: float = 0.05
    most_credit_s: float = 0.5
    many_tiles: int = 8
    sub_tile: int = 16
    refused_in_a_row: int = 8
    num_lost: int = 128
