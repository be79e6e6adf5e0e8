"""The run without arguments: what it plans, when it distrusts itself, and what it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_runs import make_records, make_workload

from sola_sched.bench import cli
from sola_sched.bench.backends.base import OnDone, RunOutcome, SchedulerSpec
from sola_sched.bench.first_run import plan as first_run_plan
from sola_sched.bench.first_run import run as first_run
from sola_sched.bench.first_run.checks import Evenness, end_wait_s, evenness, is_saturated
from sola_sched.bench.first_run.engine import FirstRun, Interrupted
from sola_sched.bench.first_run.plan import (
    FEWER_SETTINGS,
    HIGH_SHARE,
    LOW_SHARE,
    ONE_SETTING,
    OURS,
    SETTINGS,
    Machine,
    num_high_requests,
    plan_runs,
)
from sola_sched.bench.first_run.verdict import Comparison, can_be_trusted, sentences
from sola_sched.bench.report.intervals import (
    effective_size,
    paired_difference,
    pooled,
    share,
    worth,
)
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import RequestRecord
from sola_sched.workloads.workload import Workload

#: An undisturbed core: 7.7 requests/s, targets as measured there.
QUIET = Machine(7.7, 0.55, start_s=3.0, share=1.0, skips_idle=True)

# The plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "settings", "loads"),
    [
        (replace(QUIET, capacity_per_s=20.0, ttft_s=0.2), SETTINGS, [HIGH_SHARE, LOW_SHARE] * 2),
        (QUIET, FEWER_SETTINGS, [HIGH_SHARE, LOW_SHARE] * 2),
        (Machine(3.6, 1.4, 5.0, 1.0, True), FEWER_SETTINGS, [HIGH_SHARE, LOW_SHARE]),
        (Machine(3.3, 1.5, 8.0, 0.5, True), ONE_SETTING, [HIGH_SHARE, LOW_SHARE]),
        (Machine(3.3, 1.5, 30.0, 0.15, True), ONE_SETTING, [HIGH_SHARE]),
    ],
)
def test_slower_machines_get_fewer_settings_and_blocks_and_never_shorter_runs(
    machine: Machine, settings: tuple[str, ...], loads: list[float]
) -> None:
    plan = plan_runs(machine)

    expected = loads[:3] if len(loads) > 2 else loads
    assert [block.load for block in plan.blocks] == expected
    assert plan.blocks[0].settings == settings
    assert (plan.cuts == ()) == (settings == SETTINGS)
    high = [block.num_requests for block in plan.blocks if block.load > 1]
    assert high == [num_high_requests(machine)] * len(high)
    if expected != [HIGH_SHARE]:
        assert plan.seconds <= 2.0 * first_run_plan.BUDGET_S


@pytest.mark.parametrize("ttft_s", [0.2, 0.55, 1.5, 4.0])
def test_a_run_past_the_capacity_leaves_a_queue_longer_than_the_ttft_target(ttft_s: float) -> None:
    machine = replace(QUIET, ttft_s=ttft_s)

    num_requests = num_high_requests(machine)

    arrivals_s = num_requests / (HIGH_SHARE * machine.capacity_per_s)
    queue = num_requests - machine.capacity_per_s * arrivals_s
    assert queue / machine.capacity_per_s >= 2.0 * ttft_s


def test_schedulers_take_turns_in_going_first_and_requests_differ_between_blocks() -> None:
    blocks = plan_runs(QUIET).blocks

    assert [block.schedulers()[0] == OURS for block in blocks] == [False, True, False]
    assert len({block.seed for block in blocks}) == len(blocks)


def test_only_the_best_setting_so_far_runs_on_where_time_is_short() -> None:
    block = plan_runs(Machine(3.6, 1.4, 5.0, 1.0, True)).blocks[1]

    assert block.schedulers("stock:2048") == (OURS, "stock:2048")
    assert block.num_runs == 2


# The checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times_s", "is_even"),
    [
        ([([1.0, 1.0], [1.0, 1.02])], True),
        ([([1.0, 1.04], [1.0, 1.04])], True),  # drifts, but beside both
        ([([1.0, 1.0], [1.06, 1.06])], False),
        ([([1.06, 1.06], [1.0, 1.0])], False),
        ([([1.0, 1.0], [1.0, 1.0]), ([1.0, 1.0], [1.2, 1.2])], False),
        ([([1.0, 1.4], [1.0, 1.4])], False),  # equal on average, but far too unsteady
        ([([], [])], True),  # nobody measured it, as in virtual time
    ],
)
def test_equal_batches_tell_whether_the_machine_was_even(
    times_s: list[tuple[list[float], list[float]]], is_even: bool
) -> None:
    assert evenness(times_s).is_even is is_even


def test_the_queue_at_the_end_is_the_wait_of_those_who_came_last() -> None:
    workload = make_workload(40, rate=10.0)
    records = make_records(workload, [0.1] * 35 + [0.7, 0.8, 0.9, 5.0, 0.2])
    unanswered = make_records(workload, [0.1] * 36 + [math.nan] * 4)

    assert end_wait_s(records) == pytest.approx(0.8)
    assert end_wait_s(unanswered) == math.inf


def test_a_rate_is_past_the_capacity_only_if_no_setting_kept_up_in_any_block() -> None:
    kept = {"stock:512": [0.9, 0.8], "stock:2048": [0.7]}
    assert is_saturated({"stock:512": [1.0, 0.8], "stock:2048": [2.0]}, kept, ttft_s=0.5)
    assert not is_saturated({"stock:512": [1.0, 0.4], "stock:2048": [2.0]}, kept, ttft_s=0.5)
    assert not is_saturated({}, {}, ttft_s=0.5)


def test_a_rate_at_which_every_setting_fails_most_is_past_the_capacity_without_a_queue() -> None:
    waits = {"stock:512": [0.3, 0.4], "stock:2048": [0.2]}
    assert is_saturated(waits, {"stock:512": [0.2, 0.4], "stock:2048": [0.1]}, ttft_s=0.5)
    assert not is_saturated(waits, {"stock:512": [0.2, 0.6], "stock:2048": [0.1]}, ttft_s=0.5)


# Intervals ----------------------------------------------------------------------------------


def test_wilsons_interval_of_a_published_example() -> None:
    # Newcombe 1998: 81 of 263. Spread out: independent.
    estimate = share([i * 81 % 263 < 81 for i in range(263)])

    assert (estimate.low, estimate.high) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_a_paired_interval_of_a_published_example() -> None:
    # Newcombe 1998, table II: 36 both, 12 and 2 discordant, 0 neither. Shuffled: independent.
    pairs = [(1, 1)] * 36 + [(1, 0)] * 12 + [(0, 1)] * 2
    pairs = [pairs[(i * 17) % 50] for i in range(50)]
    gain = paired_difference([[p for p, _ in pairs]], [[q for _, q in pairs]])

    assert gain.value == pytest.approx(0.2)
    assert gain.low == pytest.approx(0.0569, abs=0.01)
    assert gain.high == pytest.approx(0.3404, abs=0.01)


def test_requests_of_one_queue_count_for_fewer_than_they_are() -> None:
    bursts = ([1.0] * 25 + [0.0] * 25) * 4
    mixed = [float(i % 2) for i in range(200)]

    assert effective_size(mixed) == 200.0
    assert effective_size(bursts) < 30.0
    assert effective_size([1.0] * 50) == 50.0


def test_the_share_of_requests_of_one_queue_is_known_less_well() -> None:
    bursts = ([True] * 25 + [False] * 25) * 4
    alone = share(bursts)
    mixed = share([i % 2 == 0 for i in range(200)])

    assert alone.high - alone.low > 2.0 * (mixed.high - mixed.low)
    halves = share(bursts[:100], bursts[100:])
    assert halves.value == alone.value
    assert halves.high - halves.low > 2.0 * (mixed.high - mixed.low)


def test_a_run_that_tells_little_is_not_made_good_by_one_that_tells_much() -> None:
    rng = np.random.default_rng(0)
    one_burst = (np.arange(200) // 40 % 2).astype(float)
    chances = rng.integers(0, 2, 200).astype(float)

    assert pooled([chances, chances]).size > 300.0
    assert pooled([chances, one_burst]).size < 4.0 * worth(one_burst).size


def test_a_queue_that_grows_throughout_a_run_is_no_chance() -> None:
    chances = np.random.default_rng(0).random(200)
    growing = [float(chance < i / 200) for i, chance in enumerate(chances)]

    assert effective_size(growing) > 100.0


# The verdict --------------------------------------------------------------------------------

EVEN, UNEVEN = Evenness(0.012, 1.05), Evenness(0.09, 1.2)


def spread(num_true: int, size: int = 100) -> list[bool]:
    """So many true ones, far from each other."""
    return [(i * num_true) % size < num_true for i in range(size)]


def compared(
    ours: int, others: int, load: float = 1.3, *, is_saturated: bool = True, backlog_s: float = 2.0
) -> Comparison:
    flags = [spread(ours)], [spread(others)]
    return Comparison(load, 8.0 * load, "stock:512", *flags, backlog_s, 0.5, is_saturated)


LOW = compared(100, 100, 0.6, is_saturated=False, backlog_s=0.1)


@pytest.mark.parametrize(
    ("found", "machine", "is_trusted", "words"),
    [
        ([compared(90, 40), LOW], EVEN, True,
         ["1.3 x what stock vLLM serves", "90.0 % (82.6 to 94.5)", "40.0 % (30.9 to 49.8)",
          "50.0 points more (+", "nothing is lost", "can be trusted", "1.2 % longer"]),
        ([compared(40, 90), LOW], EVEN, True, ["50.0 points fewer (-"]),
        ([compared(90, 40), compared(96, 100, 0.6, is_saturated=False)], EVEN, True,
         ["4.0 points fewer, which may be chance (-"]),
        ([compared(62, 60), LOW], EVEN, True, ["2.0 points more, which may be chance (-"]),
        ([compared(100, 98, is_saturated=False, backlog_s=0.2), LOW], EVEN, False,
         ["NOT TO BE TRUSTED", "too short or its rate too low", "waited 0.2 s", "0.5 s"]),
        ([compared(90, 40), LOW], UNEVEN, False,
         ["NOT TO BE TRUSTED", "too uneven", "9.0 % longer", "limit 5 %"]),
        ([compared(90, 40, is_saturated=False), LOW], UNEVEN, False,
         ["too short", "too uneven"]),
        ([compared(90, 40, backlog_s=0.3), LOW], EVEN, True,
         ["can be trusted", "no stock setting kept both targets of 50 %"]),
        ([LOW], EVEN, False, ["no rate past the capacity"]),
        ([compared(90, 40)], Evenness(math.nan, math.nan), True, ["was not measured"]),
    ],
)  # fmt: skip
def test_verdict_says_who_attained_how_much_and_whether_to_believe_it(
    found: list[Comparison], machine: Evenness, is_trusted: bool, words: Sequence[str]
) -> None:
    said = sentences(found, machine)

    assert can_be_trusted(found, machine) is is_trusted
    assert len(said) == len(found) + 1
    text = " ".join(said)
    for word in words:
        assert word in text
    assert ("NOT TO BE TRUSTED" in text) is not is_trusted


# A whole run --------------------------------------------------------------------------------


class QueueBackend:
    """One server in order of arrival for stock; ours answers everybody at once.

    Args:
        speeds: Factors on the reference batch of one run after another.
        capacity_per_s: Of the server; `later_per_s` from the third run on, after the short runs.
    """

    name, model_id, tokenizer_id = "queue", "queue-model", "queue-model"

    def __init__(
        self,
        capacity_per_s: float = 40.0,
        speeds: Sequence[float] = (1.0,),
        later_per_s: float | None = None,
    ) -> None:
        self.capacity_per_s, self.speeds = capacity_per_s, speeds
        self.later_per_s = later_per_s or capacity_per_s
        self.calls: list[tuple[str, Workload]] = []
        self.interrupts_at = -1
        self.notes: list[str] = []

    def run(
        self,
        workload: Workload,
        scheduler: SchedulerSpec,
        slo: SloTarget,
        *,
        max_concurrency: int | None = None,
        on_done: OnDone | None = None,
    ) -> RunOutcome:
        rate = self.capacity_per_s if len(self.calls) < 2 else self.later_per_s
        free_s, records = 0.0, []
        held_s = 0.0  # by the client; those then in flight are half done on average
        if max_concurrency is not None and max_concurrency > 1:
            held_s = (1.0 - max_concurrency / 2 / len(workload.requests)) / rate
        for index, request in enumerate(workload.requests, start=1):
            record = RequestRecord(request.req_id, request.arrival_s, 10, completed=True)
            begin_s = request.arrival_s
            if scheduler.kind != "sola":
                begin_s = max(begin_s, free_s)
            free_s = begin_s + 1.0 / rate
            record.sent_s = index * held_s or begin_s
            record.token_times_s = [begin_s + 0.9 / rate, begin_s + 0.9 / rate + 0.001]
            records.append(record)
        speed = self.speeds[len(self.calls) % len(self.speeds)]
        self.calls.append((scheduler.label, workload))
        outcome = RunOutcome(records, duration_s=free_s, clock="cpu", cpu_share=1.0)
        outcome.notes = list(self.notes)
        outcome.reference_s = (0.5 * speed, 0.5 * speed)
        outcome.interrupted = len(self.calls) == self.interrupts_at
        return outcome


def first_run_on(backend: Any, directory: Path) -> tuple[list[str], list[str]]:
    said: list[str] = []
    run = FirstRun(backend, make_workload(300), directory, said.append, is_hidden=True)
    return run.run(), said


def test_a_first_run_compares_past_the_capacity_and_below(tmp_path: Path) -> None:
    backend = QueueBackend()

    verdict, said = first_run_on(backend, tmp_path)

    labels = [label for label, _ in backend.calls[2:]]
    assert labels == [*SETTINGS, OURS, OURS, *reversed(SETTINGS), *SETTINGS, OURS]
    blocks = [backend.calls[2:6], backend.calls[6:10], backend.calls[10:]]
    assert [len({tuple(workload.requests) for _, workload in block}) for block in blocks] == [1] * 3
    assert "points more (+" in verdict[0]
    assert "nothing is lost" in verdict[1]
    assert "can be trusted" in verdict[2]
    assert sum("equal batch 500 and 500 ms" in line for line in said) == 12
    (rows,) = tmp_path.glob("*.jsonl")
    assert len(rows.read_text().splitlines()) == 12
    (figure,) = tmp_path.glob("*.png")
    assert any(str(figure) in line for line in said)


def test_a_rate_that_stock_sustains_is_raised_once(tmp_path: Path) -> None:
    backend = QueueBackend(capacity_per_s=40.0, later_per_s=53.0)  # 1.33 x what was measured

    verdict, said = first_run_on(backend, tmp_path)

    rates = [workload.request_rate for _, workload in backend.calls[2:]]
    high = rates[0]
    assert rates[4] == pytest.approx(first_run_plan.RAISE * high, rel=0.01)
    assert sum("is repeated at" in line for line in said) == 1
    assert f"{rates[4]:.3g} requests/s" in verdict[0]
    assert f"At {high:.3g} requests/s" not in " ".join(verdict)
    assert "can be trusted" in verdict[-1]


def test_a_capacity_far_above_the_measured_one_is_admitted(tmp_path: Path) -> None:
    verdict, _ = first_run_on(QueueBackend(capacity_per_s=40.0, later_per_s=400.0), tmp_path)

    assert "NOT TO BE TRUSTED" in verdict[-1]
    assert "too short or its rate too low" in verdict[-1]


def test_a_machine_that_slows_down_beside_one_scheduler_is_admitted(tmp_path: Path) -> None:
    # The two short runs, then four runs a block: ours last, first, last.
    speeds = [1.0] * 5 + [1.1, 1.1] + [1.0] * 6 + [1.1]

    verdict, _ = first_run_on(QueueBackend(speeds=speeds), tmp_path)

    assert "too uneven: the same batch took 10.0 % longer" in verdict[-1]


def test_an_interrupted_run_ends_the_comparison(tmp_path: Path) -> None:
    backend = QueueBackend()
    backend.interrupts_at = 4

    with pytest.raises(Interrupted):
        first_run_on(backend, tmp_path)

    assert len(backend.calls) == 4


def test_without_arguments_virtual_time_comes_first_then_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        first_run.first_run_virtual, "run", lambda directory, say: say("VIRTUAL TIME")
    )
    monkeypatch.setattr(first_run, "_engine", lambda say: (QueueBackend(), make_workload(300)))

    code = cli.main([])

    out = capsys.readouterr().out
    assert code == 0
    assert out.index("VIRTUAL TIME") < out.index("Block 1") < out.index("Verdict")
    assert "can be trusted" in out


def test_an_interrupt_while_the_engine_starts_says_that_runs_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starting(say: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_run.first_run_virtual, "run", lambda directory, say: None)
    monkeypatch.setattr(first_run, "_engine", starting)

    assert cli.main([]) == first_run.EXIT_INTERRUPTED

    told = capsys.readouterr()
    assert "Interrupted; the runs before are saved." in told.out
    assert told.err == ""


def test_what_a_reader_must_know_of_a_run_is_said_beside_its_numbers(tmp_path: Path) -> None:
    backend = QueueBackend()
    backend.notes = ["sola_sched stepped aside."]

    _, said = first_run_on(backend, tmp_path)

    assert sum("stepped aside" in line for line in said) == 12
