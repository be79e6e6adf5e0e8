"""The predictor process beside the real engine: tokens stay, a kill is harmless."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import engine_harness
from engine_harness import STOCK, EngineRequest, make_workload
from tiny_llama import write_byte_tokenizer, write_tiny_llama

from sola_sched.length_predictor.process import client as client_module

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LEXICAL = {"sola_sched": {"predictor": "lexical", "log_interval_s": 0}}
#: Until the process has loaded its models.
PATIENCE_S = 240.0
#: One call of `poll` that finds the process dead, or starts the next one: a fork and an exec, a
#: few tenths of a second on a busy machine. Waiting for the process would take seconds.
MAX_POLL_S = 1.0


@pytest.fixture(autouse=True)
def _is_not_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own niceness the process may not get as far as its first line on a busy machine."""
    settings = partial(client_module.ServiceSettings, niceness=0)
    monkeypatch.setattr(client_module, "ServiceSettings", settings)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("prediction"))
    write_byte_tokenizer(folder)
    return folder


def make_core(model_dir: Path, scheduler_cls: str, config: dict[str, Any]) -> Any:
    return engine_harness._make_core(
        scheduler_cls,
        model_dir,
        async_scheduling=False,
        num_gpu_blocks_override=engine_harness.AMPLE_BLOCKS,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        additional_config=config,
    )


def add(core: Any, request: EngineRequest) -> None:
    made, wave = core.preprocess_add_request(
        engine_harness._engine_core_request(request, time.time())
    )
    core.add_request(made, wave)


def step(core: Any, tokens: dict[str, list[int]]) -> bool:
    outputs, executed = core.step_fn()
    core.post_step(executed)
    for batch in (outputs or {}).values():
        for output in batch.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return bool(executed)


def serve(core: Any, requests: list[EngineRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for request in requests:
        add(core, request)
    while core.scheduler.has_requests():
        step(core, tokens)
    return tokens


def until_ready(client: client_module.PredictionClient, num_restarts: int = 0) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not client.is_ready or client.counts["num_restarts"] < num_restarts:
        client.poll()
        assert time.monotonic() < give_up_s, client.stats()
        time.sleep(0.01)


def until_answered(core: Any, count: int) -> None:
    """The engine may be faster than the process."""
    client, give_up_s = core.scheduler.sola_predictions, time.monotonic() + PATIENCE_S
    while client.counts["num_answered"] < count:
        for answer in client.poll():
            core.scheduler.sola_monitor.predicted(*answer)
        assert time.monotonic() < give_up_s, client.stats()
        time.sleep(0.01)


def test_killed_in_mid_run_no_request_is_lost_or_waits(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_FIRST_BACK_OFF_S", 0.05)
    requests = make_workload(24, output_len=60)
    stock = make_core(model_dir, STOCK, {})
    try:
        expected = serve(stock, requests)
    finally:
        stock.shutdown()
    core = make_core(model_dir, "sola_sched.Scheduler", LEXICAL)
    client = core.scheduler.sola_predictions
    try:
        until_ready(client)
        polls: list[float] = []
        poll = client.poll

        def timed() -> Any:
            start = time.perf_counter()
            answers = poll()
            polls.append(time.perf_counter() - start)
            return answers

        monkeypatch.setattr(client, "poll", timed)
        tokens: dict[str, list[int]] = {}
        for request in requests[:12]:
            add(core, request)
        ran: list[bool] = []
        killed_at = None
        while core.scheduler.has_requests():
            ran.append(step(core, tokens))
            if killed_at is None and len(ran) >= 10:
                until_answered(core, 12)
                os.kill(client.pid, signal.SIGKILL)
                killed_at = len(ran)
                for request in requests[12:]:
                    add(core, request)

        assert killed_at is not None
        assert tokens == expected
        # A plan that leaves nothing to run is followed by a step in vLLM's order, as always.
        assert all(one or other for one, other in pairwise(ran))
        assert max(polls) < MAX_POLL_S
        # Back after the back-off, on the same engine, which may have been faster.
        until_ready(client, num_restarts=1)
        serve(core, [EngineRequest("again", tuple(range(10, 40)), 300)])
        stats = core.scheduler.sola_stats()
        assert stats["num_predicted"] >= 13
        assert stats["predictor"]["ready"]
        assert stats["predictor"]["num_restarts"] == 1
        pid = client.pid
    finally:
        core.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_predictor_learns_the_lengths_that_the_engine_generates(model_dir: Path) -> None:
    core = make_core(model_dir, "sola_sched.Scheduler", LEXICAL)
    client = core.scheduler.sola_predictions
    predicted: list[float] = []
    try:
        until_ready(client)
        note = core.scheduler.sola_monitor.predicted

        def noted(req_id: str, prediction: Any) -> bool:
            predicted.append(prediction.median)
            return bool(note(req_id, prediction))

        core.scheduler.sola_monitor.predicted = noted
        for turn in range(3):
            serve(
                core,
                [EngineRequest(f"{turn}-{i}", tuple(range(20, 50 + i)), 300) for i in range(16)],
            )
            time.sleep(1.2)  # the process learns when it is idle, at most a second later
    finally:
        core.shutdown()

    # All generate 300 tokens, more than is expected of the unknown.
    assert predicted[-1] > 1.5 * predicted[0]


def test_missing_tokenizer_leaves_the_histogram(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    core = make_core(folder, "sola_sched.Scheduler", LEXICAL)
    client = core.scheduler.sola_predictions
    try:
        tokens = serve(core, make_workload(4, output_len=20))
        give_up_s = time.monotonic() + PATIENCE_S
        while client.pid is not None:
            client.poll()
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        tokens |= serve(core, [EngineRequest("later", (5, 6, 7), 5)])
    finally:
        core.shutdown()

    assert {len(each) for each in tokens.values()} == {20, 5}
    assert client.counts["num_restarts"] == 0
