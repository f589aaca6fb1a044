"""Which tokens one sequence may go on with, behind each node of its draft tree; see `TokenMasker`."""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from wingbeat.runtime.grammar.compiler import RequestGrammar
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.scheduling.sequence import TokenMasker

MOST_TREE_S = 0.005
"""For one tree's masks. A grammar that takes longer is decoded from the bare root: slower, and the same text."""
MOST_AHEAD_S = 0.001
"""CPU time of telling the drafter what is allowed, which a round waits for."""
MOST_SLOW = 4
"""Times that it may take longer, before the drafter is told nothing more."""
_MOST_CERTAIN = 2048
"""Characters of certain text that become tokens at a time: a schema may hold a constant of any length."""


def masker_of(request: Request, grammar: RequestGrammar | None) -> TokenMasker | None:
    """What a request's tokens are held to; None where they are free.

    Raises:
        ValueError: its grammar was not compiled, or what was generated before breaks it.
    """
    params, maskers = request.params, []
    if params.grammar is not None:
        if grammar is None:
            raise ValueError("structured_outputs is not served here: the model has no tokenizer")
        maskers.append(GrammarMasker(grammar, request.output_token_ids))
    words = [word for word in params.bad_words if len(word) > 1]
    if words:
        maskers.append(BadWords(words, (*request.prompt_token_ids, *request.output_token_ids)))
    return _Both(*maskers) if len(maskers) == 2 else maskers[0] if maskers else None


class GrammarMasker:
    """Follows a grammar.

    Args:
        output_token_ids: what was generated already, by another engine.

    Raises:
        ValueError: they break the grammar.
    """

    def __init__(self, grammar: RequestGrammar, output_token_ids: Sequence[int] = ()) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar.compiled)
        self._encode = grammar.encode
        self._certain: deque[int] | None = None
        """Tokens of certain text that are still ahead; None before they are looked for."""
        self._num_slow = 0
        for token_id in output_token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> bool:
        """See `TokenMasker`; nothing follows the end-of-sequence token behind a complete answer."""
        if not self._matcher.accept_token(token_id):
            raise ValueError(f"token {token_id} breaks the grammar")
        # Where it is another one, the same text is written in other tokens.
        if not self._certain or self._certain.popleft() != token_id or not self._certain:
            self._certain = None
        return self._matcher.is_terminated()

    def fill(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        """See `TokenMasker`. Rows of nodes that the grammar forbids, and of those below, are not written."""
        if not self._matcher.fill_next_token_bitmask(masks, 0):
            masks[0] = -1
        if len(token_ids) == 1:
            return True
        links = tree_links(parents)
        return self._matcher.traverse_draft_tree(
            torch.from_numpy(links.first_child),
            torch.from_numpy(links.next_sibling),
            torch.from_numpy(np.ascontiguousarray(token_ids)),
            torch.from_numpy(masks),
            MOST_TREE_S,
        )

    def allows(self, token_id: int) -> bool:
        """See `TokenMasker`."""
        is_allowed = self._matcher.accept_token(token_id)
        if is_allowed:
            self._matcher.rollback(1)
        return is_allowed

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        """See `TokenMasker`."""
        if self._num_slow == MOST_SLOW:
            return False
        matcher, started, num_taken = self._matcher, time.thread_time(), 0
        for token_id in token_ids:
            if matcher.is_terminated() or not matcher.accept_token(token_id):
                break
            num_taken += 1
        goes_on = num_taken == len(token_ids) and not matcher.is_terminated()
        is_restricted = goes_on and matcher.fill_next_token_bitmask(mask[None], 0)
        if num_taken:
            matcher.rollback(num_taken)
        self._num_slow += time.thread_time() - started > MOST_AHEAD_S
        return is_restricted

    def forced(self, most: int) -> list[int]:
        """See `TokenMasker`. The text is certain; its tokens are those that the tokenizer would write."""
        if self._certain is None:
            self._certain = deque(self._find_certain())
        return list(islice(self._certain, most))

    def _find_certain(self) -> list[int]:
        text, tokens = self._matcher.find_jump_forward_string(), []
        if not text:
            return tokens
        token_ids = self._encode(text[:_MOST_CERTAIN])
        if len(text) > _MOST_CERTAIN:  # what the last token would be is not known where the text is cut
            token_ids.pop()
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                break
            tokens.append(token_id)
        if tokens:
            self._matcher.rollback(len(tokens))
        return tokens


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

    def __init__(self, grammar: GrammarMasker, bad_words: BadWords) -> None:
        self._grammar, self._bad_words = grammar, bad_words

    def accept(self, token_id: int) -> bool:
        self._bad_words.accept(token_id)
        return self._grammar.accept(token_id)

    def forced(self, most: int) -> list[int]:
        return self._grammar.forced(most)

    def allows(self, token_id: int) -> bool:
        return self._grammar.allows(token_id)

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        return self._grammar.ahead(token_ids, mask)

    def fill(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        more = np.empty_like(masks)
        self._bad_words.fill(token_ids, parents, more)
        in_time = self._grammar.fill(token_ids, parents, masks)
        masks &= more
        return in_time


class TreeLinks(NamedTuple):
    """A tree as first children and next siblings; -1 where there is none."""

    first_child: np.ndarray
    """int64 [num_nodes]"""
    next_sibling: np.ndarray
    """int64 [num_nodes]"""


def tree_links(parents: np.ndarray) -> TreeLinks:
    """Links of a tree given by parents, int64 [num_nodes]; siblings in the order of their numbers."""
    first_child, next_sibling = np.full_like(parents, -1), np.full_like(parents, -1)
    nodes = np.argsort(parents[1:], kind="stable") + 1
    above = parents[nodes]
    same = above[1:] == above[:-1]
    next_sibling[nodes[:-1][same]] = nodes[1:][same]
    is_first = np.concatenate([[True], ~same])
    first_child[above[is_first]] = nodes[is_first]
    return TreeLinks(first_child, next_sibling)


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
