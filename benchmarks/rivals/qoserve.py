"""QoServe."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rivals.base import Rival, Step, by

#: Tokens of a step as published, and where the KV memory is nearly full.
_FULL = (128, *range(256, 2049, 256), 2552)
_SMALL = (128, 256, 384, 512)
_SHORT_OF_MEMORY_TOKENS = 32_000
_OLD_WEIGHT = 0.995


class QoServe(Rival, alpha=0.002, margin=1.1, grid=False, clock="actual"):
    """Prompts by deadline and work left, in chunks that the least slack of the decodes allows.

    Source: QoServe (Niyama), arXiv 2503.22562, and its published code. All decodes run. The step
    takes no longer than their least slack over a margin, and has 128 tokens at least. Prompts stand
    in one queue by A + F + alpha * tokens left. One without KV that reaches the head and could not
    be computed in time even alone goes behind all others, for good.

    Departures: the tokens that fit are found exactly; ``grid`` takes them from the sizes of the
    code, with which it attains less. ``clock`` says when tokens are due: ``actual``, after the
    first token, as TPOT is measured; or ``published``, after the later of the first token and its
    deadline, and one token later. The throughput is that of predicted steps.
    """

    _throughput = 8500.0
    _relegated: frozenset[int] = frozenset()

    def fill(self, step: Step) -> None:
        decodes, table = step.decodes, step.table
        due_s = step.token_due_s(decodes)
        if self.set.clock == "published":
            start_s = np.maximum(step.first_s(decodes), table.due_s[decodes])
            due_s = start_s + (step.given(decodes) + 1) * table.tpot_s[decodes]
        limit_s = float((due_s - step.now_s).min(initial=np.inf)) / self.set.margin
        step.take_decodes(decodes)
        size = self._size(step, limit_s) if self.set.grid else _FULL[0]
        for row in filter(step.may_take, self._queue(step)):
            spare = min(step.room(row, np.inf), size - len(decodes) - step.work.tokens)
            tokens = spare if self.set.grid else max(spare, step.room(row, limit_s))
            step.take(row, tokens)
            if tokens < step.left(np.array([row]))[0]:
                break
        if step.work.tokens:
            speed = step.work.tokens / step.seconds()
            self._throughput = _OLD_WEIGHT * self._throughput + (1.0 - _OLD_WEIGHT) * speed

    def _size(self, step: Step, limit_s: float) -> int:
        """The largest size of the list that fits, decodes included."""
        is_short = step.state.num_free_blocks * step.state.block_size < _SHORT_OF_MEMORY_TOKENS
        sizes, count = _SMALL if is_short else _FULL, len(step.decodes)
        chunks = [step.work.with_chunk(max(0, size - count), 0) for size in sizes]
        fitting = [s for s, c in zip(sizes, chunks, strict=True) if step.seconds_of(c) <= limit_s]
        return max(fitting, default=sizes[0])

    def _queue(self, step: Step) -> Iterator[int]:
        """The prompts in order; those that are too late go behind when they are reached."""
        rows, table = step.prompts, step.table
        left, due_s = step.left(rows), step.due_s(rows)
        rows = by(due_s + self.set.alpha * left, rows)
        late = step.now_s + step.left(rows) / self._throughput > step.due_s(rows)
        late &= (table.num_computed[rows] == 0) & (table.num_output[rows] == 0)
        last = []
        self._relegated &= frozenset(table.serial[rows].tolist())
        for row, serial, is_late in zip(
            rows.tolist(), table.serial[rows].tolist(), late.tolist(), strict=True
        ):
            if is_late:
                self._relegated |= {serial}
            if serial in self._relegated:
                last.append(row)
            else:
                yield row
        yield from last
