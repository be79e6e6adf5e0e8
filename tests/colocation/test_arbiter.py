"""Who is next among engines that share a GPU."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.colocation.arbiter import GRACE_S, Claim, first, settle


def claim(slot: int, urgency: float, since_s: float = 0.0, owed_s: float = 0.0) -> Claim:
    return Claim(slot, urgency, since_s, owed_s)


def test_nobody_is_next_where_nobody_wants_a_turn() -> None:
    assert first([]) is None


@pytest.mark.parametrize(
    ("claims", "slot"),
    [
        ([claim(0, 5.0), claim(1, 3.0)], 1),
        ([claim(0, 5.0, since_s=2.0), claim(1, 5.0, since_s=1.0)], 1),
        ([claim(0, math.inf, since_s=2.0), claim(1, math.inf, since_s=1.0)], 1),
        ([claim(0, 1.0), claim(1, 9.0, owed_s=GRACE_S)], 1),
        ([claim(0, 1.0), claim(1, 9.0, owed_s=0.99 * GRACE_S)], 0),
        ([claim(0, 1.0, owed_s=0.2), claim(1, 9.0, owed_s=0.3)], 1),
    ],
    ids=["urgent", "first come", "no targets", "owed", "owed too little", "owed more"],
)
def test_the_next_one(claims: list[Claim], slot: int) -> None:
    chosen = first(claims)

    assert chosen is not None
    assert chosen.slot == slot


def test_a_turn_is_charged_to_its_holder_and_credited_to_all_by_their_shares() -> None:
    owed = settle(0, 0.1, {0: 0.05, 1: 0.0}, {0: 0.25, 1: 0.5})

    assert owed == {0: pytest.approx(-0.025), 1: pytest.approx(0.05)}


def test_what_was_lent_is_forgotten_beyond_the_grace() -> None:
    assert settle(0, 100.0, {0: 0.0}, {0: 0.5})[0] == -GRACE_S


@given(
    shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5),
    steps=st.lists(st.floats(1e-3, 0.05), min_size=60, max_size=120),
    favoured=st.integers(0, 4),
)
@settings(max_examples=40)
def test_each_gets_its_share_of_any_period_however_urgent_the_others_are(
    shares: list[float], steps: list[float], favoured: int
) -> None:
    total = sum(shares)
    given_shares = {slot: share / max(1.0, total) for slot, share in enumerate(shares)}
    owed, got = dict.fromkeys(given_shares, 0.0), dict.fromkeys(given_shares, 0.0)
    passed_s = 0.0

    for seconds in steps:
        chosen = first(
            [claim(s, 0.0 if s == favoured else 1e9, owed_s=owed[s]) for s in given_shares]
        )
        assert chosen is not None
        owed = settle(chosen.slot, seconds, owed, given_shares)
        got[chosen.slot] += seconds
        passed_s += seconds
        most = GRACE_S + len(shares) * max(steps)
        for slot, share in given_shares.items():
            assert owed[slot] <= most
            assert got[slot] >= share * passed_s - most - GRACE_S
