"""Whatever the policy does, greedy output is vLLM's own, token by token (fp32, real engine).

The workload is served by `sola_sched.Scheduler` with prompts of different lengths that arrive
over time, and compared with stock vLLM that never preempts. Scheduling must not change a token:
each wrong block, position or resumed state shows as a different continuation, which the
negative control proves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import (
    AMPLE_BLOCKS,
    STOCK,
    TIGHT_BLOCKS,
    EngineRequest,
    RunResult,
    make_workload,
    num_different,
    run,
    run_on_v2,
)
from marks import LONG, MODES

pytestmark = pytest.mark.vllm

#: Random decisions through the same seams: more holds and preemptions than any policy makes.
CHAOS = "chaos.ChaosScheduler"
#: Targets by request, cyclically: out of reach, tight, of a class, the default.
MIXED_SLOS = (
    {"ttft_slo_ms": 1, "tpot_slo_ms": 1},
    {"ttft_slo_ms": 200, "tpot_slo_ms": 7},
    {"slo_class": "batch"},
    None,
)
SLOS: dict[str, dict[str, Any]] = {
    "mixed": {
        "ttft_s": 0.2,
        "tpot_s": 0.012,
        "classes": {"batch": {"ttft_s": 5.0, "tpot_s": None}},
    },
    "impossible": {"ttft_s": 0.001, "tpot_s": 0.001},
    "loose": {"ttft_s": 60.0, "tpot_s": 1.0},
}
POLICIES = ("attain", "paper", "alise", "chaos")
#: The default and the one that decides at random in every run, the others in slower ones.
SOME_POLICIES = [
    "attain",
    "chaos",
    *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("paper", "alise")),
]


Case = tuple[str, bool, bool, bool, str]


def name_of(case: Case) -> str:
    policy, is_async, caching, tight, slo = case
    flags = ["async" if is_async else "sync", "cache" if caching else "nocache"]
    return "-".join([policy, *flags, "tight" if tight else "ample", slo])


def options_of(case: Case) -> dict[str, Any]:
    policy, is_async, caching, tight, slo = case
    sola = SLOS[slo] if policy == "chaos" else {"policy": policy, **SLOS[slo]}
    return {
        "scheduler_cls": CHAOS if policy == "chaos" else "sola_sched.Scheduler",
        "async_scheduling": is_async,
        "prefix_caching": caching,
        "num_blocks": TIGHT_BLOCKS if tight else AMPLE_BLOCKS,
        "additional_config": {"sola_sched": sola},
    }


def workload_of(case: Case, **options: Any) -> list[EngineRequest]:
    return make_workload(extra_args=MIXED_SLOS if case[4] == "mixed" else (None,), **options)


#: A workload of half the requests and half their tokens, for many runs.
SMALL = {"num_requests": 12, "output_len": 50}
#: Everything that can go wrong together: scarce KV, mixed targets, aborts.
HARD_CASES = list(product(POLICIES, (False, True), (False, True), (True,), ("mixed",)))
#: As vLLM runs by default, and with neither asynchronous scheduling nor caching.
EXTREMES = [case for case in HARD_CASES if case[1] == case[2]]
ALL_CASES = list(product(POLICIES, (False, True), (False, True), (False, True), SLOS))


def short_and_long(cases: Iterable[Any], stride: int) -> list[Any]:
    """The cases; all but every `stride`-th are `long`. Of ``ALL_CASES`` every seventh has every
    pair of choices."""
    return [
        case if number % stride == 0 else pytest.param(case, marks=pytest.mark.long)
        for number, case in enumerate(cases)
    ]


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> RunResult:
    """Stock vLLM, synchronous, with room for everything."""
    result = run(STOCK, make_workload(), model_dir)
    assert result.num_preemptions == 0
    return result


@pytest.fixture(scope="session")
def hard_result(model_dir: Path) -> Callable[[Case], RunResult]:
    """Runs a hard case once, whichever test asks first."""

    @cache
    def result_of(case: Case) -> RunResult:
        return run(
            requests=workload_of(case, num_aborts=8), model_dir=model_dir, **options_of(case)
        )

    return result_of


def assert_same_tokens(result: RunResult, reference: RunResult, num_aborts: int = 0) -> None:
    aborted = [name for name, reason in result.finish_reasons.items() if reason == "abort"]
    assert sorted(result.finish_reasons) == sorted(reference.finish_reasons), "every request ends"
    assert len(aborted) <= num_aborts
    for name, expected in reference.tokens.items():
        tokens = result.tokens[name]
        assert tokens == expected[: len(tokens)], f"{name} continues differently"
        assert name in aborted or len(tokens) == len(expected), f"{name} lost tokens"
    assert result.num_leaked_blocks == 0


@pytest.mark.parametrize("is_async", MODES)
def test_prompts_in_steps_of_their_own_keep_all_tokens(is_async, model_dir, reference):
    sola = {"ttft_s": 0.03, "tpot_s": 0.2, "log_interval_s": 0}
    result = run(
        "sola_sched.Scheduler",
        make_workload(),
        model_dir,
        async_scheduling=is_async,
        additional_config={"sola_sched": sola},
    )

    assert_same_tokens(result, reference)
    assert result.stats["problems"].get("prompts", 0) > 0


def test_output_is_sensitive_to_the_cache(model_dir, reference):
    """Negative control: with the KV cleared once, a fifth of all tokens change."""
    result = run(STOCK, make_workload(), model_dir, zero_kv_at_step=60)

    assert num_different(result, reference) > 480


def test_preemption_by_stock_vllm_changes_no_token(model_dir, reference):
    """Control: the tight cache forces preemptions, and the reference does not depend on them."""
    result = run(STOCK, make_workload(), model_dir, num_blocks=TIGHT_BLOCKS)

    assert result.num_preemptions >= 5
    assert_same_tokens(result, reference)


def marks_of(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    """Extremes of some policies always run, those of the others in CI."""
    if case not in EXTREMES:
        return LONG
    return () if case[0] in SOME_POLICIES else (pytest.mark.slow,)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=marks_of(case)) for case in HARD_CASES],
    ids=name_of,
)
def test_tokens_are_stock_under_scarce_memory_and_aborts(case, hard_result, reference):
    assert_same_tokens(hard_result(case), reference, num_aborts=8)


@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_hard_cases_hold_reorder_and_preempt(policy, hard_result):
    """The comparisons above are worth something only if the policies intervene."""
    results = [hard_result(case) for case in EXTREMES if case[0] == policy]

    if policy != "alise":  # holds nothing but started prefills, and prompts here are short
        assert sum(r.stats["num_held"] for r in results) > 0
    assert sum(r.stats["num_reordered"] for r in results) > 0
    assert sum(r.num_preemptions for r in results) >= 5
    if policy != "paper":
        assert sum(r.stats["num_preempted_by_policy"] for r in results) > 0
    means = ("num_held", "num_reordered", "num_preempted_by_policy")
    assert sum(r.stats[name] for r in results for name in means) >= 10
    if policy == "chaos":
        assert min(r.num_preemptions for r in results) >= 5


@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_tokens_are_stock_with_room_for_everything(policy, model_dir, reference):
    case = (policy, True, True, False, "mixed")

    result = run(requests=workload_of(case), model_dir=model_dir, **options_of(case))

    assert_same_tokens(result, reference)


@pytest.fixture(scope="session")
def small_reference(model_dir: Path) -> RunResult:
    return run(STOCK, make_workload(**SMALL), model_dir)


@pytest.mark.slow
@pytest.mark.parametrize("case", short_and_long(ALL_CASES, 7), ids=name_of)
def test_tokens_are_stock_in_every_combination(case, model_dir, small_reference):
    result = run(requests=workload_of(case, **SMALL), model_dir=model_dir, **options_of(case))

    assert_same_tokens(result, small_reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "policies"),
    [
        (0, [("attain", True), ("alise", False)]),
        *(
            pytest.param(seed, list(product(POLICIES, (False, True))), marks=pytest.mark.long)
            for seed in range(8)
        ),
    ],
)
def test_random_aborts_spare_the_survivors(seed, policies, model_dir):
    """Half of the requests are aborted at random, in every state."""
    requests = make_workload(32, output_len=60, seed=seed, num_aborts=16, extra_args=MIXED_SLOS)
    spared = [EngineRequest(r.req_id, r.prompt, r.max_tokens, r.arrival_step) for r in requests]
    reference = run(STOCK, spared, model_dir)

    for policy, is_async in policies:
        case = (policy, is_async, True, True, "mixed")
        result = run(requests=requests, model_dir=model_dir, **options_of(case))
        assert_same_tokens(result, reference, num_aborts=16)


V2_SIZE = {"num_requests": 12, "output_len": 40}
V2_CASES = list(product(POLICIES, (False, True), (False, True), (False, True), ("mixed",)))


def is_brief(case: Case) -> bool:
    """One of two with scarce memory: as vLLM runs by default, and with nothing of that."""
    policy, is_async, caching, tight, _ = case
    return tight and is_async == caching and policy == ("attain" if is_async else "chaos")


def v2_group(brief: bool) -> list[Case]:
    return [case for case in V2_CASES if is_brief(case) == brief]


@pytest.fixture(scope="module")
def v2_results(model_dir: Path) -> Callable[[bool], list[RunResult]]:
    """Stock vLLM and the brief cases, or all others, in one subprocess."""

    @cache
    def results_of(brief: bool) -> list[RunResult]:
        cases = [{"scheduler_cls": STOCK, "requests": make_workload(**V2_SIZE)}]
        for case in v2_group(brief):
            requests = workload_of(case, **V2_SIZE, num_aborts=3 if case[3] else 0)
            cases.append({"requests": requests, **options_of(case)})
        return run_on_v2(cases, model_dir)

    return results_of


# Without `long` the V2 runner is in test_swap_matrix.py.
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_v2_runner_and_v1_runner_agree_on_the_reference(v2_results, model_dir):
    reference = run(STOCK, make_workload(**V2_SIZE), model_dir)

    assert_same_tokens(v2_results(True)[0], reference)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*v2_group(True), *v2_group(False)], ids=name_of)
def test_tokens_are_stock_on_the_v2_runner(case, v2_results):
    brief = is_brief(case)
    stock, *results = v2_results(brief)
    result = results[v2_group(brief).index(case)]

    assert_same_tokens(result, stock, num_aborts=3)
    if case[0] == "chaos" and case[3]:
        assert result.num_preemptions >= 5
