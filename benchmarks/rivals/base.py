"""What the published schedulers share: one step, filled with requests in the order of a rule.

A rule sees who decodes, whose prompts are left, deadlines and predicted step times; it takes
requests into the step one by one. What it has taken becomes a `StepPlan`, which vLLM's own
`schedule()` carries out: memory, victims and the prefix cache are vLLM's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sola_sched.config.policies import PolicyTraits
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import DECODE, FloatArray, IntArray, StepPlan, StepState
from sola_sched.cost.model import CostModel, StepShape
from sola_sched.errors import ConfigError
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.time import StepCounts


class Work(NamedTuple):
    """What a step computes: decodes, their KV tokens, prompts, and sums over the chunks of these.

    The sums are of tokens, of their squares, and of tokens times those computed before.
    """

    num_decodes: int = 0
    ctx: int = 0
    num_prompts: int = 0
    tokens: int = 0
    squares: float = 0.0
    products: float = 0.0

    def with_chunk(self, tokens: int, has: int) -> Work:
        """The same and a chunk of a prompt of which `has` tokens are computed."""
        return Work(
            self.num_decodes, self.ctx, self.num_prompts + 1, self.tokens + tokens,
            self.squares + tokens * tokens, self.products + tokens * has,
        )  # fmt: skip


SecondsOf = Callable[[Work], float]


def by_profile(name: str, scale: float) -> SecondsOf:
    """The step times of a profile of the simulator, all multiplied by a factor."""
    step_time: Any = load_step_profile(name).step_time

    @lru_cache(maxsize=1 << 16)
    def seconds(work: Work) -> float:
        pairs = work.products + 0.5 * work.squares
        counts = StepCounts(work.num_decodes, work.ctx, work.num_prompts, work.tokens, pairs)
        return scale * float(step_time.seconds(counts))

    return seconds


def by_model(cost: CostModel) -> SecondsOf:
    """The step times that are learned from live steps, as our own policy has them."""

    def seconds(work: Work) -> float:
        shape = StepShape(work.num_decodes, work.ctx, work.tokens, work.squares, work.products)
        return cost.step_s(shape)

    return seconds


class Step:
    """A step while a rule fills it.

    Args:
        state: Of the engine.
        seconds_of: Predicts step times.

    Attributes:
        now_s: When it starts.
        decodes: Rows of requests that have their prompt computed.
        prompts: Rows of all others: those that have begun, then those that wait.
        work: What has been taken so far.
        taken: Tokens of each row that has been taken, in the order in which they were.
        preempted, rejected: Rows that lose their KV, or are refused.
    """

    def __init__(self, state: StepState, seconds_of: SecondsOf) -> None:
        self.state, self.table, self.now_s = state, state.table, state.now_s
        self.seconds_of = seconds_of
        is_decode = self.table.phase[state.running] == DECODE
        self.decodes: IntArray = state.running[is_decode]
        self.prompts: IntArray = np.concatenate([state.running[~is_decode], state.waiting])
        self.work = Work()
        self.taken: dict[int, int] = {}
        self.preempted: list[int] = []
        self.rejected: list[int] = []
        self._running = frozenset(state.running.tolist())
        self._num_slots = state.max_num_running - len(state.running)

    # What a rule may know -------------------------------------------------------------------

    def given(self, rows: IntArray) -> IntArray:
        """Output tokens that are there when the step starts."""
        given: IntArray = self.table.num_output[rows] + self.table.num_in_flight[rows]
        return given

    def first_s(self, rows: IntArray) -> FloatArray:
        """When the first token came; now where it comes with the step before."""
        first: FloatArray = self.table.first_token_s[rows]
        return np.where(np.isnan(first), self.now_s, first)

    def token_due_s(self, rows: IntArray, start_s: FloatArray | None = None) -> FloatArray:
        """When the next tokens of decodes are due: one TPOT each after `start_s`.

        By default that is the first token itself, as the mean time per token is measured.
        """
        start_s = self.first_s(rows) if start_s is None else start_s
        due: FloatArray = start_s + self.given(rows) * self.table.tpot_s[rows]
        return due

    def due_s(self, rows: IntArray) -> FloatArray:
        """When prompts must be computed: for the first token, or the next one after a loss."""
        due_s: FloatArray = self.table.due_s[rows].copy()
        has_some = self.table.num_output[rows] > 0
        due_s[has_some] = self.token_due_s(rows[has_some])
        return due_s

    def left(self, rows: IntArray) -> IntArray:
        """Tokens of each prompt that are not computed yet, >= 1."""
        left: IntArray = self.table.prefill_target[rows] - self.table.num_computed[rows]
        return np.maximum(left, 1)

    def ctx(self, rows: IntArray) -> int:
        """KV tokens that these decodes read."""
        return int(self.table.num_prompt[rows].sum() + self.given(rows).sum())

    def shortest_tpot_s(self, rows: IntArray) -> float:
        """The tightest TPOT target of these, inf for none."""
        return float(self.table.tpot_s[rows].min(initial=np.inf))

    def is_running(self, row: int) -> bool:
        """Whether it holds a slot and KV."""
        return row in self._running

    def may_take(self, row: int) -> bool:
        """Whether it has a slot, or finds one."""
        return self.is_running(row) or self._num_slots > 0

    def decodes_s(self, rows: IntArray) -> float:
        """Time of a step with these decodes and nothing else; 0 for none."""
        return self.seconds_of(Work(len(rows), self.ctx(rows)))

    def alone_s(self, row: int) -> float:
        """Time of a step with all that is left of a prompt and nothing else."""
        left, has = int(self.left(np.array([row]))[0]), int(self.table.num_computed[row])
        return self.seconds_of(Work().with_chunk(left, has))

    def constant_s(self) -> float:
        """Time of a step beside its work."""
        return self.seconds_of(Work(1))

    def seconds(self) -> float:
        """Predicted time of what has been taken."""
        return self.seconds_of(self.work)

    def tokens_left(self) -> int:
        """Of the engine's largest step, beside those taken."""
        return self.state.max_num_tokens - self.work.num_decodes - self.work.tokens

    def room(self, row: int, limit_s: float) -> int:
        """Most tokens of a prompt with which the step takes no longer, >= 0; 0 without a slot."""
        if not self.may_take(row):
            return 0
        left = int(self.left(np.array([row]))[0])
        return self.most_tokens(limit_s, left, int(self.table.num_computed[row]))

    def most_tokens(self, limit_s: float, most: int = 1 << 30, has: int = 0) -> int:
        """Longest chunk with which the step takes no longer, >= 0, up to `most`.

        Args:
            limit_s: Seconds.
            most: Tokens.
            has: Tokens of the same prompt that are computed.
        """
        low, high = 0, min(most, self.tokens_left())

        def fits(tokens: int) -> bool:
            return self.seconds_of(self.work.with_chunk(tokens, has)) <= limit_s

        if high < 1 or limit_s == np.inf or fits(high):
            return max(0, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # What a rule does -----------------------------------------------------------------------

    def take_decodes(self, rows: IntArray, limit_s: float = np.inf) -> int:
        """Take decodes from the front, as many as fit into the time; at least one into none."""
        ctx = np.cumsum(self.table.num_prompt[rows] + self.given(rows))
        work = self.work

        def with_first(count: int) -> Work:
            more = int(ctx[count - 1])
            return work._replace(num_decodes=work.num_decodes + count, ctx=work.ctx + more)

        low, high = 0, min(len(rows), self.tokens_left())
        if high < 1:
            return 0
        if limit_s == np.inf or self.seconds_of(with_first(high)) <= limit_s:
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.seconds_of(with_first(middle)) <= limit_s
            low, high = (middle, high) if fits else (low, middle)
        count = max(low, 0 if self.taken else 1)
        if count:
            self.work = with_first(count)
            self.taken |= dict.fromkeys(rows[:count].tolist(), 1)
        return count

    def take(self, row: int, tokens: int) -> None:
        """Take so many tokens of a prompt, once per step; only the last one may be cut."""
        if tokens < 1:
            return
        self._num_slots -= not self.is_running(row)
        self.work = self.work.with_chunk(tokens, int(self.table.num_computed[row]))
        self.taken[row] = tokens

    def take_prompts(self, rows: Iterable[int], limit_s: float = np.inf) -> None:
        """Take prompts in order, each as far as the time goes; past those that find no slot."""
        for row in filter(self.may_take, rows):
            tokens = self.room(row, limit_s)
            self.take(row, tokens)
            if tokens < self.left(np.array([row]))[0]:
                return

    def make_room(self, row: int, victims: list[int]) -> None:
        """Preempt victims, the last first, until a waiting prompt finds a slot and blocks."""
        size, table = self.state.block_size, self.table
        freed = sum(int(table.num_computed[each]) // size for each in self.preempted)
        need = int(table.prefill_target[row]) // size + 1 - self.state.num_free_blocks - freed
        while victims and (self._num_slots < 1 or need > 0):
            victim = victims.pop()
            self.preempted.append(victim)
            self._num_slots += 1
            need -= int(table.num_prompt[victim] + table.num_output[victim]) // size

    def plan(self, problem: str) -> StepPlan:
        """The step as vLLM is to see it.

        vLLM serves those that have begun before those that wait. So one that has begun and is cut
        behind a waiting one gets its part by a limit on all chunks, or sits the step out where
        another chunk is longer than that.
        """
        if not self.taken:  # nothing fits: the engine must not stand still
            self.take_decodes(self.decodes)
            self.take_prompts(self.prompts.tolist())
        taken, cap = dict(self.taken), None
        new = [row for row in taken if row not in self._running]
        chunks = [row for row in taken if row not in set(self.decodes.tolist())]
        last = chunks[-1] if chunks else -1
        if new and last in self._running and taken[last] < self.left(np.array([last]))[0]:
            cap = taken[last]
            if max(taken[row] for row in chunks[:-1]) > cap:
                del taken[last]
                cap = None
        gone = set(self.preempted)
        run = [row for row in taken if row in self._running and row not in gone]
        return StepPlan(
            run=np.array(run, dtype=np.int64),
            admit=np.array(new, dtype=np.int64),
            token_budget=max(1, sum(taken.values())),
            prefill_cap=cap,
            preempt=np.array(self.preempted, dtype=np.int64),
            reject=np.array(self.rejected, dtype=np.int64),
            problem=problem,
        )


class Rival:
    """A published scheduler as a policy.

    Args:
        config: `policy_options` may have those of `settings`, ``"profile"``, whose step times are
            used in place of learned ones, and ``"scale"``, a factor on these.

    Raises:
        ConfigError: An option is not known.
    """

    traits = PolicyTraits(options=("policy_options",))
    #: Options of the rule, with their values by default: what its class is defined with.
    settings: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, **settings: Any) -> None:
        cls.settings = settings

    def __init__(self, config: SolaConfig) -> None:
        known = {"profile": "", "scale": 1.0} | dict(self.settings)
        given = dict(config.policy_options)
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigError(
                f"'policy_options' of {type(self).__name__} must be of {', '.join(known)} "
                f"(got {', '.join(unknown)})."
            )
        self.set = SimpleNamespace(**known | given)
        self._seconds_of = None
        if self.set.profile:
            self._seconds_of = by_profile(self.set.profile, float(self.set.scale))

    def plan(self, state: StepState) -> StepPlan:
        """Fill the step by the rule; vLLM's own order while step times are unknown."""
        if self._seconds_of is None and not state.cost.is_ready:
            return StepPlan(problem="learning")
        step = Step(state, self._seconds_of or by_model(state.cost))
        self.fill(step)
        return step.plan(type(self).__name__)

    @abstractmethod
    def fill(self, step: Step) -> None:
        """Take requests into the step, as the rule says."""


def by(key: FloatArray, rows: IntArray) -> IntArray:
    """The rows in ascending order of a key, ties as they come."""
    ordered: IntArray = rows[np.argsort(key, kind="stable")]
    return ordered
