"""Which runs on the real engine a first run has time for on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Stock settings of the full comparison, and those kept where time is short.
SETTINGS = ("stock:256", "stock:512", "stock:2048")
FEWER_SETTINGS = ("stock:512", "stock:2048")
ONE_SETTING = ("stock:512",)
OURS = "sola"
#: Request rates as shares of the measured capacity: past it, and well below.
HIGH_SHARE, LOW_SHARE = 1.3, 0.6
#: What the rate is multiplied by where the first block shows that stock sustains it.
RAISE = 1.2
#: Wall-clock seconds on the engine, the short runs before included.
BUDGET_S = 240.0
#: Without time for anything else, only the rate past the capacity is run from here on.
_MAX_BUDGETS = 2.0
#: When the arrivals end, the queue of a full engine is to be worth so many TTFT targets.
_BACKLOG_TARGETS = 4.0
_MIN_REQUESTS, _MAX_REQUESTS, _MIN_LOW_REQUESTS = 120, 400, 100
#: A run takes so many times what its requests take at capacity: it starts and ends with few.
_TAIL = 1.25


@dataclass(frozen=True)
class Machine:
    """What the short runs before found out.

    Attributes:
        capacity_per_s: Requests per second of the engine's clock that stock vLLM serves.
        ttft_s: Target, seconds.
        start_s: Wall-clock time until an engine is warm.
        share: Seconds of the engine's clock in a wall-clock second of work, in (0, 1].
        skips_idle: Whether pauses between arrivals take no time.
    """

    capacity_per_s: float
    ttft_s: float
    start_s: float
    share: float
    skips_idle: bool = False


@dataclass(frozen=True)
class Block:
    """Runs of the same requests at the same times, one after another.

    Attributes:
        load: Share of the capacity.
        seed: Of arrivals and of the order of the requests.
        num_requests: Of each run.
        settings: Stock settings, of which only the best so far is run if `only_best`.
        only_best: See there.
        ours_first: Whether ours goes first; alternates from block to block.
    """

    load: float
    seed: int
    num_requests: int
    settings: tuple[str, ...]
    only_best: bool
    ours_first: bool

    def schedulers(self, best: str | None = None) -> tuple[str, ...]:
        """In the order in which they run."""
        stock = (best,) if self.only_best and best is not None else self.settings
        return (OURS, *reversed(stock)) if self.ours_first else (*stock, OURS)

    @property
    def num_runs(self) -> int:
        """How many there are."""
        return 2 if self.only_best else len(self.settings) + 1


@dataclass(frozen=True)
class FirstRunPlan:
    """Blocks in order, the wall-clock time they will take, and what there was no time for."""

    blocks: tuple[Block, ...]
    seconds: float
    cuts: tuple[str, ...]


def plan_runs(machine: Machine, budget_s: float = BUDGET_S) -> FirstRunPlan:
    """The largest comparison that fits the budget.

    Runs are never shortened: one in which no queue builds up compares nothing. Where time is short
    there are fewer stock settings, then fewer runs.
    """
    plan = _plan(machine, SETTINGS, False, 2, True, ())
    no_256 = "stock vLLM at chunks of 256"
    narrowed = "all stock settings but the best of the first block in later blocks"
    one = f"all stock settings but {ONE_SETTING[0]}"
    second = "the second block past the capacity"
    ladder = (
        (FEWER_SETTINGS, False, 2, (no_256,)),
        (FEWER_SETTINGS, True, 2, (no_256, narrowed)),
        (FEWER_SETTINGS, True, 1, (no_256, narrowed, second)),
        (ONE_SETTING, False, 1, (one, second)),
    )
    for settings, is_narrowed, num_high, cuts in ladder:
        if plan.seconds <= budget_s:
            return plan
        plan = _plan(machine, settings, is_narrowed, num_high, True, cuts)
    if plan.seconds > _MAX_BUDGETS * budget_s:
        low = "the rate below the capacity"
        plan = _plan(machine, ONE_SETTING, False, 1, False, (one, second, low))
    return plan


def num_high_requests(machine: Machine, load: float = HIGH_SHARE) -> int:
    """Requests with which the queue at the end of the arrivals exceeds the TTFT target for sure."""
    # n requests leave n (1 - 1 / load) in the queue when the last one arrives.
    needed = _BACKLOG_TARGETS * machine.ttft_s * machine.capacity_per_s / (1.0 - 1.0 / load)
    return int(min(_MAX_REQUESTS, max(_MIN_REQUESTS, math.ceil(needed))))


def run_s(machine: Machine, load: float, num_requests: int) -> float:
    """Wall-clock seconds that one run takes."""
    at_rate_s = num_requests / machine.capacity_per_s
    if not machine.skips_idle:
        at_rate_s /= min(1.0, load)
    return machine.start_s + _TAIL * at_rate_s / machine.share


def _plan(
    machine: Machine,
    settings: tuple[str, ...],
    is_narrowed: bool,
    num_high: int,
    has_low: bool,
    cuts: tuple[str, ...],
) -> FirstRunPlan:
    high = num_high_requests(machine)
    low = max(_MIN_LOW_REQUESTS, high // 2)
    # The low rate comes second: after it the machine is looked at past its capacity once more.
    loads = [(HIGH_SHARE, high), *[(LOW_SHARE, low)] * has_low, *[(HIGH_SHARE, high)]]
    if num_high == 1:
        loads = loads[:-1]
    blocks = tuple(
        Block(
            load, seed, size, settings, is_narrowed and seed > 0 and len(settings) > 1, seed % 2 > 0
        )
        for seed, (load, size) in enumerate(loads)
    )
    seconds = sum(b.num_runs * run_s(machine, b.load, b.num_requests) for b in blocks)
    return FirstRunPlan(blocks, seconds, cuts)
