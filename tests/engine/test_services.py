"""Three LoRA adapters of one base model as services of the real engine: no token changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, EngineRequest, RunResult, adapter_of, make_workload, run
from tiny_llama import write_adapter

pytestmark = pytest.mark.vllm

#: Named as the harness names adapters; with targets out of reach, tight, and for the whole answer.
CLASSES = {
    "adapter 1": {"ttft_s": 0.001, "tpot_s": 0.001, "share": 0.3},
    "adapter 2": {"ttft_s": 0.2, "tpot_s": 0.012, "share": 0.3},
    "adapter 3": {"ttft_s": None, "tpot_s": None, "e2e_s": 2.0, "share": 0.1},
}
LORA = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> list[EngineRequest]:
    """Of the three adapters in turn.

    None is of the base model: beside adapters vLLM's CPU kernels give it the weights of the last
    slot, so that its tokens depend on the batch (`docs/support.md`).
    """
    folder = tmp_path_factory.mktemp("adapters")
    folders = [str(write_adapter(folder / f"{number}", number)) for number in (1, 2, 3)]
    return [
        replace(request, adapter=(i % 3 + 1, folders[i % 3]))
        for i, request in enumerate(make_workload(20, output_len=40))
    ]


@pytest.fixture(scope="module")
def reference(requests: list[EngineRequest], model_dir: Path) -> RunResult:
    return run(STOCK, requests, model_dir, max_num_seqs=6, max_loras=2, **LORA)


def serve(
    policy: str,
    requests: list[EngineRequest],
    model_dir: Path,
    *,
    max_loras: int,
    at_steps: Mapping[int, Callable[[Any], object]] | None = None,
    classes: Mapping[str, Mapping[str, float | None]] = CLASSES,
) -> RunResult:
    sola = {"policy": policy, "classes": classes, "log_interval_s": 0}
    return run(
        "sola_sched.Scheduler", requests, model_dir, max_num_seqs=6, max_loras=max_loras,
        additional_config={"sola_sched": sola}, at_steps=at_steps, **LORA,
    )  # fmt: skip


def assert_same(result: RunResult, reference: RunResult) -> None:
    assert result.tokens == reference.tokens
    assert set(result.finish_reasons) == set(reference.finish_reasons)
    assert result.num_leaked_blocks == 0


@pytest.mark.parametrize("policy", ["attain", pytest.param("doubling", marks=pytest.mark.slow)])
def test_services_keep_all_tokens_and_slots(policy, requests, model_dir, reference):
    """Also with two slots for three adapters, so that their weights are exchanged."""
    result = serve(policy, requests, model_dir, max_loras=2)

    assert_same(result, reference)
    assert list(result.finish_reasons) != list(reference.finish_reasons), "in another order"
    assert set(result.stats["services"]) == {"default", *CLASSES}


@pytest.mark.slow
def test_adapters_make_a_difference(requests, model_dir, reference):
    """Negative control: each answers as neither the base model nor another adapter does."""
    plain = run(STOCK, [replace(r, adapter=None) for r in requests], model_dir)
    others = [replace(r, adapter=requests[i - 1].adapter) for i, r in enumerate(requests)]
    swapped = run(STOCK, others[1:], model_dir, max_loras=3, **LORA)

    for wrong in (plain, swapped):
        same = [name for name, tokens in wrong.tokens.items() if tokens == reference.tokens[name]]
        assert len(same) < len(requests) / 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["attain", "doubling"])
def test_adapters_come_and_go_while_requests_run(policy, requests, model_dir, reference, caplog):
    """Those removed in the middle are loaded again for the requests that still need them.

    The third, which is loaded while requests run, is of the class of its name. The second has
    none: it counts as the default service, and the log says so once.
    """
    caplog.set_level(logging.INFO, "vllm.sola_sched")
    third = requests[2]
    seen: list[tuple[int, set[int]]] = []
    classes = {name: targets for name, targets in CLASSES.items() if name != "adapter 2"}

    def note(core: Any) -> None:
        seen.append((len(core.scheduler.running), set(core.list_loras())))

    def remove(core: Any) -> None:
        note(core)
        for number in (1, 2):
            core.remove_lora(number)
        note(core)

    def add(core: Any) -> None:
        core.add_lora(adapter_of(third))
        note(core)

    result = serve(
        policy, requests, model_dir, max_loras=3, at_steps={2: add, 30: remove, 60: note},
        classes=classes,
    )  # fmt: skip

    assert_same(result, reference)
    (_, loaded), (running, before), (_, after), (_, again) = seen
    assert 3 in loaded
    assert running > 0
    assert {1, 2} <= before
    assert not {1, 2} & after
    assert {1, 2} & again
    sent = Counter(adapter_of(request).lora_name for request in requests)
    services = result.stats["services"]
    assert {name: each["num_counted"] for name, each in services.items()} == {
        "default": sent["adapter 2"], "adapter 1": sent["adapter 1"],
        "adapter 3": sent["adapter 3"],
    }  # fmt: skip
    assert {name: each["share"] for name, each in services.items()} == {
        "default": 0.0, "adapter 1": 0.3, "adapter 3": 0.1,
    }  # fmt: skip
    assert all(each["served_s"] > 0.0 for each in services.values())
    (said,) = (r.getMessage() for r in caplog.records if "has no class" in r.getMessage())
    assert "adapter 'adapter 2' has no class in 'classes'" in said
