"""Follows the grammar of one request and computes its token masks; see `GrammarMasker`."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wingbeat.runtime.grammar import certain_text
from wingbeat.runtime.grammar.vocabulary import Vocabulary
from wingbeat.runtime.scheduling.request import GrammarSpec, RequestTooExpensive
from wingbeat.runtime.scheduling.sequence import NothingAllowed

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_TREE_S = 0.005
"""CPU seconds allowed for the masks of one tree.

If a grammar takes longer, only the root is verified, which is slower but gives the same text.
"""
MOST_AHEAD_S = 0.001
"""CPU seconds allowed for the mask that the drafter gets; a round waits for that mask."""
MOST_SLOW = 4
"""Number of drafter masks, or of consecutive trees, that may exceed their time; after that no more masks of that
kind are computed.
"""
MASK_S = 1e-3
"""CPU seconds per token that a request may take on average; the limit exists because the rounds of the batch wait
for the masks.
"""
MOST_AT_ONCE_S = 0.25
"""CPU seconds that a request may take in addition to this average."""
_ALL = -1
_NOTHING_FITS = "NoExtensionBias"
"""Part of llguidance's error message if the grammar allows no token."""


class RequestGrammar(NamedTuple):
    """Compiled grammar of a request."""

    compiled: "LLMatcher"
    """Matcher at the beginning of a text; each use copies it, so it is never modified."""
    vocabulary: Vocabulary
    spec: GrammarSpec

    def matcher(self) -> "LLMatcher":
        """Returns a new matcher for one text."""
        return self.compiled.deep_copy()

    def masker(self, token_ids: Sequence[int]) -> "GrammarMasker":
        """Masker for a text that begins with these tokens; raises like `GrammarMasker`."""
        return GrammarMasker(self, token_ids)


class _Tree(NamedTuple):
    """The tree of the latest `fill`, and the masks of its nodes."""

    token_ids: np.ndarray
    parents: np.ndarray
    masks: np.ndarray


class GrammarMasker:
    """Follows the grammar of one text, and computes the masks of allowed tokens.

    Drafted nodes are followed with copies of the text's matcher; a copy takes microseconds. Matchers are never rolled
    back, because in llguidance 1.9.1 the masks after a rollback may be those of the abandoned path. llguidance limits
    the computation of each call, and a matcher that has hit a limit is unusable. A request whose grammar takes too much
    time ends with `RequestTooExpensive` at its next token.

    Args:
        output_token_ids: tokens of the answer that another engine generated before.

    Raises:
        ValueError: these tokens do not match the grammar.
        RequestTooExpensive: following these tokens takes too long.
    """

    def __init__(self, grammar: RequestGrammar, output_token_ids: Sequence[int] = ()) -> None:
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self.problem: RequestTooExpensive | None = None
        """Error with which the request will end at its next token; None if there is no problem."""
        self._matcher = grammar.matcher()
        self._spent_s = 0.0
        """CPU seconds used, minus `MASK_S` for each token."""
        self._tree: _Tree | None = None
        self._may_force: bool | None = None
        """Result of `may_force` for the latest tree; None before it is computed."""
        self._node = 0
        """Node of the latest tree that holds the last accepted token."""
        self._root: np.ndarray | None = None
        """Mask of the token after the last accepted token, int32 [1, num_words]; None before it is computed."""
        self._ahead: tuple[list[int], np.ndarray] | None = None
        """Predicted next tokens, and the mask of the token after them."""
        self._certain: deque[int] | None = None
        """Forced tokens that are not generated yet; None before they are computed."""
        self._num_slow = self._num_late = 0
        for token_id in output_token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> bool:
        """See `TokenMasker`; the end-of-sequence token behind a complete answer ends the sequence."""
        self._spent_s = max(0.0, self._spent_s - MASK_S)
        if self.problem is not None:
            raise self.problem
        masked = self._tree is not None
        if masked:
            self._step(token_id)
        # If the model writes the forced text with other tokens, the list no longer fits and is computed again.
        if not self._certain or self._certain.popleft() != token_id or not self._certain:
            self._certain = None
        is_end = token_id in self._vocabulary.stop_token_ids
        started = time.thread_time()
        fits = self._matcher.is_accepting() if is_end else self._matcher.try_consume_tokens([token_id]) == 1
        self._spend(time.thread_time() - started)
        # If a matcher refuses a token that its own mask allows, it has hit a limit, which llguidance 1.9.1 does not
        # report in this case.
        if self._matcher.is_error() or (masked and not fits):
            raise self._too_expensive()
        if not fits:
            raise ValueError(f"token {token_id} does not match the grammar")
        self._foretold(token_id)
        return is_end

    def fill(self, token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        """See `TokenMasker`. Rows of nodes that the grammar forbids, and of their descendants, are not written."""
        masks[:1] = _ALL if self._root_mask() is None else self._root
        in_time = len(token_ids) == 1
        if not in_time and self.problem is None and self._num_late < MOST_SLOW:
            in_time = bool(self._for_drafts(self._fill_tree, token_ids, parents, masks))
            self._num_late = 0 if in_time else self._num_late + 1
        nodes, self._may_force = slice(None if in_time else 1), None
        self._tree, self._node = _Tree(token_ids[nodes], parents[nodes], masks[nodes]), 0
        return in_time

    def may_force(self) -> bool:
        """See `TokenMasker`."""
        if self._may_force is None and self._tree is not None:
            self._may_force = any(
                certain_text.only_text(mask, self._vocabulary) is not None for mask in self._tree.masks
            )
        return bool(self._may_force)

    def allows(self, token_id: int) -> bool:
        """See `TokenMasker`."""
        root = self._root_mask()
        return root is not None and _has(root[0], token_id)

    def ahead(self, token_ids: list[int], mask: np.ndarray) -> bool:
        """See `TokenMasker`."""
        if self._num_slow == MOST_SLOW or self.problem is not None:
            return False
        if not token_ids:
            root = self._root_mask()
            mask[:] = 0 if root is None else root[0]
            return root is not None
        started = time.thread_time()
        found = self._for_drafts(self._look_ahead, token_ids)
        self._num_slow += time.thread_time() - started > MOST_AHEAD_S
        if found is None:
            return False
        mask[:] = found[0]
        self._ahead = list(token_ids), found
        return True

    def forced(self, most: int) -> list[int]:
        """See `TokenMasker`. The text is forced; its split into tokens is the tokenizer's."""
        if self._certain is None:
            self._certain = deque(self._find_certain())
        return list(islice(self._certain, most))

    def _step(self, token_id: int) -> None:
        """Advances in the latest tree by a token, after checking it against the mask with which the token was chosen.

        Raises:
            NothingAllowed: every token is forbidden.
            ValueError: the token is forbidden.
        """
        tree, node = self._tree, self._node
        if not _has(tree.masks[node], token_id):
            if not tree.masks[node].any():
                raise NothingAllowed("the grammar allows no token here")
            raise ValueError(f"token {token_id} does not match the grammar")
        below = np.flatnonzero((tree.parents == node) & (tree.token_ids == token_id))
        self._node = int(below[0]) if len(below) else 0
        if not len(below):
            self._tree = None

    def _foretold(self, token_id: int) -> None:
        """Keeps the mask computed ahead while accepted tokens equal the predicted ones; uses it after the last one."""
        self._root = None
        if self._ahead is not None:
            (first, *rest), found = self._ahead
            self._ahead = (rest, found) if first == token_id and rest else None
            if first == token_id and not rest:
                self._root = found

    def _find_certain(self) -> list[int]:
        root = self._root_mask()
        first = None if root is None else certain_text.only_text(root[0], self._vocabulary)
        if first is None:
            return []
        found = self._for_drafts(certain_text.walk, first, self._vocabulary)
        if found is None or not found.token_ids:
            return []
        spelled = certain_text.spelled(found, self._vocabulary)
        return spelled[: self._for_drafts(_num_allowed, spelled) or 0] or found.token_ids

    def _root_mask(self) -> np.ndarray | None:
        """Mask of the token after the last accepted token, int32 [1, num_words]; None if the request must end."""
        if self._root is None and self.problem is None:
            started, self._root = time.thread_time(), np.zeros((1, self._vocabulary.num_words), np.int32)
            fill_row(self._matcher, self._root, 0)
            self._spend(time.thread_time() - started)
            if self._matcher.is_error():
                self._root[:] = 0
                if _NOTHING_FITS not in self._matcher.get_error():
                    self.problem = self._too_expensive()
        return self._root if self.problem is None else None

    def _fill_tree(self, matcher: "LLMatcher", token_ids: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> bool:
        until, walk, path = time.thread_time() + MOST_TREE_S, _Walk(parents), [matcher]
        for node, above in walk:
            token_id = int(token_ids[node])
            if token_id in self._vocabulary.stop_token_ids:
                continue
            below = path[above].deep_copy()
            fits = below.try_consume_tokens([token_id]) == 1
            if fits:
                fill_row(below, masks, node)
            # The row of a node at which a limit was hit must not be used, because the text may still continue there.
            if below.is_error():
                self._leave_drafts()
                return False
            if time.thread_time() > until:
                return False
            if fits:
                path[above + 1 :] = [below]
                walk.descend()
        return True

    def _look_ahead(self, matcher: "LLMatcher", token_ids: list[int]) -> np.ndarray | None:
        if self._vocabulary.stop_token_ids.intersection(token_ids):
            return None
        if matcher.try_consume_tokens(token_ids) != len(token_ids):
            return None
        found = np.zeros((1, self._vocabulary.num_words), np.int32)
        fill_row(matcher, found, 0)
        return found

    def _for_drafts(self, work: Callable[..., Any], *args: Any) -> Any:
        """Runs `work` with a copy of the matcher.

        Returns None if the copy hit a limit; the text's own matcher is not affected by that.
        """
        if self._matcher.is_error():
            return None
        matcher = self._matcher.deep_copy()
        found = work(matcher, *args)
        if matcher.is_error():
            self._leave_drafts()
            return None
        return found

    def _leave_drafts(self) -> None:
        """Stops computing masks for drafts of this request, because a limit was hit."""
        self._num_late = self._num_slow = MOST_SLOW

    def _spend(self, seconds: float) -> None:
        """Adds CPU time that the text itself took.

        Time for drafts is not added, because drafting must not change when a request ends.
        """
        self._spent_s += seconds
        if self._spent_s > MOST_AT_ONCE_S:
            self.problem = self._too_expensive()

    def _too_expensive(self) -> RequestTooExpensive:
        return RequestTooExpensive(
            f"{self._grammar.spec.field} takes more computing or memory for each token than it may"
        )


def _num_allowed(matcher: "LLMatcher", token_ids: list[int]) -> int:
    return matcher.validate_tokens(token_ids)


class _Walk:
    """Depth-first iteration over the nodes below a tree's root; a parent comes before its children.

    The children of the node that was yielded last are visited only if `descend` is called.
    """

    def __init__(self, parents: np.ndarray) -> None:
        self._below: dict[int, list[int]] = {}
        for node in range(len(parents) - 1, 0, -1):
            self._below.setdefault(int(parents[node]), []).append(node)
        self._pending = [(node, 0) for node in self._below.get(0, ())]
        self._last = 0, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields each node with the number of its ancestors below the root."""
        while self._pending:
            self._last = self._pending.pop()
            yield self._last

    def descend(self) -> None:
        """Makes the children of the node that was yielded last the next nodes."""
        node, above = self._last
        self._pending += [(below, above + 1) for below in self._below.get(node, ())]


def fill_row(matcher: "LLMatcher", masks: np.ndarray, row: int) -> None:
    """Writes the allowed next tokens into one row of masks, int32 [_, num_words]."""
    target = masks[row]
    matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)


def _has(mask: np.ndarray, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)
