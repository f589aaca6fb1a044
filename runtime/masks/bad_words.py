"""Maskers of requests: bad words, alone or together with a grammar; see `TokenMasker`."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from wingbeat.runtime.scheduling.maskers import CompiledGrammar
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.scheduling.sequence import TokenMasker


def masker(request: Request, grammar: CompiledGrammar | None) -> TokenMasker | None:
    """Returns a masker for the tokens of a request with masks; raises like `maskers.masker_of`."""
    params, maskers = request.params, []
    if grammar is not None:
        maskers.append(grammar.masker(request.output_token_ids))
    words = [word for word in params.bad_words if len(word) > 1]
    if words:
        maskers.append(BadWords(words, (*request.prompt_token_ids, *request.output_token_ids)))
    return _Both(*maskers) if len(maskers) == 2 else maskers[0]


class BadWords:
    """Forbids the last token of each bad word after the word's other tokens.

    Args:
        words: token sequences of two or more tokens.
        history: tokens of the prompt and of the output so far.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], history: Sequence[int]) -> None:
        by_length = defaultdict(list)
        for word in words:
            by_length[len(word) - 1].append(word)
        self._words = [np.array(same) for same in by_length.values()]
        """Words of equal length as int64 [num_words, length]."""
        self._length = max(by_length)
        self._tail = list(history[-self._length :])

    def accept(self, token_id: int) -> bool:
        """See `TokenMasker`. Bad words never end the sequence."""
        self._tail = [*self._tail, token_id][-self._length :]
        return False

    def forced(self, most: int) -> list[int]:
        """See `TokenMasker`; bad words force no token."""
        return []

    def may_force(self) -> bool:
        """See `TokenMasker`; bad words force no token."""
        return False

    def allows(self, token_id: int) -> bool:
        """See `TokenMasker`. This method is not used: only grammars add nodes to trees."""
        return True

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        """See `TokenMasker`. No mask is written, because bad words forbid too few tokens to matter to a drafter."""
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
    """Combines the maskers of a grammar and of bad words."""

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
        # `masks` is changed in place, because the grammar keeps a reference to `masks` and later raises NothingAllowed
        # where the combined mask is empty.
        masks &= more
        return in_time


def _histories(tail: list[int], token_ids: np.ndarray, parents: np.ndarray, length: int) -> np.ndarray:
    """Returns the last `length` tokens up to and including each node.

    The result is int64 [num_nodes, length], padded with -1 before the beginning of the text.
    """
    known = np.array([-1] * (length - len(tail)) + tail)
    node = np.arange(len(parents))
    above = np.maximum(parents, 0)
    above[0] = 0
    columns, depth = [], np.zeros_like(node)
    for _ in range(length):
        below = node > 0
        columns.append(np.where(below, token_ids[node], known[length - 1 - np.minimum(depth, length - 1)]))
        # Once the root is reached, each further step goes back one token in the committed tokens.
        depth = np.where(below, depth, depth + 1)
        node = above[node]
    return np.stack(columns[::-1], axis=1)
