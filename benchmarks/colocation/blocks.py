"""SeaLLM Fig. 9 in numbers that need no GPU: one pool of KV blocks for two models, merged or split.

Two services with bursts of requests share a pool that is too small for their peaks. The *merged*
pool is `sola_sched.colocation.unified_blocks`, the *split* one cuts every block into pieces of one
layer and head, as MuxServe does, and the *partition* gives each service half of the memory.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.colocation.unified_blocks import MergedPool
from sola_sched.workloads.workload import arrival_times

BLOCK_TOKENS = 16
_HEAD, _BYTES, _KV = 128, 2, 2
_POOL = 24 << 30
_STEP_S = 0.03
_MEAN_PROMPT, _MEAN_OUTPUT = 250, 250


@dataclass(frozen=True)
class Model:
    """What decides the bytes of its KV."""

    name: str
    layers: int
    heads: int

    @property
    def pieces(self) -> int:
        """Of a block in the split pool: a layer's and head's keys, or values."""
        return self.layers * self.heads * _KV

    @property
    def piece_bytes(self) -> int:
        return BLOCK_TOKENS * _HEAD * _BYTES

    @property
    def block_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    def bytes_of(self, num_tokens: int) -> int:
        """Of the KV of so many tokens, without any unused place."""
        return num_tokens * self.block_bytes // BLOCK_TOKENS


L7, L13, L70 = Model("L7", 32, 32), Model("L13", 40, 40), Model("L70", 80, 8)
PAIRS = ((L7, L7), (L7, L13), (L13, L70), (L7, L70))


class Pool(Protocol):
    """Memory for blocks of two services."""

    def take(self, service: int, count: int) -> Any | None:
        """Blocks, or None if there are not as many."""

    def give_back(self, service: int, blocks: Any) -> None:
        """The end of a request."""

    def held_bytes(self) -> int:
        """What nobody else can have."""

    def entries(self, service: int, count: int) -> int:
        """Numbers in the block table of so many blocks."""

    def part(self, service: int) -> int:
        """Of the memory; services of one part want for the same blocks."""


class Merged:
    """The paper's way."""

    def __init__(self, models: Sequence[Model], total: int) -> None:
        self._pool = MergedPool(total, {str(i): m.block_bytes for i, m in enumerate(models)})

    def take(self, service: int, count: int) -> Any | None:
        return self._pool.allocate(str(service), count)

    def give_back(self, service: int, blocks: Any) -> None:
        self._pool.free(str(service), blocks)

    def held_bytes(self) -> int:
        return self._pool.use().held

    def entries(self, service: int, count: int) -> int:
        return 2 * count

    def part(self, service: int) -> int:
        return 0


class Split:
    """Every block in pieces that fit all models: nothing is left over, and the table is long."""

    def __init__(self, models: Sequence[Model], total: int) -> None:
        self._models = models
        self._left = total // models[0].piece_bytes
        self._total = self._left

    def take(self, service: int, count: int) -> Any | None:
        pieces = count * self._models[service].pieces
        if pieces > self._left:
            return None
        self._left -= pieces
        return pieces

    def give_back(self, service: int, blocks: Any) -> None:
        self._left += blocks

    def held_bytes(self) -> int:
        return (self._total - self._left) * self._models[0].piece_bytes

    def entries(self, service: int, count: int) -> int:
        return count * self._models[service].pieces

    def part(self, service: int) -> int:
        return 0


class Partition:
    """Half of the memory for each, as two engines have it."""

    def __init__(self, models: Sequence[Model], total: int) -> None:
        self._models = models
        self._left = [total // len(models) // model.block_bytes for model in models]
        self._held = total  # each engine keeps what it was started with

    def take(self, service: int, count: int) -> Any | None:
        if count > self._left[service]:
            return None
        self._left[service] -= count
        return count

    def give_back(self, service: int, blocks: Any) -> None:
        self._left[service] += blocks

    def held_bytes(self) -> int:
        return self._held

    def entries(self, service: int, count: int) -> int:
        return count

    def part(self, service: int) -> int:
        return service


POOLS: Mapping[str, type[Merged] | type[Split] | type[Partition]] = {
    "merged": Merged, "split": Split, "partition": Partition,
}  # fmt: skip


@dataclass
class _Request:
    service: int
    arrival_s: float
    prompt: int
    output: int
    done: int = 0
    blocks: list[Any] = field(default_factory=list)
    num_blocks: int = 0


def replay(models: Sequence[Model], pool: Pool, requests: Sequence[_Request]) -> dict[str, float]:
    """Steps of equal length: requests enter in turn, grow by a token a step, and leave.

    Who finds no block for its next token waits a step, holding what it has, and nobody enters
    meanwhile. If nobody can go on, the newest is started anew, as vLLM does.
    """
    waiting = sorted(requests, key=lambda r: r.arrival_s)
    running: list[_Request] = []
    now_s, unused, waits, ended, restarted = 0.0, [], [], 0, 0
    while waiting or running:
        now_s += _STEP_S
        moved, stuck = set[int](), set[int]()  # parts of the memory
        for request in list(running):
            request.done += 1
            if request.done >= request.output:
                running.remove(request)
                _leave(pool, request)
                ended += 1
                moved.add(pool.part(request.service))
            elif _grow(pool, request, request.prompt + request.done + 1):
                moved.add(pool.part(request.service))
            else:
                request.done -= 1
                stuck.add(pool.part(request.service))
        for part in stuck - moved:
            request = [r for r in running if pool.part(r.service) == part][-1]
            running.remove(request)
            _leave(pool, request)
            request.done, restarted = 0, restarted + 1
            waiting.insert(0, request)
        for request in list(waiting):  # each service's own queue
            if request.arrival_s > now_s:
                break
            ahead = waiting[: waiting.index(request)]
            blocked = any(w.service == request.service for w in ahead)
            if (
                pool.part(request.service) not in stuck
                and not blocked
                and _grow(pool, request, request.prompt + 1)
            ):
                waiting.remove(request)
                running.append(request)
                waits.append(now_s - request.arrival_s)
        held = pool.held_bytes()
        if running and held:
            used = sum(models[r.service].bytes_of(r.prompt + r.done) for r in running)
            unused.append(1.0 - used / held)
    return {
        "unused": float(np.mean(unused)),
        "wait_s": float(np.mean(waits)),
        "duration_s": now_s,
        "num_ended": ended,
        "num_restarted": restarted,
    }


def _grow(pool: Pool, request: _Request, num_tokens: int) -> bool:
    more = math.ceil(num_tokens / BLOCK_TOKENS) - request.num_blocks
    if more <= 0:
        return True
    found = pool.take(request.service, more)
    if found is None:
        return False
    request.blocks.append(found)
    request.num_blocks += more
    return True


def _leave(pool: Pool, request: _Request) -> None:
    for blocks in request.blocks:
        pool.give_back(request.service, blocks)
    request.blocks, request.num_blocks = [], 0


def workload(models: Sequence[Model], count: int, seed: int) -> list[_Request]:
    """Bursty requests of both services at a rate that fills the pool at times.

    Lengths are log-normal; each service asks for as many bytes as the other.
    """
    rng = np.random.default_rng([seed, 27])
    requests = []
    for service, model in enumerate(models):
        life_s = _MEAN_OUTPUT * _STEP_S
        bytes_each = model.bytes_of(_MEAN_PROMPT + _MEAN_OUTPUT // 2)
        rate = 0.4 * _POOL / bytes_each / life_s
        for arrival_s in arrival_times(count, rate, 0.1, int(rng.integers(1 << 30))):
            prompt, output = (
                int(np.clip(rng.lognormal(math.log(mean) - 0.5, 1.0), 4, 2000))
                for mean in (_MEAN_PROMPT, _MEAN_OUTPUT)
            )
            requests.append(_Request(service, float(arrival_s), prompt, output))
    return requests


def gather_s(model: Model, way: str, num_blocks: int, seed: int) -> float:
    """Seconds to copy a request's KV out of the pool, by the pieces of the block table, on a CPU.

    The least of five, of a pool of twice the size in which its pieces lie anywhere.
    """
    rng = np.random.default_rng(seed)
    pieces = num_blocks * (model.pieces if way == "split" else 1)
    length = model.piece_bytes if way == "split" else model.block_bytes
    pool = np.zeros((2 * pieces, length), dtype=np.uint8)
    pool[:] = 1  # every page is there
    table = rng.permutation(2 * pieces)[:pieces]
    out = np.empty((pieces, length), dtype=np.uint8)
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        np.take(pool, table, axis=0, out=out, mode="clip")
        times.append(time.perf_counter() - started_s)
    return min(times)


def sharing_blocks(setup: Setup) -> Outcome:
    """The table."""
    count = 40 if setup.is_quick else 400
    lines = []
    for models, (way, make) in itertools.product(PAIRS, POOLS.items()):
        results = [
            replay(models, make(models, _POOL), workload(models, count, seed))
            for seed in setup.seeds
        ]
        assert all(found["num_ended"] == 2 * count for found in results)
        mean = {key: float(np.mean([found[key] for found in results])) for key in results[0]}
        entries = [make(models, _POOL).entries(s, 1) for s in range(2)]
        gather = [1e3 * gather_s(model, way, 8, 0) for model in models]
        lines.append(
            ["-".join(m.name for m in models), way, f"{100 * mean['unused']:.1f} %",
             " / ".join(f"{n:,}" for n in entries), f"{mean['wait_s']:.1f}",
             f"{mean['duration_s']:.0f}",
             f"{mean['num_restarted']:.0f}", " / ".join(f"{ms:.1f}" for ms in gather)]
        )  # fmt: skip
    head = ["models", "pool", "held bytes without KV", "numbers a block", "mean wait, s",
            "all done, s",
            "started anew", "copy of 8 blocks, ms"]  # fmt: skip
    return Outcome(
        [],
        f"Llama2-7B, 13B and 70B (8 KV heads), blocks of {BLOCK_TOKENS} tokens, a pool of "
        f"{_POOL >> 30} GiB, {count} requests of each of two services in bursts, means of seeds "
        f"{', '.join(map(str, setup.seeds))}. Of a partition all bytes are held. A service's "
        "figures are divided by a slash. The copy is one of memory to memory on this CPU.\n\n"
        + markdown(head, lines, num_left=2),
    )
