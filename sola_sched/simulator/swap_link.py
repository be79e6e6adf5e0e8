"""The workers of KV swapping in virtual time: a link to the host, and nothing that is copied.

The scheduler half of the connector is the real one. Each direction of the link carries one copy
after the other. As on a device, a copy starts when the step that it was ordered with has ended,
and its end is noticed when a later step is launched and told with that step's output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from sola_sched.kv_swap.connector import SolaKVSwapConnector, SwapWorkerMetadata
from sola_sched.kv_swap.jobs import Job, Report

#: Bytes of a value of the KV cache, and of a scale with its offset.
_VALUE_BYTES, _SCALE_BYTES = 2, 4
#: Seconds that a copy takes whatever its size: launches and the event.
_LATENCY_S = 50e-6
_GIB = 1 << 30


@dataclass(frozen=True)
class LinkSpeed:
    """What the link moves.

    Attributes:
        kv_bytes_per_token: KV of one token on each GPU, 16 bits a value.
        bytes_per_s: In each direction, on each GPU.
    """

    kv_bytes_per_token: int
    bytes_per_s: float


class SwapLink:
    """Plays the workers of one engine.

    Args:
        connector: The scheduler's half.
        speed: Of the link.
    """

    def __init__(self, connector: SolaKVSwapConnector, speed: LinkSpeed) -> None:
        assert connector.manager is not None
        self._geometry = connector.manager.geometry
        self._speed = speed
        self._ratio = 1.0
        if self._geometry.is_int8:
            group = self._geometry.group_tokens or self._geometry.segment_tokens
            self._ratio = (1 + _SCALE_BYTES / group) / _VALUE_BYTES
        slot_bytes = self._num_bytes(self._geometry.slot_tokens)
        self._num_slots: int | None = int(connector.options.host_gib * _GIB / slot_bytes)
        self._free_s = {False: 0.0, True: 0.0}
        self._under_way: dict[bool, deque[tuple[float, float, Job]]] = {
            False: deque(),
            True: deque(),
        }

    def submit(self, jobs: Iterable[Job], at_s: float) -> None:
        """Start copies that were ordered with a step, when it ends at `at_s`."""
        for job in jobs:
            start_s = max(at_s, self._free_s[job.is_load])
            end_s = start_s + _LATENCY_S + self._job_bytes(job) / self._speed.bytes_per_s
            self._free_s[job.is_load] = end_s
            self._under_way[job.is_load].append((start_s, end_s, job))

    def poll(self, at_s: float) -> KVConnectorOutput | None:
        """What a step that is launched at `at_s` tells of copies that have ended."""
        report, loaded = Report(num_slots=self._num_slots), set()
        self._num_slots = None
        for is_load, under_way in self._under_way.items():
            while under_way and under_way[0][1] <= at_s:
                start_s, end_s, job = under_way.popleft()
                report.num_ended[job.job_id] = 1
                if is_load:
                    loaded.add(job.req_id)
                    report.load_s += end_s - start_s
                    report.load_bytes += self._job_bytes(job)
                else:
                    report.save_s += end_s - start_s
                    report.save_bytes += self._job_bytes(job)
        if report.is_empty:
            return None
        return KVConnectorOutput(
            finished_recving=loaded or None, kv_connector_worker_meta=SwapWorkerMetadata(report)
        )

    def _job_bytes(self, job: Job) -> int:
        return sum(self._num_bytes(piece.image_tokens) for piece in job.pieces)

    def _num_bytes(self, num_tokens: int) -> int:
        if not self._geometry.is_int8:
            size = self._geometry.block_alignment
            num_tokens = -(-num_tokens // size) * size
        return int(num_tokens * self._speed.kv_bytes_per_token * self._ratio)


def name_connector(vllm_config: Any, scheduler_cls: type[Any]) -> None:
    """Give an engine's configuration the connector, as the plug-in does for a real engine."""
    from vllm.config import KVTransferConfig

    from sola_sched.config.swap import CONNECTOR

    vllm_config.scheduler_config.scheduler_cls = scheduler_cls
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR, kv_role="kv_producer", kv_load_failure_policy="recompute"
    )
