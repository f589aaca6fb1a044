"""Follows one request's grammar; see `GrammarMasker`."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from wingbeat.runtime.grammar import certain_text
from wingbeat.runtime.grammar.bounded_calls import TookTooLong
from wingbeat.runtime.grammar.budget import GrammarBudget, too_dear
from wingbeat.runtime.grammar.compiler import RequestGrammar
from wingbeat.runtime.scheduling.request import TooDear
from wingbeat.runtime.scheduling.sequence import NothingAllowed

MOST_TREE_S = 0.005
"""For one tree's masks. A grammar that takes longer is decoded from the bare root: slower, and the same text."""
MOST_AHEAD_S = 0.001
"""CPU time of telling the drafter what is allowed, which a round waits for."""
MOST_SLOW = 4
"""Times that telling it may take longer, and trees one after another, before either is left out for good."""
_REPLAYED_AT_ONCE = 256
_ALL = -1


class _Tree(NamedTuple):
    """The tree whose masks were found last, and those masks."""

    token_ids: np.ndarray
    parents: np.ndarray
    masks: np.ndarray


class GrammarMasker:
    """Follows a grammar.

    What a token does to the parser is computed with the next masks, on a thread that is given up where that takes too
    long: whether a token is allowed, its own row of the last masks says. A request whose grammar is too dear ends by
    `TooDear` at its next token, whoever has found it out.

    Args:
        output_token_ids: what was generated already, by another engine.

    Raises:
        ValueError: they break the grammar.
        TooDear: they take too long.
    """

    def __init__(self, grammar: RequestGrammar, output_token_ids: Sequence[int] = ()) -> None:
        from xgrammar import GrammarMatcher

        self._grammar, self._table = grammar, grammar.table
        self._num_words = -(-grammar.vocab_size // 32)
        self._budget = GrammarBudget(grammar.parsing_of_all)
        self.problem: Exception | None = None
        """What the request ends by at its next token."""
        self._pending: list[int] = []
        """Taken, and not known to the matcher yet."""
        self._tree: _Tree | None = None
        self._node = 0
        """Of the tree, whose masks say what may follow the last token taken."""
        self._root: np.ndarray | None = None
        """The mask behind what the matcher knows, int32 [1, num_words]; None where it was not asked for."""
        self._ahead: tuple[list[int], np.ndarray] | None = None
        """What is pending, as was foretold, and the mask behind it."""
        self._certain: deque[int] | None = None
        """Tokens of certain text that are still ahead; None before they are looked for."""
        self._num_slow = self._num_late = 0
        self._matcher = self._call(GrammarMatcher, grammar.compiled)
        for start in range(0, len(output_token_ids), _REPLAYED_AT_ONCE):
            self._pending = list(output_token_ids[start : start + _REPLAYED_AT_ONCE])
            self._call(self._catch_up)
            for _ in range(_REPLAYED_AT_ONCE):
                self._budget.took_token()
        if self.problem is not None:
            raise self._failure()

    def accept(self, token_id: int) -> bool:
        """See `TokenMasker`; nothing follows the end-of-sequence token behind a complete answer."""
        if self.problem is not None:
            raise self._failure()
        self._budget.took_token()
        is_known = self._tree is not None
        if is_known:
            self._step(token_id)
        self._pending.append(token_id)
        # Where it is another one, the same text is written in other tokens.
        if not self._certain or self._certain.popleft() != token_id or not self._certain:
            self._certain = None
        if is_known and token_id not in self._table.stop_token_ids:
            return False
        self._call(self._catch_up)
        if self.problem is not None:
            raise self._failure()
        return self._matcher.is_terminated()

    def fill(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        """See `TokenMasker`. Rows of nodes that the grammar forbids, and of those below, are not written."""
        masks[:1] = _ALL
        in_time = False
        if self._root_mask() is not None:
            masks[:1] = self._root
            in_time = len(token_ids) == 1
            if not in_time and self._num_late < MOST_SLOW:
                in_time, seconds = self._timed(self._fill_tree, token_ids, parents, masks) or (False, 0.0)
                self._num_late = 0 if in_time else self._num_late + 1
                # A tree that is late is the engine's matter, up to its time.
                self._spend(max(0.0, seconds - 2 * MOST_TREE_S))
        nodes = slice(None if in_time else 1)
        self._tree, self._node = _Tree(token_ids[nodes], parents[nodes], masks[nodes]), 0
        return in_time

    def allows(self, token_id: int) -> bool:
        """See `TokenMasker`."""
        root = self._root_mask()
        return root is not None and _has(root[0], token_id)

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        """See `TokenMasker`."""
        if self._num_slow == MOST_SLOW or self.problem is not None:
            return False
        # Of its own: a call that is given up may write to it when the channel's row is another's.
        found = np.zeros((1, self._num_words), np.int32)
        done = self._timed(self._look_ahead, token_ids, found)
        if done is None:
            return False
        is_restricted, seconds = done
        self._num_slow += seconds > MOST_AHEAD_S
        self._spend(seconds)
        if is_restricted:
            mask[:] = found[0]
            self._ahead = [*self._pending, *token_ids], found
        return is_restricted

    def forced(self, most: int) -> list[int]:
        """See `TokenMasker`. The text is certain; its tokens are those that the tokenizer would write."""
        if self._certain is None:
            self._certain = deque(self._find_certain())
        return list(islice(self._certain, most))

    def _step(self, token_id: int) -> None:
        """Follow a token by the masks that it was chosen by.

        Raises:
            NothingAllowed: nothing may stand there.
            ValueError: it is forbidden.
        """
        tree, node = self._tree, self._node
        if not _has(tree.masks[node], token_id):
            if not tree.masks[node].any():
                raise NothingAllowed("the grammar allows nothing here")
            raise ValueError(f"token {token_id} breaks the grammar")
        below = np.flatnonzero((tree.parents == node) & (tree.token_ids == token_id))
        self._node = int(below[0]) if len(below) else 0
        if not len(below):
            self._tree = None

    def _find_certain(self) -> list[int]:
        root = self._root_mask()
        first = None if root is None else certain_text.only_text(root[0], self._table)
        if first is None:
            return []
        found = self._call(certain_text.walk, self._matcher, first, self._num_words, self._table)
        if found is None or not found.token_ids:
            return []
        spelled = certain_text.spelled(found, self._table)
        return self._call(certain_text.allowed_part, self._matcher, spelled) or found.token_ids

    def _root_mask(self) -> np.ndarray | None:
        """The mask behind the last token taken, int32 [1, num_words]; None where the request ends."""
        if self._root is None or self._pending:
            self._call(self._find_root)
        return None if self.problem is not None else self._root

    def _find_root(self) -> None:
        foretold = self._ahead
        is_foretold = foretold is not None and foretold[0] == self._pending
        self._catch_up()
        if is_foretold:
            self._root = foretold[1]
        elif self._root is None:
            mask = np.zeros((1, self._num_words), np.int32)
            if self._matcher.is_terminated() or not self._matcher.fill_next_token_bitmask(mask, 0):
                mask[:] = _ALL
            self._root = mask

    def _catch_up(self) -> None:
        """Have the matcher take what is pending."""
        if not self._pending:
            return
        self._root = self._ahead = None
        started = time.thread_time()
        pending, self._pending = self._pending, []
        for token_id in pending:
            if not self._matcher.accept_token(token_id):
                raise ValueError(f"token {token_id} breaks the grammar")
        self._budget.spend(0.0, time.thread_time() - started)

    def _fill_tree(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        links = tree_links(parents)
        return self._matcher.traverse_draft_tree(
            torch.from_numpy(links.first_child),
            torch.from_numpy(links.next_sibling),
            torch.from_numpy(np.ascontiguousarray(token_ids)),
            torch.from_numpy(masks),
            MOST_TREE_S,
        )

    def _look_ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        self._catch_up()
        matcher, num_taken = self._matcher, 0
        for token_id in token_ids:
            if matcher.is_terminated() or not matcher.accept_token(token_id):
                break
            num_taken += 1
        goes_on = num_taken == len(token_ids) and not matcher.is_terminated()
        is_restricted = goes_on and matcher.fill_next_token_bitmask(mask, 0)
        if num_taken:
            matcher.rollback(num_taken)
        return is_restricted

    def _call(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(*args)` within the budget; None where the request ends."""
        done = self._timed(work, *args)
        if done is None:
            return None
        self._spend(done[1])
        return done[0]

    def _timed(self, work: Callable[..., Any], *args: Any) -> tuple[Any, float] | None:
        """What it returned, and its CPU seconds; None where the request ends: by this call, or by one before."""
        if self._grammar.spec in self._grammar.dear:
            # Of several choices of a prompt only the first one found out.
            self._give_up()
        if self.problem is not None:
            return None
        try:
            return self._grammar.calls.run(work, *args)
        except TookTooLong:
            self._grammar.dear.add(self._grammar.spec)
            self._give_up()
        except Exception as error:
            # Raised here it would end the round of all others.
            self.problem = error
        return None

    def _spend(self, seconds: float) -> None:
        self._budget.spend(seconds)
        if self._budget.is_over:
            self._give_up()

    def _failure(self) -> Exception:
        """The problem, to be raised: another object, as a traceback of its own would keep the parser's memory."""
        kind = type(self.problem)
        return kind(str(self.problem)) if kind in (TooDear, ValueError) else RuntimeError(repr(self.problem))

    def _give_up(self) -> None:
        self.problem = TooDear(too_dear(self._grammar.spec))


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


def _has(mask: np.ndarray, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)
