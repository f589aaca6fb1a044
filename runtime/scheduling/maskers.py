"""Token maskers, which compute the tokens that may follow each node of a sequence's draft tree; see `TokenMasker`.

Runtime parts compile grammars and make maskers (hooks `grammars` and `masker` of `wingbeat.runtime.parts`).
"""

from collections.abc import Sequence
from typing import Any, Protocol

from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.scheduling.request import GrammarSpec, Request
from wingbeat.runtime.scheduling.sequence import TokenMasker


class CompiledGrammar(Protocol):
    """Grammar, in compiled form, that an answer must match."""

    def masker(self, token_ids: Sequence[int]) -> TokenMasker:
        """Returns a masker for a text that begins with these tokens; raises like `masker_of`."""
        ...


class GrammarCompiler(Protocol):
    """Compiles the grammars that answers must match, for one model. Threads may share a compiler."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compiles a grammar.

        Raises:
            ValueError: the grammar cannot be compiled; the message is one line that begins with the name of the
                request's field that holds the grammar.
        """
        ...


def grammar_compiler(*model: Any) -> GrammarCompiler | None:
    """Returns a grammar compiler; None if no part provides a compiler. `model` holds the arguments of the hook."""
    return first_result("grammars", *model)


def no_compiler(spec: GrammarSpec) -> ValueError:
    """Returns the error for a request with a grammar if no compiler is available."""
    if hooks("grammars"):
        return ValueError("structured_outputs is not served here: the model has no tokenizer")
    return ValueError(f"{spec.field} is not served here: no grammar compiler is installed")


def masker_of(request: Request, grammar: CompiledGrammar | None) -> TokenMasker | None:
    """Returns a masker for the tokens of a request; None if all tokens are allowed.

    Raises:
        ValueError: the grammar was not compiled, `output_token_ids` of the request do not match it, or no part makes
            maskers.
        RequestTooExpensive: matching `output_token_ids` against the grammar takes too long.
    """
    params = request.params
    if params.grammar is not None and grammar is None:
        raise no_compiler(params.grammar)
    if not params.has_masks:
        return None
    masker = first_result("masker", request, grammar)
    if masker is None:
        raise ValueError("bad_words of several tokens are not served here: no part computes masks of tokens")
    return masker
