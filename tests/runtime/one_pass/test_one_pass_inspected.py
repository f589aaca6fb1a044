"""`wingbeat inspect` shows a one-pass head by its family."""

import json

import pytest

from tests.deployments.inspection.test_inspect_command import FIELDS, inspect  # noqa: F401
from tests.runtime.one_pass.one_pass_world import random_tensors, raw_config, save_head
from tests.runtime.one_pass.parallel_eagle_world import parallel_config, parallel_tensors


@pytest.mark.slow
def test_a_head_that_drafts_in_one_pass_is_shown_by_its_family(inspect, tmp_path):  # noqa: F811
    raw = raw_config("dspark-gated", (0, 2), num_layers=2, block_size=7, num_target_layers=4)
    flat = parallel_config((1, 3), num_layers=2)
    for folder, config, tensors, words in (
        (tmp_path / "dspark", raw, random_tensors(raw), "DSpark with shift slots"),
        (tmp_path / "peagle", flat, parallel_tensors(flat), "P-EAGLE with masked slots"),
    ):
        got = inspect(str(save_head(folder, config, tensors)), "--json", "--dtype", "float32")
        assert got.code == 0, got.err
        found = json.loads(got.out)
        assert set(found) == FIELDS
        assert (found["kind"], found["format"]) == ("one_pass", words)
        assert found["shapes"]["taps enter layers"] == [1, 3]
        assert found["shapes"]["num_hidden_layers"] == 2
        assert found["parameters"] == sum(tensor.numel() for tensor in tensors.values())
        assert found["memory"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
