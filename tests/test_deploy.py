"""What is in deploy/ is what the tools of each format accept, and says what the server takes.

hadolint, Helm's own library and the schemas of Kubernetes are packages of the extra `deploy`, which CI has;
without them their tests are skipped. No package has the schemas of custom resources: custom_resources.py has.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from custom_resources import schema_of
from jsonschema import Draft7Validator, ValidationError
from lock import locked
from typer.main import get_command

from personae.api.cli import app
from personae.api.options import ServeOptions, options_of

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "personae"
OPTIONS = {each.name.replace("_", "-") for each in options_of(ServeOptions)}
KEY = {"secret": {"serverKey": "a-key"}}
EVERYTHING = {
    **KEY,
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", "annotations": {"a": "b"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "imagePullSecrets": [{"name": "registry"}],
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "data": {"storageClass": "fast"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "runtimeClassName": "nvidia",
    "podAnnotations": {"c": "d"},
    "options": {"model": "org/name", "drain-timeout": 60, "adapters": ["a=org/a"]},
}
NOTHING_KEPT = {
    "secret": {"existing": "mine"},
    "data": {"persistent": False},
    "cache": {"persistent": False},
}


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of `personae serve` in a command line."""
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]  # a group has commands
    return dict(command.make_context("serve", list(words)).params)


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chart's objects by kind and name."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (the extra `deploy`)")
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="test", namespace="default")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    objects = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in objects}


def mounts(pod: dict[str, Any]) -> Iterator[str]:
    for container in pod["containers"]:
        yield from (mount["name"] for mount in container["volumeMounts"])


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (the extra `deploy`)")
    file = DEPLOY / "docker" / "Dockerfile"
    checked = subprocess.run(
        [hadolint, "--strict-labels", str(file)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_images_start_the_server_as_a_user_that_is_not_root() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    commands = [json.loads(line) for line in re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)]
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    users = [re.findall(r"^USER (.*)$", stage, re.MULTILINE) for stage in stages]
    assert [found[-1] for found in users if found] == ["10001"] * 3
    assert len(commands) == 2
    for command in commands:
        assert command[:2] == ["personae", "serve"]
        asked = parsed([*command[2:], "org/name"])
        assert (asked["host"], asked["port"], str(asked["data_dir"])) == ("0.0.0.0", 8000, "/data/personae")


def test_the_images_have_what_servers_with_a_shared_database_and_an_object_store_need() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    libraries = [stage for stage in re.split(r"^FROM ", text, flags=re.MULTILINE) if "-libraries\n" in stage]
    assert len(libraries) == 2
    for stage in libraries:
        assert "--require-hashes --no-deps --requirement /opt/personae/requirements.lock" in stage
    assert locked().keys() >= {"psycopg", "psycopg-binary", "obstore"}


def test_the_image_gets_every_folder_of_the_package_and_nothing_else_of_the_checkout() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "**"
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for path in sent:
        assert (ROOT / path).exists(), path
    packages = {link.readlink().name for link in (ROOT / ".pkg" / "personae").iterdir() if link.is_symlink()}
    assert packages <= sent
    assert "setup.py" in sent  # it adds the compiled kernels to the wheel


def test_the_compose_file_starts_the_server_and_scrapes_it() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    assert services["services"].keys() == {"personae", "prometheus", "grafana"}
    build = services["services"]["personae"]["build"]
    folder = DEPLOY / "compose"
    assert (folder / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "docker" / "Dockerfile"
    for service in services["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            known = (folder / source).exists() if source.startswith(".") else source in services["volumes"]
            assert known, volume
    (scrape,) = yaml.safe_load((folder / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["personae:8000"]
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/server_key"
    assert services["services"]["prometheus"]["secrets"] == ["server_key"]
    (provider,) = yaml.safe_load((folder / "grafana/dashboards/personae.yaml").read_text())["providers"]
    assert f":{provider['options']['path']}:ro" in str(services["services"]["grafana"]["volumes"])


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "personae"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "systemd" / "personae.service").read_text(encoding="utf-8")
    unit = tmp_path / "personae.service"
    unit.write_text(text.replace("/opt/personae/bin/personae", str(program)))
    checked = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    ours = [line for line in checked.stderr.splitlines() if "personae" in line]
    assert ours == []
    assert checked.returncode == 0


def test_the_systemd_unit_starts_the_server_with_the_file_beside_it() -> None:
    unit = (DEPLOY / "systemd" / "personae.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    file = DEPLOY / "systemd" / "serve.yaml"
    words = command.replace("/etc/personae/serve.yaml", str(file)).split()[2:]
    asked = parsed(words)
    assert str(asked["model"]) == yaml.safe_load(file.read_text())["model"]
    assert str(asked["data_dir"]) == "/var/lib/personae"


def test_helm_lints_the_chart() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (the extra `deploy`)")
    for values in (KEY, EVERYTHING, NOTHING_KEPT):
        report = helm.lint(CHART, values, strict=True)
        assert [one for one in report["messages"] if one["severity"] > 1] == []
        assert report["errors"] == []


@pytest.mark.parametrize(
    "values", [KEY, EVERYTHING, NOTHING_KEPT], ids=["defaults", "everything", "no-volumes"]
)
def test_kubernetes_takes_what_the_chart_renders(values: dict[str, Any]) -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (the extra `deploy`)"
    )
    objects = rendered(values)
    for name, each in objects.items():
        if not name.startswith("ServiceMonitor/"):  # of the Prometheus operator, which has its own schemas
            kubernetes.validate(each, "1.34", strict=True)
    pod = objects["Deployment/test-personae"]["spec"]["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts(pod))
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {name.partition("/")[2] for name in objects if name.startswith("PersistentVolumeClaim/")}
    file = yaml.safe_load(objects["ConfigMap/test-personae"]["data"]["serve.yaml"])
    assert file.keys() <= OPTIONS
    assert pod["terminationGracePeriodSeconds"] > file["drain-timeout"]
    secret = pod["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"]["name"]
    assert secret == values["secret"].get("existing", "test-personae")
    assert (f"Secret/{secret}" in objects) == (values is not NOTHING_KEPT)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "set secret.serverKey"),
        ({**KEY, "option": {}}, "additional properties"),
        ({**KEY, "options": {"model": "a/b", "api-key": "in a ConfigMap"}}, "api-key"),
        ({**KEY, "service": {"port": 0}}, "port"),
    ],
)
def test_the_chart_refuses_values_that_cannot_be_right(values: dict[str, Any], said: str) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (the extra `deploy`)")
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=said):
        chart.render(values, name="test")


def test_the_charts_default_values_fit_its_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    Draft7Validator.check_schema(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    Draft7Validator(schema).validate(values)
    assert values.keys() == schema["properties"].keys() - {"global"}
    assert values["options"].keys() <= OPTIONS


def check_custom(thing: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError if an operator would refuse its custom resource."""
    Draft7Validator(schema_of(thing["apiVersion"], thing["kind"])).validate(thing)


def check_pod_template(template: dict[str, Any]) -> None:
    """Raises a ValidationError if Kubernetes would refuse the template of a custom resource's pods."""
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (the extra `deploy`)"
    )
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
    kubernetes.validate(whole, "1.34", strict=True)


def example(name: str) -> dict[str, dict[str, Any]]:
    """The objects of an example for Kubernetes, by kind."""
    text = (DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def options_in(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The options of `personae serve` in the Deployment. A model's folder exists only in its pods."""
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return parsed([str(DEPLOY) if word.startswith("/models/") else word for word in container["args"]])


def check_shared(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Check a Deployment of servers that share a database, and how KEDA scales it. Returns their options."""
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    taken = options_in(objects)
    assert taken["object_store"] == "s3://personae/contents"
    environment = {each["name"] for each in container["env"]}
    assert environment >= {each.info.env for each in options_of(ServeOptions) if each.info.env}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts(pod))
    assert "/data" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert pod["terminationGracePeriodSeconds"] > taken["drain_timeout"]
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
    assert probes == ["/health", "/health", "/ready"]
    check_custom(objects["ScaledObject"])
    scaled = objects["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    metric = re.search(r"personae:\w+", scaled["triggers"][0]["metadata"]["query"])
    assert metric is not None
    assert f'"{metric[0]}"' in (ROOT / "actors" / "client.py").read_text(encoding="utf-8")
    return taken


def test_the_example_of_servers_that_share_a_database_is_what_kubernetes_and_the_server_take() -> None:
    objects = example("shared.yaml")
    check_shared(objects)
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (the extra `deploy`)"
    )
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        kubernetes.validate(objects[kind], "1.34", strict=True)


def test_the_example_of_engines_on_a_ray_cluster_is_what_kuberay_and_the_server_take() -> None:
    objects = example("ray.yaml")
    taken = check_shared(objects)
    assert taken["ray"] == "auto"
    cluster, deployment = objects["RayCluster"], objects["Deployment"]
    check_custom(cluster)
    pod = deployment["spec"]["template"]["spec"]
    (node,) = pod["initContainers"]
    name = cluster["metadata"]["name"]
    assert f"--address={name}-head-svc:6379" in node["command"]
    assert node["restartPolicy"] == "Always", "a sidecar: it ends after the server has drained"
    assert {"--num-cpus=0", "--num-gpus=0", "--block"} <= set(node["command"])
    assert f"ray=={cluster['spec']['rayVersion']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for container in (node, *pod["containers"]):
        token = {each["name"]: each for each in container["env"]}["RAY_AUTH_TOKEN"]["valueFrom"][
            "secretKeyRef"
        ]
        assert token == {"name": name, "key": "auth_token"}
        shared = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm"} <= shared, "Ray's sockets and memory"
    ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
    assert ports["engines"] == taken["cluster_port"]


def test_ray_can_start_a_pod_for_each_engine_that_the_servers_of_the_example_ask_for() -> None:
    objects = example("ray.yaml")
    taken = options_in(objects)
    (workers,) = objects["RayCluster"]["spec"]["workerGroupSpecs"]
    scaled = objects["ScaledObject"]["spec"]
    asked = taken["replicas"]
    engines = [scaled["minReplicaCount"] * asked.least, scaled["maxReplicaCount"] * asked.most]
    assert engines == [workers["minReplicas"], workers["maxReplicas"]]
    (worker,) = workers["template"]["spec"]["containers"]
    resources = worker["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == taken["gpus_per_replica"] == 1
    assert float(resources["requests"]["cpu"]) == taken["cpus_per_replica"]
    (server,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["args"][0].startswith("/models/"), "the same path at each node"
    for pod in (workers["template"]["spec"], objects["Deployment"]["spec"]["template"]["spec"]):
        (container,) = pod["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (claim,) = (each for each in pod["volumes"] if each["name"] == mounted["/models"])
        assert claim["persistentVolumeClaim"]["claimName"] == "personae-models"


def test_the_network_of_the_ray_cluster_is_open_for_its_own_nodes_only() -> None:
    objects = example("ray.yaml")
    policy = objects["NetworkPolicy"]["spec"]
    label = policy["podSelector"]["matchLabels"]
    cluster = objects["RayCluster"]["spec"]
    for spec in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"], objects["Deployment"]["spec"]):
        assert label.items() <= spec["template"]["metadata"]["labels"].items()
    nodes, clients = policy["ingress"]
    assert nodes == {"from": [{"podSelector": {"matchLabels": label}}]}
    assert clients == {"ports": [{"port": "http"}]}


def test_kubernetes_takes_the_pods_and_objects_of_the_ray_cluster() -> None:
    objects = example("ray.yaml")
    cluster = objects.pop("RayCluster")["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check_pod_template(group["template"])
    objects.pop("ScaledObject")
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (the extra `deploy`)"
    )
    for each in objects.values():
        kubernetes.validate(each, "1.34", strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "headGroupSpec"), None),
        (("spec", "workerGroupSpecs", 0, "maxReplicas"), "16"),
        (("spec", "workerGroupSpecs", 0, "maximum"), 16),
        (("spec", "autoscalerOptions", "version"), "v3"),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    ],
)
def test_a_mistake_in_a_ray_cluster_is_noticed(path: tuple[Any, ...], value: Any) -> None:
    cluster = example("ray.yaml")["RayCluster"]
    *parents, last = path
    place: Any = cluster
    for each in parents:
        place = place[each]
    place[last] = value
    with pytest.raises(ValidationError):
        check_custom(cluster)
