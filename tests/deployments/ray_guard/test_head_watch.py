"""The end of Ray's head."""

import subprocess
import threading
from types import SimpleNamespace

import pytest

from wingbeat.deployments import launch
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.launch import ServedApplication
from wingbeat.deployments.ray_guard import guard
from wingbeat.deployments.ray_guard.guard import RayGuard

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_the_end_of_rays_head_ends_the_process_though_ray_waits_for_it_for_ever(fake_ray, monkeypatch, capsys, name):
    fake, left = fake_ray(), threading.Event()
    monkeypatch.setattr(launch, "first_result", lambda name, *given: name == "guard_ray" and RayGuard(*given))
    monkeypatch.setattr(guard, "Watchdog", lambda folder: SimpleNamespace(pid=0, close=lambda: None))
    monkeypatch.setattr(guard, "POLL_S", 0.01)
    monkeypatch.setattr(launch.os, "_exit", lambda code: codes.append(code) or left.set())
    codes: list[int] = []
    with subprocess.Popen(["sleep", "600"]) as head:
        fake.head[name] = [SimpleNamespace(process=head)]
        application = ServedApplication(AppConfig())
        application.start()
        assert not left.wait(0.1)
        head.kill()
        assert left.wait(30)
        application.close()
    assert codes == [1]
    assert "Ray's head has ended" in capsys.readouterr().err
