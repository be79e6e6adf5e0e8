"""The instances as a struct of arrays, and Aladdin's constraints on all of them at once.

Source: Aladdin, section 4.2, constraints (b) to (e) for instance i and its requests j:

    (b) sum_j (l_in + gamma l_out) <= theta l_d(number of requests)           TPOT, by Eq. 4
    (c) t_p(sum of new l_in) <= T_pre                                         TTFT, by Eq. 2
    (d) t_p(sum of new l_in) <= theta min_j (T_dec l_out - t_dec)             the bank of those
                                                                              that decode already
    (e) KV of all requests <= M at every future step

gamma in [0, 1] says how much of the output to come counts in (b): with 0 the next step meets the
target, with 1 the last does. theta in (0, 1] is the margin for wrong predictions.

Every instance has coefficients of its own, so equal GPUs are the special case of unequal ones.

Departures: l_out in (b) is the output to come for a request that is placed (its prediction), and
for one that runs what it has counts in full and what is left times gamma. Targets are those of the
requests: the tightest TPOT on an instance holds for (b), each new request's own TTFT for (c), with
prompts served in the order in which they came. (e) is exact: the sum of memories grows until one
request ends, so it is looked at where requests end. Slots are a constraint too.

Engines that chunk prompts do not stop decoding for them. For these (c) and (d) become one: until
the first token is due, T_pre seconds, the decodes need the share u = t_d / T_dec of the time to
keep pace, less what they have saved:

    t_p(sum of new l_in) <= min(T_pre, T_pre (1 - u) + theta bank)              (c, d chunked)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sola_sched.cluster.performance.model import PerformanceModel
from sola_sched.cluster.placement.demand import Demand
from sola_sched.cluster.placement.kv_peak import peak_tokens
from sola_sched.errors import ConfigError

FloatArray = NDArray[np.float64]

#: The rows of `Fleet.load_with`.
CONTEXT, PROMPTS, MEMORY, SLOTS = range(4)
_LEAST = 1e-18  # in place of 0 seconds per context token


class Phase(enum.Enum):
    """What instances do with a request.

    With prefill and decode pools (section 5.1) a prompt goes to an instance of the first kind,
    where (b) and (d) do not hold, and its decode to one of the second, where (c) and (d) do not.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Tightness:
    """gamma and theta of section 4.2.

    Attributes:
        gamma: In [0, 1]; the paper takes 0.5.
        theta: In (0, 1].
    """

    gamma: float = 0.5
    theta: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"'gamma' must be in [0, 1] (got {self.gamma!r}).")
        if not 0.0 < self.theta <= 1.0:
            raise ConfigError(f"'theta' must be in (0, 1] (got {self.theta!r}).")


class Fleet:
    """What placement knows of `n` instances; all columns have length n.

    Args:
        models: Of each instance.
        max_requests: Slots of each instance, one number for all or one for each.
        tightness: gamma and theta.
        phase: What the instances do.
        is_chunked: Whether prompts are computed in chunks beside the decodes.

    Attributes:
        num_requests: On the instance, waiting ones included.
        context: sum of l_in + gamma l_out, tokens.
        new_tokens: Prompt tokens that are not computed yet.
        bank_s: Smallest time that a decode has saved, seconds; inf without decodes.
        tpot_s: Tightest target on the instance, seconds.
        kv_now: Memory now, with the prompts to come, tokens.
        kv_ends: Memory if all requests were at their end at once, tokens.
        is_open: Whether it takes requests.
    """

    def __init__(
        self,
        models: Sequence[PerformanceModel],
        max_requests: int | Sequence[int] = 256,
        *,
        tightness: Tightness | None = None,
        phase: Phase = Phase.BOTH,
        is_chunked: bool = False,
    ) -> None:
        self.models = list(models)
        self.tightness = tightness or Tightness()
        self.phase = phase
        self.is_chunked = is_chunked and phase is Phase.BOTH
        n = len(self.models)
        slots = np.asarray(max_requests, dtype=np.float64)
        if n == 0 or not (slots >= 1.0).all():
            raise ConfigError(
                f"A fleet must have instances with slots >= 1 (got {n} instances, slots "
                f"{max_requests!r})."
            )
        self.max_requests: FloatArray = np.broadcast_to(slots, n).copy()
        self.num_requests: FloatArray = np.zeros(n)
        self.context: FloatArray = np.zeros(n)
        self.new_tokens: FloatArray = np.zeros(n)
        self.bank_s: FloatArray = np.full(n, np.inf)
        self.tpot_s: FloatArray = np.full(n, np.inf)
        self.kv_now: FloatArray = np.zeros(n)
        self.kv_ends: FloatArray = np.zeros(n)
        self.is_open = np.ones(n, dtype=bool)
        self._num_idle: FloatArray = np.zeros(n)
        self._held: list[list[float]] = [[] for _ in range(n)]
        self._left: list[list[float]] = [[] for _ in range(n)]
        self._use: FloatArray = np.zeros((4, n))
        self._limit: FloatArray = np.full((4, n), np.inf)
        # Of the models, and what `load_with` adds a request to.
        self._per_token, self._prefill_base, self._decode_base = np.zeros((3, n))
        self._tokens_per_s, self._tokens_per_request, self._kv_fixed = np.zeros((3, n))
        self._weighed, self._prompts_s, self._bank_limit_s = np.zeros((3, n))
        self._kv_before, self._free_ratio, self.kv_capacity = np.zeros((3, n))
        for i, model in enumerate(self.models):
            self._read_model(i, model)

    def __len__(self) -> int:
        return len(self.models)

    def load_with(self, demand: Demand) -> tuple[FloatArray, FloatArray]:
        """What each constraint has and allows on each instance if it got the request.

        The rows are (b), in tokens and with what the requests themselves cost as tokens; (c) and
        (d) together, in seconds; (e) with the memory of now, a lower bound that `kv_fits` makes
        exact, in tokens; and slots.

        Returns:
            Use and limit, both [4, n]: arrays of the fleet that the next call writes over.
        """
        use, limit = self._use, self._limit
        if self.phase is not Phase.PREFILL:
            # theta l_d(b) = theta (T - c3 - c2 b) / k2, the term of b on the other side
            weight = demand.prompt_tokens + self.tightness.gamma * demand.output_tokens
            np.add(self._weighed, weight, out=use[CONTEXT])
            np.minimum(self.tpot_s, demand.tpot_s, out=limit[CONTEXT])
            limit[CONTEXT] -= self._decode_base
            limit[CONTEXT] *= self._tokens_per_s
        if self.phase is not Phase.DECODE:
            np.multiply(self._per_token, demand.prompt_tokens, out=use[PROMPTS])
            use[PROMPTS] += self._prompts_s
            if self.is_chunked:
                free_s = self._free_ratio * demand.ttft_s
                free_s += self._bank_limit_s
                np.minimum(free_s, demand.ttft_s, out=limit[PROMPTS])
            else:
                np.minimum(self._bank_limit_s, demand.ttft_s, out=limit[PROMPTS])
        np.add(self._kv_before, demand.prompt_tokens, out=use[MEMORY])
        return use, limit

    def feasible(self, demand: Demand) -> NDArray[np.bool_]:
        """Instances on which no constraint is broken, [n]; KV memory as in `load_with`."""
        use, limit = self.load_with(demand)
        ok: NDArray[np.bool_] = self.is_open & (use <= limit).all(axis=0)
        return ok

    def broken(self, i: int, demand: Demand) -> list[str]:
        """The constraints that the request would break on instance i, each with use and limit."""
        model, phase = self.models[i], self.phase
        gamma, theta = self.tightness.gamma, self.tightness.theta
        num_requests = float(self.num_requests[i]) + 1.0
        num_served = num_requests - float(self._num_idle[i])
        found: list[tuple[str, float, float, str]] = []
        if phase is not Phase.PREFILL:
            tpot_s = min(float(self.tpot_s[i]), demand.tpot_s)
            context = self.context[i] + demand.prompt_tokens + gamma * demand.output_tokens
            allowed = theta * model.decode.context_limit(num_served, tpot_s)
            found.append((f"(b) context for TPOT {tpot_s:g} s", context, allowed, "tokens"))
        if phase is not Phase.DECODE:
            needed_s = model.prefill_s(self.new_tokens[i] + demand.prompt_tokens)
            found.append(("(c) prompts before TTFT", needed_s, demand.ttft_s, "s"))
            if phase is Phase.BOTH:
                allowed_s = theta * float(self.bank_s[i])
                name = "(d) prompts within the bank of decodes"
                if self.is_chunked:
                    allowed_s += float(self._free_ratio[i]) * demand.ttft_s
                    name = "(c, d) prompts beside the decodes"
                found.append((name, needed_s, allowed_s, "s"))
        if not self.kv_fits(i, demand):
            peak = self.kv_peak(i, demand)
            found.append(("(e) KV memory", peak, float(self.kv_capacity[i]), "tokens"))
        found.append(("slots", num_requests, float(self.max_requests[i]), "requests"))
        return [
            f"{name} would be {used:.6g} of {allowed:.6g} {unit}"
            for name, used, allowed, unit in found
            if not used <= allowed
        ]

    def kv_fits(self, i: int, demand: Demand) -> bool:
        """Constraint (e) exactly: at no future step does the memory of instance i overflow."""
        end = self.kv_ends[i] + demand.prompt_tokens + self._output(demand) + self._kv_fixed[i]
        # Most often there is room for all requests at their ends at once.
        return bool(end <= self.kv_capacity[i] or self.kv_peak(i, demand) <= self.kv_capacity[i])

    def kv_peak(self, i: int, demand: Demand) -> float:
        """Memory at the worst future step of instance i with the request, tokens."""
        held = np.array([*self._held[i], demand.prompt_tokens])
        left = np.array([*self._left[i], self._output(demand)])
        return peak_tokens(held + self._kv_fixed[i], left)

    def add(self, i: int, demand: Demand) -> None:
        """The request goes to instance i."""
        output = self._output(demand)
        self._held[i].append(float(demand.prompt_tokens))
        self._left[i].append(output)
        self.num_requests[i] += 1.0
        self.context[i] += demand.prompt_tokens + self.tightness.gamma * output
        if self.phase is not Phase.DECODE:
            self.new_tokens[i] += demand.prompt_tokens
        if demand.tpot_s < self.tpot_s[i]:
            self.tpot_s[i] = demand.tpot_s
        held = demand.prompt_tokens + self._kv_fixed[i]
        self.kv_now[i] += held
        self.kv_ends[i] += held + output
        self._refresh(i)

    def set_requests(
        self,
        i: int,
        held: FloatArray,
        left: FloatArray,
        *,
        new_tokens: float = 0.0,
        bank_s: float = np.inf,
        tpot_s: float = np.inf,
        is_lost: NDArray[np.bool_] | None = None,
    ) -> None:
        """Instance i has exactly these requests.

        Args:
            i: The instance.
            held: Tokens of each, prompt and output so far; a prompt not computed yet in full [r].
            left: Output tokens that each is expected to generate yet [r].
            new_tokens: Prompt tokens among them that are not computed yet.
            bank_s: Smallest time that one of them has saved against its TPOT target, seconds.
            tpot_s: Tightest target among them, seconds.
            is_lost: Those that the engine serves with what the others leave [r]: they take memory
                and slots, and count in no step. None for none.
        """
        fixed = self._kv_fixed[i] * len(held)
        total_held, total_left = float(held.sum()), float(left.sum())
        self._held[i] = held.tolist()
        self._left[i] = left.tolist()
        self.num_requests[i] = len(held)
        self.context[i] = total_held + self.tightness.gamma * total_left
        self._num_idle[i] = 0.0
        if is_lost is not None and is_lost.any():
            lost = float(held[is_lost].sum()) + self.tightness.gamma * float(left[is_lost].sum())
            self.context[i] -= lost
            self._num_idle[i] = np.count_nonzero(is_lost)
        self.new_tokens[i] = new_tokens
        self.bank_s[i] = bank_s
        self.tpot_s[i] = tpot_s
        self.kv_now[i] = total_held + fixed
        self.kv_ends[i] = total_held + total_left + fixed
        self._refresh(i)

    def set_new_tokens(self, new_tokens: FloatArray) -> None:
        """Prompt tokens that are not computed yet, of every instance [n]."""
        self.new_tokens = new_tokens
        self._prompts_s = new_tokens * self._per_token + self._prefill_base

    def requests_of(self, i: int) -> tuple[FloatArray, FloatArray]:
        """Memory now, with its fixed part, and output to come of each request of instance i."""
        return np.array(self._held[i]) + self._kv_fixed[i], np.array(self._left[i])

    def set_model(self, i: int, model: PerformanceModel, max_requests: int) -> None:
        """Instance i is of another kind, or its model has been corrected."""
        if model != self.models[i] or max_requests != self.max_requests[i]:
            self.models[i] = model
            self.max_requests[i] = max_requests
            self._read_model(i, model)

    def _output(self, demand: Demand) -> float:
        return 0.0 if self.phase is Phase.PREFILL else demand.output_tokens

    def _read_model(self, i: int, model: PerformanceModel) -> None:
        self._per_token[i] = model.prefill.per_token_s
        self._prefill_base[i] = model.prefill.base_s
        self._tokens_per_s[i] = self.tightness.theta / max(model.decode.per_ctx_s, _LEAST)
        self._tokens_per_request[i] = model.decode.per_request_s * self._tokens_per_s[i]
        self._decode_base[i] = model.decode.base_s
        self._kv_fixed[i] = model.kv_tokens_per_request
        # The whole memory in tokens; each request takes its fixed part of it beside its tokens.
        self.kv_capacity[i] = model.kv_capacity_bytes / model.kv.bytes_per_token
        self._limit[MEMORY, i] = self.kv_capacity[i]
        self._limit[SLOTS, i] = self.max_requests[i]
        self._refresh(i)

    def _refresh(self, i: int) -> None:
        """Derive what `load_with` adds a request to."""
        with_one = self.num_requests[i] + 1.0
        self._use[SLOTS, i] = with_one
        num_served = with_one - self._num_idle[i]
        self._weighed[i] = self.context[i] + num_served * self._tokens_per_request[i]
        self._prompts_s[i] = self.new_tokens[i] * self._per_token[i] + self._prefill_base[i]
        self._bank_limit_s[i] = (
            self.tightness.theta * self.bank_s[i] if self.phase is Phase.BOTH else np.inf
        )
        self._kv_before[i] = self.kv_now[i] + self._kv_fixed[i]
        if self.is_chunked and num_served > 1.0:
            ctx = min(float(self.kv_now[i]), float(self.context[i]))
            decode_s = float(self.models[i].decode_s(num_served - 1.0, ctx))
            self._free_ratio[i] = max(0.0, 1.0 - decode_s / float(self.tpot_s[i]))
        else:
            self._free_ratio[i] = 1.0
