"""Choice of the Ray cluster: a silent cluster is reported at once, a failed start is tried once more."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.optional import FEATURES, is_deleted
from wingbeat.deployments import app, launch, ray_cluster
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.launch import ServedApplication, StartError
from wingbeat.deployments.ray_cluster import LOCAL, ClusterError, address_to_join

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
ONE_LINE = re.compile(r"[^\n]+")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster.services, "find_gcs_addresses", set)
    monkeypatch.setattr(ray_cluster.services, "find_bootstrap_address", lambda folder: None)
    monkeypatch.setattr(ray_cluster, "JOIN_S", 0.5)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port whose listener answers nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def head() -> Iterator[int]:
    """A port where a head of Ray answers as all servers of gRPC do."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    yield port
    server.stop(None)


def test_without_an_address_and_without_a_cluster_ray_is_started_here():
    assert address_to_join(None) == LOCAL


@pytest.mark.parametrize("by", ["option", "environment"])
def test_an_address_where_nobody_listens_ends_the_start_in_one_line(monkeypatch: pytest.MonkeyPatch, by: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    if by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    said = f"RAY_ADDRESS={address}" if by == "environment" else f"--address {address}"
    with pytest.raises(
        ClusterError, match=f"{said}: no Ray cluster answers .*Connection refused.*ray start"
    ) as refused:
        address_to_join(address if by == "option" else None)
    assert ONE_LINE.fullmatch(str(refused.value))


def test_a_server_that_is_no_ray_is_named(silent: int):
    with pytest.raises(ClusterError, match="is not the head of a Ray cluster"):
        address_to_join(f"127.0.0.1:{silent}")


def test_auto_without_a_cluster_is_one_line():
    with pytest.raises(ClusterError, match="--address auto: no Ray cluster is there") as refused:
        address_to_join("auto")
    assert ONE_LINE.fullmatch(str(refused.value))


def test_a_cluster_that_answers_is_joined_whatever_proxy_there_is(monkeypatch: pytest.MonkeyPatch, head: int):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert address_to_join(f"127.0.0.1:{head}").endswith(f":{head}")


def test_what_a_killed_cluster_left_behind_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(ray_cluster.services, "find_bootstrap_address", lambda folder: f"127.0.0.1:{port}")
    assert address_to_join(None) == LOCAL


def test_a_ray_of_its_own_starts_without_dashboard_and_monitor_and_has_time(fake_ray, monkeypatch):
    fake, seen = fake_ray(), []
    come_up = fake.init

    def init(**options: object) -> None:
        own = ray_cluster.services.wait_for_node.__defaults__
        seen.append((ray_cluster.Node.start_api_server(), ray_cluster.Node.start_monitor(), own))
        come_up(**options)

    before = ray_cluster.Node.start_monitor, ray_cluster.services.wait_for_node.__defaults__
    monkeypatch.setattr(fake, "init", init)
    ServedApplication(AppConfig()).start()
    assert seen == [(None, None, (ray_cluster.NODE_S,))]
    assert (ray_cluster.Node.start_monitor, ray_cluster.services.wait_for_node.__defaults__) == before
    assert before[1][0] < ray_cluster.NODE_S


@pytest.mark.parametrize("failures", [1, 2])
def test_a_ray_that_does_not_come_up_is_started_twice_at_most(fake_ray, monkeypatch, failures: int):
    fake, tries = fake_ray(), []
    come_up = fake.init

    def init(**options: object) -> None:
        tries.append(options["address"])
        if len(tries) <= failures:
            raise TimeoutError("Traceback\n  ...\nTimed out after 60 seconds while waiting for node to startup.")
        come_up(**options)

    monkeypatch.setattr(fake, "init", init)
    application = ServedApplication(AppConfig())
    if failures == 1:
        application.start()
    else:
        with pytest.raises(
            StartError, match=r"in two attempts: Timed out after 60 seconds .*ray start --head"
        ) as refused:
            application.start()
        assert ONE_LINE.fullmatch(str(refused.value))
    assert tries == [LOCAL, LOCAL]


def test_a_cluster_that_refuses_this_process_is_asked_once(fake_ray, monkeypatch):
    fake, tries = fake_ray(attached=True), []

    def init(**options: object) -> None:
        tries.append(options["address"])
        raise RuntimeError("Version mismatch")

    monkeypatch.setattr(fake, "init", init)
    with pytest.raises(StartError, match=r"the Ray cluster at 10\.0\.0\.1:6379 cannot be joined: Version mismatch"):
        ServedApplication(AppConfig(), address="10.0.0.1:6379").start()
    assert tries == ["10.0.0.1:6379"]


def test_serves_grpc_reaches_replicas_past_any_proxy(monkeypatch: pytest.MonkeyPatch, head: int):
    # In the environment of every process that calls replicas: of the launcher's own Ray, and of the replicas of any.
    assert ray_cluster.PROXY_ENV.items() <= launch.RAY_ENV.items()
    shared = {} if is_deleted(FEATURES["shared_drafters"]) else {"drafters": {"num": 1}}
    application = app.build(AppConfig(**shared, device="cpu"))
    deployments, found = [application._bound_deployment], []
    while deployments:
        one = deployments.pop()
        found.append(one.name)
        assert ray_cluster.PROXY_ENV.items() <= one.ray_actor_options["runtime_env"]["env_vars"].items()
        for argument in _flat(one.init_args):
            if hasattr(argument, "_bound_deployment"):
                deployments.append(argument._bound_deployment)
    assert sorted(found) == [*["DrafterPool"] * len(shared), "Router", "Verifier"]
    for name, value in {"http_proxy": "http://127.0.0.1:9", **ray_cluster.PROXY_ENV}.items():
        monkeypatch.setenv(name, value)
    with grpc.insecure_channel(f"127.0.0.1:{head}") as channel:
        grpc.channel_ready_future(channel).result(timeout=30)


def _flat(values):
    for value in values:
        yield from _flat(value) if isinstance(value, list | tuple) else [value]
