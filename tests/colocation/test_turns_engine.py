"""Turns around the steps of vLLM's real engine core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from turn_takers import PATIENCE_S, takers

pytest.importorskip("vllm", exc_type=ImportError)

from engine_harness import STOCK, RunResult, make_workload, num_different, run
from tiny_llama import write_tiny_llama

import sola_sched
from sola_sched.colocation.lease import LeaseStats
from sola_sched.errors import ConfigError

pytestmark = pytest.mark.vllm
NUM_REQUESTS, OUTPUT_LEN = 8, 30


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> RunResult:
    return run(STOCK, make_workload(NUM_REQUESTS, output_len=OUTPUT_LEN), model_dir)


class _Watched(sola_sched.Scheduler):
    """Keeps what its lease counted."""

    stats: LeaseStats

    def shutdown(self) -> None:
        assert self.sola_lease is not None
        _Watched.stats = self.sola_lease.stats
        super().shutdown()


def serve(model_dir: Path, group: Path, policy: str = "attain", **options: Any) -> RunResult:
    turns = {"group": str(group), "share": 0.2, "limit_s": PATIENCE_S}
    config = {"sola_sched": {"ttft_s": 0.5, "tpot_s": 0.05, "policy": policy, "turns": turns}}
    num_aborts = options.pop("num_aborts", 0)
    workload = make_workload(NUM_REQUESTS, output_len=OUTPUT_LEN, num_aborts=num_aborts)
    return run(_Watched, workload, model_dir, additional_config=config, **options)


@pytest.mark.parametrize(
    ("is_async", "policy"),
    [
        (True, "attain"),
        pytest.param(False, "attain", marks=pytest.mark.slow),
        pytest.param(False, "alise", marks=pytest.mark.slow),
    ],
)
def test_an_engine_among_others_gives_the_same_tokens_and_lets_them_run(
    model_dir: Path, tmp_path: Path, reference: RunResult, is_async: bool, policy: str
) -> None:
    rule = "shortest" if policy == "alise" else "deadline"
    with takers(str(tmp_path / "turns"), "other", share=0.3, rule=rule) as (other,):
        other.order("work", -1e9)  # always more urgent

        result = serve(model_dir, tmp_path / "turns", policy, async_scheduling=is_async)

        other.order("give", None)
        assert other.answer() > 0
    assert num_different(result, reference) == 0
    assert set(result.finish_reasons.values()) == {"length"}
    assert _Watched.stats.num_waits > 0
    assert _Watched.stats.num_lost == 0


@pytest.mark.slow
def test_an_idle_engine_keeps_nobody_waiting(model_dir: Path, tmp_path: Path) -> None:
    with takers(str(tmp_path / "turns"), "other") as (other,):

        def ask(core: Any) -> None:
            assert not core.scheduler.has_requests()
            other.order("take")
            other.answer()

        result = serve(model_dir, tmp_path / "turns", num_aborts=NUM_REQUESTS, at_steps={600: ask})

    assert len(result.finish_reasons) == NUM_REQUESTS


@pytest.mark.slow
def test_an_engine_alone_in_its_group_never_waits(model_dir: Path, tmp_path: Path) -> None:
    serve(model_dir, tmp_path / "turns")

    assert _Watched.stats.num_turns > 0
    assert _Watched.stats.num_waits == 0


def test_a_neighbour_that_hangs_costs_one_limit(model_dir: Path, tmp_path: Path) -> None:
    with takers(str(tmp_path / "turns"), "hung") as (other,):
        other.order("take")
        other.answer()
        other.order("stop")
        turns = {"group": str(tmp_path / "turns"), "limit_s": 0.1}

        result = run(
            _Watched, make_workload(4, output_len=20), model_dir,
            additional_config={"sola_sched": {"turns": turns}},
        )  # fmt: skip

    assert set(result.finish_reasons.values()) == {"length"}
    assert _Watched.stats.num_taken_over == 1
    assert _Watched.stats.num_waits <= 1  # none, if the engine took longer to start


def test_without_the_option_there_is_no_lease(model_dir: Path) -> None:
    seen: list[Any] = []
    check: Callable[[Any], None] = lambda core: seen.append(core.scheduler.sola_lease)  # noqa: E731

    run(sola_sched.Scheduler, make_workload(2, output_len=5), model_dir, at_steps={0: check})

    assert seen == [None]


def test_data_parallel_ranks_take_no_turns() -> None:
    from types import SimpleNamespace

    from sola_sched.vllm_adapter.steps.turns import refuse_ranks

    with pytest.raises(ConfigError, match=r"'turns' must be off with data parallelism \(got 4"):
        refuse_ranks(SimpleNamespace(data_parallel_size=4))
    refuse_ranks(SimpleNamespace(data_parallel_size=1))
