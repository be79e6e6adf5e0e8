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
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], named: str) -> None:
    pytest.importorskip("ray.serve")
    from sola_sched.serving.ray_app import ClusterArgs

    with pytest.raises(ValueError, match=named):
        ClusterArgs.model_validate({"model": "m", **changes})


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
