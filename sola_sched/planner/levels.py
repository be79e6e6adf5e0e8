"""Priority levels of preemptive scheduling: by remaining time, with aging.

The engine's queue stays in `queues.py`; this is the order in which a planner serves it.
"""

from __future__ import annotations

import math

import numpy as np

from sola_sched.core.state import DECODE, BoolArray, FloatArray, IntArray, RequestTable


class PriorityLevels:
    """Levels whose quanta double, and virtual aging through them.

    Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1: several queues by estimated remaining
    time, virtual aging with a threshold K, demotion when an estimate is exceeded. The paper leaves
    the rest open; here:

    - Level 0 is served first. Level l holds requests with up to 2^l quanta of remaining time, the
      last level all others, so a request climbs as it is served.
    - A request whose estimate is overrun gets a doubled one (`sola_sched.prediction.length`) and
      so sinks by itself; nothing else demotes.
    - K seconds without service lift a request by one level. Lifted requests go before the others
      of their level, the oldest first, so at level 0 nobody who comes later passes one. That is
      the bound on starvation: after K times its level a request is behind older ones only.
    - A lifted request keeps its place until it has a further token and has been served for the
      quantum of the level it came from. Without the quantum it would lose its place with its first
      token, and its KV soon after; without the token, requests that starve in turn could displace
      each other for ever.

    `policy="doubling"` has one level and an order of its own; K is its starvation threshold.

    Args:
        num_levels: >= 1.
        aging_s: K, seconds, > 0; ``inf`` for no aging.
    """

    def __init__(self, num_levels: int, aging_s: float) -> None:
        self.num_levels = num_levels
        self.aging_s = aging_s
        self._serial: IntArray = np.empty(0, dtype=np.int64)
        self._age_s: FloatArray = np.empty(0)
        self._spent_s: FloatArray = np.empty(0)
        self._last_s = math.nan

    def natural(self, remaining_s: FloatArray, quantum_s: float) -> IntArray:
        """Levels by remaining time alone, [n]."""
        quanta = np.maximum(remaining_s / max(quantum_s, 1e-12), 1.0)
        level: IntArray = np.minimum(np.ceil(np.log2(quanta)), self.num_levels - 1).astype(np.int64)
        return level

    def age(
        self,
        table: RequestTable,
        rows: IntArray,
        served: BoolArray,
        quanta_s: FloatArray,
        now_s: float,
    ) -> FloatArray:
        """Seconds that count as spent without service; call once per plan, for all live rows.

        Args:
            table: Of the rows.
            rows: Running and waiting rows, [n].
            served: Whether a row took part in the step planned last, [n].
            quanta_s: Service after which a lifted row gives its lift back, [n].
            now_s: Not before that of the call before.

        Returns:
            Seconds [n].
        """
        if len(self._serial) < table.capacity:
            more = table.capacity - len(self._serial)
            self._serial = np.append(self._serial, np.full(more, -1))
            self._age_s = np.append(self._age_s, np.zeros(more))
            self._spent_s = np.append(self._spent_s, np.zeros(more))
        elapsed_s = 0.0 if math.isnan(self._last_s) else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        age, spent, serial = self._age_s[rows], self._spent_s[rows], table.serial[rows]
        lifted = age >= self.aging_s
        spent += elapsed_s
        spent[~(served & lifted)] = 0.0
        age += elapsed_s
        age[served] -= elapsed_s
        keeps = lifted & ((spent < quanta_s) | (table.phase[rows] != DECODE))
        age[served & ~keeps] = 0.0
        fresh = serial != self._serial[rows]
        if np.count_nonzero(fresh):
            age[fresh] = np.maximum(now_s - table.arrival_s[rows[fresh]], 0.0)
            spent[fresh] = 0.0
            self._serial[rows] = serial
        self._age_s[rows], self._spent_s[rows] = age, spent
        return age

    def lifted(self, natural: IntArray, age_s: FloatArray) -> tuple[IntArray, BoolArray]:
        """Levels after aging [n], and which rows were lifted [n]."""
        if math.isinf(self.aging_s):
            return natural, np.zeros(len(natural), dtype=np.bool_)
        is_lifted = age_s >= self.aging_s
        if not is_lifted.any():
            return natural, is_lifted
        steps = np.floor(age_s / self.aging_s).astype(np.int64)
        return np.maximum(natural - steps, 0), is_lifted

    def promote_s(self, natural: IntArray, age_s: FloatArray) -> FloatArray:
        """T_promote of ALISE Eq. 7: seconds until a row that is not served is at level 0, [n]."""
        if math.isinf(self.aging_s):
            return np.where(natural > 0, np.inf, 0.0)
        result: FloatArray = np.maximum(natural * self.aging_s - age_s, 0.0)
        return result
