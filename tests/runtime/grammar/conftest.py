"""Fixtures: the demo verifier, and grammars over its tokenizer."""

import pytest

from tests.runtime.grammar.world import TOKENIZER
from tests.runtime.models import reference
from wingbeat.runtime.grammar.compiler import Grammars


@pytest.fixture(scope="module")
def loaded():
    return reference("demo", 1).loaded


@pytest.fixture(scope="module")
def grammars(loaded):
    return Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)
