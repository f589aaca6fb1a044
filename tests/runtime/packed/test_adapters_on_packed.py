"""Adapters over weights that stay packed on a GPU."""

import pytest

from tests.runtime.models import CHAIN
from tests.runtime.quantised import test_packed_adapters


@pytest.mark.parametrize("case", ["awq", "fp8"])
def test_texts_are_those_of_merged_weights(tmp_path, case):
    test_packed_adapters.test_texts_are_those_of_merged_weights(tmp_path, case, CHAIN)
