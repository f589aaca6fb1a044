"""`wingbeat train`: its help has every setting."""

import pytest
import torch

from wingbeat.deployments.cli.main import main
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig


@pytest.mark.parametrize("command", [["train"], ["train", "drafter", "-h"]])
def test_help_is_no_error(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    assert "Usage: wingbeat train" in capsys.readouterr().out


def test_denormal_numbers_are_flushed_while_it_trains(monkeypatch, tmp_path):
    """CPUs multiply with them up to 25 times as slowly."""
    found = []
    monkeypatch.setattr(
        "wingbeat.runtime.training.drafter.train_drafter",
        lambda *_, **__: found.append(float(torch.tensor([1e-39]) * 1)),
    )
    try:
        with pytest.raises(SystemExit):
            main(["train", "drafter", "--verifier", str(tmp_path), "--output", str(tmp_path / "head")])
    finally:
        torch.set_flush_denormal(False)
    assert found == [0.0]


def test_every_setting_is_an_option(capsys):
    with pytest.raises(SystemExit):
        main(["train", "drafter", "--help"])
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in TrainDrafterConfig.model_fields)
