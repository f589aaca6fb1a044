"""Settings that ranks do not support are refused before a rank starts or weights are read."""

import pytest
import torch

from tests.runtime.models import DEMO_PAIR, engine_config
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.pair import PairSettings, engine_of_pair
from wingbeat.runtime.tensor_parallel.group import RankGroup


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"deterministic": True}, "deterministic is True and tensor_parallel_size is 2: sums"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8 and tensor_parallel_size is 2"),
    ],
    ids=["deterministic", "fp8"],
)
def test_limits_that_ranks_do_not_have(limits, message, tmp_path):
    folder, group = DEMO_PAIR / "verifier", RankGroup(tmp_path / "store", 2)
    choice = parse_drafter("none", folder)
    settings = PairSettings(folder, choice, engine_config(**limits), torch.float32, spread=group)
    with pytest.raises(ValueError, match=message):
        engine_of_pair(settings, "cpu", lambda *_: None)
