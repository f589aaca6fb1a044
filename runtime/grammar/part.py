"""Grammars that answers must match; imports what compiles them where it is asked for."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.grammar.compiler import Grammars
    from wingbeat.runtime.tokenizer import Tokenizer

add_certain = "wingbeat.runtime.grammar.certain_trees:add_certain"
with_certain = "wingbeat.runtime.grammar.certain_trees:with_certain"


def grammars(tokenizer: "Tokenizer | None", vocab_size: int, eos_token_ids: frozenset[int]) -> "Grammars | None":
    """The compiler of a model; None without a tokenizer."""
    from wingbeat.runtime.grammar.compiler import Grammars

    return None if tokenizer is None else Grammars(tokenizer, vocab_size, eos_token_ids)
