"""Services: who shares the engine, what time each has had, and what it is owed.

A *service* is an SLO class: the requests that name it, or the adapter or base model of its name.
Service 0 is that of all other requests. Each step's time is divided among the services whose
requests took part in it. One with a share is *owed* time while its requests wait or sit out and it
has got less than its share; what it does not ask for goes to whoever does. What it had beyond its
share while others asked counts against it later, for a while; what was lent to it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sola_sched.config.slo import DEFAULT_CLASS
from sola_sched.cost.execution import ExecutionTime
from sola_sched.cost.model import CostModel

if TYPE_CHECKING:
    from sola_sched.core.state import RequestTable

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

#: A service is owed no more than this, seconds of engine time: the longest burst of one that was
#: kept waiting, as by requests that could not give way.
MOST_OWED_S = 2.0
#: Finished requests of a service whose lengths are remembered.
NUM_REMEMBERED = 256


class Services:
    """The services of one engine; all arrays are [num_services].

    Args:
        shares: Guaranteed shares of the engine time by name, each in (0, 1), in sum below 1.

    Attributes:
        names: Of the services; the first is that of requests without any.
        share: Guaranteed share of the engine time.
        num_live: Unfinished requests.
        served_s: Engine time that its requests have had, seconds.
        owed_s: Engine time that it may claim, seconds, at most `MOST_OWED_S`; below 0 where it has
            had more than its share while others asked for it, no less than -`MOST_OWED_S`.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        self.share = self.served_s = self.owed_s = np.zeros(0)
        self.num_live: IntArray = np.zeros(0, dtype=np.int64)
        self._lengths: NDArray[np.int64] = np.zeros((0, NUM_REMEMBERED, 2), dtype=np.int64)
        self._num_ended: list[int] = []
        self.index_of(DEFAULT_CLASS)
        self.set_shares(shares or {})

    def __len__(self) -> int:
        return len(self.names)

    def index_of(self, name: str) -> int:
        """Its number, a new one for a new name."""
        index = self._index.get(name)
        if index is None:
            index = self._index[name] = len(self.names)
            self.names.append(name)
            self._num_ended.append(0)
            self.share, self.served_s, self.owed_s = (
                np.append(values, 0.0) for values in (self.share, self.served_s, self.owed_s)
            )
            self.num_live = np.append(self.num_live, 0)
            self._lengths = np.pad(self._lengths, ((0, 1), (0, 0), (0, 0)))
        return index

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """These are guaranteed from now on; who has none any more is owed nothing."""
        indices = [self.index_of(name) for name in shares]
        self.share[:] = 0.0
        self.share[indices] = list(shares.values())
        self.owed_s[self.share == 0.0] = 0.0
        self._are_shared = bool(self.share.any())

    # Lengths --------------------------------------------------------------------------------

    def observe(self, service: int, num_prompt: int, num_output: int) -> None:
        """Remember a request that ended by itself, tokens."""
        self._lengths[service, self._num_ended[service] % NUM_REMEMBERED] = num_prompt, num_output
        self._num_ended[service] += 1

    def lengths_of(self, service: int) -> IntArray:
        """Prompt and output tokens [n, 2] of the last requests that ended; n <= NUM_REMEMBERED."""
        return self._lengths[service, : self._num_ended[service]]

    def num_ended(self, service: int) -> int:
        """Requests of it that have ended by themselves."""
        return self._num_ended[service]

    # Time -----------------------------------------------------------------------------------

    def parts_of(
        self,
        table: RequestTable,
        cost: CostModel,
        decode_rows: IntArray,
        prefill_rows: Sequence[int],
        prefill_tokens: Sequence[int],
    ) -> tuple[FloatArray, BoolArray] | None:
        """How a step about to begin is divided; None where nobody needs to know.

        A decode takes its part of a step of these decodes alone, and its context's; a chunk takes
        what it adds to one.

        Args:
            table, cost: Of the engine.
            decode_rows: Rows that decode in the step.
            prefill_rows: Rows that prefill, with their `prefill_tokens`, not computed yet.

        Returns:
            The part of the time of each service, in sum 1; and whether it has requests that get
            nothing in the step, or not all that they ask for.
        """
        if len(self.names) == 1 or not cost.is_ready:
            return None
        count, service = len(self.names), table.service
        taken: FloatArray = np.zeros(count)
        present: IntArray = np.zeros(count, dtype=np.int64)
        if len(decode_rows):
            of_decode = service[decode_rows]
            time = ExecutionTime.of(cost, len(decode_rows))
            ctx = table.num_prompt[decode_rows] + table.num_output[decode_rows]
            taken += np.bincount(of_decode, time.alpha_s * ctx + time.beta_s, count)
            present += np.bincount(of_decode, minlength=count)
        if len(prefill_rows):
            rows = np.asarray(prefill_rows, dtype=np.int64)
            tokens = np.asarray(prefill_tokens, dtype=np.int64)
            of_prefill, has = service[rows], table.num_computed[rows]
            chunk_s = np.asarray(cost.prefill_marginal_s(tokens, has))
            taken += np.bincount(of_prefill, chunk_s, count)
            is_whole = has + tokens >= table.prefill_target[rows]
            present += np.bincount(of_prefill[is_whole], minlength=count)
        total = float(taken.sum())
        parts = taken / total if total > 0.0 else taken
        return parts, present < self.num_live

    def book(self, elapsed_s: float, parts: FloatArray, wants: BoolArray) -> None:
        """A step of `elapsed_s` has completed that was divided as `parts_of` says."""
        count = len(parts)  # a service may have come since
        had_s = elapsed_s * parts
        self.served_s[:count] += had_s
        if not self._are_shared:
            return
        owed_s = self.owed_s[:count] + self.share[:count] * elapsed_s - had_s
        is_lent = np.count_nonzero(wants) - wants == 0  # nobody else asked for what it has had
        least_s = np.where(is_lent | (self.share[:count] == 0.0), 0.0, -MOST_OWED_S)
        self.owed_s[:count] = np.clip(owed_s, least_s, np.where(wants, MOST_OWED_S, 0.0))

    def lifts(self) -> IntArray | None:
        """By how many ranks each goes before those who are owed nothing; None if nobody is owed.

        Whoever is owed most goes first.
        """
        if not self._are_shared or not (self.owed_s > 0.0).any():
            return None
        order = self.owed_s.argsort(kind="stable")
        lifts: IntArray = np.zeros(len(order), dtype=np.int64)
        lifts[order] = np.arange(len(order))
        lifts[self.owed_s <= 0.0] = 0
        return lifts
