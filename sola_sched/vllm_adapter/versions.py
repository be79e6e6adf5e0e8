"""Supported vLLM versions, and the few places where they differ.

This is the only module that knows about versions. `Seams` is what the scheduler steers; that all of
it is there (`sola_sched.vllm_adapter.names`) is checked at start.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from sola_sched.config.swap import CONNECTOR
from sola_sched.errors import IncompatibleVllmError
from sola_sched.vllm_adapter.names import lacking

#: The status of a streaming session without a next input.
WAITS_FOR_INPUT = "WAITING_FOR_STREAMING_REQ"
#: The status of a request whose KV is being loaded, or has been and vLLM has not looked since.
IS_LOADED = "WAITING_FOR_REMOTE_KVS"
#: The status of a request whose grammar is being compiled.
WAITS_FOR_GRAMMAR = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
#: Of a request's `kv_transfer_params`: another engine has computed its prompt, and sends the KV.
_IS_AWAITED = "do_remote_prefill"
#: vLLM's own connectors that heed it.
_AWAITING = frozenset((
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector",
    "MoRIIOConnector",
))  # fmt: skip
#: First supported and first unsupported (major, minor).
MIN_VERSION, END_VERSION = (0, 28), (0, 34)
#: Environment variable with one more version that is let in, e.g. 0.34, to be tried.
TRY = "SOLA_SCHED_TRY_VLLM"
_NONE = (-1, -1)

logger = logging.getLogger("vllm.sola_sched")

#: Whether the longest chunk of a prefill grows where few requests are there; from 0.31 on.
_ADAPTIVE = "adaptive_long_prefill_threshold"


def check_version(version: str) -> tuple[int, int]:
    """Return (major, minor) of a vLLM version that is supported, or to be tried.

    Raises:
        IncompatibleVllmError: The version is outside the supported range and not the one that the
            environment names in `TRY`, or unreadable.
    """
    parsed = _parsed(version)
    if not MIN_VERSION <= parsed < END_VERSION:
        if parsed != _NONE and parsed == _parsed(os.environ.get(TRY, "")):
            logger.warning(
                "vLLM %s is not supported; it is tried because %s says so.", version, TRY
            )
            return parsed
        last = END_VERSION[1] - 1
        raise IncompatibleVllmError(
            f"sola_sched steers vLLM {MIN_VERSION[0]}.{MIN_VERSION[1]} to {END_VERSION[0]}.{last} "
            f"(found vLLM {version}); install a supported vLLM, e.g. "
            f"pip install 'vllm=={END_VERSION[0]}.{last}.*', or a sola_sched made for yours."
        )
    return parsed


def _parsed(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else _NONE


def _awaits_kv(transfer: Mapping[str, Any]) -> bool:
    """Whether a KV connector gets prompts that another engine has computed, if a request says so.

    A client may say so to any engine. Connectors from outside vLLM are taken to do as told.

    Args:
        transfer: Fields of vLLM's `KVTransferConfig`; a part of a `MultiConnector` may lack some.
    """
    name = transfer.get("kv_connector")
    if name in (None, CONNECTOR) or transfer.get("kv_role") == "kv_producer":
        return False
    if name == "MultiConnector":
        parts = (transfer.get("kv_connector_extra_config") or {}).get("connectors", ())
        return any(map(_awaits_kv, parts))
    return bool(transfer.get("kv_connector_module_path")) or name in _AWAITING


class Rooms(NamedTuple):
    """What a prefill may lack.

    Attributes:
        num_embeddings: Room in the encoder cache, in embeddings.
        num_blocks: Free blocks of the KV cache.
        num_slots: Free slots.
    """

    num_embeddings: int
    num_blocks: int
    num_slots: int


class Seams:
    """The attributes and methods of vLLM's scheduler that are steered.

    Args:
        scheduler: A scheduler built by vLLM's own constructor.

    Attributes:
        apart: While vLLM schedules, who has KV and waits for an adapter slot: in none of its queues
            then.

    Raises:
        IncompatibleVllmError: Something that a step needs is missing.
    """

    def __init__(self, scheduler: Any) -> None:
        missing = lacking(scheduler)
        if missing:
            raise IncompatibleVllmError(
                f"vLLM must have {', '.join(missing)} (this build lacks "
                f"{'it' if len(missing) == 1 else 'them'}); use an unmodified vLLM "
                f"{MIN_VERSION[0]}.{MIN_VERSION[1]} to {END_VERSION[0]}.{END_VERSION[1] - 1}."
            )
        self._scheduler = scheduler
        self.apart: list[Any] = []
        # 0.31 separated the admission cap from the number of model-runner slots.
        self.slots_attribute = (
            "max_num_active_reqs"
            if hasattr(scheduler, "max_num_active_reqs")
            else "max_num_running_reqs"
        )
        # A KV connector that is not ours: what it finds of a prompt is known at the admission.
        transfer = scheduler.vllm_config.kv_transfer_config
        self.loads_by_others = transfer is not None and transfer.kv_connector not in (
            None,
            CONNECTOR,
        )
        self._awaits_kv = transfer is not None and _awaits_kv(vars(transfer))
        # Up to 0.30, skipped requests wait in a queue of their own that is drained first.
        self._has_skipped = hasattr(scheduler, "skipped_waiting")

    def defers_prefills(self, is_throttled: bool) -> bool:
        """Whether vLLM starts and continues no prefill in the next step, for the cadence's sake.

        Asked before anybody is held: vLLM itself goes by the requests that it sees.

        Args:
            is_throttled: What the engine core says: this step is none of those at which data
                parallel ranks have agreed to start prefills.
        """
        scheduler = self._scheduler
        if scheduler.prefill_capacity_bound:
            return False
        # From 0.33 on an engine by itself counts the steps since its last one with prefills.
        interval = getattr(scheduler, "local_prefill_interval", 1)
        since = getattr(scheduler, "num_executed_steps", 0) + 1
        since -= getattr(scheduler, "last_prefill_step", 0)
        is_held = is_throttled or 1 <= since < interval
        return is_held and any(not request.is_prefill_chunk for request in scheduler.running)

    def num_ready(self) -> int:
        """Waiting requests that vLLM does not put off by itself, as it counts them."""
        scheduler = self._scheduler
        if self._has_skipped:
            return len(scheduler.waiting)
        return int(scheduler.get_request_counts()[1]) - len(scheduler.deferred_waiting)

    def max_chunk(self) -> int | None:
        """Tokens of one prefill in the next step, at most, by `--long-prefill-token-threshold`."""
        scheduler = self._scheduler
        config = scheduler.scheduler_config
        threshold = int(config.long_prefill_token_threshold)
        if threshold <= 0:
            return None
        is_adaptive = getattr(scheduler, _ADAPTIVE, None)
        if is_adaptive is None:  # up to 0.30
            return threshold
        num_requests = sum(scheduler.get_request_counts())
        if num_requests <= 1:
            return None
        return max(threshold, config.max_num_batched_tokens // num_requests if is_adaptive else 0)

    def chunk_limit(self) -> tuple[int, bool]:
        """That threshold, and whether it adapts to the requests there."""
        scheduler = self._scheduler
        threshold = scheduler.scheduler_config.long_prefill_token_threshold
        return threshold, getattr(scheduler, _ADAPTIVE, False)

    def limit_chunks(self, threshold: int, is_adaptive: bool) -> None:
        """Set both."""
        scheduler = self._scheduler
        scheduler.scheduler_config.long_prefill_token_threshold = threshold
        if hasattr(scheduler, _ADAPTIVE):
            setattr(scheduler, _ADAPTIVE, is_adaptive)

    @property
    def num_slots(self) -> int:
        """Requests that may hold a slot at once, parked streaming sessions subtracted."""
        slots = int(getattr(self._scheduler, self.slots_attribute))
        return slots - int(getattr(self._scheduler, "num_waiting_for_streaming_input", 0))

    def add_slots(self, number: int) -> None:
        """Let so many more requests run at once, or fewer."""
        slots = getattr(self._scheduler, self.slots_attribute)
        setattr(self._scheduler, self.slots_attribute, slots + number)

    def merge_skipped(self) -> list[Any]:
        """Bring requests that only waited for a passing condition back under the plan's order.

        Returns:
            For `part_skipped`, all that were in vLLM's queue of skipped ones; empty if none moves.
        """
        if not self._has_skipped:
            return []
        scheduler = self._scheduler
        ready = [
            request
            for request in scheduler.skipped_waiting
            if request.num_computed_tokens == 0 and self._is_ready(request)
        ]
        if not ready:
            return []
        skipped = list(scheduler.skipped_waiting)
        scheduler.skipped_waiting.remove_requests(ready)
        scheduler.waiting.prepend_requests(reversed(ready))
        return skipped

    def part_skipped(self, skipped: list[Any]) -> None:
        """Undo `merge_skipped`, before anything else moves: vLLM goes by its own two queues.

        Args:
            skipped: What that has returned.
        """
        if not skipped:
            return
        scheduler = self._scheduler
        scheduler.waiting.remove_requests(skipped)
        scheduler.skipped_waiting.remove_requests(skipped)
        scheduler.skipped_waiting.prepend_requests(reversed(skipped))

    def parked(self) -> list[Any]:
        """Waiting requests that a plan cannot start: vLLM drains them first, or they are blocked.

        Those hold KV, load it, wait for more input or for their grammar.
        """
        scheduler = self._scheduler
        if self._has_skipped:
            return list(scheduler.skipped_waiting)
        if not scheduler.kv_holding_waiting and not scheduler.deferred_waiting:
            return []
        blocked = [r for r in scheduler.deferred_waiting if not self._is_ready(r)]
        return [*scheduler.kv_holding_waiting, *blocked]

    def not_running(self) -> list[Any]:
        """Live requests without a slot, those of the queue first and in its order."""
        scheduler = self._scheduler
        seen = {*scheduler.running, *scheduler.waiting}
        others = [r for r in scheduler.requests.values() if r not in seen and not r.is_finished()]
        return [*scheduler.waiting, *others]

    def resuming(self, late: Collection[Any] = ()) -> list[Any]:
        """Waiting requests that vLLM starts before all that a plan admits.

        Their KV is there, or the load of it has failed and they are computed again.

        Args:
            late: Who must not start for want of an adapter slot; see `AdapterSlots`.
        """
        scheduler = self._scheduler
        queue = scheduler.skipped_waiting if self._has_skipped else scheduler.kv_holding_waiting
        loaded = scheduler.finished_recving_kv_req_ids

        def starts(request: Any) -> bool:
            if request.request_id in loaded:
                return True
            may_have_kv = request.num_computed_tokens or not self._has_skipped
            return may_have_kv and not scheduler._is_blocked_waiting_status(request.status)

        return [request for request in queue if request not in late and starts(request)]

    def without_place(self) -> list[Any]:
        """Live requests whose place is in `waiting` and nowhere else, those preempted first."""
        scheduler = self._scheduler
        elsewhere = {*scheduler.running, *self.drained_first(), *self.apart}
        found = [
            request
            for request in scheduler.requests.values()
            if request not in elsewhere
            and not request.is_finished()
            and request.status.name != "RUNNING"
        ]
        return sorted(found, key=lambda request: request.status.name != "PREEMPTED")

    def is_waiting(self, request: Any) -> bool:
        """Whether it is in a queue of those without a slot, or will be put back there."""
        places = (self._scheduler.waiting, self.drained_first(), self.apart)
        return any(request in place for place in places)

    def take_out(self, request: Any) -> None:
        """Take it out of the queues of those without a slot."""
        scheduler = self._scheduler
        for queue in (self.drained_first(), scheduler.waiting):
            queue.remove_requests([request])
        self.apart = [other for other in self.apart if other is not request]
        if not self._has_skipped:
            scheduler.deferred_waiting.discard(request)

    def own_queue(self, requests: Iterable[Any]) -> Any:
        """A waiting queue of vLLM's own with these requests, for the policy in force."""
        from vllm.v1.core.sched.request_queue import create_request_queue

        queue = create_request_queue(self._scheduler.policy)
        for request in requests:
            queue.add_request(request)
        return queue

    def drained_first(self) -> Any:
        """The queue that vLLM empties before `waiting`."""
        scheduler = self._scheduler
        return scheduler.skipped_waiting if self._has_skipped else scheduler.kv_holding_waiting

    def _is_ready(self, request: Any) -> bool:
        """Whether nothing blocks the request; a finished grammar unblocks it here."""
        scheduler = self._scheduler
        if not scheduler._is_blocked_waiting_status(request.status):
            return True
        if request.status.name != WAITS_FOR_GRAMMAR:
            return False
        return self.promote(request)

    def promote(self, request: Any) -> bool:
        """Let a blocked request go on if what it waits for is there; whether it is.

        vLLM does the same when its scan comes to the request, which may never be.
        """
        scheduler = self._scheduler
        promote = getattr(
            scheduler,
            "_handle_blocked_waiting_request",
            getattr(scheduler, "_try_promote_blocked_waiting_request", None),
        )
        return promote is not None and bool(promote(request))

    @property
    def caches_prefixes(self) -> bool:
        """Whether a waiting request may find part of its prompt computed."""
        return bool(self._scheduler.kv_cache_manager.enable_caching)

    def num_cached_tokens(self, request: Any) -> int:
        """Tokens that a waiting request would find in the prefix cache now; no side effects."""
        if not request.block_hashes or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        find = self._scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
        return int(find(request.block_hashes, request.num_tokens - 1)[1])

    @property
    def walks_all_blocks(self) -> bool:
        """Whether a look-up may walk over all blocks of a prompt although it finds none of them.

        With full attention it ends at the first block that is not there; windows and states are
        looked for from the end.
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        specs = [group.kv_cache_spec for group in self._scheduler.kv_cache_config.kv_cache_groups]
        parts = (getattr(spec, "kv_cache_specs", {"": spec}).values() for spec in specs)
        return not all(isinstance(spec, FullAttentionSpec) for part in parts for spec in part)

    def num_awaited_tokens(self, request: Any) -> int:
        """Tokens of a waiting request whose KV another engine has and sends when it is admitted.

        All of its prompt; one is computed again, for the first token.
        """
        if request.num_computed_tokens or not self._awaits_kv:
            return 0
        transfer = getattr(request, "kv_transfer_params", None) or {}
        return int(request.num_prompt_tokens) - 1 if transfer.get(_IS_AWAITED) else 0

    def encoder_room(self) -> int:
        """Embeddings for which the encoder cache has room once those that nobody uses are gone."""
        cache = getattr(self._scheduler, "encoder_cache_manager", None)
        return int(getattr(cache, "num_freeable_slots", 0))

    def next_image_length(self, request: Any) -> int:
        """Tokens of the prompt that its next image not computed yet takes; 0 without one."""
        places = (feature.mm_position for feature in request.mm_features)
        num_computed = request.num_computed_tokens
        return next((p.length for p in places if p.offset + p.length > num_computed), 0)

    def rooms(self) -> Rooms:
        """What is free now."""
        scheduler = self._scheduler
        return Rooms(
            num_embeddings=self.encoder_room(),
            num_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            num_slots=self.num_slots - len(scheduler.running),
        )

    def num_blocks_of(self, request: Any) -> int:
        """Blocks of the KV cache that the request's tokens need."""
        return -(-int(request.num_tokens) // int(self._scheduler.block_size))

    def prefix_hash(self, request: Any, num_tokens: int) -> Any:
        """The hash of its first tokens, a whole number of blocks; None if it has not so many."""
        size = getattr(self._scheduler, "hash_block_size", self._scheduler.block_size)
        place = num_tokens // size - 1
        return request.block_hashes[place] if 0 <= place < len(request.block_hashes) else None

    def can_preempt(self, request: Any) -> bool:
        """Whether the request's blocks would be free at once (no step in flight writes them)."""
        check = getattr(self._scheduler, "_request_blocks_can_be_freed", None)
        return check is None or bool(check(request))

    def is_ending(self, request: Any) -> bool:
        """Whether it is sure to end with the output of the steps in flight."""
        num_ahead = request.num_output_placeholders
        if not num_ahead:
            return False
        # Of what is ahead one token is sure; draft tokens may be rejected.
        num_sure = request.num_computed_tokens + 2 - num_ahead
        limit = min(request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len)
        return bool(num_sure >= limit)

    def preempt(self, request: Any, timestamp: float) -> None:
        """Preempt a request that was taken out of `running`, as vLLM itself would."""
        scheduler = self._scheduler
        drop = getattr(scheduler, "requires_kv_delivery", False)
        scheduler._preempt_request(request, timestamp, drop_stale_output=drop)

    def give_back(self, request: Any, timestamp: float) -> None:
        """Take its KV from a request that waits with it, to be loaded or computed anew."""
        from vllm.v1.request import RequestStatus

        status = request.status
        self.take_out(request)
        request.status = RequestStatus.RUNNING  # only such are preempted
        try:
            self.preempt(request, timestamp)
        finally:
            # As it was: the model's worker has not seen the next input of a session. Once its KV
            # has been loaded, vLLM goes by this count, and would send the worker no input.
            request.status = status
            if status == RequestStatus.WAITING:
                request.num_preemptions = 0

    def set_apart(self, requests: list[Any]) -> None:
        """Take requests out of the queue that vLLM drains first, until `put_back`."""
        self.apart = list(requests)
        scheduler = self._scheduler
        queue = scheduler.skipped_waiting if self._has_skipped else scheduler.kv_holding_waiting
        queue.remove_requests(requests)
        self.defer(requests)

    def defer(self, requests: Iterable[Any]) -> None:
        """Mark waiting requests as vLLM marks those that it skips: for want of an adapter slot.

        It does not count them among those that it is short of room for. Up to 0.30 it counts those
        that it sees, and these are not among them.
        """
        if not self._has_skipped:
            self._scheduler.deferred_waiting.update(requests)

    def put_back(self) -> None:
        """Undo `set_apart`: they are the first again, in their order."""
        scheduler = self._scheduler
        queue = scheduler.skipped_waiting if self._has_skipped else scheduler.kv_holding_waiting
        requests, self.apart = self.apart, []
        there = set(queue)
        queue.prepend_requests(r for r in reversed(requests) if r not in there)
