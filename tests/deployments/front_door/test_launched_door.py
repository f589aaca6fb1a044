"""Listening at the launcher's address: by the only router, or by Serve's proxy."""

from types import SimpleNamespace

import pytest

from tests.ports import free_port
from wingbeat.deployments import launch
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.bound_socket import bind
from wingbeat.deployments.front_door.door import DoorError
from wingbeat.deployments.front_door.part import DIRECT
from wingbeat.deployments.launch import ServedApplication, StartError, serve_until_stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """In the place of the environment's variables."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(launch.os, "environ", variables)
    return variables


@pytest.mark.parametrize("told", [None, "1"])
def test_the_only_router_of_a_ray_of_its_own_gets_the_launchers_socket(fake_ray, environ, told: str | None):
    fake, port = fake_ray(), free_port()
    environ |= {} if told is None else {DIRECT: told}
    application = ServedApplication(AppConfig(), port=port)
    application.start()
    assert (fake.options, fake.application.host) == ({"proxy_location": "Disabled"}, "127.0.0.1")
    assert application.url() == f"http://127.0.0.1:{port}"
    with fake.application.receive_socket() as lent:
        assert lent.getsockname() == ("127.0.0.1", port)
    assert environ[DIRECT] == "0", "Serve would drain such a router for 30 s"
    application.close()
    with pytest.raises(DoorError):
        fake.application.receive_socket()


def test_a_port_that_is_taken_after_it_was_looked_at_ends_the_start_in_one_line(fake_ray, environ):
    fake = fake_ray()
    with bind("127.0.0.1", 0) as other:
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on port {port} of 127.0.0.1: Address already in use"):
            serve_until_stopped(AppConfig(), port=port)
    assert "run" not in fake.calls


@pytest.mark.parametrize("why", ["several routers", "autoscaled routers", "told so", "HAProxy", "in a cluster"])
def test_else_serves_proxy_listens(fake_ray, environ, why: str):
    fake = fake_ray(attached=why == "in a cluster")
    fake.listens = SimpleNamespace(host="127.0.0.1", port=9000)
    if why == "told so":
        environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"] = "0"
    if why == "HAProxy":
        environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    settings = {
        "several routers": {"num_router_replicas": 2},
        "autoscaled routers": {"router_autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
    }
    application = ServedApplication(AppConfig(**settings.get(why, {})), port=9000)
    application.start()
    assert fake.options == {"http_options": {"host": "127.0.0.1", "port": 9000}}
    assert application.url() == "http://127.0.0.1:9000"
