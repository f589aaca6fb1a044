"""A folder with a one-pass head is told by its config."""

import pytest

from tests.runtime.drafters.test_drafter_kinds import LLAMA, checkpoint
from wingbeat.runtime.drafters.registry import kind_of


@pytest.mark.parametrize("name", ["fc.weight", "model.fc.weight"])
def test_a_folder_with_a_head_that_drafts_in_one_pass_is_one(tmp_path, name):
    assert kind_of(checkpoint(tmp_path, LLAMA | {"dflash_config": {}}, {name: (4, 8)})) == "one_pass"
