"""Tokens that a scripted engine generates: its own text, as far as the request's fields allow."""

from collections.abc import Sequence
from importlib import import_module
from random import Random
from typing import Any

from wingbeat.deployments.fleet.interface import RequestRefused
from wingbeat.runtime.scheduling.maskers import grammar_compiler
from wingbeat.runtime.scheduling.request import FinishReason, Request, TokenLogprob
from wingbeat.runtime.tokenizer import Tokenizer

EOS = 0


class Script:
    """Honours stop conditions, `allowed_token_ids` and grammars; bias and penalties have no effect."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = 4096) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammar_compiler(tokenizer, vocab_size, frozenset([EOS]))

    def tokens(self, request: Request, wanted: Sequence[int]) -> tuple[list[int], FinishReason]:
        """Tokens and finish reason of the answer; `wanted` are the tokens of the scripted text.

        Raises:
            RequestRefused: the request's grammar does not compile.
        """
        params = request.params
        if params.grammar is not None:
            try:
                grammar = self._grammars.compile(params.grammar)
            except ValueError as error:
                raise RequestRefused(str(error)) from error
            return self._in_grammar(request, grammar, wanted)
        ends = {EOS, *params.stop_token_ids} if not params.ignore_eos else set(params.stop_token_ids)
        text = [*wanted, EOS] if not params.ignore_eos else list(wanted)
        while len(text) < params.min_tokens:
            text = [*wanted, *text] if wanted else [1, *text]
        if params.allowed_token_ids:
            text = [params.allowed_token_ids[token_id % len(params.allowed_token_ids)] for token_id in text]
        for place, token_id in enumerate(text[: params.max_tokens], 1):
            if token_id in ends and place > params.min_tokens:
                return text[:place], FinishReason.STOP
        return text[: params.max_tokens], FinishReason.LENGTH

    def _in_grammar(self, request: Request, grammar: Any, wanted: Sequence[int]) -> tuple[list[int], FinishReason]:
        """The wanted tokens if the grammar allows them, else drawn ones that end as soon as allowed."""
        # By its name: the module goes with grammars.
        allowed_tokens = import_module("tests.runtime.grammar.walks").allowed_tokens
        params = request.params
        judge = grammar.matcher()
        fits = judge.try_consume_tokens(list(wanted)) == len(wanted) and judge.is_accepting()
        if len(wanted) < request.params.max_tokens and fits:
            return [*wanted, EOS], FinishReason.STOP
        rng, matcher, tokens = Random(params.seed if params.temperature else 0), grammar.matcher(), []
        while len(tokens) < params.max_tokens:
            allowed = allowed_tokens(matcher, grammar.vocabulary)
            tokens.append(EOS if EOS in allowed else rng.choice(allowed))
            matcher.consume_token(tokens[-1])
            if tokens[-1] == EOS or tokens[-1] in params.stop_token_ids:
                return tokens, FinishReason.STOP
        return tokens, FinishReason.LENGTH


def scripted_logprobs(asked: int | None, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities by token, with the lowest ids as the likeliest; empty if none were requested."""
    if asked is None:
        return ()
    top = tuple((token_id, logprob_of(token_id)) for token_id in range(asked))
    return tuple(TokenLogprob(logprob_of(token_id), top) for token_id in token_ids)


def logprob_of(token_id: int) -> float:
    """Smaller for greater ids."""
    return -(token_id + 1) / 1000
