"""Settings that rollouts allow and refuse."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.rollouts.settings import changes_weights


def test_vllm_s_switch_implies_them():
    config = AppConfig(weight_transfer_config='{"backend": "gloo"}')
    assert changes_weights(config)
    assert config.weight_transfer_config.backend == "gloo"
    assert config.engine_config().frees_memory
    assert not changes_weights(AppConfig())
    assert not AppConfig().engine_config().frees_memory


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rollouts": True, "engine_factory": "a:b"}, "a user's engine manages its own weights"),
        ({"rollouts": True, "recording_dir": "/tmp/r"}, "rollouts and recording_dir are both given"),
        ({"rollouts": True, "prefix_dir": "/tmp/r"}, "stored data would belong to weights that change"),
        ({"weight_transfer_config": {"backend": "ipc"}}, "backend"),
        ({"weight_transfer_config": "gloo"}, "is not JSON"),
        ({"rollouts_journal": True}, "rollouts_journal is given: give rollouts as well"),
        ({"rollouts_dir": Path("/tmp/r")}, "rollouts_dir is given: give rollouts as well"),
    ],
)
def test_what_does_not_go_with_them_is_refused_in_a_line(fields: dict, reason: str):
    with pytest.raises(ValidationError, match=reason):
        AppConfig(**fields)


def test_a_head_may_learn_beside_them(tmp_path: Path):
    assert changes_weights(AppConfig(rollouts=True, learn={"dir": tmp_path}))
