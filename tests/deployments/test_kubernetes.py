"""The examples for KubeRay by their text and KubeRay's schema; no cluster reads them here."""

import copy
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from tests.deployments.kuberay_schema import problems
from wingbeat.deployments.app_config import CPUS_OF_DRAFTER, CPUS_OF_ROUTER, AppConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
KILL_S = 30
"""Seconds that a container gets beyond `shutdown_timeout_s`, as docs/operations.md sets them."""


class Example:
    """An example file: its RayService and the parts of it."""

    def __init__(self, path: Path) -> None:
        documents = {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}
        self.service, self.budget = documents["RayService"], documents["PodDisruptionBudget"]
        spec = self.service["spec"]
        self.serve = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
        (self.application,) = self.serve.applications
        self.cluster = spec["rayClusterConfig"]
        self.head = self.cluster["headGroupSpec"]["template"]
        (self.workers,) = self.cluster["workerGroupSpecs"]
        self.worker = self.workers["template"]
        (self.container,) = self.worker["spec"]["containers"]

    def config(self, folder: Path) -> AppConfig:
        """The settings, with a folder that is there in place of the model's."""
        (folder / "config.json").write_text("{}")
        args = self.application.args
        return AppConfig.model_validate(args | {name: str(folder) for name in ("model", "drafter") if name in args})


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Example:
    return Example(request.param)


def test_kuberays_own_schema_takes_every_field(example):
    assert list(problems(example.service)) == []


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda service: service["spec"].update(serveConfigV3=""), "spec"),
        (lambda service: service["spec"]["rayClusterConfig"].pop("headGroupSpec"), "spec.rayClusterConfig"),
        (
            lambda service: service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="two"),
            "spec.rayClusterConfig.workerGroupSpecs.0.replicas",
        ),
        (
            lambda service: service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"][
                "containers"
            ][0].update(image_pull_policy="Always"),
            "spec.rayClusterConfig.workerGroupSpecs.0.template.spec.containers.0",
        ),
    ],
)
def test_the_schema_refuses_what_kuberay_would(example, change, place: str):
    service = copy.deepcopy(example.service)
    change(service)
    assert [one.partition(": ")[0] for one in problems(service)] == [place]


def test_there_is_an_example_for_cpus_and_one_for_gpus():
    assert [path.stem for path in EXAMPLES] == ["ray_service_cpu", "ray_service_gpu"]


def test_serves_configuration_is_one_that_ray_and_the_application_take(example, tmp_path):
    build = import_attr(example.application.import_path)
    assert AppConfig in get_args(build.__annotations__["args"])
    config = example.config(tmp_path)
    assert config.autoscaling_config["min_replicas"] >= 1
    assert example.application.route_prefix == "/"


def test_every_pod_has_the_image_of_the_dockerfile_with_its_version_of_ray(example):
    (version,) = re.findall(r"^ARG RAY_VERSION=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert example.cluster["rayVersion"] == version
    variant = "cuda" if "nvidia.com/gpu" in example.container["resources"]["limits"] else "cpu"
    for pod in (example.head, example.worker):
        assert [container["image"] for container in pod["spec"]["containers"]] == [f"wingbeat:{variant}"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]


def test_ports_and_the_probe_are_those_of_serves_proxy(example):
    from ray.serve._private.constants import DEFAULT_HTTP_PORT

    options = example.serve.http_options
    assert (options.host, options.port) == ("0.0.0.0", DEFAULT_HTTP_PORT)
    for pod in (example.head, example.worker):
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        # KubeRay makes its service of the port with this name.
        assert ports["serve"] == options.port
    assert example.container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    # A probe asks each pod, so each pod with a replica needs a proxy.
    assert example.serve.proxy_location.value == "EveryNode"


def test_workers_are_added_as_engines_are_and_each_holds_a_pair(example, tmp_path):
    config, workers = example.config(tmp_path), example.workers
    assert example.cluster["enableInTreeAutoscaling"] is True
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    scaling = config.autoscaling_config
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (workers["minReplicas"], workers["maxReplicas"])
    limits = example.container["resources"]["limits"]
    cpus = config.num_cpus_per_verifier + CPUS_OF_DRAFTER + CPUS_OF_ROUTER
    assert cpus <= int(limits["cpu"])
    assert config.num_gpus_per_verifier + config.num_gpus_per_drafter <= int(limits.get("nvidia.com/gpu", 0))


def test_a_pod_gets_the_time_that_its_requests_have(example, tmp_path):
    grace_s = example.worker["spec"]["terminationGracePeriodSeconds"]
    assert grace_s == example.config(tmp_path).shutdown_timeout_s + KILL_S


def test_the_disruption_budget_is_for_the_workers_one_at_a_time(example):
    spec = example.budget["spec"]
    assert spec["maxUnavailable"] == 1
    wanted = spec["selector"]["matchLabels"]
    assert wanted.items() <= example.worker["metadata"]["labels"].items()
    assert not wanted.items() <= example.head.get("metadata", {}).get("labels", {}).items()


def test_channels_have_shared_memory_of_their_own(example):
    mounts = {mount["mountPath"]: mount["name"] for mount in example.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in example.worker["spec"]["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert set(mounts.values()) == set(volumes)
