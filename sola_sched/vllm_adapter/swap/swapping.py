"""Swapping as the scheduler sees it: what a preempted request takes along, and what it must not.

The scheduler's hooks call `Swapping` around vLLM's own methods. Where nothing is swapped there is
none.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from sola_sched.config.swap import CONNECTOR
from sola_sched.core.state import WAITING, StepPlan, StepState
from sola_sched.vllm_adapter.names import lacking
from sola_sched.vllm_adapter.swap.swapping_ahead import SwappingAhead
from sola_sched.vllm_adapter.versions import Seams

if TYPE_CHECKING:
    from sola_sched.kv_swap.connector import SolaKVSwapConnector
    from sola_sched.kv_swap.jobs import Report
    from sola_sched.kv_swap.manager import SwapManager
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin

logger = init_logger("vllm.sola_sched")

#: How requests wait that may hold KV and need no more input.
_RESUMES = (
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING,
)


class Swapping:
    """Takes requests to the host when they are preempted, or before.

    Args:
        scheduler: Whose requests they are.
        seams: Of the same scheduler.
        connector: Its scheduler half, with copies.

    Attributes:
        connector: The same.
        inexact: Requests on the accelerator whose KV went through INT8.
    """

    def __init__(
        self, scheduler: SolaSchedulerMixin, seams: Seams, connector: SolaKVSwapConnector
    ) -> None:
        from sola_sched.kv_swap.policy import Link

        self._scheduler, self._seams = scheduler, seams
        self._monitor, self._guard = scheduler.sola_monitor, scheduler.sola_guard
        self.connector = connector
        self.inexact: set[str] = set()
        self._link = Link()
        self._refused: set[str] = set()  # counted as refused since they were preempted
        self._ahead = SwappingAhead(scheduler, seams, self)
        #: Tokens of a waiting request that the plan of this step expects from its copy; 0 where the
        #: copy is not to be loaded.
        self._expected: dict[str, int] = {}
        connector.accept = self._accepts
        connector.on_report = self._observe_copies
        connector.on_failure = self._lost_copies
        self.copies.evictable = self._evictable
        if connector.is_int8:
            self._keep_inexact_blocks_out_of_the_prefix_cache()

    @property
    def copies(self) -> SwapManager:
        """The host copies; others after a failure."""
        assert self.connector.manager is not None
        return self.connector.manager

    def _keep_inexact_blocks_out_of_the_prefix_cache(self) -> None:
        """Publish no block of a request that was restored from INT8.

        That holds for the restored blocks and for all later ones: they were computed from those.
        Everything that is published passes through this one method of vLLM's.
        """
        coordinator = self._scheduler.kv_cache_manager.coordinator
        publish = coordinator.cache_blocks

        def publish_if_exact(request: Request, num_computed_tokens: int) -> None:
            if request.request_id not in self.inexact:
                publish(request, num_computed_tokens)

        coordinator.cache_blocks = publish_if_exact

    # Keep, swap or compute again ------------------------------------------------------------

    def _accepts(self, req_id: str, num_before: int, num_tokens: int) -> bool:
        """vLLM's question whether to load a copy; where we cannot tell, it is used."""
        try:
            return self._accepts_load(req_id, num_before, num_tokens)
        except Exception as error:
            self._guard.failed("weighing a copy", error)
            return True

    def _accepts_load(self, req_id: str, num_before: int, num_tokens: int) -> bool:
        """`is_worth_loading`; where it is not, the link is told, once since the preemption."""
        if self.is_worth_loading(req_id, num_before, num_tokens):
            return True
        if req_id not in self._refused:
            self._refused.add(req_id)
            self._link.count_refusal(
                self._monitor.cost, num_tokens, num_before, len(self._scheduler.running)
            )
        return False

    def is_worth_loading(self, req_id: str, num_before: int, num_tokens: int) -> bool:
        """Whether loading a copy is faster than computing what it holds.

        Args:
            req_id: Whose copy.
            num_before: Tokens that are on the accelerator.
            num_tokens: Tokens behind those, to be loaded or computed.
        """
        if self.connector.options.always:
            return True
        expected = self._expected.get(req_id)
        if expected is not None and not num_before:
            return expected > 0  # as it was planned
        return self._link.is_worth_loading(
            self._monitor.cost, num_tokens, num_before, len(self._scheduler.running)
        )

    def _observe_copies(self, report: Report, num_loaded: int) -> None:
        try:
            self._link.observe(report, num_loaded)
        except Exception as error:
            self._guard.failed("learning from a copy", error)

    def _evictable(self) -> list[str]:
        """Copies of running requests, the one that is preempted last first."""
        return [request.request_id for request in self._scheduler.running]

    # What vLLM does with requests -----------------------------------------------------------

    def leaves(self, request: Request, is_reset: bool) -> None:
        """A request is about to be preempted; `is_reset` if what it has is no longer wanted."""
        self.inexact.discard(request.request_id)
        self._refused.discard(request.request_id)
        try:
            self._save_leaving(request, is_reset)
        except Exception as error:  # what was copied of it is not trusted
            self._guard.failed("saving a preempted request", error)
            self.connector.drop(request.request_id)

    def _save_leaving(self, request: Request, is_reset: bool) -> None:
        """Copy a request that is about to lose its blocks, where the copy is of use."""
        req_id, num_tokens = request.request_id, request.num_computed_tokens
        if is_reset:
            self.connector.drop(req_id)
        elif request.skip_reading_prefix_cache:  # vLLM would load nothing
            return
        elif self._accepts_load(req_id, 0, num_tokens):
            self.connector.save(request, num_tokens, frees_blocks=True)
        else:
            self.copies.counts.num_not_worth += num_tokens

    def has_loaded(self, request: Request) -> None:
        """A load has ended. Call before vLLM publishes its blocks."""
        has_failed = request.request_id in self._scheduler.failed_recving_kv_req_ids
        if self.connector.is_int8 and not has_failed:
            self.inexact.add(request.request_id)

    def tokens_of(self, request: Request) -> list[int]:
        """Its tokens so far; for `continued`."""
        return list(request.all_token_ids)

    def continued(self, session: Request, before: list[int]) -> None:
        """vLLM has given a session its next input; `before` are its tokens until then."""
        try:
            self._cut_copy(session, before)
        except Exception as error:
            self._guard.failed("cutting the copy of a session", error)
            self.connector.drop(session.request_id)

    def _cut_copy(self, session: Request, before: list[int]) -> None:
        """Of the last answer of a session, not all tokens are kept."""
        pairs = zip(before, session.all_token_ids, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.connector.cut(session.request_id, kept)

    def ended(self, request: Request) -> None:
        """A request has ended."""
        self.inexact.discard(request.request_id)
        self._refused.discard(request.request_id)

    # Around a reset -------------------------------------------------------------------------

    def begin_reset(self, takes_running: bool) -> dict[str, list[Any]]:
        """Drop all copies, since the weights may have changed, and free what vLLM will not free.

        Args:
            takes_running: Whether vLLM takes the blocks of running requests.

        Returns:
            By request, blocks that a load goes on writing; for `end_reset`.
        """
        being_written: dict[str, list[Any]] = {}
        try:
            self._settle_unsent_loads()
            self._take_back_loads(takes_running, being_written)
            self._forget_expected()
            self.connector.reset_cache()
        except Exception as error:
            self._guard.failed("taking back what is being loaded", error)
        return being_written

    def end_reset(self, being_written: dict[str, list[Any]]) -> None:
        """vLLM has reset its cache: from now on nobody may have these blocks."""
        for req_id, blocks in being_written.items():
            self.connector.give_up_load(req_id, blocks)

    def _take_back_loads(self, takes_running: bool, being_written: dict[str, list[Any]]) -> None:
        """Free all blocks that wait for a load to end, or for the loaded request to run.

        vLLM resets its prefix cache only when every block is free, and takes blocks from running
        requests alone.

        Args:
            takes_running: Otherwise only those of requests that have ended are freed.
            being_written: Gets, for each request, the blocks that a load goes on writing, before
                they are freed. Nobody may have them before its end.
        """
        scheduler = self._scheduler
        for request in [*scheduler.requests.values()]:
            req_id = request.request_id
            is_loading = self.connector.awaits_load(req_id)
            if request.is_finished():
                has_blocks = is_loading
            else:
                has_blocks = takes_running and request.status in _RESUMES and _has_kv(request)
            if not has_blocks:
                continue
            if is_loading:
                groups = scheduler.kv_cache_manager.get_blocks(req_id).blocks
                being_written[req_id] = [b for group in groups for b in group if not b.is_null]
            if request.is_finished():
                scheduler._free_blocks(request)
            else:
                self.take_back(request)
        self.connector.lend_given_up(being_written)

    def take_back(self, request: Request) -> None:
        """A request that waits with KV waits without; its host copy is kept."""
        scheduler, req_id = self._scheduler, request.request_id
        self._ahead.residents.discard(req_id)
        self.inexact.discard(req_id)
        scheduler.finished_recving_kv_req_ids.discard(req_id)
        scheduler.failed_recving_kv_req_ids.discard(req_id)
        scheduler.kv_holding_waiting.remove_requests([request])
        scheduler.deferred_waiting.discard(request)
        scheduler._inflight_prefills.discard(request)
        scheduler.kv_cache_manager.free(request)
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            has_run = bool(request.num_preemptions)
            request.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING
        request.num_computed_tokens = 0
        scheduler.waiting.prepend_request(request)

    # When a booking has failed ---------------------------------------------------------------

    def _lost_copies(self, doing: str, error: Exception) -> bool:
        """All copies are forgotten, since a booking failed; whether new ones may be made."""
        self._guard.book("forgetting copies", self._forget_expected)
        return self._guard.swapping_failed(doing, error)

    def _forget_expected(self) -> None:
        """What the planner expects of copies is not to be had."""
        table = self._monitor.table
        rows = [table.row_of[name] for name in self._expected if name in table.row_of]
        table.num_computed[[row for row in rows if table.phase[row] == WAITING]] = 0
        self._expected.clear()

    def begin_step(self) -> None:
        """Call before each step: vLLM may wait for loads that were never sent."""
        try:
            self._settle_unsent_loads()
        except Exception as error:
            self._guard.failed("ending loads that were not sent", error)

    def _settle_unsent_loads(self) -> None:
        """As if they had failed: whoever waits for one is computed again."""
        scheduler = self._scheduler
        for req_id in self.connector.take_unsent():
            request = scheduler.requests.get(req_id)
            if request is None:
                continue
            if request.is_finished():  # its blocks wait for the end of the load
                scheduler._free_blocks(request)
            elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                scheduler.failed_recving_kv_req_ids.add(req_id)
                scheduler.finished_recving_kv_req_ids.add(req_id)

    def end(self) -> None:
        """Copy nothing any more: whoever is preempted is computed again."""
        self.connector.end()

    # Around planning ------------------------------------------------------------------------

    def expect_loads(self, state: StepState) -> None:
        """Tell the planner what swapped requests need not compute. Call before planning."""
        state.reload_s_per_token = self._link.s_per_token
        state.num_leaving_blocks = self.connector.num_pinned
        table = self._monitor.table
        before, self._expected = self._expected, {}
        for req_id in self.copies.req_ids():
            request = self._scheduler.requests[req_id]
            row = table.row_of[req_id]
            if table.phase[row] != WAITING:
                continue
            num_tokens = self.copies.coming(req_id, request.num_tokens - 1)
            # One token is left to compute: vLLM admits nobody in a step without tokens for it.
            most = min(num_tokens, int(table.prefill_target[row]) - 1)
            is_used = num_tokens > 0 and self._accepts_load(req_id, 0, num_tokens)
            self._expected[req_id] = most if is_used else 0
        for req_id, num_tokens in before.items():
            row = table.row_of.get(req_id, -1)
            is_waiting = row >= 0 and table.phase[row] == WAITING
            if is_waiting and self._expected.get(req_id, 0) < num_tokens:
                # What was expected then is not to be had: loads are slow, or a copy has failed.
                table.num_computed[row] = self._num_cached(self._scheduler.requests[req_id])
        for req_id, num_tokens in self._expected.items():
            row = table.row_of[req_id]
            table.num_computed[row] = max(num_tokens, table.num_computed[row])

    def _num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that the prefix cache has."""
        return self._seams.num_cached_tokens(request) if self._seams.caches_prefixes else 0

    def with_swaps(self, state: StepState, plan: StepPlan) -> StepPlan:
        """The plan with victims chosen in time. Call after planning.

        Copies ahead are ordered, unless plans are only counted.
        """
        if not self.connector.options.ahead:
            return plan
        return self._ahead.order(state, plan, is_followed=self._scheduler.sola_config.steer)

    def frees_soon(self) -> bool:
        """Whether blocks come free by themselves, as soon as copies have ended."""
        return self.connector.has_pending_block_frees()

    def has_plenty(self, state: StepState) -> bool:
        """Whether memory will be enough for a while, and nobody waits for a copy."""
        from sola_sched.kv_swap.policy import has_plenty

        return has_plenty(state) and not self._ahead.residents

    # Figures --------------------------------------------------------------------------------

    def num_bytes(self) -> tuple[int, int]:
        """Bytes copied to the host and back since start."""
        return self.copies.counts.saved_bytes, self.copies.counts.loaded_bytes

    def stats(self) -> dict[str, Any]:
        """For `sola_stats`."""
        manager, cost = self.copies, self._monitor.cost
        counts, per_token = manager.counts, self._link.s_per_token
        is_known = per_token is not None and cost.is_ready
        return {
            "mode": "int8" if self.connector.is_int8 else "raw",
            "has_ended": self.connector.has_ended,
            "num_host_slots": manager.num_slots,
            "num_free_host_slots": manager.num_free_slots,
            "load_tokens_per_s": 1.0 / per_token if per_token else 0.0,
            "crossover_tokens": self._link.crossover_tokens(cost, len(self._scheduler.running))
            if is_known
            else None,
            **{name: getattr(counts, name) for name in counts.__slots__},
        }


def make_swapping(scheduler: SolaSchedulerMixin, seams: Seams) -> Swapping | None:
    """Take hold of the connector; None where KV is not swapped. Call after vLLM's constructor."""
    connector: Any = getattr(scheduler, "connector", None)
    if type(connector).__name__ != CONNECTOR or connector.manager is None:
        return None
    missing = lacking(scheduler, swapping=True)
    if missing:
        connector.manager = None
        logger.warning(
            "sola_sched: KV is not swapped, preempted requests are computed again: this vLLM "
            "has no %s",
            ", ".join(missing),
        )
        return None
    return Swapping(scheduler, seams, connector)


def _has_kv(request: Request) -> bool:
    """Whether one that waits has blocks; a load that failed has taken its computed tokens."""
    is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return is_loading or request.num_computed_tokens > 0
