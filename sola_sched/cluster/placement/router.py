"""Aladdin's placement as a router, for equal and for unequal instances.

Routers read each engine's own state from its view: what runs with how much left, what waits, the
bank of those that can still attain, slots and memory. Where no instance meets all constraints the
request goes to the one whose worst constraint is broken by the least factor.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from sola_sched.cluster.performance.model import DecodeTime, KvUse, PerformanceModel, PrefillTime
from sola_sched.cluster.placement.best_fit import best_fit, least_pressed
from sola_sched.cluster.placement.demand import Demand
from sola_sched.cluster.placement.fleet import Fleet, Phase, Tightness
from sola_sched.cluster.ties import Turns
from sola_sched.cluster.view import (
    InstanceView,
    Refusal,
    RoutedRequest,
    StepModel,
    Views,
    refusal,
)

FloatArray = NDArray[np.float64]

#: Half a block of 16 tokens: what is empty of a request's last block on average.
_EMPTY_TOKENS = 8.0
#: Where a model that is not linear is taken for the line through its ends.
_PROMPT, _CONTEXT = 2048.0, 32768.0
_SHORTEST_S = 1e-9


class PackingRouter:
    """Best fit under Aladdin's constraints, on views.

    Args:
        tightness: gamma and theta.
        phase: What the instances do: both, or one pool of split-phase serving.
        is_relative: Rank instances by shares of their limits; for unequal ones.
        is_chunked: Whether the engines chunk prompts; constraints (c) and (d) follow.
        skips_lost: Whether the engines serve requests that have lost their targets with what the
            others leave, as `sola_sched` does; these count in no constraint but memory and slots.
    """

    def __init__(
        self,
        tightness: Tightness | None = None,
        *,
        phase: Phase = Phase.BOTH,
        is_relative: bool = False,
        is_chunked: bool = False,
        skips_lost: bool = False,
    ) -> None:
        self._skips_lost = skips_lost
        self._tightness, self._phase = tightness or Tightness(), phase
        self._is_relative, self._is_chunked = is_relative, is_chunked
        self._turns = Turns()
        self._fleet: Fleet | None = None
        self._seen: list[InstanceView] = []
        self._is_alive: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._longest: FloatArray = np.zeros(0)
        # Prompt tokens by report and sent since, when that was, and what a token takes [n].
        self._prompts: FloatArray = np.zeros((4, 0))
        self._targets: list[Counter[float]] = []
        self._target_of: dict[tuple[str, int], float] = {}

    def choose(self, request: RoutedRequest, views: Views, now_s: float) -> int | Refusal:
        """See `Router.choose`."""
        if not views:
            return refusal(request, views)
        fleet = self._follow(views, now_s)
        able = self._is_alive & (self._longest > request.prompt_tokens)
        if request.avoid:
            fresh = able.copy()
            fresh[[i for i in request.avoid if i < len(views)]] = False
            able = fresh if fresh.any() else able
        fleet.is_open = able
        demand = Demand(
            request.prompt_tokens,
            request.length.mean,
            request.arrival_s + request.slo.ttft_s - now_s,
            request.slo.tpot_s,
        )
        chosen = self._place(fleet, demand)
        if chosen is None:
            return refusal(request, views)
        self._targets[chosen][demand.tpot_s] += 1
        self._target_of[request.req_id, chosen] = demand.tpot_s
        return chosen

    def ended(self, req_id: str, instance: int) -> None:
        """See `Router.ended`."""
        tpot_s = self._target_of.pop((req_id, instance), None)
        if tpot_s is not None:
            targets = self._targets[instance]
            targets[tpot_s] -= 1
            if not targets[tpot_s]:
                del targets[tpot_s]

    def _place(self, fleet: Fleet, demand: Demand) -> int | None:
        """The instance, or None if none is open."""
        chosen = best_fit(fleet, demand, is_relative=self._is_relative, turns=self._turns)
        return least_pressed(fleet, demand, turns=self._turns) if chosen is None else chosen

    def _follow(self, views: Views, now_s: float) -> Fleet:
        """The fleet with every view that has changed since the last request."""
        fleet = self._fleet
        if fleet is None or len(views) != len(self._seen):
            # Instances joined: those known keep their places.
            slots = [view.max_num_seqs for view in views]
            fleet = self._fleet = Fleet(
                [performance_of(view) for view in views], slots,
                tightness=self._tightness, phase=self._phase, is_chunked=self._is_chunked,
            )  # fmt: skip
            self._targets += [Counter() for _ in range(len(views) - len(self._targets))]
            self._is_alive = np.zeros(len(views), dtype=bool)
            self._longest = np.zeros(len(views))
            self._prompts = np.zeros((4, len(views)))
            self._seen = []
        changed = [
            i for i, (new, old) in enumerate(zip(views, self._seen, strict=False)) if new is not old
        ]
        for i in [*changed, *range(len(self._seen), len(views))]:
            self._read(fleet, i, views[i])
        self._seen = list(views)
        # What was reported has been worked on since.
        reported, sent, reported_s, token_s = self._prompts
        done = np.maximum(0.0, now_s - reported_s) / np.maximum(token_s, _SHORTEST_S)
        fleet.set_new_tokens(np.maximum(0.0, reported - done) + sent)
        return fleet

    def _read(self, fleet: Fleet, i: int, view: InstanceView) -> None:
        self._is_alive[i] = view.is_alive
        self._longest[i] = min(view.max_model_len, view.kv_capacity_tokens)
        model = performance_of(view)
        fleet.set_model(i, model, view.max_num_seqs)
        held = np.concatenate((view.running_ctx + view.running_prefill, view.waiting_tokens))
        left = np.concatenate((view.running_left, view.waiting_outputs))
        is_lost = np.zeros(len(held), dtype=bool)
        if self._skips_lost:
            num_running = view.num_running
            is_lost[:num_running] = view.running_lost > 0.0
            # Those that wait stand in order of arrival: the first are the late ones.
            is_lost[num_running : num_running + view.num_waiting_lost] = True
        prompts = np.concatenate((view.running_prefill, view.waiting_tokens))
        prompts[is_lost] = 0.0
        num_reported = len(held) - view.num_unreported
        self._prompts[:, i] = (
            prompts[:num_reported].sum(), prompts[num_reported:].sum(), view.reported_s,
            model.prefill.per_token_s,
        )  # fmt: skip
        fleet.set_requests(
            i, held, left,
            new_tokens=float(prompts.sum()),
            bank_s=view.bank_s,
            tpot_s=min(self._targets[i], default=np.inf),
            is_lost=is_lost,
        )  # fmt: skip


class SpreadingRouter(PackingRouter):
    """The instance on which the request leaves the most room to every constraint.

    For a given number of instances, equal or not: packing leaves instances free that could be given
    back, and takes from the others the room for what was not predicted. Constraints are those of
    `PackingRouter` with each instance's own model and chunked prompts; what is compared is the
    constraint that is nearest to its limit.

    Args:
        tightness: gamma and theta.
        skips_lost: As for `PackingRouter`.
    """

    def __init__(self, tightness: Tightness | None = None, *, skips_lost: bool = True) -> None:
        super().__init__(tightness, is_chunked=True, skips_lost=skips_lost)

    def _place(self, fleet: Fleet, demand: Demand) -> int | None:
        return least_pressed(fleet, demand, turns=self._turns)


def performance_of(view: InstanceView) -> PerformanceModel:
    """The performance model of an instance, with tokens for bytes: lines through its step times."""
    model, capacity = view.model, float(view.kv_capacity_tokens)
    empty, prefill, decode = _EMPTY_TOKENS, None, None
    if isinstance(model, PerformanceModel):
        empty, prefill, decode = model.kv_tokens_per_request, model.prefill, model.decode
    return PerformanceModel(
        name=getattr(model, "name", type(model).__name__),
        kv=KvUse(1.0, empty),
        prefill=prefill or _prefill_line(model),
        decode=decode or _decode_plane(model),
        kv_capacity_bytes=capacity,
        num_gpus=view.num_gpus,
    )


def _prefill_line(model: StepModel) -> PrefillTime:
    base_s = max(0.0, float(model.prefill_s(0.0)))
    slope = (float(model.prefill_s(_PROMPT)) - base_s) / _PROMPT
    return PrefillTime(max(0.0, slope), base_s)


def _decode_plane(model: StepModel) -> DecodeTime:
    base_s = max(0.0, float(model.decode_s(0.0, 0.0)))
    per_request_s = float(model.decode_s(1.0, 0.0)) - base_s
    per_ctx_s = (float(model.decode_s(1.0, _CONTEXT)) - base_s - per_request_s) / _CONTEXT
    return DecodeTime(max(0.0, per_ctx_s), max(0.0, per_request_s), base_s)
