"""Adapters that `user_config` names, in replicas that run on."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.operators_cluster import Cluster
from tests.e2e.test_user_config import Deployed, text
from tests.runtime.lora_world import write_adapter
from wingbeat.runtime.demo import demo_pair

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


def test_adapters_come_change_and_go_in_the_same_replicas(cluster: Cluster, tmp_path: Path):
    root = tmp_path / "adapters"
    model = AutoModelForCausalLM.from_pretrained(demo_pair().verifier)
    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, model, seed=seed, std=0.3)
    settings = {"lora_update_dir": str(root), "max_loras": 2, "max_lora_rank": 8, "num_replicas": 2}
    deployed = Deployed(cluster, tmp_path, **settings)

    def texts(name: str) -> set[str]:
        """Texts of all routers, once all of them know the adapter."""
        served = deployed.until(lambda answers: {answer.status_code for answer in answers} == {200}, model=name)
        return {text(answer) for answer in served}

    base = {text(answer) for answer in deployed.answers()}
    deployed.deploy(Router={"lora_modules": {"sql": "one"}})
    one = texts("sql")
    deployed.deploy(Router={"lora_modules": {"sql": "two", "code": "one"}})
    assert texts("code") == one
    two = texts("sql")
    assert len(base | one | two) == 3
    deployed.deploy(Router={"lora_modules": {"sql": "nowhere"}})
    assert (texts("sql"), texts("code")) == (two, one)
    deployed.deploy(Router={"lora_modules": {"code": "one"}})
    deployed.until(lambda answers: {answer.status_code for answer in answers} == {404}, model="sql")
    assert texts("code") == one
    assert deployed.running() == deployed.replicas
