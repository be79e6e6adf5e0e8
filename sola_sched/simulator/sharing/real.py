"""A group of GPUs with a real engine for each service, which pass turns to each other.

What `engine.SharedEngine` estimates is executed here: vLLM's scheduler and KV cache manager for
each service, KV memory split between them as `plan` deploys it, and turns by the rule of
`colocation` (`urgency`, `arbiter`), step by step. Left out: what a turn costs (0.2 ms, see
`docs/results/colocation-turns.md`), and asynchronous scheduling, which engines give up anyway while
another one waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sola_sched.cluster.sharing.placement import Group, Placement
from sola_sched.cluster.sharing.queue import SharedRequest
from sola_sched.cluster.sharing.services import Service
from sola_sched.colocation import arbiter
from sola_sched.colocation.arbiter import Claim
from sola_sched.colocation.urgency import urgency, urgency_of_a_waiter
from sola_sched.config.sola_config import CONFIG_KEY
from sola_sched.simulator.engine import VirtualEngine
from sola_sched.simulator.request import RequestRecord, VirtualRequest
from sola_sched.simulator.sharing.cluster import Setting
from sola_sched.simulator.sharing.group_engine import GroupEngine

#: A scheduler does not depend on the model's layers; step times and memory are given.
_MODEL = "llama-3-8b"
_BLOCK = 16
_NUM_WARMUPS, _WARMUP_OUTPUT = 8, 16
#: No limits by processor time, and no log: time is virtual.
_QUIET = {"plan_limit_s": None, "log_interval_s": 0.0}


@dataclass(eq=False)
class _Member:
    """One engine.

    Attributes:
        claim: Urgency and since when, as it stood when it began to wait; None if it does not.
        owed_s: See `arbiter`.
    """

    slot: int
    engine: VirtualEngine
    longest_output: int
    max_model_len: int
    claim: tuple[float, float] | None = None
    owed_s: float = 0.0
    live: dict[str, SharedRequest] = field(default_factory=dict)

    @property
    def policy(self) -> str | None:
        """Of its scheduler; None for vLLM's own."""
        config = getattr(self.engine.scheduler, "sola_config", None)
        return None if config is None else str(config.policy)

    def urgency(self, now_s: float, is_waiter: bool) -> float:
        """Of its next turn; vLLM's own engines are alike, and so take turns in a round."""
        scheduler = self.engine.scheduler
        if self.policy is None:
            return 0.0
        by_targets = scheduler.sola_config.traits.goes_by_targets
        if not is_waiter:
            return urgency(by_targets, scheduler.sola_monitor, now_s)
        shortest_s = float(scheduler.sola_config.default_slo.ttft_s)
        return urgency_of_a_waiter(by_targets, scheduler.sola_monitor, now_s, shortest_s)


class RealSharedEngine(GroupEngine):
    """Serves requests of several services on the same GPUs; see `GroupEngine`.

    Args:
        engines: By service; they have served their warm-up, and their clocks differ.
        services: By name.

    Attributes:
        next_s: When it has to be advanced next; inf while it is idle.
        num_open: Requests that have not ended.
        busy_s: Seconds of all steps so far.
        num_turns: Steps with tokens.
    """

    def __init__(
        self, engines: Mapping[str, VirtualEngine], services: Mapping[str, Service]
    ) -> None:
        self.next_s, self.num_open = math.inf, 0
        self.busy_s, self.num_turns = 0.0, 0
        self._members = {
            name: _Member(
                slot,
                engine,
                max(output for _, output in services[name].lengths),
                int(engine.vllm_config.model_config.max_model_len),
            )
            for slot, (name, engine) in enumerate(engines.items())
        }
        # The engines' clocks begin where the last warm-up ended.
        self._start_s = max(engine.clock.now for engine in engines.values())
        self._holder: _Member | None = None
        self._since_s = 0.0
        self._ended: list[SharedRequest] = []
        for member in self._members.values():
            member.engine.on_finish = self._on_finish(member)

    def add(self, request: SharedRequest, now_s: float) -> None:
        """See `SharedEngine.add`.

        Raises:
            ValueError: It does not fit into the engine's context.
        """
        member = self._members[request.service]
        arrival_s = self._start_s + request.arrival_s
        virtual = VirtualRequest(
            str(request.req_id),
            arrival_s,
            request.output,
            prompt_len=request.prompt,
            max_tokens=min(member.longest_output, member.max_model_len - request.prompt),
        )
        member.live[virtual.req_id] = request
        member.engine.add(virtual)
        self.num_open += 1
        if member is not self._holder and member.claim is None:
            self._wait(member, now_s)
        if self._holder is None:
            self.next_s = now_s

    def advance(self) -> list[SharedRequest]:
        """See `SharedEngine.advance`."""
        now_s, last = self.next_s, self._holder
        if last is not None:
            now_s = self._finish(last, now_s)
        chosen = self._choose()
        if last is not None and last is not chosen:
            last.claim = None
            self._wait(last, now_s)
            chosen = chosen or self._choose()
        self._holder, self.next_s = None, math.inf
        while chosen is not None:
            due_s = self._begin(chosen, now_s)
            if due_s is not None:
                self._holder, self._since_s, self.next_s = chosen, now_s, due_s
                break
            chosen = self._choose()
        ended, self._ended = self._ended, []
        return ended

    def withdraw(self, now_s: float) -> list[SharedRequest]:
        """Real engines do not hand requests over in virtual time.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("placements with real schedulers must not change (one did).")

    def _finish(self, holder: _Member, now_s: float) -> float:
        """The step ends; its engine claims the next turn. Returns when."""
        trace = holder.engine.finish_step()
        ended_s = max(now_s, holder.engine.clock.now - self._start_s)
        took_s = ended_s - self._since_s
        has_run = bool(trace.output.total_num_scheduled_tokens)
        self.busy_s += took_s if has_run else 0.0
        self.num_turns += has_run
        self._settle(holder, took_s)
        if has_run and holder.engine.has_work:
            holder.claim = (holder.urgency(self._start_s + ended_s, False), ended_s)
        else:
            holder.owed_s = 0.0
        return ended_s

    def _settle(self, holder: _Member, took_s: float) -> None:
        counted = [m for m in self._members.values() if m.claim is not None or m is holder]
        owed = {member.slot: member.owed_s for member in counted}
        shares = {member.slot: self._share(member) for member in counted}
        after = arbiter.settle(holder.slot, took_s, owed, shares)
        for member in counted:
            member.owed_s = after[member.slot]

    @staticmethod
    def _share(member: _Member) -> float:
        config: Any = getattr(member.engine.scheduler, "sola_config", None)
        turns = None if config is None else config.turns
        return 0.0 if turns is None else float(turns.share)

    def _choose(self) -> _Member | None:
        """Who has the next turn, of those that wait; it waits no more."""
        waiting = {m.slot: m for m in self._members.values() if m.claim is not None}
        claims = [
            Claim(slot, *member.claim, member.owed_s)
            for slot, member in waiting.items()
            if member.claim is not None
        ]
        first = arbiter.first(claims)
        if first is None:
            return None
        waiting[first.slot].claim = None
        return waiting[first.slot]

    def _wait(self, member: _Member, now_s: float) -> None:
        """The engine looks at what has come, and claims a turn if there is anything to do."""
        engine = member.engine
        self._let_pass(member, now_s)
        engine.admit()
        if engine.has_work:
            member.claim = (member.urgency(engine.clock.now, True), now_s)

    def _begin(self, member: _Member, now_s: float) -> float | None:
        """Begin a step; when it is due, None if there is nothing to do."""
        self._let_pass(member, now_s)
        due_s = member.engine.start_step()
        return None if due_s is None else max(now_s, due_s - self._start_s)

    def _let_pass(self, member: _Member, now_s: float) -> None:
        """The engine has waited until now, in nobody's step: see `Turns`."""
        clock = member.engine.clock
        since_s, clock.now = clock.now, max(clock.now, self._start_s + now_s)
        if member.policy is not None:
            member.engine.scheduler.sola_monitor.waited(clock.now - since_s)

    def _on_finish(self, member: _Member) -> Any:
        def ended(record: RequestRecord) -> None:
            request = member.live.pop(record.req_id)
            assert record.first_token_s is not None, record
            assert record.last_token_s is not None, record
            request.first_s = record.first_token_s - self._start_s
            request.last_s = record.last_token_s - self._start_s
            request.num_done = record.num_output_tokens
            request.num_displaced = record.num_preemptions
            self._ended.append(request)
            self.num_open -= 1

        return ended


def real_engine(
    setting: Setting,
    placement: Placement,
    group: Group,
    policy: str | None = "attain",
) -> RealSharedEngine:
    """A group's engines as `plan` deploys them, warm.

    Args:
        setting: What the groups have in common.
        placement: What the group is part of; says how many requests it gets.
        group: Which.
        policy: Of `sola_sched.Scheduler`; None for vLLM's own scheduler.
    """
    services = {name: setting.services[name] for name in group.services}
    rates = setting.rates(placement, group)
    kv = setting.hardware.kv_split(group.degree, list(services.values()), rates)
    return RealSharedEngine(
        {name: _engine(setting, group, name, kv[name], policy) for name in services}, services
    )


def _engine(
    setting: Setting, group: Group, name: str, kv_bytes: float, policy: str | None
) -> VirtualEngine:
    """One engine that has served a few requests, so that it knows its step times."""
    from sola_sched.simulator.host import stock_scheduler_cls
    from sola_sched.vllm_adapter.scheduler import Scheduler

    service = setting.services[name]
    max_num_seqs, max_num_batched_tokens = setting.limits(name)
    steps = setting.hardware.steps(service.model, group.degree)
    longest = -(-service.longest // _BLOCK) * _BLOCK
    options: dict[str, Any] = {"policy": policy, **_targets(setting, service), **_QUIET}
    engine = VirtualEngine(
        stock_scheduler_cls(async_scheduling=False) if policy is None else Scheduler,
        model=_MODEL,
        num_blocks=int(kv_bytes / setting.hardware.kv_bytes(service.model, group.degree)) // _BLOCK,
        block_size=_BLOCK,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        additional_config={} if policy is None else {CONFIG_KEY: options},
        step_time=steps.step_time,
        stall_limit_s=math.inf,
    )
    every = max(1, len(service.lengths) // _NUM_WARMUPS)
    engine.run(
        [
            VirtualRequest(f"warm-{i}", 0.0, min(output, _WARMUP_OUTPUT), prompt_len=prompt)
            for i, (prompt, output) in enumerate(service.lengths[::every][:_NUM_WARMUPS])
        ]
    )
    return engine


def _targets(setting: Setting, service: Service) -> dict[str, float | None]:
    """Its targets as options; a scale on the execution time is a target for the last token."""
    e2e_s = service.slo_scale * setting.profiles[service.name].mean_s
    found = {"ttft_s": service.slo.ttft_s, "tpot_s": service.slo.tpot_s, "e2e_s": e2e_s}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
