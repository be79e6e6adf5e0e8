"""Copies, slots and pins are conserved, and what is loaded is what was saved.

A machine plays a scheduler with its workers at random: requests compute, are preempted, resume,
lose tokens, end; copies end late, in any order, or fail. Memory is modelled by names: a slot holds
the tokens that a job wrote, and a load must find exactly those that the request has by then.
"""

from __future__ import annotations

from operator import not_
from typing import Any

import pytest
from fake_blocks import Block, BlockPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

torch = pytest.importorskip("torch", reason="needs torch")

from sola_sched.kv_swap.geometry import Geometry  # noqa: E402  after the check for torch
from sola_sched.kv_swap.host_copy import first_held  # noqa: E402
from sola_sched.kv_swap.jobs import Job, Report  # noqa: E402
from sola_sched.kv_swap.manager import SwapManager  # noqa: E402

BLOCK_SIZE = 4
NUM_BLOCKS = 40
NUM_SLOTS = 8


class Request:
    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        self.blocks: list[Block] = []
        self.num_tokens = 0
        self.tokens: list[int] = []  # all that were ever computed and still count
        self.loading: tuple[int, int] | None = None


class SwapMachine(RuleBasedStateMachine):
    """One KV cache group, two workers."""

    @initialize(is_int8=st.booleans())
    def start(self, is_int8: bool) -> None:
        self.geometry = Geometry.of([BLOCK_SIZE], is_int8=is_int8, group_tokens=3, segment_tokens=8)
        self.pool = BlockPool(NUM_BLOCKS)
        self.manager = SwapManager(self.geometry, 2, self.pool.pin, self.pool.unpin)
        self.manager.report(Report(num_slots=NUM_SLOTS))
        self.requests: dict[str, Request] = {}
        self.jobs: list[list[Job]] = [[], []]  # not yet ended, by worker
        self.written: dict[int, tuple[int, list[int]]] = {}  # slot: first position and tokens
        self.num_created = 0
        self.num_computed = 0
        # Blocks of requests that ended while they were loaded: vLLM frees them at the load's end.
        self.orphaned: dict[str, list[Block]] = {}

    @rule()
    def arrive(self) -> None:
        request = Request(f"r{self.num_created}")
        self.num_created += 1
        self.requests[request.req_id] = request

    def running(self) -> list[Request]:
        return [r for r in self.requests.values() if r.blocks and r.loading is None]

    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        able = [r for r in self.requests.values() if r.loading is None]
        if not able:
            return
        request = data.draw(st.sampled_from(able))
        if not request.blocks and self.manager.covered_tokens(request.req_id):
            return  # resumes by a load, or loses its copy first
        need = -(-(request.num_tokens + num_tokens) // BLOCK_SIZE) - len(request.blocks)
        if need <= self.pool.num_free:
            request.blocks += self.pool.take(max(0, need))
            request.num_tokens += num_tokens
            while len(request.tokens) < request.num_tokens:
                self.num_computed += 1
                request.tokens.append(self.num_computed)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if not self.running():
            return
        request = data.draw(st.sampled_from(self.running()))
        self.save(request, request.num_tokens, frees_blocks=True)
        self.pool.unpin(request.blocks)
        request.blocks, request.num_tokens = [], 0

    @rule(data=st.data(), keeps=st.integers(0, 30))
    def take_tokens_back(self, data: st.DataObject, keeps: int) -> None:
        """A session goes on from an earlier token."""
        gone = [r for r in self.requests.values() if not r.blocks]
        if gone:
            request = data.draw(st.sampled_from(gone))
            del request.tokens[keeps:]
            self.manager.cut(request.req_id, keeps)

    @rule(data=st.data())
    def save_ahead(self, data: st.DataObject) -> None:
        if not self.running():
            return
        request = data.draw(st.sampled_from(self.running()))
        self.save(request, request.num_tokens // BLOCK_SIZE * BLOCK_SIZE, frees_blocks=False)

    def save(self, request: Request, end_token: int, *, frees_blocks: bool) -> None:
        before = self.manager.covered_tokens(request.req_id)
        ordered = self.manager.save(
            request.req_id,
            [request.blocks],
            end_token,
            num_processed=end_token,
            frees_blocks=frees_blocks,
        )
        assert 0 <= ordered <= max(0, end_token - before)
        self.give_out()

    @rule(data=st.data(), local_blocks=st.integers(0, 2))
    def resume(self, data: st.DataObject, local_blocks: int) -> None:
        gone = [r for r in self.requests.values() if not r.blocks]
        if not gone:
            return
        request = data.draw(st.sampled_from(gone))
        if self.manager.is_saving(request.req_id):
            return
        end = self.manager.loadable(request.req_id, data.draw(st.integers(1, 60)))
        first = local_blocks * BLOCK_SIZE
        need = -(-end // BLOCK_SIZE)
        if end <= first or need > self.pool.num_free:
            return
        request.blocks = self.pool.take(need)
        del request.tokens[end:]
        self.manager.load(request.req_id, first, end, [[b.block_id for b in request.blocks]])
        request.loading = (first, end)
        self.give_out()

    def give_out(self) -> None:
        for job in self.manager.take_jobs():
            for jobs in self.jobs:
                jobs.append(job)
            request = self.requests[job.req_id]
            for piece in job.pieces:
                for slot in piece.slots:
                    if job.is_load:
                        start, tokens = self.written[slot]
                        assert start == piece.image_first
                        held = tokens[piece.first_token - start : piece.end_token - start]
                        assert held == request.tokens[piece.first_token : piece.end_token]
                    else:
                        tokens = request.tokens[piece.image_first : piece.end_token]
                        self.written[slot] = (piece.image_first, tokens)
            if job.is_load:
                covered = [
                    token
                    for piece in job.pieces
                    for token in range(piece.first_token, piece.end_token)
                ]
                assert request.loading is not None
                assert covered == list(range(*request.loading))

    @precondition(lambda self: any(self.jobs))
    @rule(data=st.data(), fails=st.booleans())
    def end_a_copy(self, data: st.DataObject, fails: bool) -> None:
        worker = data.draw(st.sampled_from([jobs for jobs in self.jobs if jobs]))
        job = data.draw(st.sampled_from(worker))
        worker.remove(job)
        self.manager.report(Report({job.job_id: 1}, failed={job.job_id} if fails else set()))
        request = self.requests.get(job.req_id)
        if not job.is_load or any(job in jobs for jobs in self.jobs):
            return
        if request is None:
            self.pool.unpin(self.orphaned.pop(job.req_id))
            return
        assert request.loading is not None
        if self.manager.host_tokens(job.req_id):
            request.num_tokens = request.loading[1]
        else:
            self.pool.unpin(request.blocks)
            request.blocks = []
        request.loading = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end_a_request(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests.pop(req_id)
        self.manager.drop(req_id)
        if request.loading is not None:
            self.orphaned[req_id] = request.blocks
        else:
            self.pool.unpin(request.blocks)

    @rule(count=st.integers(0, 2))
    def let_copies_go_when_the_host_is_full(self, count: int) -> None:
        names = [r.req_id for r in self.running()][:count]
        self.manager.evictable = lambda: names

    @invariant()
    def slots_are_accounted_for(self) -> None:
        self.manager.check_integrity()

    def teardown(self) -> None:
        """When all is over, every block and slot is free again."""
        if not hasattr(self, "manager"):
            return
        while any(self.jobs):
            for worker in self.jobs:
                for job in list(worker):
                    worker.remove(job)
                    self.manager.report(Report({job.job_id: 1}))
        for request in self.requests.values():
            self.manager.drop(request.req_id)
            self.pool.unpin(request.blocks)
        for blocks in self.orphaned.values():
            self.pool.unpin(blocks)
        self.manager.check_integrity()
        assert self.manager.is_idle
        assert self.manager.num_free_slots == NUM_SLOTS
        assert self.pool.num_free == NUM_BLOCKS - 1


SwapMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestSwapping = SwapMachine.TestCase


def make_manager(
    *,
    num_slots: int = 8,
    block_sizes: tuple[int, ...] = (4,),
    world_size: int = 1,
    is_int8: bool = False,
    segment_tokens: int = 8,
) -> tuple[SwapManager, BlockPool]:
    geometry = Geometry.of(
        block_sizes, is_int8=is_int8, group_tokens=None, segment_tokens=segment_tokens
    )
    pool = BlockPool(NUM_BLOCKS)
    manager = SwapManager(geometry, world_size, pool.pin, pool.unpin)
    manager.report(Report(num_slots=num_slots))
    return manager, pool


def save(manager: SwapManager, blocks: list[list[Block]], end: int, *, frees: bool = True) -> int:
    return manager.save("a", blocks, end, num_processed=end, frees_blocks=frees)


def end_all(manager: SwapManager) -> list[Job]:
    jobs = manager.take_jobs()
    manager.report(Report({job.job_id: 1 for job in jobs}))
    return jobs


def test_blocks_are_pinned_until_every_worker_has_copied_them() -> None:
    manager, pool = make_manager(world_size=2)
    blocks = pool.take(2)

    save(manager, [blocks], 7)
    pool.unpin(blocks)
    (job,) = manager.take_jobs()
    pinned = [pool.num_free]
    for _ in range(2):
        manager.report(Report({job.job_id: 1}))
        pinned.append(pool.num_free)

    assert pinned == [NUM_BLOCKS - 3, NUM_BLOCKS - 3, NUM_BLOCKS - 1]
    assert manager.host_tokens("a") == 7


def test_the_next_swap_out_copies_only_what_is_new() -> None:
    manager, pool = make_manager()
    blocks = pool.take(4)
    save(manager, [blocks], 10)
    end_all(manager)

    save(manager, [blocks], 15)
    (job,) = end_all(manager)

    # Tokens 8 and 9 share a block with new ones, and raw images hold whole blocks.
    assert [(p.first_token, p.end_token) for p in job.pieces] == [(8, 15)]
    assert manager.host_tokens("a") == 15


@pytest.mark.parametrize("segment_tokens", [2, 4, 8])
@pytest.mark.parametrize("is_int8", [False, True])
def test_what_is_copied_again_gives_its_slots_back(is_int8: bool, segment_tokens: int) -> None:
    manager, pool = make_manager(num_slots=60, is_int8=is_int8, segment_tokens=segment_tokens)
    blocks = pool.take(10)
    save(manager, [blocks], 10)
    end_all(manager)
    for num_tokens in range(11, 21):
        before = manager.loadable("a", num_tokens - 1)
        manager.load("a", 0, before, [[block.block_id for block in blocks]])
        end_all(manager)
        save(manager, [blocks], num_tokens)
        jobs = manager.take_jobs()
        for job in jobs:
            manager.report(Report({job.job_id: 1}))
            assert manager.loadable("a", 99) >= before, "what is there stays there"
        manager.check_integrity()

    assert manager.host_tokens("a") == 20
    most = 5 if not is_int8 and segment_tokens >= 4 else 20
    assert manager.num_slots - manager.num_free_slots <= most


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("restored", [5, 8, 9])
def test_what_a_load_leaves_out_is_copied_anew(restored: int, is_int8: bool) -> None:
    """The request computes it again after the load, and other tokens may come in its place."""
    manager, pool = make_manager(is_int8=is_int8)
    blocks = pool.take(5)
    save(manager, [blocks], 11)
    end_all(manager)
    manager.load("a", 0, restored, [[1, 2, 3]])
    end_all(manager)

    ordered = save(manager, [blocks], 18)
    (piece, *_) = [p for job in end_all(manager) for p in job.pieces]

    assert ordered == 18 - restored
    assert piece.first_token == (restored if is_int8 else restored - restored % 4)


@pytest.mark.parametrize(
    ("kept", "left", "used"), [(12, 11, 3), (11, 11, 3), (9, 9, 3), (8, 8, 2), (3, 3, 2), (0, 0, 0)]
)
def test_a_copy_is_cut_to_the_tokens_that_a_request_keeps(kept: int, left: int, used: int) -> None:
    """Two images, of tokens 0 to 7 and 8 to 10; each is in its slots until all of it goes."""
    manager, pool = make_manager()
    save(manager, [pool.take(3)], 11)
    end_all(manager)

    manager.cut("a", kept)

    assert manager.loadable("a", 100) == left
    assert manager.num_slots - manager.num_free_slots == used
    manager.check_integrity()


def test_a_copy_that_is_cut_within_its_window_is_of_no_use() -> None:
    manager, pool = make_manager(block_sizes=(4, 4))
    recent = pool.take(2)
    save(manager, [pool.take(4), [pool.blocks[0], pool.blocks[0], *recent]], 14)
    end_all(manager)

    manager.cut("a", 13)

    assert (manager.num_copies, manager.num_free_slots) == (0, manager.num_slots)


def test_a_copy_stops_where_the_host_is_full() -> None:
    manager, pool = make_manager(num_slots=3)
    blocks = pool.take(5)

    ordered = save(manager, [blocks], 20)

    assert (ordered, manager.counts.num_refused) == (8, 12)


def test_copies_of_running_requests_give_way() -> None:
    manager, pool = make_manager(num_slots=2)
    first, second = pool.take(2), pool.take(2)
    manager.save("old", [first], 8, num_processed=8, frees_blocks=False)
    end_all(manager)
    manager.evictable = lambda: ["old"]

    assert save(manager, [second], 8) == 8
    assert (manager.host_tokens("old"), manager.counts.num_evicted) == (0, 8)


@pytest.mark.parametrize("is_under_way", [False, True])
def test_nobody_gives_way_where_that_is_not_enough(is_under_way: bool) -> None:
    manager, pool = make_manager(num_slots=4)
    first, second, third = pool.take(3), pool.take(1), pool.take(4)
    manager.save("waits", [first], 12, num_processed=12, frees_blocks=True)
    end_all(manager)
    manager.save("old", [second], 4, num_processed=4, frees_blocks=False)
    if not is_under_way:
        end_all(manager)
    manager.evictable = lambda: ["old"]

    assert save(manager, [third], 16) == 0
    end_all(manager)
    assert (manager.host_tokens("old"), manager.counts.num_evicted) == (4, 0)


def test_a_failed_copy_leaves_what_comes_before_it() -> None:
    manager, pool = make_manager()
    save(manager, [pool.take(6)], 24)
    jobs = manager.take_jobs()

    manager.report(Report({j.job_id: 1 for j in jobs}, failed={jobs[1].job_id}))

    assert len(jobs) == 3
    assert manager.host_tokens("a") == 8
    assert manager.num_free_slots == 6


def test_a_failed_load_forgets_the_copy() -> None:
    manager, pool = make_manager()
    save(manager, [pool.take(2)], 8)
    end_all(manager)
    manager.load("a", 0, 7, [[5, 6]])
    (job,) = manager.take_jobs()

    manager.report(Report({job.job_id: 1}, failed={job.job_id}))

    assert (manager.host_tokens("a"), manager.num_free_slots) == (0, 8)


def test_only_loads_that_ended_well_say_how_many_tokens_were_loaded() -> None:
    """What a failed one took is in no report."""
    manager, pool = make_manager(world_size=2)
    for name, end in (("a", 7), ("b", 5)):
        manager.save(name, [pool.take(2)], end, num_processed=end, frees_blocks=True)
    manager.report(Report({job.job_id: 2 for job in manager.take_jobs()}))
    manager.load("a", 0, 7, [[1, 2]])
    manager.load("b", 0, 5, [[3, 4]])
    first, second = (job.job_id for job in manager.take_jobs())

    assert manager.report(Report({first: 1, second: 1}, failed={first})) == 0
    assert manager.report(Report({first: 1, second: 1})) == 5


def test_slots_outlive_a_request_that_ends_while_they_are_written() -> None:
    manager, pool = make_manager()
    save(manager, [pool.take(2)], 8)
    (job,) = manager.take_jobs()

    manager.drop("a")
    in_use = manager.num_slots - manager.num_free_slots
    manager.report(Report({job.job_id: 1}))

    assert (in_use, manager.num_free_slots) == (2, 8)


def test_a_window_saves_and_restores_what_is_inside() -> None:
    """Two groups; the second has lost its first two blocks to a window."""
    manager, pool = make_manager(block_sizes=(4, 4))
    full, recent = pool.take(4), pool.take(2)
    windowed = [pool.blocks[0], pool.blocks[0], *recent]
    save(manager, [full, windowed], 14)
    saved = [p for job in end_all(manager) for p in job.pieces]

    manager.load("a", 4, 14, [[21, 22, 23, 24], [0, 0, 33, 34]])
    (job,) = manager.take_jobs()

    assert [(p.group, p.first_token, p.end_token) for p in saved] == [
        (0, 0, 8),
        (0, 8, 14),
        (1, 8, 14),
    ]
    assert [(p.group, p.first_token, p.end_token, p.block_ids) for p in job.pieces] == [
        (0, 4, 8, (22,)),
        (0, 8, 14, (23, 24)),
        (1, 8, 14, (33, 34)),
    ]
    assert manager.loadable("a", 13) == 0  # its window would reach further back


def half_in_a_window(pool: BlockPool) -> list[list[Block]]:
    """24 tokens, of which the second group has the last eight."""
    return [pool.take(6), [pool.blocks[0]] * 4 + pool.take(2)]


def test_a_window_whose_end_the_host_has_no_room_for_is_not_kept() -> None:
    """What had left the window is nowhere, so nothing before its end can be restored."""
    manager, pool = make_manager(block_sizes=(4, 4), num_slots=5)

    assert save(manager, half_in_a_window(pool), 24) == 0
    assert (manager.num_copies, manager.covered_tokens("a")) == (0, 0)
    assert (manager.counts.num_swapped_out, manager.counts.num_refused) == (0, 24)
    end_all(manager)
    assert manager.num_free_slots == 5
    manager.check_integrity()


@pytest.mark.parametrize(("failed", "num_copies"), [(0, 0), (1, 0), (2, 0)])
def test_nor_is_one_whose_copy_fails(failed: int, num_copies: int) -> None:
    manager, pool = make_manager(block_sizes=(4, 4), num_slots=20)
    save(manager, half_in_a_window(pool), 24)
    jobs = manager.take_jobs()
    manager.report(Report(failed={jobs[failed].job_id}))

    assert (manager.num_copies, manager.counts.num_failed) == (num_copies, 24)
    manager.report(Report({job.job_id: 1 for job in jobs}))
    assert manager.num_free_slots == 20
    assert pool.num_free == NUM_BLOCKS - 1 - 8
    manager.check_integrity()


def test_what_is_coming_counts_copies_under_way_but_not_one_that_ends_within_its_window() -> None:
    manager, pool = make_manager(block_sizes=(4, 4), num_slots=20)
    blocks = half_in_a_window(pool)
    manager.save("a", blocks, 20, num_processed=22, frees_blocks=False)

    assert (manager.covered_tokens("a"), manager.coming("a", 100)) == (20, 0)
    save(manager, blocks, 24)
    assert [manager.coming("a", limit) for limit in (100, 24, 21)] == [24, 24, 0]
    assert manager.loadable("a", 100) == manager.coming("b", 100) == 0
    end_all(manager)
    assert manager.loadable("a", 100) == 24


def test_a_segment_looks_at_its_own_blocks_alone() -> None:
    """Else a copy of 128k tokens in segments of 256 takes seconds of the scheduler's."""
    looked: list[int] = []

    class Blocks(list[int]):
        def __getitem__(self, index: Any) -> Any:
            looked.append(index)
            return super().__getitem__(index)

    held = Blocks([1] * 8192)
    assert first_held(4096, 4352, 16, held, not_) == 4096
    held[256:260] = [0] * 4
    assert first_held(4096, 4352, 16, held, not_) == 4160
    assert first_held(4096, 4112, 16, held, not_) == 4112
    assert len(looked) <= 10
