"""The files for real GPUs are valid by the schemas of Compose, Kubernetes and KubeRay.

The Compose specification's schema comes with `check-jsonschema`, Kubernetes' own with
`kubernetes-validate`. KubeRay's CRD is 0.8 MB, nearly all of it copies of Kubernetes' pod template.
So its few levels above the templates are written down here, and the templates go to Kubernetes'
schema, more strictly than KubeRay's own: an unknown key is an error, where a cluster would drop it.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cluster"
KUBERNETES = "1.33"
#: What Kubernetes reads as an amount: its schema takes any text.
QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")

_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def level(required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


HEAD = level(
    ("rayStartParams", "template"),
    enableIngress={"type": "boolean"},
    headService={"type": "object"},
    rayStartParams=_TEXTS,
    serviceType={"type": "string"},
    template={"type": "object"},
)
WORKERS = level(
    ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"),
    groupName={"type": "string"},
    idleTimeoutSeconds=_NUMBER,
    maxReplicas=_NUMBER,
    minReplicas=_NUMBER,
    numOfHosts=_NUMBER,
    rayStartParams=_TEXTS,
    replicas=_NUMBER,
    scaleStrategy={"type": "object"},
    suspend={"type": "boolean"},
    template={"type": "object"},
)
CLUSTER = level(
    ("headGroupSpec",),
    autoscalerOptions={"type": "object"},
    enableInTreeAutoscaling={"type": "boolean"},
    gcsFaultToleranceOptions={"type": "object"},
    headGroupSpec=HEAD,
    headServiceAnnotations=_TEXTS,
    managedBy={"type": "string"},
    rayVersion={"type": "string"},
    suspend={"type": "boolean"},
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
#: RayService of KubeRay 1.3 (ray.io/v1), without what is inside a pod template.
RAY_SERVICE = level(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object", "required": ["name"]},
    spec=level(
        (),
        rayClusterConfig=CLUSTER,
        serveConfigV2={"type": "string"},
        serveService={"type": "object"},
        upgradeStrategy={"type": "object"},
    ),
)


def amounts(value: Any) -> Iterator[Any]:
    """The amounts of `limits` and `requests`, wherever they are."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if key in ("limits", "requests"):
                yield from entry.values()
            else:
                yield from amounts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from amounts(entry)


def check_ray_service(document: dict[str, Any]) -> None:
    """Refuse what KubeRay or Kubernetes would not read as it is meant.

    Raises:
        jsonschema.ValidationError: A key is unknown or missing, or a value is of the wrong kind.
    """
    jsonschema.validate(document, RAY_SERVICE)
    cluster = document["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    for amount in amounts(cluster):
        if not QUANTITY.fullmatch(str(amount)):
            raise jsonschema.ValidationError(f"{amount!r} is no amount")


def ray_service() -> dict[str, Any]:
    """The first document of the file."""
    found: dict[str, Any] = next(yaml.safe_load_all((EXAMPLES / "rayservice.yaml").read_text()))
    return found


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    """What the Compose specification's schema says of the file."""
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(
        [sys.executable, "-P", *command], capture_output=True, text=True, check=False
    )


def test_the_compose_file_is_valid_by_the_compose_specification() -> None:
    done = check_compose(EXAMPLES / "compose.yaml")

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("restart:", "restrat:", "'restrat' was unexpected"),
        ("services:", "servces:", "'servces' does not match"),
        ("capabilities: [gpu]", "capability: [gpu]", "'capabilities' is a required property"),
        ('device_ids: ["0"]', "device_ids: [0]", "0 is not of type 'string'"),
    ],
)
def test_a_wrong_key_or_value_in_the_compose_file_is_refused(
    tmp_path: Path, right: str, wrong: str, named: str
) -> None:
    text = (EXAMPLES / "compose.yaml").read_text()
    assert right in text
    path = tmp_path / "compose.yaml"
    path.write_text(text.replace(right, wrong))

    done = check_compose(path)

    assert done.returncode == 1
    assert named in done.stdout


def test_the_kubernetes_file_is_valid_by_the_schemas_of_kuberay_and_kubernetes() -> None:
    service, front = yaml.safe_load_all((EXAMPLES / "rayservice.yaml").read_text())

    check_ray_service(service)
    kubernetes_validate.validate(front, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("place", "key", "value", "named"),
    [
        ((), "kind", "RayServe", "'RayService' was expected"),
        (("spec",), "serveConfig", "", "'serveConfig' was unexpected"),
        (("spec", "rayClusterConfig"), "rayversion", "2.60.0", "'rayversion' was unexpected"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0), "replicas", "2", "not of type"),
        (("spec", "rayClusterConfig", "headGroupSpec"), "rayStartParams", {"num-cpus": 0},
         "0 is not of type 'string'"),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0),
         "imge", "IMAGE", "'imge' was unexpected"),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0,
          "resources", "limits"), "memory", "8Gib", "'8Gib' is no amount"),
    ],
)  # fmt: skip
def test_a_wrong_key_unit_or_value_in_the_kubernetes_file_is_refused(
    place: tuple[Any, ...], key: str, value: Any, named: str
) -> None:
    document = copy.deepcopy(ray_service())
    at: Any = document
    for part in place:
        at = at[part]
    at[key] = value

    with pytest.raises(jsonschema.ValidationError, match=re.escape(named)):
        check_ray_service(document)


def test_a_wrong_key_in_the_kubernetes_service_is_refused() -> None:
    _, front = yaml.safe_load_all((EXAMPLES / "rayservice.yaml").read_text())
    front["spec"]["selectr"] = {}

    with pytest.raises(jsonschema.ValidationError, match="'selectr' was unexpected"):
        kubernetes_validate.validate(front, KUBERNETES, strict=True)


def test_the_image_is_built_from_the_checkout() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    copied = {
        name.rstrip("/")
        for line in re.findall(r"^COPY (.*)", text, flags=re.M)
        for name in line.split()[:-1]
    }
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = settings["tool"]["setuptools"]["package-dir"].values()

    assert copied == {"pyproject.toml", "README.md", "LICENSE", "sola_sched", *folders}
    assert all((ROOT / name).exists() for name in copied)
    build = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["gateway"]["build"]
    assert (EXAMPLES / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
