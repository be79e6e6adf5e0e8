"""The files for real GPUs are what Ray Serve and KubeRay read; their application is ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def serve_configs() -> list[dict[str, Any]]:
    (plain,) = documents("serve.yaml")
    service = documents("rayservice.yaml")[0]
    return [plain, yaml.safe_load(service["spec"]["serveConfigV2"])]


def test_both_files_deploy_the_same() -> None:
    plain, in_kubernetes = serve_configs()

    assert plain == in_kubernetes


def test_kubernetes_has_the_gpus_and_resources_that_the_application_asks_for() -> None:
    service, front = documents("rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    args = serve_configs()[1]["applications"][0]["args"]

    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for engines in args["engines"]:
        (kind,) = (name.partition(":")[2].lower() for name in engines["resources"])
        (container,) = groups[kind]["template"]["spec"]["containers"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert groups[kind]["replicas"] * gpus >= engines["num_replicas"] * engines["num_gpus"]
    head = cluster["headGroupSpec"]
    # A JSON text within quotes, as `ray start` on a shell's command line wants it.
    resources = json.loads(json.loads(head["rayStartParams"]["resources"]))
    assert resources.keys() >= args["gateway_resources"].keys()
    # The service leads to the port that the gateway listens on, on the head.
    assert front["spec"]["selector"]["ray.io/node-type"] == "head"
    ports = {port["name"]: port["containerPort"] for port in _head_container(head)["ports"]}
    (port,) = front["spec"]["ports"]
    assert ports[port["targetPort"]] == args["port"]


def _head_container(head: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = head["template"]["spec"]["containers"][0]
    return container


@pytest.mark.ray
@pytest.mark.parametrize("place", [0, 1])
def test_ray_serve_accepts_the_configuration(place: int) -> None:
    pytest.importorskip("ray.serve")
    from ray.serve.schema import ServeDeploySchema

    from sola_sched.serving.ray_app import ClusterArgs

    schema = ServeDeploySchema.model_validate(serve_configs()[place])

    (application,) = schema.applications
    assert application.import_path == "sola_sched.serving.ray_app:build"
    args = ClusterArgs.model_validate(application.args)
    assert sum(group.num_replicas or 0 for group in args.engines) == 4


@pytest.mark.ray
def test_the_application_has_a_deployment_for_each_group_and_the_gateway() -> None:
    pytest.importorskip("ray.serve")
    from sola_sched.serving.ray_app import build

    args = {"model": "m", "engines": [{"num_replicas": 2}, {"options": {"max_num_seqs": 4}}]}
    app = build(args)

    assert app._bound_deployment.name == "gateway"
    engines = app._bound_deployment.init_args[0]
    assert [e._bound_deployment.name for e in engines] == ["engine-0", "engine-1"]
    assert engines[1]._bound_deployment.init_args[0] == {"model": "m", "max_num_seqs": 4}


@pytest.mark.ray
def test_serves_own_proxy_takes_one_group_of_engines() -> None:
    pytest.importorskip("ray.serve")
    from sola_sched.serving.ray_app import build

    assert build({"model": "m", "front": "serve"})._bound_deployment.name == "engine-0"
    with pytest.raises(ValueError, match="'front' must be 'gateway'"):
        build({"model": "m", "front": "serve", "engines": [{}, {}]})


def compose() -> dict[str, Any]:
    (document,) = documents("compose.yaml")
    return document


def test_composes_gateway_asks_the_engines_that_there_are_on_their_ports() -> None:
    pytest.importorskip("aiohttp")
    from sola_sched.serving.cli import make_parser

    services = compose()["services"]
    gateway = services["gateway"]
    assert gateway["command"][:3] == ["python3", "-m", "sola_sched.serving"]

    args = make_parser().parse_args(gateway["command"][3:])

    engines = {name for name in services if name != "gateway"}
    assert sorted(args.replica) == sorted(f"http://{name}:8000" for name in engines)
    assert all("--port=8000" in services[name]["command"] for name in engines)
    assert args.host == "0.0.0.0"
    assert gateway["ports"] == [f"8000:{args.port}"]


def test_composes_engines_have_a_gpu_each() -> None:
    services = compose()["services"]
    given = [
        device
        for name, service in services.items()
        if name != "gateway"
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]

    assert [device["capabilities"] for device in given] == [["gpu"], ["gpu"]]
    assert [device["device_ids"] for device in given] == [["0"], ["1"]]


def test_composes_engines_run_our_scheduler_with_options_that_it_knows() -> None:
    from sola_sched.config.sola_config import SolaConfig

    for name in ("engine-0", "engine-1"):
        command = compose()["services"][name]["command"]
        assert command[:2] == ["vllm", "serve"]
        options = dict(part.removeprefix("--").split("=", 1) for part in command[3:])
        assert options["scheduler-cls"] == "sola_sched.Scheduler"
        config = SolaConfig.from_additional(json.loads(options["additional-config"]))
        assert (config.ttft_s, config.tpot_s, config.load_interval_s) == (1.0, 0.06, 0.1)
