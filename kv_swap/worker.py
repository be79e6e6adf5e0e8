"""Worker half of KV swapping: the host pool, and the copies between it and the blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from sola_sched.kv_swap.geometry import Geometry
from sola_sched.kv_swap.host_pool import HostPool
from sola_sched.kv_swap.jobs import Job, Piece, Report
from sola_sched.kv_swap.packing import Packer, Tables
from sola_sched.kv_swap.transfer import Ended, StreamTransfers, ThreadTransfers, Transfers

logger = logging.getLogger("vllm.sola_sched")


_GIB = 1 << 30
#: Most of the available host memory that the workers of a host take: the rest needs some too.
_MAX_SHARE = 0.5


class SwapWorker:
    """Carries out the jobs of a scheduler on one worker.

    Args:
        geometry: As the scheduler's.
        packers: One per KV cache group.
        device: Where the blocks are.
        limit_bytes: Host memory to take.
        transfers: How copies run; None picks threads or streams by the device.
        num_workers: Workers that share the host's memory.
    """

    def __init__(
        self,
        geometry: Geometry,
        packers: Sequence[Packer],
        device: torch.device,
        limit_bytes: int,
        transfers: Transfers | None = None,
        num_workers: int = 1,
    ) -> None:
        self.geometry = geometry
        self._packers = packers
        self._device = device
        slot_bytes = max(packer.image_bytes(geometry.slot_tokens) for packer in packers)
        self.pool = _pool(slot_bytes, limit_bytes, num_workers)
        self._staging: dict[bool, torch.Tensor] = {}
        if transfers is None:
            on_cuda = device.type == "cuda"
            transfers = StreamTransfers(device) if on_cuda else ThreadTransfers()
        self.transfers = transfers
        if device.type == "cuda" and self.pool is not None:
            num_bytes = geometry.num_slots(geometry.segment_tokens) * self.pool.slot_bytes
            for is_load in (False, True):
                self._staging[is_load] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._has_reported = False
        self._num_under_way = 0
        self._num_failed = 0

    @property
    def num_slots(self) -> int:
        """Host slots of this worker."""
        return self.pool.num_slots if self.pool else 0

    @property
    def is_idle(self) -> bool:
        """Whether `poll` would have nothing to tell."""
        return self._has_reported and not self._num_under_way

    def submit(self, jobs: Iterable[Job]) -> None:
        """Start copies, ordered after all steps submitted so far."""
        for job in jobs:
            self._num_under_way += 1
            self.transfers.submit(job, self._copy)

    def poll(self) -> tuple[Report, set[str], set[str]]:
        """What ended since the last call, without waiting.

        Returns:
            The report for the scheduler, the requests whose loads ended, and those of them whose
            loads failed.
        """
        report = Report()
        if not self._has_reported:
            report.num_slots = self.num_slots
            self._has_reported = True
        loaded, failed = set(), set()
        for ended in self.transfers.poll():
            self._num_under_way -= 1
            job = ended.job
            report.num_ended[job.job_id] = 1
            if job.is_load:
                loaded.add(job.req_id)
            if ended.error is not None:
                self._log_failure(ended)
                report.failed.add(job.job_id)
                if job.is_load:
                    failed.add(job.req_id)
            elif job.is_load:
                report.load_s += ended.elapsed_s
                report.load_bytes += self._num_bytes(job)
            else:
                report.save_s += ended.elapsed_s
                report.save_bytes += self._num_bytes(job)
        report.num_loading = int(report.load_s > 0.0)
        return report, loaded, failed

    def close(self) -> None:
        """Wait for copies under way, and unlock the host memory."""
        self.transfers.close()
        if self.pool is not None:
            self.pool.close()

    def _copy(self, job: Job) -> None:
        for piece, tables in self._tables(job.pieces):
            if job.is_load:
                self._load(piece, tables)
            else:
                self._save(piece, tables)

    def _tables(self, pieces: Sequence[Piece]) -> list[tuple[Piece, Tables]]:
        """The pieces in their order, each with where its blocks are."""
        by_group: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_group.setdefault(piece.group, []).append(piece)
        found = {group: iter(self._packers[group].tables(mine)) for group, mine in by_group.items()}
        return [(piece, next(found[piece.group])) for piece in pieces]

    def _save(self, piece: Piece, tables: Tables) -> None:
        assert self.pool is not None
        packer = self._packers[piece.group]
        num_bytes = packer.image_bytes(piece.image_tokens)
        runs = list(self.pool.runs(piece.slots))
        if not self._staging and len(runs) == 1:
            packer.pack(piece, runs[0][:num_bytes], tables)
            return
        image = self._image(False, num_bytes)
        packer.pack(piece, image, tables)
        start = 0
        for run in runs:
            end = min(start + len(run), num_bytes)
            run[: end - start].copy_(image[start:end], non_blocking=True)
            start = end

    def _load(self, piece: Piece, tables: Tables) -> None:
        assert self.pool is not None
        packer = self._packers[piece.group]
        num_bytes = packer.image_bytes(piece.image_tokens)
        runs = list(self.pool.runs(piece.slots))
        if not self._staging and len(runs) == 1:
            packer.unpack(piece, runs[0][:num_bytes], tables)
            return
        image = self._image(True, num_bytes)
        start = 0
        for run in runs:
            end = min(start + len(run), num_bytes)
            image[start:end].copy_(run[: end - start], non_blocking=True)
            start = end
        packer.unpack(piece, image, tables)

    def _image(self, is_load: bool, num_bytes: int) -> torch.Tensor:
        """Contiguous memory beside the blocks; on a device each direction reuses its own."""
        if self._staging:
            return self._staging[is_load][:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _num_bytes(self, job: Job) -> int:
        return sum(self._packers[p.group].image_bytes(p.image_tokens) for p in job.pieces)

    def _log_failure(self, ended: Ended) -> None:
        self._num_failed += 1
        if self._num_failed == 1:
            logger.warning(
                "sola_sched: a KV copy %s the host failed, its tokens are computed again (later "
                "failures are counted, not logged): %r",
                "from" if ended.job.is_load else "to",
                ended.error,
            )


def _pool(slot_bytes: int, limit_bytes: int, num_workers: int) -> HostPool | None:
    """The pool, None where not a single slot fits or the machine refuses the memory."""
    available = _available_bytes()
    share = _MAX_SHARE / num_workers
    if available is not None and limit_bytes > available * share:
        logger.warning(
            "sola_sched: 'swap.host_gib' asks for %.1f GiB of host memory, %.1f GiB are available; "
            "this worker takes %.1f GiB, one of %d that share them",
            limit_bytes / _GIB,
            available / _GIB,
            available * share / _GIB,
            num_workers,
        )
        limit_bytes = int(available * share)
    if not limit_bytes:
        return None
    if limit_bytes < slot_bytes:
        logger.warning(
            "sola_sched: no host memory for swapped KV, preempted requests are computed again: a "
            "slot takes %d bytes, this worker may take %d; raise 'swap.host_gib'",
            slot_bytes,
            limit_bytes,
        )
        return None
    try:
        return HostPool(slot_bytes, limit_bytes)
    except (ValueError, RuntimeError) as error:  # page-locking fails with RuntimeError
        logger.warning(
            "sola_sched: no host memory for swapped KV (%d bytes asked for), preempted requests "
            "are computed again: %s",
            limit_bytes,
            error,
        )
        return None


#: By the versions of control groups: what a container may have in all, what it has taken, and where
#: it says of which that is.
_LIMITS = (
    (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.current",
        "/sys/fs/cgroup/memory.stat",
    ),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
#: Of that, files which the system keeps as long as nobody needs the memory, as those of the weights
#: are after the start: where a control group has others below it, with these.
_FILES = ("active_file", "inactive_file")


def _available_bytes(path: str = "/proc/meminfo") -> int | None:
    """Host memory that can be taken without swapping; None where the system does not tell.

    In a container no more than its limit leaves.
    """
    found = [_left_of_limit(*paths) for paths in _LIMITS]
    try:
        with open(path, encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    return min((each for each in found if each is not None), default=None)


def _left_of_limit(limit: str, taken: str, parts: str) -> int | None:
    """What a limit leaves, bytes; None without one ("max")."""
    try:
        most, used = (int(Path(each).read_text(encoding="ascii")) for each in (limit, taken))
    except (OSError, ValueError):
        return None
    return min(most, max(0, most - used + _file_bytes(parts)))


def _file_bytes(parts: str) -> int:
    """Files that are kept in memory, bytes; 0 where that is not told."""
    try:
        lines = Path(parts).read_text(encoding="ascii").splitlines()
        found = {name: int(number) for name, number in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in _FILES)
