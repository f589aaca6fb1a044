"""The demo verifier, and grammars over its tokenizer."""

from tests.runtime.grammar.conftest import grammars, loaded

__all__ = ["grammars", "loaded"]
