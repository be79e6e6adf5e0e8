"""Copies that a scheduler orders and its workers carry out, and what came of them: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one KV cache group that a job moves between blocks and a host image.

    An *image* is the packed form of consecutive tokens of one group, all layers of a worker; it
    fills its host slots in order.

    Attributes:
        group: Index of the KV cache group.
        image_first: Position of the image's first token.
        image_tokens: Tokens in the image, > 0.
        slots: Host slots of the image, in order.
        first_token, end_token: Positions that move; all of the image when it is saved.
        block_ids: Blocks that hold `first_token` to `end_token`, in token order.
    """

    group: int
    image_first: int
    image_tokens: int
    slots: tuple[int, ...]
    first_token: int
    end_token: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One copy; every worker carries it out and reports its end.

    Attributes:
        job_id: Unique in the life of an engine.
        req_id: The request whose KV it is.
        is_load: From the host into blocks; otherwise from blocks to the host.
        pieces: What moves, in this order.
    """

    job_id: int
    req_id: str
    is_load: bool
    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens moved, of the group that moves most."""
        moved: dict[int, int] = {}
        for piece in self.pieces:
            moved[piece.group] = moved.get(piece.group, 0) + piece.end_token - piece.first_token
        return max(moved.values(), default=0)


@dataclass(slots=True)
class Report:
    """What workers say after a step; `merge` adds up those of one step.

    Attributes:
        num_ended: Job to the number of workers that have ended it.
        failed: Jobs that failed on some worker.
        num_slots: Host slots of the smallest pool, in each worker's first report; else None.
        load_s, load_bytes, save_s, save_bytes: Seconds and bytes of the copies that ended, of
            all workers, failed ones not; their ratio is the bandwidth of one worker.
        num_loading: Workers on which loads ended.
    """

    num_ended: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    num_slots: int | None = None
    load_s: float = 0.0
    load_bytes: int = 0
    num_loading: int = 0
    save_s: float = 0.0
    save_bytes: int = 0

    def merge(self, other: Report) -> None:
        """Add another worker's report of the same step."""
        for job_id, count in other.num_ended.items():
            self.num_ended[job_id] = self.num_ended.get(job_id, 0) + count
        self.failed |= other.failed
        if other.num_slots is not None:
            self.num_slots = (
                other.num_slots if self.num_slots is None else min(self.num_slots, other.num_slots)
            )
        self.load_s += other.load_s
        self.load_bytes += other.load_bytes
        self.num_loading += other.num_loading
        self.save_s += other.save_s
        self.save_bytes += other.save_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.num_ended and self.num_slots is None


@dataclass(slots=True)
class SwapCounts:
    """Counters since start; tokens unless named otherwise.

    Attributes:
        num_swapped_out: Copies ordered of requests that were preempted.
        num_saved_ahead: Copies ordered of requests that went on running.
        num_swapped_in: Loads ordered.
        num_loaded: Loads that have ended, failed ones included.
        num_loaded_ahead: Loads ordered of requests that had no slot yet.
        num_refused: Not copied because the host was full; computed again.
        num_failed: Lost to copies that failed; computed again.
        num_evicted: Copies of running requests that gave way to others.
        num_not_worth: Not copied because computing them again delays less.
        num_failed_jobs: Copies that failed.
        saved_bytes, loaded_bytes: What ended copies moved to the host and back, of all workers.
    """

    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_loaded: int = 0
    num_loaded_ahead: int = 0
    num_saved_ahead: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_evicted: int = 0
    num_not_worth: int = 0
    num_failed_jobs: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
