"""A draft model passes the self-test of a pair by what it drafts."""

import pytest

from tests.runtime.engine_checks.test_self_test import open_llm, pair  # noqa: F401
from tests.runtime.models import random_model
from wingbeat.runtime.engine_checks.self_test import BadDrafterError


@pytest.mark.slow
def test_a_draft_model_is_tested(pair, tmp_path):  # noqa: F811
    assert open_llm(pair, pair[0]).self_test.first_position > 0.95, "the verifier itself, up to rounding"
    random_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "other")
    with pytest.raises(BadDrafterError, match="other"):
        open_llm(pair, tmp_path / "other")
