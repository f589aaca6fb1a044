"""GPUs of a machine, where several models would take them."""

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.gpu_shares import shares
from wingbeat.deployments.gpu_shares.gpus import Gpu
from wingbeat.deployments.options.problems import SettingsError

TWO = ({"served_model_name": "one"}, {"served_model_name": "two", "drafter": "none"})


def test_gpus_are_not_divided_among_models_by_guess(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shares, "gpus_here", lambda: [Gpu("any", True)] * 2)
    said: list[str] = []
    with pytest.raises(SettingsError, match="give each num_gpus_per_verifier"):
        shares.take_gpus(AppConfig(models=TWO), False, said.append)
    on_cpus = AppConfig(models=TWO, device="cpu")
    assert shares.take_gpus(on_cpus, False, said.append) == on_cpus
    monkeypatch.setattr(shares, "gpus_here", list)
    placed = shares.take_gpus(AppConfig(models=TWO), False, said.append)
    assert not any(one.leaves_gpus_open() for one in placed.served())
    assert said == []
