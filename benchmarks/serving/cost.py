"""What a token costs with `sola_sched` beside stock vLLM: `vllm serve`, and the engine alone.

For each seed all that is compared is started anew and stays up. Requests then go to one after the
other, in one order and back, so that other work on the machine falls on all alike; what is
compared is a variant and its stock vLLM in the same round.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from harness.markdown import markdown
from harness.resumable import Row
from harness.setup import Outcome, Setup
from serving.engine_alone import EngineAlone
from serving.process import Answers, EngineProcess
from serving.served import Served

STOCK, STOCK_BARE = "vLLM", "vLLM, no statistics"
_IDLE_CONNECTOR = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "serving.idle_connector",
    "kv_role": "kv_both",
}
#: What vLLM spins for before it sleeps: others would share the cores with it.
_SPINS_S = 1.1
_WARM_TOKENS = 40
_NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Variant:
    """An engine that is compared.

    Attributes:
        options: Of `sola_sched`; None for vLLM's own scheduler.
        has_statistics: Whether vLLM's statistics are on, with which our metrics travel.
        has_idle_connector: Whether there is a KV connector that does nothing.
        beside: The stock vLLM that it is compared with.
    """

    options: Mapping[str, Any] | None = field(default_factory=dict)
    has_statistics: bool = True
    has_idle_connector: bool = False
    beside: str = STOCK

    @property
    def environment(self) -> dict[str, str]:
        """Of its process. With any connector but ours vLLM would take a core from the model."""
        return {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"} if self.has_idle_connector else {}

    @property
    def arguments(self) -> dict[str, Any]:
        """Of vLLM's engine."""
        arguments: dict[str, Any] = {"load_format": "dummy", "served_model_name": "tiny"}
        if not self.has_statistics:
            arguments["disable_log_stats"] = True
        if self.has_idle_connector:
            arguments["kv_transfer_config"] = _IDLE_CONNECTOR
        if self.options is not None:
            arguments["scheduler_cls"] = "sola_sched.Scheduler"
            arguments["additional_config"] = {"sola_sched": dict(self.options)}
        return arguments


VARIANTS: Mapping[str, Variant] = {
    STOCK: Variant(None),
    "sola_sched": Variant(),
    "no swapping": Variant({"swap": {"mode": "off"}}),
    "vLLM, idle connector": Variant(None, has_idle_connector=True),
    "no planning": Variant({"ttft_s": None, "tpot_s": None}),
    "predictor process": Variant({"predictor": "lexical"}),
    STOCK_BARE: Variant(None, has_statistics=False, beside=STOCK_BARE),
    "sola_sched, no statistics": Variant(has_statistics=False, beside=STOCK_BARE),
}
WAYS = {
    "served": "`vllm serve`, its clients",
    "alone": "engine in one process, `step()`",
}
CLIENTS = (1, 8)


def serving_cost(setup: Setup) -> Outcome:
    """Measure, or take the rows that are stored; the table is of the last run.

    Raises:
        ConfigError: `--only` names no variant.
    """
    setup.check_only(tuple(VARIANTS))
    rows = setup.all_rows() if setup.is_stored else list(setup.keep(_measured(setup)))
    latest = _latest(rows)
    return Outcome(latest, table(latest))


def _latest(rows: Sequence[Row]) -> list[Row]:
    """Of each variant the rows of its last run, and those of stock vLLM in these runs."""
    last = {(row["way"], row["variant"]): row["run"] for row in rows}
    kept = {(*key, run) for key, run in last.items()}
    kept |= {(way, VARIANTS[name].beside, run) for way, name, run in kept}
    return [row for row in rows if (row["way"], row["variant"], row["run"]) in kept]


def _measured(setup: Setup) -> Iterator[Row]:
    """A row for each start, way, number of clients and variant."""
    from sola_sched.bench.backends.model import TINY_SHAPE, cached_model

    run, num_tokens = int(time.time()), setup.options["output_len"]
    names = [
        name for name in VARIANTS
        if not setup.only or name in setup.only or name in {VARIANTS[n].beside for n in setup.only}
    ]  # fmt: skip
    model_dir = cached_model(TINY_SHAPE)  # whose path is that of the code which vLLM has compiled
    for seed in setup.seeds:
        for way in setup.options["ways"]:
            kind: Any = {"served": Served, "alone": EngineAlone}[way]
            with ExitStack() as stack:
                subjects = {
                    name: stack.enter_context(
                        kind(model_dir, VARIANTS[name].arguments, VARIANTS[name].environment)
                    )
                    for name in names
                }
                for subject in subjects.values():  # all start at once
                    subject.wait()
                for row in _rounds(subjects, setup, seed, num_tokens):
                    yield {"run": run, "way": way, "seed": seed, "tokens": num_tokens} | row


def _rounds(
    subjects: Mapping[str, EngineProcess], setup: Setup, seed: int, num_tokens: int
) -> Iterator[Row]:
    """All subjects in turn, once in each round, every second one back."""
    rng = random.Random(seed)
    for num_clients in CLIENTS:
        times: dict[str, list[Answers]] = {name: [] for name in subjects}
        loads = []
        for number in range(setup.options["num_rounds"]):
            loads.append(os.getloadavg()[0])
            order = list(subjects) if number % 2 == 0 else list(subjects)[::-1]
            for name in order:
                subjects[name].answer(num_clients, _WARM_TOKENS, rng.randrange(2**31))
                answers = subjects[name].answer(num_clients, num_tokens, rng.randrange(2**31))
                times[name].append(answers)
                time.sleep(_SPINS_S)
        for name, answers_of in times.items():
            yield {
                "clients": num_clients,
                "variant": name,
                "ms": [round(1e3 * answers.token_s, 4) for answers in answers_of],
                "quiet_ms": [round(1e3 * answers.quiet_s, 4) for answers in answers_of],
                "cpu_ms": [round(1e3 * answers.cpu_s, 4) for answers in answers_of],
                "load": round(statistics.mean(loads), 1),
            }


@dataclass(frozen=True)
class Beside:
    """A variant beside its stock vLLM: medians over rounds, and a 95 % interval of the share.

    Attributes:
        ms, cpu_ms: A token's time, and the processor time that it took.
        added_ms, added_cpu_ms: What was added in the same round.
        added, low, high: What was added to the time, as a share.
        quiet_ms, quiet_added_ms: The tenth percentile of the time between two tokens, and how much
            more than stock vLLM's in the same round. Other work on the machine lengthens some
            steps of nearly every round, and the mean with them; it leaves the quickest alone.
        quiet_low_ms, quiet_high_ms: 95 % interval of the latter.
    """

    ms: float
    cpu_ms: float
    quiet_ms: float
    quiet_added_ms: float
    quiet_low_ms: float
    quiet_high_ms: float
    added_ms: float
    added_cpu_ms: float
    added: float
    low: float
    high: float


def compared(own: Iterable[Row], stock: Iterable[Row]) -> Beside:
    """Rows of a variant and of its stock vLLM, those of one start beside each other."""
    by_start = {(row["run"], row["seed"]): row for row in stock}
    pairs = []
    for row in own:
        beside = by_start[row["run"], row["seed"]]
        columns = [part[name] for name in ("ms", "cpu_ms", "quiet_ms") for part in (row, beside)]
        pairs += list(zip(*columns, strict=True))
    shares = [pair[0] / pair[1] - 1.0 for pair in pairs]
    quiet_ms = [pair[4] - pair[5] for pair in pairs]
    low, high = _interval(shares)
    quiet_low_ms, quiet_high_ms = _interval(quiet_ms)
    return Beside(
        ms=statistics.median(pair[0] for pair in pairs),
        cpu_ms=statistics.median(pair[2] for pair in pairs),
        quiet_ms=statistics.median(pair[4] for pair in pairs),
        quiet_added_ms=statistics.median(quiet_ms),
        quiet_low_ms=quiet_low_ms,
        quiet_high_ms=quiet_high_ms,
        added_ms=statistics.median(pair[0] - pair[1] for pair in pairs),
        added_cpu_ms=statistics.median(pair[2] - pair[3] for pair in pairs),
        added=statistics.median(shares),
        low=low,
        high=high,
    )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES)
    )
    return medians[_NUM_RESAMPLES // 40], medians[-_NUM_RESAMPLES // 40]


def table(rows: Sequence[Row]) -> str:
    """A line for each way, number of clients and variant."""
    head = (
        "measured in", "clients", "variant", "rounds", "ms a token", "spread", "added, ms",
        "added (95 %)", "quiet, ms", "added, ms (95 %)", "CPU, ms a token", "added, ms",
    )  # fmt: skip
    lines = []
    for way, text in WAYS.items():
        for num_clients in CLIENTS:
            here = [row for row in rows if row["way"] == way and row["clients"] == num_clients]
            for name, variant in VARIANTS.items():
                own = [row for row in here if row["variant"] == name]
                if not own:
                    continue
                stock = [row for row in here if row["variant"] == variant.beside]
                lines.append([text, str(num_clients), name, *_cells(own, stock)])
    first, loads = rows[0], [row["load"] for row in rows]
    lengths = " and ".join(map(str, sorted({row["tokens"] for row in rows})))
    return (
        f"vLLM {first['vllm']}, {first['cpu']}, {first['num_cores']} cores, load average "
        f"{min(loads):.1f} to {max(loads):.1f} with these processes; requests of {lengths} tokens. "
        "Medians over rounds; spread: quartiles. Added: to its stock vLLM in the same round. "
        "Quiet: tenth percentile of the time between two tokens, beside stock's in the same round. "
        "CPU: of the HTTP server's process, of the whole engine where it is one process.\n\n"
        + markdown(head, lines, num_left=3)
    )


def _cells(own: Sequence[Row], stock: Sequence[Row]) -> list[str]:
    beside = compared(own, stock)
    times = [ms for row in own for ms in row["ms"]]
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    cells = [str(len(times)), f"{beside.ms:.3f}", f"{low:.3f} to {high:.3f}"]
    quiet, cpu = f"{beside.quiet_ms:.3f}", f"{beside.cpu_ms:.3f}"
    if own[0]["variant"] == stock[0]["variant"]:
        return [*cells, "", "", quiet, "", cpu, ""]
    share = f"{beside.added:+.1%} ({beside.low:+.1%} to {beside.high:+.1%})"
    added = (
        f"{beside.quiet_added_ms:+.3f} ({beside.quiet_low_ms:+.3f} to {beside.quiet_high_ms:+.3f})"
    )
    return [
        *cells, f"{beside.added_ms:+.3f}", share, quiet, added, cpu,
        f"{beside.added_cpu_ms:+.3f}",
    ]  # fmt: skip
