"""`wingbeat train`: its help has every setting."""

import pytest

from wingbeat.deployments.cli.main import main
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig


@pytest.mark.parametrize("command", [["train"], ["train", "drafter", "-h"]])
def test_help_is_no_error(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    assert "Usage: wingbeat train" in capsys.readouterr().out


def test_every_setting_is_an_option(capsys):
    with pytest.raises(SystemExit):
        main(["train", "drafter", "--help"])
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in TrainDrafterConfig.model_fields)
