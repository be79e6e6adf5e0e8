"""Whose request it is: the class it names, its adapter's or its model's; and shares in effect."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from virtual_model import TINY_MODEL
from virtual_runs import STEP_TIME, make_workload

import sola_sched
from sola_sched.config.slo import DEFAULT_CLASS, SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.simulator import VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.requests.targets import Targets

pytestmark = pytest.mark.vllm

CLASSES = {"chat": SloTarget(0.5), "base": SloTarget(1.5)}


def service_of(adapter: str | None, served_as: str = "llama") -> tuple[str, SloTarget]:
    targets = Targets(SolaConfig(ttft_s=9.0, tpot_s=None, classes=CLASSES), served_as)
    lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
    return targets.of(SimpleNamespace(lora_request=lora, sampling_params=None))


def test_a_request_is_of_the_class_of_its_adapter_or_model() -> None:
    assert service_of("chat") == ("chat", SloTarget(0.5))
    assert service_of(None, served_as="base") == ("base", SloTarget(1.5))
    assert service_of("unknown", served_as="base") == (DEFAULT_CLASS, SloTarget(9.0))
    assert service_of(None) == (DEFAULT_CLASS, SloTarget(9.0))


@pytest.mark.parametrize("policy", ["attain", "doubling"])
def test_a_flood_does_not_push_a_service_below_its_share(policy: str) -> None:
    """While both ask for more than there is, the costly service gets its half of the time."""
    targets = {"ttft_s": 1.0, "tpot_s": 0.1}
    config = {"policy": policy, "classes": {"flood": targets, "steady": targets | {"share": 0.5}}}
    flood = make_workload(300, 60.0, prompt=200, extra_args={"slo_class": "flood"})
    steady = [
        VirtualRequest(
            f"s{i}", arrival_s=0.2 * i, prompt_len=2000, output_len=20, max_tokens=1000,
            extra_args={"slo_class": "steady"},
        )
        for i in range(25)
    ]  # fmt: skip
    engine = VirtualEngine(
        sola_sched.Scheduler, model=TINY_MODEL, num_blocks=4000, max_model_len=4096,
        max_num_seqs=16, step_time=STEP_TIME, additional_config={"sola_sched": config},
    )  # fmt: skip
    services = engine.scheduler.sola_monitor.services
    had: list[tuple[float, float]] = []

    def note(_: object) -> None:
        if 1.0 <= engine.clock.now <= 5.0:  # step times have been learned, and both ask
            had.append((engine.clock.now, float(services.served_s[services.index_of("steady")])))

    records = engine.run([*flood, *steady], on_step=note)

    (began_s, before_s), (ended_s, after_s) = had[0], had[-1]
    assert (after_s - before_s) / (ended_s - began_s) >= 0.45
    assert all(record.is_finished for record in records)
