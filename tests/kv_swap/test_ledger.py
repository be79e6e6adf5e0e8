"""What is under way is known whatever becomes of the manager."""

from __future__ import annotations

import pytest
from fake_blocks import BlockPool

pytest.importorskip("torch", reason="the package of the ledger needs torch")

from sola_sched.kv_swap.jobs import Job, Report
from sola_sched.kv_swap.ledger import Ledger

SAVE, LOAD = Job(1, "saved", False, ()), Job(2, "loaded", True, ())


def make_ledger(num_workers: int = 1) -> tuple[Ledger, BlockPool]:
    pool = BlockPool(9)
    return Ledger(num_workers, pool.pin, pool.unpin), pool


def test_a_job_is_under_way_until_every_worker_has_ended_it() -> None:
    ledger, _ = make_ledger(num_workers=2)
    ledger.send([SAVE, LOAD])
    ledger.book(Report({1: 2, 2: 1}))
    assert ledger.is_awaited("loaded")
    assert not ledger.is_empty

    ledger.book(Report({2: 1}))
    assert not ledger.is_loading("loaded")
    assert ledger.is_empty


def test_a_load_that_is_promised_and_not_sent_is_told_once() -> None:
    ledger, _ = make_ledger()
    ledger.promise("loaded")
    ledger.promise("lost")
    ledger.send([LOAD])

    assert ledger.take_unsent() == {"lost"}
    assert ledger.take_unsent() == set()


def test_blocks_of_a_given_up_load_are_kept_until_it_ends_and_those_of_copies_are_not() -> None:
    ledger, pool = make_ledger()
    ledger.send([SAVE, LOAD])
    read, written, others = pool.take(2), pool.take(3), pool.take(3)
    ledger.pin(read)
    pool.unpin(read)
    ledger.give_up("loaded", written)
    ledger.give_up("loaded", others)  # the load writes the first ones
    ledger.give_up("saved", others)  # nothing is loaded
    pool.unpin(written)
    pool.unpin(others)
    assert (pool.num_free, ledger.num_given_up) == (3, 3)
    assert ledger.is_loading("loaded")
    assert not ledger.is_awaited("loaded")

    ledger.unpin_all()
    ledger.unpin(read)
    assert pool.num_free == 5
    assert ledger.book(Report({1: 1, 2: 1})) == {"loaded"}
    assert pool.num_free == 8


def test_blocks_that_a_given_up_load_writes_can_be_lent_for_a_moment() -> None:
    ledger, pool = make_ledger()
    ledger.send([LOAD])
    ledger.give_up("loaded", written := pool.take(3))
    pool.unpin(written)
    lent: dict[str, list[object]] = {}
    ledger.lend_given_up(lent)
    assert pool.num_free == 8

    for req_id, blocks in lent.items():
        ledger.give_up(req_id, blocks)
    assert pool.num_free == 5
    assert ledger.book(Report({2: 1})) == {"loaded"}


def test_reports_of_jobs_that_are_not_known_change_nothing() -> None:
    ledger, _ = make_ledger()
    assert ledger.book(Report({7: 1})) == set()
    assert ledger.is_empty
