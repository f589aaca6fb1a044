"""Beside every family of heads, requests with adapters get the text that they get without a drafter."""

import pytest

from tests.runtime.engine.test_families_lossless import check, drafters, table
from tests.runtime.lora_world import lora_world

drafter_of = pytest.fixture(drafters, scope="module")


@pytest.mark.few(1)
@pytest.mark.parametrize("row", table(["lora"]))
def test_the_text_is_that_of_plain_decoding(row, drafter_of, monkeypatch):
    world = lora_world()
    try:
        check(row, world, drafter_of, monkeypatch, world.adapters)
    finally:
        world.loaded.parts["adapters"].rows = None
