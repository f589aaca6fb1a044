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

If a grammar takes longer, the round ignores the sequence's drafted tokens and chooses only the token after the root.
This is slower but gives the same text.
"""
MOST_AHEAD_S = 0.001
"""CPU seconds allowed for the mask that is sent to the drafter. The limit exists because a round waits for this
mask.
"""
MOST_SLOW = 4
"""Number of masks for the drafter that may exceed `MOST_AHEAD_S`, and number of consecutive trees that may exceed
`MOST_TREE_S`. After that, no more masks of that kind are computed for the request.
"""
MASK_S = 1e-3
"""CPU seconds per token that a request may take on average. The limit exists because the whole batch waits for the
masks of a round.
"""
MOST_AT_ONCE_S = 0.25
"""CPU seconds that a request may take in addition to `MASK_S` per token."""
_ALL = -1
_NOTHING_FITS = "NoExtensionBias"
"""Part of the error message that llguidance returns if the grammar allows no token."""


class RequestGrammar(NamedTuple):
    """The compiled grammar of a request."""

    compiled: "LLMatcher"
    """Matcher at the beginning of a text; each use copies it, so it is never modified."""
    vocabulary: Vocabulary
    spec: GrammarSpec

    def matcher(self) -> "LLMatcher":
        """Returns a new matcher for one text."""
        return self.compiled.deep_copy()

    def masker(self, token_ids: Sequence[int]) -> "GrammarMasker":
        """Masker for a text that begins with these tokens; raises the errors of `GrammarMasker`."""
        return GrammarMasker(self, token_ids)


class _Tree(NamedTuple):
    """The tree of the latest `fill`, and the masks of its nodes."""

    token_ids: np.ndarray
    parents: np.ndarray
    masks: np.ndarray


class GrammarMasker:
    """Follows the grammar of one text, and computes the masks of allowed tokens.

    Drafted nodes are followed with copies of the text's matcher; a copy takes microseconds. Matchers are never rolled
    back, because llguidance 1.9.1 may return masks of the abandoned path after a rollback. llguidance limits the
    computation of each call, and a matcher that has exceeded a limit cannot be used any more. A request whose grammar
    takes too much time ends with `RequestTooExpensive` at its next token.

    Args:
        output_token_ids: tokens of the answer that another engine generated before.

    Raises:
        ValueError: these tokens do not match the grammar.
        RequestTooExpensive: matching these tokens takes too long.
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
        """Mask for the token after the last accepted token, int32 [1, num_words]; None before it is computed."""
        self._ahead: tuple[list[int], np.ndarray] | None = None
        """Predicted next tokens, and the mask for the token after them."""
        self._certain: deque[int] | None = None
        """Forced tokens that are not generated yet; None before they are computed."""
        self._num_slow = self._num_late = 0
        for token_id in output_token_ids:
            self.accept(token_id)

    def accept(self, token_id: int) -> bool:
        """See `TokenMasker`. An end-of-sequence token is accepted only after a complete answer, and ends the
        sequence.
        """
        self._spent_s = max(0.0, self._spent_s - MASK_S)
        if self.problem is not None:
            raise self.problem
        masked = self._tree is not None
        if masked:
            self._step(token_id)
        # If the model generates the forced text with other tokens than those of the list, the list is computed again.
        if not self._certain or self._certain.popleft() != token_id or not self._certain:
            self._certain = None
        is_end = token_id in self._vocabulary.stop_token_ids
        started = time.thread_time()
        fits = self._matcher.is_accepting() if is_end else self._matcher.try_consume_tokens([token_id]) == 1
        self._spend(time.thread_time() - started)
        # If a matcher refuses a token that its own mask allows, the matcher has exceeded a limit. llguidance 1.9.1 does
        # not report the limit in this case.
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
        """See `TokenMasker`. The grammar forces only the text; the returned tokens are those into which the tokenizer
        splits the text.
        """
        if self._certain is None:
            self._certain = deque(self._find_certain())
        return list(islice(self._certain, most))

    def _step(self, token_id: int) -> None:
        """Moves to the token's node in the latest tree, after checking the token against the mask with which it was
        chosen.

        Raises:
            NothingAllowed: all tokens are forbidden.
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
        """Keeps the mask that was computed ahead as long as the accepted tokens equal the predicted tokens; after the
        last predicted token, that mask is the root's mask.
        """
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
        """Mask for the token after the last accepted token, int32 [1, num_words]; None if the request must end."""
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
            # The row of a node at which a limit was exceeded must not be used as a mask, because the text may still
            # continue there.
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

        Returns None if the copy exceeded a limit, which does not affect the text's own matcher.
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
        """Stops computing masks for drafts of this request, because a limit was exceeded."""
        self._num_late = self._num_slow = MOST_SLOW

    def _spend(self, seconds: float) -> None:
        """Adds CPU time that was spent on the text itself.

        Time spent on drafts is not added, because a request must end at the same token with and without drafting.
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
