"""The setting `cpu_activations` of commands that run a model in their own process."""

import pytest

from tests.needs import needs
from wingbeat.deployments.local.engine import LocalConfig


def test_commands_without_a_server_have_it_too():
    assert LocalConfig(cpu_activations="int8", max_model_len=64).engine_config(2).cpu_activations == "int8"


@needs("tensorrt")
def test_engines_round_none(tmp_path):
    (tmp_path / "base_config.json").touch()
    with pytest.raises(
        ValueError, match="cpu_activations is int8 and engine_dir is given: its engines do not round them"
    ):
        LocalConfig(cpu_activations="int8", engine_dir=tmp_path)
