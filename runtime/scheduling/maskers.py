"""Which tokens one sequence may go on with, behind each node of its draft tree; see `TokenMasker`.

Forms are compiled by a part (`grammars` of `wingbeat.runtime.parts`); words are looked for here.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from wingbeat.runtime.parts import first, hooks
from wingbeat.runtime.scheduling.request import GrammarSpec, Request
from wingbeat.runtime.scheduling.sequence import TokenMasker


class CompiledGrammar(Protocol):
    """Compiled grammar that an answer must match."""

    def masker(self, token_ids: Sequence[int]) -> TokenMasker:
        """Follows a text that begins with these tokens; raises as `masker_of`."""
        ...


class GrammarCompiler(Protocol):
    """Compiles what answers must match, for one model; safe to share between threads."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises ValueError, one line that begins with the field's name, where that cannot be."""
        ...


def grammar_compiler(*model: Any) -> GrammarCompiler | None:
    """Compiler of grammars for a model, given as the arguments of the hook; None where there is none."""
    return first("grammars", *model)


def no_compiler(spec: GrammarSpec) -> ValueError:
    """For a request that has a grammar where there is no compiler."""
    if hooks("grammars"):
        return ValueError("structured_outputs is not served here: the model has no tokenizer")
    return ValueError(f"{spec.field} is not served here: nothing holds answers to a form")


def masker_of(request: Request, grammar: CompiledGrammar | None) -> TokenMasker | None:
    """What a request's tokens are held to; None where they are free.

    Raises:
        ValueError: its grammar was not compiled, or what was generated before breaks it.
        TooDear: its grammar takes too long over what was generated before.
    """
    params, maskers = request.params, []
    if params.grammar is not None:
        if grammar is None:
            raise no_compiler(params.grammar)
        maskers.append(grammar.masker(request.output_token_ids))
    words = [word for word in params.bad_words if len(word) > 1]
    if words:
        maskers.append(BadWords(words, (*request.prompt_token_ids, *request.output_token_ids)))
    return _Both(*maskers) if len(maskers) == 2 else maskers[0] if maskers else None


class BadWords:
    """Forbids the last token of a word behind the others.

    Args:
        words: token sequences of two or more.
        history: tokens so far.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], history: Sequence[int]) -> None:
        by_length = defaultdict(list)
        for word in words:
            by_length[len(word) - 1].append(word)
        self._words = [np.array(same) for same in by_length.values()]
        """By length, int64 [num_words, length]."""
        self._length = max(by_length)
        self._tail = list(history[-self._length :])

    def accept(self, token_id: int) -> bool:
        """See `TokenMasker`; never the end."""
        self._tail = [*self._tail, token_id][-self._length :]
        return False

    def forced(self, most: int) -> list[int]:
        """See `TokenMasker`: nothing is."""
        return []

    def may_force(self) -> bool:
        """See `TokenMasker`: nothing is."""
        return False

    def allows(self, token_id: int) -> bool:
        """See `TokenMasker`: what is said only of trees that grammars add to."""
        return True

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        """See `TokenMasker`: too few are forbidden for a drafter to be told."""
        return False

    def fill(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        """See `TokenMasker`."""
        masks[:] = -1
        histories = _histories(self._tail, token_ids, parents, self._length)
        for words in self._words:
            length = words.shape[1] - 1
            found = (histories[:, None, self._length - length :] == words[None, :, :-1]).all(axis=2)
            nodes, which = found.nonzero()
            last = words[which, -1]
            bits = np.left_shift(np.uint32(1), (last % 32).astype(np.uint32)).view(np.int32)
            np.bitwise_and.at(masks, (nodes, last // 32), ~bits)
        return True


class _Both:
    """A grammar, and words that it may not spell."""

    def __init__(self, grammar: TokenMasker, bad_words: BadWords) -> None:
        self._grammar, self._bad_words = grammar, bad_words

    def accept(self, token_id: int) -> bool:
        self._bad_words.accept(token_id)
        return self._grammar.accept(token_id)

    def forced(self, most: int) -> list[int]:
        return self._grammar.forced(most)

    def may_force(self) -> bool:
        return self._grammar.may_force()

    def allows(self, token_id: int) -> bool:
        return self._grammar.allows(token_id)

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        return self._grammar.ahead(token_ids, mask)

    def fill(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        more = np.empty_like(masks)
        self._bad_words.fill(token_ids, parents, more)
        in_time = self._grammar.fill(token_ids, parents, masks)
        # In place: the grammar's own reading of what nothing is left of follows.
        masks &= more
        return in_time


def _histories(tail: list[int], token_ids: np.ndarray, parents: np.ndarray, length: int) -> np.ndarray:
    """The last tokens before each node's successor: int64 [num_nodes, length], -1 before the beginning."""
    known = np.array([-1] * (length - len(tail)) + tail)
    node = np.arange(len(parents))
    above = np.maximum(parents, 0)
    columns, depth = [], np.zeros_like(node)
    for _ in range(length):
        below = node > 0
        columns.append(np.where(below, token_ids[node], known[length - 1 - np.minimum(depth, length - 1)]))
        # Above the root come the tokens before it, one further back per step.
        depth = np.where(below, depth, depth + 1)
        node = above[node]
    return np.stack(columns[::-1], axis=1)
