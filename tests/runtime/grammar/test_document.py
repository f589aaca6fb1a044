"""A number in a document agrees with the constant of the grammars."""

from tests.test_docs import text_of
from wingbeat.runtime.grammar.grammar_masker import MOST_TREE_S


def test_what_the_document_says_of_late_masks_is_the_limit():
    assert f"masks are not ready within {1000 * MOST_TREE_S:.0f} ms" in text_of("architecture.md")
