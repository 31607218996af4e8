"""JSON schemas of the custom resources in deploy/: KubeRay's and KEDA's.

Their operators bring the whole schemas, as CustomResourceDefinitions of up to a megabyte. PERSONAE_CRDS names
a folder with them, if there is one (`ray.io_rayclusters.yaml`, `keda.sh_scaledobjects.yaml`). Without it the
schemas below are used: they have the fields that deploy/ has, as the API references of KubeRay 1.7 and KEDA
describe them. kubernetes-validate checks the pods in these resources.
"""

import os
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
OBJECT: Schema = {"type": "object"}


def _closed(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


_WORKERS = _closed(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    idleTimeoutSeconds=COUNT,
    template=OBJECT,
)
_RAY_CLUSTER = _closed(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=_closed(mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=_closed(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    ),
    headGroupSpec=_closed(("template",), rayStartParams=TEXTS, template=OBJECT),
    workerGroupSpecs=_list(_WORKERS),
)
_TRIGGER = _closed(
    ("type", "metadata"),
    type=TEXT,
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    metadata=TEXTS,
)
_SCALED_OBJECT = _closed(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=_closed(("name",), name=TEXT, kind=TEXT, apiVersion=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    cooldownPeriod=COUNT,
    pollingInterval=COUNT,
    triggers=_list(_TRIGGER),
)
_SPECS = {
    ("ray.io/v1", "RayCluster"): _RAY_CLUSTER,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
}
_FILES = {"RayCluster": "ray.io_rayclusters.yaml", "ScaledObject": "keda.sh_scaledobjects.yaml"}


def schema_of(version: str, kind: str) -> Schema:
    """The schema of a custom resource, which refuses fields that it does not know. Raises KeyError."""
    ours = _closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=OBJECT,
        spec=_SPECS[version, kind],
    )
    if (folder := os.environ.get("PERSONAE_CRDS")) is None:
        return ours
    definition = yaml.load(Path(folder, _FILES[kind]).read_text(encoding="utf-8"), yaml.CSafeLoader)
    (whole,) = (
        each["schema"]["openAPIV3Schema"]
        for each in definition["spec"]["versions"]
        if each["name"] == version.partition("/")[2]
    )
    _close(whole)
    whole["properties"]["metadata"] = OBJECT
    return dict(whole)


def _close(part: Any) -> None:
    """Refuse unknown fields, as `kubectl apply` does, and allow what only Kubernetes's own words allow."""
    if isinstance(part, list):
        for each in part:
            _close(each)
        return
    if not isinstance(part, dict):
        return
    if part.get("x-kubernetes-int-or-string"):
        part.pop("type", None)
    open_ended = part.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in part
    if isinstance(part.get("properties"), dict) and part.get("type") == "object" and not open_ended:
        part["additionalProperties"] = False
    for each in list(part.values()):
        _close(each)
