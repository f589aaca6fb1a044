"""Prefixes saved in deterministic mode or with rounded weights are not loaded by engines without them."""

import pytest
import torch

from tests.runtime.cpu.layers.test_deterministic import loaded_in
from tests.runtime.cpu.layers.test_eight_bits import world
from tests.runtime.models import random_model
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.prefixes.identity import identity_of
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


def test_saved_prefixes_of_the_other_mode_are_others(tmp_path):
    (tmp_path / "config.json").touch()
    loaded = loaded_in(torch.bfloat16)
    assert identity_of(tmp_path, loaded, 4)["dtype"] == "bfloat16 deterministic"


def test_what_is_kept_for_other_weights_is_not_taken(tmp_path):
    (tmp_path / "config.json").touch()
    ours, others = world("llama")[0], prepare_model(random_model("llama"), "llama")
    assert ours.computed_by != others.computed_by
    assert identity_of(tmp_path, ours, 16) != identity_of(tmp_path, others, 16)
