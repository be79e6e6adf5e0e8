"""What an operator writes of a cluster, its scaling above all, as Ray Serve takes it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ruptures")
pytest.importorskip("ray.serve")

from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    DeploymentID,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from sola_sched.serving import ray_app
from sola_sched.serving.arrivals import ARRIVED
from sola_sched.serving.ray_app import ClusterArgs, build
from sola_sched.serving.ray_scaling import autoscaling_of

pytestmark = pytest.mark.ray

POLICY = "sola_sched.serving.scaling:ScalingPolicy"
LAW: dict[str, Any] = {"rates_per_s": [5, 10], "replicas": [1, 2]}
AUTOSCALING: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 4,
    "policy": {"policy_function": POLICY, "policy_kwargs": LAW | {"heartbeat_s": 2.0}},
}


def _group(**changes: Any) -> dict[str, Any]:
    return {"engines": [{"autoscaling": AUTOSCALING | changes}]}


def _policy(**arguments: Any) -> dict[str, Any]:
    return {"policy_function": POLICY, "policy_kwargs": LAW | arguments}


def test_serve_gets_a_configuration_in_which_the_policy_alone_decides() -> None:
    app = build({"model": "m", **_group(look_back_period_s=40.0)})

    (engine,) = app._bound_deployment.init_args[0]
    config = engine._bound_deployment._deployment_config.autoscaling_config
    assert isinstance(config, AutoscalingConfig)
    assert (config.min_replicas, config.max_replicas) == (1, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)
    assert (config.metrics_interval_s, config.look_back_period_s) == (2.0, 40.0)


def test_serves_own_autoscaler_loads_the_class_and_keeps_its_answer_within_the_bounds() -> None:
    name = DeploymentID("engine-0", "sola")
    replica = ReplicaID("r0", name)
    config = DeploymentConfig(autoscaling_config=autoscaling_of(AUTOSCALING, is_counted=False))
    config = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())  # as it reaches Serve
    serves = DeploymentAutoscalingState(name)
    info = SimpleNamespace(
        deployment_config=config, target_capacity=None, target_capacity_direction=None
    )
    serves.register(info, 1)
    serves.update_running_replica_ids([replica])

    assert serves.get_decision_num_replicas(1) == 1
    now_s = time.time()
    counts = [TimeStampedValue(now_s - 10.0 + 2 * i, 200.0 * i) for i in range(6)]
    serves.record_request_metrics_for_replica(
        ReplicaMetricReport(replica, {ARRIVED: counts}, now_s)
    )
    assert serves.get_decision_num_replicas(1) == 4  # Eq. 7 asks for 21


def test_serves_schema_takes_the_configuration_in_either_place() -> None:
    application = {
        "name": "sola",
        "route_prefix": None,
        "import_path": "sola_sched.serving.ray_app:build",
        "args": {"model": "m", **_group()},
        "deployments": [{"name": "engine-0", "autoscaling_config": AUTOSCALING}],
    }

    schema = ServeDeploySchema.model_validate({"applications": [application]})

    args = ClusterArgs.model_validate(schema.applications[0].args)
    assert ClusterArgs(**args.model_dump()) == args  # the gateway gets it so


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"router": "best"}, "router"),
        ({"front": "nginx"}, "front"),
        ({"engines": []}, "engines"),
        ({"engines": [{"num_replicas": 0}]}, "num_replicas"),
        ({"engines": [{"gpus": 1}]}, "gpus"),
        ({"port": 70_000}, "port"),
        ({"modell": "x"}, "modell"),
        (_group(max_replica=3), "max_replica"),
        (_group(min_replicas=0), "'min_replicas' must be >= 1"),
        (_group(max_replicas=0), "max_replicas"),
        (_group(look_back_period_s=7.0), r"'look_back_period_s' must be >= .* = 8 \(got 7\)"),
        (_group(policy={}), "'autoscaling' must name a 'policy'"),
        (_group(policy={"policy_function": "sola_sched.nothing:Here"}), "'policy_function' must"),
        (_group(policy=_policy(replicas=None)), "must be arguments of ScalingPolicy"),
        (_group(policy=_policy(heartbeat_s="1")), "must be arguments of ScalingPolicy"),
        (_group(policy=_policy(windw=1)), "windw"),
        ({"engines": [{"num_replicas": 2, "autoscaling": AUTOSCALING}]}, "'num_replicas' must"),
        ({"engines": [{"drain_s": -1}]}, "drain_s"),
    ],
)
def test_a_wrong_configuration_says_what_must_hold(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ClusterArgs.model_validate({"model": "m", **changes})


def test_behind_serves_own_proxy_its_own_policy_has_counts() -> None:
    ClusterArgs(model="m", front="serve", engines=[{"autoscaling": {"max_replicas": 2}}])


def test_the_configuration_on_the_page_is_taken() -> None:
    yaml = pytest.importorskip("yaml")
    page = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
    section = page.read_text(encoding="utf-8").partition("## Scaling")[2]
    shown = yaml.safe_load(section.partition("```yaml")[2].partition("```")[0])

    (group,) = ClusterArgs(model="m", **shown).engines
    assert group.autoscaling is not None
    assert group.autoscaling["policy"]["policy_function"] == POLICY


@pytest.mark.parametrize(
    ("given", "gateway", "engines"),
    [
        ({}, "127.0.0.1", "127.0.0.1"),
        ({"host": None}, None, None),
        ({"host": "0.0.0.0"}, "0.0.0.0", None),
        ({"host": "::1"}, "::1", "::1"),
        ({"host": "10.0.0.7"}, "10.0.0.7", "10.0.0.7"),
        ({"engine_host": None}, "127.0.0.1", None),
        ({"host": None, "engine_host": "127.0.0.1"}, None, "127.0.0.1"),
    ],
)
def test_nothing_listens_beyond_its_own_node_unless_it_is_asked_to(
    given: dict[str, Any], gateway: str | None, engines: str | None
) -> None:
    args = ClusterArgs(model="m", **given)

    assert (args.host, args.engine_host) == (gateway, engines)
    assert ClusterArgs(**args.model_dump()) == args  # as it is passed on to the gateway


@pytest.mark.parametrize(
    ("host", "options", "is_told"),
    [
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("10.0.0.7", {}, True),
        (None, {}, True),
        ("0.0.0.0", {}, True),
        ("10.0.0.7", {"api_key": "k"}, False),
    ],
)
def test_an_engine_that_nothing_protects_says_so(
    host: str | None,
    options: dict[str, Any],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(ray_app.ray.util, "get_node_ip_address", lambda: "10.0.0.9")

    address = ray_app._engine_address(host, options)

    assert address == ("10.0.0.9" if host in (None, "0.0.0.0") else host)
    told = [record.getMessage() for record in caplog.records]
    assert bool(told) == is_told
    assert all("nothing protects it" in line for line in told)
