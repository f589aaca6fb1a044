"""Walks through a grammar that is tried out: what an engine would call, under the budget that an engine has."""

import time
from random import Random

import numpy as np

from wingbeat.runtime.grammar.compiler import RequestGrammar
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker

NUM_STEPS = 192
"""Tokens of a walk: what grows with the text is found before a request has it."""
MOST_WALKS_S = 0.5
"""CPU time of all walks, where nothing is found."""
_NUM_CHILDREN = 6
_NUM_LOOKED_AT = 32
_ROUND_STEPS = 8
"""Tokens between two of which more than their mask is asked for."""


def problem_of(grammar: RequestGrammar) -> str:
    """What is wrong with a compiled grammar, beginning with its field; empty where nothing is found."""
    until = time.process_time() + MOST_WALKS_S
    for seed, pick in enumerate((_again, _shortest, _any, _longest, _any)):
        masker, rng, last = GrammarMasker(grammar), Random(seed), -1
        for step in range(NUM_STEPS):
            allowed = _allowed(masker, grammar)
            if masker.problem is not None:
                return str(masker.problem)
            if not len(allowed) and step == 0:
                return f"{grammar.spec.field} matches no text that the model's tokens can write"
            some = _some(allowed, last, rng, grammar)
            if not some or time.process_time() > until:
                break
            last = pick(some, last, rng, grammar)
            if step % _ROUND_STEPS == 0:
                _work(masker, grammar, [last, *some[:_NUM_CHILDREN]])
                if masker.problem is not None:
                    return str(masker.problem)
            masker.accept(last)
    return ""


def _work(masker: GrammarMasker, grammar: RequestGrammar, children: list[int]) -> None:
    """A round: what is certain, a tree of the root's children and one below, and what may follow the first of them."""
    token_ids = np.array([0, *children, children[0]])
    parents = np.array([-1, *[0] * len(children), 1])
    masker.forced(8)
    masker.fill(token_ids, parents, _masks(len(parents), grammar))
    masker.ahead(children[:1], _masks(1, grammar)[0])


def _allowed(masker: GrammarMasker, grammar: RequestGrammar) -> np.ndarray:
    masks = _masks(1, grammar)
    masker.fill(np.zeros(1, np.int64), np.full(1, -1, np.int64), masks)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[: len(grammar.table.texts)])


def _some(allowed: np.ndarray, last: int, rng: Random, grammar: RequestGrammar) -> list[int]:
    """Tokens to go on with: a sample, in which is the last one where it is allowed."""
    places = rng.sample(range(len(allowed)), min(len(allowed), _NUM_LOOKED_AT))
    some = allowed[places].tolist()
    if last in allowed:
        some.append(last)
    return [token_id for token_id in some if token_id not in grammar.table.stop_token_ids]


def _masks(num_nodes: int, grammar: RequestGrammar) -> np.ndarray:
    return np.zeros((num_nodes, -(-grammar.vocab_size // 32)), np.int32)


def _any(some: list[int], last: int, rng: Random, grammar: RequestGrammar) -> int:
    return rng.choice(some)


def _again(some: list[int], last: int, rng: Random, grammar: RequestGrammar) -> int:
    """The same token as long as it may be: repetition is what ambiguous grammars grow by."""
    return last if last in some else rng.choice(some)


def _shortest(some: list[int], last: int, rng: Random, grammar: RequestGrammar) -> int:
    return min(some, key=lambda token_id: (len(grammar.table.texts[token_id]), rng.random()))


def _longest(some: list[int], last: int, rng: Random, grammar: RequestGrammar) -> int:
    return max(some, key=lambda token_id: (len(grammar.table.texts[token_id]), rng.random()))
