"""vLLM's door: a KV connector that swaps preempted requests to host memory and back.

`sola_sched.Scheduler` drives the scheduler half: it orders copies when it preempts, or ahead of
need. vLLM asks the connector when a request resumes, allocates blocks for what is on the host,
and lets the request run once all workers have loaded it. Both halves decide for themselves, from
the same configuration, whether the model can be swapped; where not, they do nothing.

vLLM calls the scheduler half in the middle of its own step, where nothing of ours may raise. Where
something does, the bookkeeping is not trusted any more: all copies are forgotten, loads that were
not sent to the workers count as failed, and copies are made again when those under way have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from sola_sched.config.sola_config import SolaConfig
from sola_sched.config.swap import NUM_ENGINES, SwapConfig
from sola_sched.kv_swap.geometry import Geometry
from sola_sched.kv_swap.jobs import Job, Report
from sola_sched.kv_swap.ledger import Ledger
from sola_sched.kv_swap.manager import SwapManager
from sola_sched.kv_swap.packing import Packer
from sola_sched.kv_swap.support import is_latent, reason_against, without_int8
from sola_sched.kv_swap.tiles import TokenOrder
from sola_sched.kv_swap.worker import SwapWorker

logger = init_logger("vllm.sola_sched")

_GIB = 1 << 30
_T = TypeVar("_T")


@dataclass
class SwapMetadata(KVConnectorMetadata):
    """Jobs of one step, for the workers."""

    jobs: list[Job] = field(default_factory=list)


@dataclass
class SwapWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers ended in one step, for the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add the report of another worker."""
        assert isinstance(other, SwapWorkerMetadata)
        self.report.merge(other.report)
        return self


class SolaKVSwapConnector(KVConnectorBase_V1, SupportsHMA):
    """Host copies of requests' KV. See the module docstring and `SwapManager`.

    Options come from ``kv_connector_extra_config``, or else from ``swap`` in this package's part
    of ``--additional-config``.

    Attributes:
        manager: Scheduler half; None where nothing is swapped.
        worker: Worker half, built with the KV cache; None where nothing is swapped.
        options: The options in force, with ``int8`` turned to ``raw`` where it does not fit.
        accept: Asked before each load with request id, tokens on the accelerator and tokens that
            a load would restore; False has them computed again.
        on_report: Called with each report of the workers and the tokens of the loads that ended
            well with it.
        on_failure: Called with what was being done and what was raised, after all copies have been
            forgotten; False ends swapping.
        has_ended: No copies are made any more.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = swap_options(vllm_config)
        self.manager: SwapManager | None = None
        self.worker: SwapWorker | None = None
        self.accept: Callable[[str, int, int], bool] = lambda *_: True
        self.on_report: Callable[[Report, int], None] = lambda *_: None
        self.on_failure: Callable[[str, Exception], bool] = _log_failure
        self.has_ended = False
        self._starts_anew = False  # as soon as the workers have ended what is under way
        self._num_slots: int | None = None
        self._jobs: list[Job] = []  # of a worker's step
        self._planned: dict[str, int] = {}  # tokens already on the accelerator, by request
        self._seen: Report | None = None
        self._block_pool: Any = None
        self.reason = reason_against(vllm_config, kv_cache_config, self.options)
        is_scheduler = role == KVConnectorRole.SCHEDULER
        if self.reason:
            if is_scheduler:
                logger.info(
                    "sola_sched: KV is not swapped, preempted requests are computed again: %s",
                    self.reason,
                )
            return
        problem = without_int8(kv_cache_config) if self.options.mode == "int8" else None
        if problem and is_scheduler:
            logger.info("sola_sched: KV is swapped as raw bytes, not INT8: %s", problem)
        self._num_workers = workers_on_host(vllm_config)
        self.is_int8 = self.options.mode == "int8" and not problem
        self.geometry = Geometry.of(
            [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
            is_int8=self.is_int8,
            group_tokens=self.options.group_length,
            segment_tokens=self.options.segment_tokens,
        )
        if is_scheduler:
            world_size = vllm_config.parallel_config.world_size
            self._ledger = Ledger(
                world_size,
                lambda blocks: self._block_pool.touch(blocks),
                lambda blocks: self._block_pool.free_blocks(reversed(blocks)),
            )
            self.manager = SwapManager(
                self.geometry, world_size, self._ledger.pin, self._ledger.unpin
            )
            _recompute_failed_loads(vllm_config)
            logger.info(
                "sola_sched: preempted requests are swapped to the host (%s, %g GiB per worker)",
                f"INT8, {self.options.group_tokens} tokens a group" if self.is_int8 else "raw",
                self.options.host_gib,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A swap out is never owed to anybody: True would drop tokens at each preemption."""
        return False

    # Scheduler side -------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Remember the pool whose blocks are pinned."""
        self._block_pool = gpu_block_pool

    @property
    def num_pinned(self) -> int:
        """Blocks that are free but for a copy under way."""
        assert self.manager is not None
        return self.manager.num_pinned + self._ledger.num_given_up

    def awaits_load(self, req_id: str) -> bool:
        """Whether vLLM waits for the end of a load that workers have been sent."""
        return self._ledger.is_awaited(req_id)

    def save(self, request: Any, end_token: int, *, frees_blocks: bool) -> int:
        """Order the copy of a request's tokens up to `end_token`; returns the tokens ordered.

        With `frees_blocks` the request is about to be preempted; its blocks are still its own.
        What steps in flight compute beyond the tokens that are known are drafts. They may be
        rejected, and others computed in their place, so they are not copied.
        """
        assert self.manager is not None
        assert self._kv_cache_manager is not None
        return self._bounded(
            "ordering a copy",
            0,
            partial(
                self.manager.save,
                num_processed=max(0, request.num_computed_tokens - request.num_in_flight_tokens),
                frees_blocks=frees_blocks,
            ),
            request.request_id,
            self._kv_cache_manager.get_blocks(request.request_id).blocks,
            min(end_token, request.num_tokens),
        )

    def cut(self, req_id: str, num_tokens: int) -> None:
        """Forget what the copy has beyond so many tokens: others take their places."""
        if self.manager is not None:
            self._bounded("cutting a copy", None, self.manager.cut, req_id, num_tokens)

    def drop(self, req_id: str) -> None:
        """Forget the request's copy."""
        self._planned.pop(req_id, None)
        if self.manager is not None:
            self._bounded("dropping a copy", None, self.manager.drop, req_id)

    def lend_given_up(self, lent: dict[str, list[Any]]) -> None:
        """Unpin the blocks of loads that were given up; give them up again before anything else.

        Args:
            lent: Gets the blocks, by request.
        """
        self._ledger.lend_given_up(lent)

    def give_up_load(self, req_id: str, blocks: list[Any]) -> None:
        """The request does without the load under way, whose blocks are pinned until it ends."""
        self._ledger.give_up(req_id, blocks)

    def take_unsent(self) -> set[str]:
        """Requests for whose loads vLLM waits in vain. Call before each step."""
        return self._ledger.take_unsent()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens on the host beyond those on the accelerator; None while they are under way."""
        nothing: tuple[int | None, bool] = 0, False
        if self.manager is None:
            return nothing
        return self._bounded(
            "looking for a copy", nothing, self._find_copy, request, num_computed_tokens
        )

    def _find_copy(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        manager, req_id = self.manager, request.request_id
        assert manager is not None
        if not manager.covered_tokens(req_id):
            return 0, False
        if manager.is_saving(req_id) or self._ledger.is_loading(req_id):  # one that was given up
            return None, False
        num_tokens = manager.loadable(req_id, request.num_tokens - 1) - num_computed_tokens
        if num_tokens <= 0 or not self.accept(req_id, num_computed_tokens, num_tokens):
            return 0, False
        self._planned[req_id] = num_computed_tokens
        return num_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load into the blocks that vLLM has allocated."""
        if self.manager is None or not num_external_tokens:
            return
        self._ledger.promise(request.request_id)
        self._bounded(
            "ordering a load",
            None,
            self._order_load,
            request.request_id,
            blocks.get_block_ids(),
            num_external_tokens,
        )

    def _order_load(self, req_id: str, block_ids: Any, num_tokens: int) -> None:
        assert self.manager is not None
        first = self._planned.pop(req_id)
        self.manager.load(req_id, first, first + num_tokens, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups whose blocks are loaded whole; INT8 leaves the slots behind the last token."""
        if self.manager is None or self.is_int8:
            return ()
        return tuple(range(len(self.geometry.block_sizes)))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The jobs ordered since the last step."""
        if self.manager is None or not (self._starts_anew or self.manager.has_new_jobs):
            return SwapMetadata()
        none: list[Job] = []
        jobs = self._bounded("sending copies", none, self._take_jobs)
        self._ledger.send(jobs)
        return SwapMetadata(jobs)

    def _take_jobs(self) -> list[Job]:
        assert self.manager is not None
        if self._starts_anew and self._ledger.is_empty:
            self._starts_anew = False
            self.manager.report(Report(num_slots=self._num_slots))
        return self.manager.take_jobs()

    def update_connector_output(self, connector_output: Any) -> None:
        """Book the copies that ended."""
        metadata = connector_output.kv_connector_worker_meta
        if self.manager is None or metadata is None:
            return
        report = metadata.report
        if report.num_slots is not None:
            self._num_slots = report.num_slots
            if not report.num_slots:
                logger.warning(
                    "sola_sched: KV is not swapped, preempted requests are computed again: a "
                    "worker has no host memory for it"
                )
        over = self._ledger.book(report)  # vLLM does not wait for these any more
        for names in (connector_output.finished_recving, connector_output.failed_recving):
            if names:
                names -= over
        if not self._starts_anew:
            self._bounded("booking copies that ended", None, self._book, report)

    def _book(self, report: Report) -> None:
        assert self.manager is not None
        self.on_report(report, self.manager.report(report))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request's copy is of no more use."""
        self.drop(request.request_id)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether waiting, instead of preempting one more, will give blocks."""
        manager = self.manager
        if manager is None:
            return False
        if self._ledger.num_given_up:
            return True
        return self._bounded("looking at copies", False, lambda: manager.frees_blocks)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping until copies have ended."""
        manager = self.manager
        if manager is None:
            return False
        if not self._ledger.is_empty:
            return True
        return self._bounded("looking at copies", False, lambda: not manager.is_idle)

    def reset_cache(self) -> bool | None:
        """Forget all copies."""
        if self.manager is not None:
            self._bounded("dropping all copies", None, self.manager.drop_all)
        return True

    def _bounded(self, doing: str, otherwise: _T, action: Callable[..., _T], *args: Any) -> _T:
        """What the action returns; where it fails, `otherwise`, and all copies are forgotten."""
        if self.has_ended:
            return otherwise
        try:
            return action(*args)
        except Exception as error:
            self._forget_copies()
            self.has_ended = not self.on_failure(doing, error)
            return otherwise

    def end(self) -> None:
        """Make no copies any more, and forget those that there are."""
        self._forget_copies()
        self.has_ended = True

    def _forget_copies(self) -> None:
        assert self.manager is not None
        self._ledger.unpin_all()
        self.manager = self.manager.successor()
        self._starts_anew = True

    # Worker side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the host memory, now that the layout of the cache is known."""
        if self.reason:
            return
        try:
            self.worker = self._make_worker(kv_caches)
        except Exception as error:
            self._seen = Report(num_slots=0)  # so that no copy is ordered
            logger.warning(
                "sola_sched: this worker cannot copy KV, preempted requests are computed again",
                exc_info=error,
            )

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> SwapWorker:
        config = self._kv_cache_config
        packers = []
        for group in config.kv_cache_groups:
            caches = [kv_caches[name] for name in group.layer_names if name in kv_caches]
            packers.append(
                Packer(
                    caches,
                    config.num_blocks,
                    group.kv_cache_spec.block_size,
                    is_int8=self.is_int8,
                    group_tokens=self.geometry.group_tokens,
                    order=_token_order(group, caches[0]) if self.is_int8 else None,
                )
            )
        device = next(iter(kv_caches.values())).device
        return SwapWorker(
            self.geometry,
            packers,
            device,
            int(self.options.host_gib * _GIB),
            num_workers=self._num_workers,
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take this step's jobs. Not kept as metadata, for which vLLM would ask at each layer."""
        assert isinstance(connector_metadata, SwapMetadata)
        self._jobs = connector_metadata.jobs

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._jobs = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's copies to the accelerator, behind the step itself."""
        if self._jobs:
            self._submit(is_load=True)

    def wait_for_save(self) -> None:
        """Start this step's copies to the host, behind the step itself; waits for nothing."""
        if self._jobs:
            self._submit(is_load=False)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The loads that ended, failed ones included."""
        if self.worker is None or self.worker.is_idle:
            return KVConnectorTransferResults()
        self._seen, loaded, failed = self.worker.poll()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What ended, as found by `get_transfer_results` in this step."""
        report, self._seen = self._seen, None
        return None if report is None or report.is_empty else SwapWorkerMetadata(report)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step runs on blocks that are being loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: copies are of whole requests."""

    def shutdown(self) -> None:
        """Wait for copies under way."""
        if self.worker is not None:
            self.worker.close()

    def _submit(self, is_load: bool) -> None:
        if self.worker is not None:
            self.worker.submit(job for job in self._jobs if job.is_load == is_load)


def swap_options(vllm_config: Any) -> SwapConfig:
    """The options in force: the connector's own, or those of the scheduler."""
    transfer = vllm_config.kv_transfer_config
    own = dict(transfer.kv_connector_extra_config or {}) if transfer is not None else {}
    own.pop(NUM_ENGINES, None)
    if own:
        return SwapConfig.from_mapping(own)
    return SolaConfig.from_additional(vllm_config.additional_config).swap


def workers_on_host(vllm_config: Any) -> int:
    """Workers of the same server on one host, that share its memory."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    extra = (transfer.kv_connector_extra_config or {}) if transfer is not None else {}
    num_engines = max(extra.get(NUM_ENGINES, 1), parallel.data_parallel_size_local)
    return max(1, num_engines * int(parallel.local_world_size))


def _recompute_failed_loads(vllm_config: Any) -> None:
    """vLLM's scheduler reads the policy after it has made its connector; its default is "fail"."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info(
            "sola_sched: kv_load_failure_policy is set to 'recompute': a request whose copy cannot "
            "be loaded is computed again"
        )


def _log_failure(doing: str, error: Exception) -> bool:
    logger.warning(
        "sola_sched: %s failed; KV is not swapped any more, preempted requests are computed again",
        doing,
        exc_info=error,
    )
    return False


def _token_order(group: Any, cache: torch.Tensor) -> TokenOrder | None:
    """How vLLM's CPU attention orders a block; None where the order is the plain one."""
    if cache.device.type != "cpu" or is_latent(group):
        return None
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    _, num_heads, num_tokens, channels = cache.shape
    isa = _get_attn_isa(cache.dtype, num_tokens, channels // 2)

    def write(key: torch.Tensor, value: torch.Tensor, page: torch.Tensor) -> None:
        halves = page.view(1, num_heads, 2 * num_tokens, channels // 2).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(num_tokens), isa)

    return TokenOrder(torch.empty_like(cache[:1]), write)
