"""Changes in place by an operator: `serve deploy` with another `user_config`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.operators_cluster import ROOT, START_S, Cluster, completion, on_this_machine

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
NUM_ROUTERS = 2
NUM_ASKED = 6 * NUM_ROUTERS
"""Requests in a row of which each router has some."""


class Deployed:
    """The demo pair by two routers, whose `user_config` changes."""

    def __init__(self, cluster: Cluster, folder: Path, **settings: Any) -> None:
        self._cluster, self._folder = cluster, folder
        example = ROOT / "examples" / "serve" / "demo_cpu.yaml"
        self._document = on_this_machine(example, cluster.port, max_num_seqs=4, adaptive=False, **settings)
        (self._application,) = self._document["applications"]
        self.deploy()
        self.replicas = self.running()

    def deploy(self, **user_configs: dict[str, Any]) -> None:
        """`serve deploy` with a `user_config` by deployment."""
        configs = [{"name": name, "user_config": one} for name, one in user_configs.items()]
        routers = {"name": "Router", "num_replicas": NUM_ROUTERS}
        given = {one["name"]: one for one in (routers, *configs)}
        given["Router"] |= routers
        self._application["deployments"] = list(given.values())
        self._cluster.deploy(self._document, self._folder)
        self._cluster.wait_until_it_runs()

    def running(self) -> dict[str, set[str]]:
        return {deployment: self._cluster.replicas(deployment) for deployment in ("Router", "Verifier")}

    def answers(self, **fields: Any) -> list[httpx.Response]:
        return [completion(self._cluster, "def main():\n    ", **fields) for _ in range(NUM_ASKED)]

    def until(self, holds: Callable[[list[httpx.Response]], bool], **fields: Any) -> list[httpx.Response]:
        """Answers of all routers once they are as they are to be."""
        deadline = time.monotonic() + START_S
        while not holds(answers := self.answers(**fields)):
            assert time.monotonic() < deadline, [answer.text for answer in answers]
            time.sleep(0.5)
        return answers


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def is_drafted(answer: httpx.Response) -> bool:
    metrics = answer.json().get("metrics") or {}
    return metrics.get("speculative_decoding", {}).get("num_drafts", 0) > 0


def test_limits_speculation_and_log_levels_change_in_the_same_replicas(cluster: Cluster, tmp_path: Path):
    deployed = Deployed(cluster, tmp_path)
    drafted = deployed.until(lambda answers: all(map(is_drafted, answers)))
    deployed.deploy(Router={"speculation": False, "max_queued_requests": 0}, Verifier={"log_level": "warning"})
    plain = deployed.until(lambda answers: not any(map(is_drafted, answers)))
    assert {text(answer) for answer in plain} == {text(answer) for answer in drafted}
    deployed.until(
        lambda answers: {answer.status_code for answer in answers} == {400}, n=5
    )  # more than ever run at once
    deployed.deploy(Router={}, Verifier={})
    deployed.until(lambda answers: all(map(is_drafted, answers)))
    assert deployed.running() == deployed.replicas


def test_what_is_wrong_stops_no_replica(cluster: Cluster, tmp_path: Path):
    deployed = Deployed(cluster, tmp_path)
    deployed.deploy(Router={"speculation": "sometimes"}, Verifier={"log_level": "loud"})
    assert all(map(is_drafted, deployed.answers()))
    assert deployed.running() == deployed.replicas
    deployed.deploy(Router={"speculation": False})
    deployed.until(lambda answers: not any(map(is_drafted, answers)))
    assert deployed.running() == deployed.replicas
