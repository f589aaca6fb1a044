"""What is settled before an application starts."""

import pytest

from wingbeat.deployments import launch
from wingbeat.deployments.app import warn_if_open
from wingbeat.deployments.config import AppConfig

ON_GPU = AppConfig(num_gpus_per_verifier=0.7, num_gpus_per_drafter=0.3)


def test_a_pair_that_fits_no_node_ends_the_start_before_anything_is_deployed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(launch.NICENESS, "0")
    monkeypatch.setattr(launch.serve, "start", lambda **options: None)
    monkeypatch.setattr(launch, "node_gpus", lambda: [0.0])
    monkeypatch.setattr(launch, "build", lambda config: pytest.fail("deployed"))
    with pytest.raises(launch.StartError, match=r"per_verifier is 0\.7 and .* is 0\.3: a pair needs 1 GPU\(s\)"):
        launch.launch(ON_GPU)


@pytest.mark.parametrize(("told", "niceness"), [(None, "0"), ("5", "5")])
def test_a_ray_started_for_an_application_does_not_hold_its_workers_back(
    monkeypatch: pytest.MonkeyPatch, told: str | None, niceness: str
):
    seen = []
    environ = {} if told is None else {launch.NICENESS: told}
    monkeypatch.setattr(launch.os, "environ", environ)
    monkeypatch.setattr(launch.serve, "start", lambda **options: seen.append(environ[launch.NICENESS]))
    monkeypatch.setattr(launch.serve, "run", lambda app, name: None)
    monkeypatch.setattr(launch, "build", lambda config: None)
    launch.launch(AppConfig())
    assert seen == [niceness]


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", "hidden", False), ("127.0.0.1", None, False)]
)
def test_a_server_that_other_machines_reach_without_a_key_says_so(
    caplog: pytest.LogCaptureFixture, host: str, key: str | None, warns: bool
):
    warn_if_open(AppConfig(api_key=key), host)
    assert [host in record.getMessage() for record in caplog.records] == [True] * warns
