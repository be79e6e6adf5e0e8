"""Scheduler half of KV swapping: who has a copy on the host, and which copies are under way.

Nothing here touches memory. A copy of a request is a list of segments, in token order, each an
image per KV cache group in host slots. The KV of a token never changes, so a request that was
swapped in keeps its copy, and the next swap out adds what is new. Where other tokens may take the
place of those that were copied, the copy is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sola_sched.kv_swap.geometry import Geometry
from sola_sched.kv_swap.host_copy import HostCopy, Image, Segment, first_held
from sola_sched.kv_swap.host_pool import PoolExhaustedError, SlotAllocator
from sola_sched.kv_swap.jobs import Job, Piece, Report, SwapCounts


@dataclass(slots=True, eq=False)
class _InFlight:
    job: Job
    segments: tuple[Segment, ...]
    pins: list[Any]
    num_left: int
    frees_blocks: bool = False
    has_failed: bool = False


class SwapManager:
    """Keeps the host copies of one engine.

    Args:
        geometry: Sizes shared with the workers.
        world_size: Workers that report the end of each job.
        pin: Called with blocks that must not be reused until `unpin` gets the same list.
        unpin: See `pin`.
    """

    def __init__(
        self,
        geometry: Geometry,
        world_size: int,
        pin: Callable[[list[Any]], None],
        unpin: Callable[[list[Any]], None],
    ) -> None:
        self.geometry = geometry
        self.counts = SwapCounts()
        #: Requests whose copies may go when the host is full, first to go first.
        self.evictable: Callable[[], Iterable[str]] = tuple
        self._world_size = world_size
        self._pin, self._unpin = pin, unpin
        self._slots: SlotAllocator | None = None
        self._copies: dict[str, HostCopy] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._loading: set[str] = set()
        self._new_jobs: list[Job] = []
        self._next_job_id = 0

    def successor(self) -> SwapManager:
        """An empty one to take the place of this one after a failure.

        It refuses all copies until it is told of host slots, whose users must have ended by then.
        """
        successor = SwapManager(self.geometry, self._world_size, self._pin, self._unpin)
        successor.counts, successor.evictable = self.counts, self.evictable
        successor._next_job_id = self._next_job_id
        return successor

    # State ----------------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        """Host slots that can be allocated; 0 until the workers have reported theirs."""
        return self._slots.num_free_slots if self._slots else 0

    @property
    def num_slots(self) -> int:
        """Host slots in all; 0 until the workers have reported theirs."""
        return self._slots.num_slots if self._slots else 0

    @property
    def is_idle(self) -> bool:
        """Whether no copy is ordered or under way."""
        return not self._in_flight

    @property
    def frees_blocks(self) -> bool:
        """Whether copies under way hold blocks that nobody else does."""
        return any(entry.frees_blocks for entry in self._in_flight.values())

    @property
    def num_saving_ahead(self) -> int:
        """Copies under way of requests that run on."""
        return sum(not e.frees_blocks and not e.job.is_load for e in self._in_flight.values())

    @property
    def num_pinned(self) -> int:
        """Blocks that are free but for a copy under way."""
        return sum(len(e.pins) for e in self._in_flight.values() if e.frees_blocks)

    @property
    def num_copies(self) -> int:
        """Requests with a copy on the host, or on the way there."""
        return len(self._copies)

    def req_ids(self) -> list[str]:
        """Requests with a copy on the host, or on the way there."""
        return list(self._copies)

    def host_tokens(self, req_id: str) -> int:
        """Tokens of the request that are on the host, from its first on."""
        copy = self._copies.get(req_id)
        return copy.num_saved if copy else 0

    def covered_tokens(self, req_id: str) -> int:
        """Like `host_tokens`, with copies under way counted as done."""
        copy = self._copies.get(req_id)
        return copy.end_token if copy else 0

    def coming(self, req_id: str, limit: int) -> int:
        """Like `loadable`, with copies under way counted as done."""
        copy = self._copies.get(req_id)
        return copy.usable(copy.end_token, limit) if copy else 0

    def is_saving(self, req_id: str) -> bool:
        """Whether a copy to the host is under way for the request."""
        copy = self._copies.get(req_id)
        return copy is not None and any(not segment.is_saved for segment in copy.segments)

    def loadable(self, req_id: str, limit: int) -> int:
        """Tokens, from the first on, that a load can restore when at most `limit` are wanted."""
        copy = self._copies.get(req_id)
        return copy.usable(copy.num_saved, limit) if copy else 0

    # Commands -------------------------------------------------------------------------------

    def save(
        self,
        req_id: str,
        blocks: Sequence[Sequence[Any]],
        end_token: int,
        *,
        num_processed: int,
        frees_blocks: bool,
    ) -> int:
        """Order copies of what is not yet on the host, up to `end_token`.

        Args:
            req_id: The request.
            blocks: Its blocks, for each group those from token 0 on; null blocks, outside a
                window, may come first.
            end_token: Position behind the last token to copy. Its KV is written by steps that are
                scheduled already, or by the one that is being scheduled; drafts, which a step may
                reject, are not to be copied.
            num_processed: Tokens that no step in flight can still take back.
            frees_blocks: The request gives up its blocks; otherwise it runs on.

        Returns:
            Tokens ordered; fewer than asked for where host memory is short.
        """
        copy = self._copies.setdefault(req_id, HostCopy())
        if frees_blocks:
            for entry in self._in_flight.values():
                if entry.job.req_id == req_id and not entry.job.is_load:
                    entry.frees_blocks = True
        before = first = copy.end_token
        if not self.geometry.is_int8:  # a partial block is copied again, whole
            first -= first % self.geometry.block_alignment
        while before < end_token and first < end_token:
            end = min(first + self.geometry.segment_tokens, end_token)
            segment = self._new_segment(req_id, first, end, blocks)
            if segment is None:
                self.counts.num_refused += end_token - copy.end_token
                break
            copy.segments.append(segment)
            if not segment.is_whole(len(blocks)):
                copy.min_tokens = max(copy.min_tokens, num_processed)
            self._order_save(req_id, segment, blocks, frees_blocks)
            first = end
        ordered = copy.end_token - before
        if frees_blocks and copy.end_token < copy.min_tokens:  # it stays within its window
            self.counts.num_refused += copy.end_token
            self.drop(req_id)
            return 0
        if frees_blocks:
            self.counts.num_swapped_out += ordered
        else:
            self.counts.num_saved_ahead += ordered
        if not copy.segments:
            del self._copies[req_id]
        return ordered

    def load(
        self, req_id: str, first_token: int, end_token: int, block_ids: Sequence[Sequence[int]]
    ) -> int:
        """Order the copy of tokens `first_token` to `end_token` into new blocks.

        What the copy has beyond them is forgotten, since the request computes it anew.

        Args:
            req_id: The request; `loadable` must reach `end_token`.
            first_token: Start of a block in every group.
            end_token: Position behind the last token.
            block_ids: The request's blocks from token 0 on, for each group; 0 is the null block.

        Returns:
            Tokens ordered.
        """
        copy = self._copies[req_id]
        assert first_token % self.geometry.block_alignment == 0 or self.geometry.is_int8, (
            f"load of {req_id!r} from token {first_token} must start at a block"
        )
        assert copy.min_tokens <= end_token <= copy.num_saved, (
            f"load of {req_id!r} up to {end_token}, on the host {copy.min_tokens} to "
            f"{copy.num_saved}"
        )
        self.cut(req_id, end_token)
        pieces: list[Piece] = []
        segments: list[Segment] = []
        for index, segment in enumerate(copy.segments):
            following = copy.segments[index + 1 : index + 2]
            end = min(segment.end_token, end_token, *(s.first_token for s in following))
            first = max(segment.first_token, first_token)
            if first >= end:
                continue
            segments.append(segment)
            pieces += segment.load_pieces(self.geometry, first, end, block_ids)
        self._start(Job(self._job_id(), req_id, True, tuple(pieces)), tuple(segments), [])
        self._loading.add(req_id)
        self.counts.num_swapped_in += end_token - first_token
        return end_token - first_token

    def drop(self, req_id: str) -> None:
        """Forget the request's copy; slots come back once no copy under way uses them."""
        copy = self._copies.pop(req_id, None)
        if copy is None:
            return
        for entry in self._in_flight.values():
            if entry.job.req_id == req_id and not entry.job.is_load:
                self._release(entry)  # the copy is of no use: what it reads no longer matters
        for segment in copy.segments:
            self._drop_segment(segment)

    def cut(self, req_id: str, num_tokens: int) -> None:
        """Forget what the copy has beyond so many tokens: others will take their places."""
        copy = self._copies.get(req_id)
        if copy is None or copy.end_token <= num_tokens:
            return
        if num_tokens < max(1, copy.min_tokens):
            self.drop(req_id)
            return
        while copy.segments[-1].first_token >= num_tokens:
            self._drop_segment(copy.segments.pop())
        for segment in copy.segments:
            segment.end_token = min(segment.end_token, num_tokens)

    def drop_all(self) -> None:
        """Forget all copies, e.g. because the model's weights have changed."""
        for req_id in list(self._copies):
            self.drop(req_id)
        for entry in self._in_flight.values():
            if not entry.job.is_load:  # of copies that had failed
                self._release(entry)

    @property
    def has_new_jobs(self) -> bool:
        """Whether `take_jobs` would give any."""
        return bool(self._new_jobs)

    def take_jobs(self) -> list[Job]:
        """The jobs ordered since the last call; workers get each exactly once."""
        jobs, self._new_jobs = self._new_jobs, []
        return jobs

    def report(self, report: Report) -> int:
        """Book what the workers have ended; returns the tokens of the loads that ended well."""
        num_loaded = 0
        if report.num_slots:
            self._slots = SlotAllocator(report.num_slots)
        self.counts.saved_bytes += report.save_bytes
        self.counts.loaded_bytes += report.load_bytes
        for job_id in report.failed:
            if job_id in self._in_flight:
                self._failed(self._in_flight[job_id])
        for job_id, count in report.num_ended.items():
            entry = self._in_flight[job_id]
            entry.num_left -= count
            assert entry.num_left >= 0, f"job {job_id} was reported too often"
            if not entry.num_left:
                self._ended(entry)
                if entry.job.is_load and not entry.has_failed:
                    num_loaded += entry.job.num_tokens
        return num_loaded

    def check_integrity(self) -> None:
        """Assert that slots, copies and jobs agree."""
        if self._slots is None:
            assert not self._copies
            assert not self._in_flight
            return
        self._slots.check_integrity()
        owned = [
            segment
            for copy in self._copies.values()
            for segment in copy.segments
            if not segment.is_dropped
        ]
        segments = {id(segment): segment for segment in owned}
        for entry in self._in_flight.values():
            segments.update({id(segment): segment for segment in entry.segments})
        slots = [s for segment in segments.values() for i in segment.images for s in i.slots]
        assert len(slots) == len(set(slots)), "a host slot belongs to two images"
        num_used = self.num_slots - self.num_free_slots
        assert len(slots) == num_used, f"{num_used} slots in use, {len(slots)} accounted for"
        for copy in self._copies.values():
            ends = [segment.end_token for segment in copy.segments]
            assert ends == sorted(ends), f"segments out of order: {ends}"

    # Helpers --------------------------------------------------------------------------------

    def _job_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id

    def _new_segment(
        self, req_id: str, first: int, end: int, blocks: Sequence[Sequence[Any]]
    ) -> Segment | None:
        """A segment with its slots, or None where the host is full."""
        starts = [
            first_held(first, end, block_size, held, attrgetter("is_null"))
            for held, block_size in zip(blocks, self.geometry.block_sizes, strict=True)
        ]
        needs = [self.geometry.num_slots(max(0, end - start)) for start in starts]
        slots = self._allocate(sum(needs), req_id)
        if slots is None:
            return None
        images, used = [], 0
        for group, (start, need) in enumerate(zip(starts, needs, strict=True)):
            if need:
                images.append(Image(group, start, end - start, tuple(slots[used : used + need])))
            used += need
        return Segment(first, end, tuple(images))

    def _allocate(self, num_slots: int, req_id: str) -> list[int] | None:
        if self._slots is None or num_slots > self._slots.num_slots:
            return None
        if num_slots > self._slots.num_free_slots:
            kept = {req_id, *self._loading}
            others = [each for each in self.evictable() if each not in kept]
            num_free = self._slots.num_free_slots + sum(map(self._num_idle_slots, others))
            if num_slots > num_free:
                return None
            for other in others:
                if num_slots <= self._slots.num_free_slots:
                    break
                self.counts.num_evicted += self.host_tokens(other)
                self.drop(other)
        try:
            return self._slots.allocate(num_slots)
        except PoolExhaustedError:
            return None

    def _num_idle_slots(self, req_id: str) -> int:
        """Slots of a copy that come free as soon as it is dropped."""
        copy = self._copies.get(req_id)
        idle = [] if copy is None else [each for each in copy.segments if not each.num_users]
        return sum(len(image.slots) for segment in idle for image in segment.images)

    def _order_save(
        self, req_id: str, segment: Segment, blocks: Sequence[Sequence[Any]], frees_blocks: bool
    ) -> None:
        pieces: list[Piece] = []
        pins: list[Any] = []
        for image in segment.images:
            sources = blocks[image.group][image.blocks(self.geometry)]
            pins += sources
            pieces.append(image.piece(block.block_id for block in sources))
        self._pin(pins)
        job = Job(self._job_id(), req_id, False, tuple(pieces))
        self._start(job, (segment,), pins, frees_blocks)

    def _start(
        self, job: Job, segments: tuple[Segment, ...], pins: list[Any], frees: bool = False
    ) -> None:
        for segment in segments:
            segment.num_users += 1
        self._in_flight[job.job_id] = _InFlight(job, segments, pins, self._world_size, frees)
        self._new_jobs.append(job)

    def _failed(self, entry: _InFlight) -> None:
        """The copy ends where the failed segment begins; a failed load spoils all of it."""
        self.counts.num_failed_jobs += 1
        entry.has_failed = True
        req_id = entry.job.req_id
        copy = self._copies.get(req_id)
        if copy is None or not any(segment in copy.segments for segment in entry.segments):
            return  # it was dropped; there may be a new one
        if entry.job.is_load:
            self.counts.num_failed += entry.job.num_tokens
            self.drop(req_id)
            return
        (segment,) = entry.segments
        index = copy.segments.index(segment)
        spoilt = copy.segments[index:]
        self.counts.num_failed += spoilt[-1].end_token - spoilt[0].first_token
        del copy.segments[index:]
        for dropped in spoilt:
            self._drop_segment(dropped)
        if not copy.segments:
            del self._copies[req_id]
        elif entry.frees_blocks and copy.end_token < copy.min_tokens:
            self.counts.num_failed += copy.end_token
            self.drop(req_id)

    def _ended(self, entry: _InFlight) -> None:
        del self._in_flight[entry.job.job_id]
        self._release(entry)
        if entry.job.is_load:
            self.counts.num_loaded += entry.job.num_tokens
            self._loading.discard(entry.job.req_id)
        for segment in entry.segments:
            segment.num_users -= 1
            segment.is_saved = True
            if segment.is_dropped:
                self._free_slots(segment)
            elif not entry.job.is_load:
                self._drop_replaced(entry.job.req_id, segment)

    def _drop_replaced(self, req_id: str, segment: Segment) -> None:
        """Forget what a segment on the host replaces: those before it that it has all of."""
        segments = self._copies[req_id].segments
        for each in segments[: segments.index(segment)]:
            if each.first_token >= segment.first_token and each.end_token <= segment.end_token:
                segments.remove(each)
                self._drop_segment(each)

    def _release(self, entry: _InFlight) -> None:
        pins, entry.pins, entry.frees_blocks = entry.pins, [], False
        if pins:
            self._unpin(pins)

    def _drop_segment(self, segment: Segment) -> None:
        segment.is_dropped = True
        self._free_slots(segment)

    def _free_slots(self, segment: Segment) -> None:
        if segment.num_users:
            return
        assert self._slots is not None
        self._slots.free(slot for image in segment.images for slot in image.slots)
