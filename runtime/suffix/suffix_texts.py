"""Texts of requests in suffix automata, and drafts that continue these texts; uses neither tensors nor verifiers.

Source: Oliaro et al., SuffixDecoding (2024): the longest context that occurred before is continued with the tokens that
followed it most often, likeliest path first, to a depth that grows with the context's length.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.suffix.suffix_automaton import Cursor, SuffixAutomaton, Text

LEVELS_PER_TOKEN = 4.0
"""Number of levels drafted per token of the matched context; called alpha in the paper, which tries 1 to 4."""
MIN_PROBABILITY = 0.01
"""Minimum estimated path probability of a drafted node."""
TAIL_TOKENS = 8
"""Number of tokens before an output, or before a part of an output, that are added to the shared texts together with
the output. With these tokens, the beginning of the output can be matched too.
"""
MAX_SHARED_TOKENS = 1 << 17
"""Number of tokens of outputs, of running or finished requests, that are remembered. A token needs about 500 bytes."""
_LEAST_SCORE = log(MIN_PROBABILITY)
_START, _NOWHERE = Text(), Cursor()


class SuffixLimits(NamedTuple):
    """Limits of matching, memory and drafts; None means the drafter's default."""

    max_tree_depth: int | None = None
    """Maximum sum of context tokens and drafted tokens."""
    max_cached_requests: int | None = None
    """Number of requests whose outputs are remembered; 0 means none."""
    max_spec_factor: float | None = None
    """Number of drafted levels per token of the context."""
    min_token_prob: float | None = None
    """Minimum share of a context's occurrences in which the drafted tokens up to a node followed."""

    def levels(self, context_length: int) -> int:
        """Maximum levels of a draft after a context of this length.

        The suffixes of the context match too, and a shorter context may allow more levels, so the result is the maximum
        over the context and all its suffixes.
        """
        factor = LEVELS_PER_TOKEN if self.max_spec_factor is None else self.max_spec_factor
        if self.max_tree_depth is None:
            return _levels(context_length, factor)
        lengths = range(1, min(context_length, self.max_tree_depth - 1) + 1)
        return max((min(_levels(length, factor), self.max_tree_depth - length) for length in lengths), default=0)


def _levels(context_length: int, factor: float) -> int:
    return int(context_length * factor + 1e-6)


class _Match(NamedTuple):
    """Automaton and cursor from which a draft continues."""

    automaton: SuffixAutomaton
    cursor: Cursor


@dataclass
class KnownText:
    """The part of a sequence's text that the automata contain so far."""

    epoch: int
    shared_from: int
    """Index of the first token that is added to the shared texts."""
    num_known: int = 0
    last_token_id: int = -1
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    text: Text = _START
    tail: deque[int] = field(default_factory=lambda: deque(maxlen=TAIL_TOKENS))
    """The latest known tokens."""
    generation: int = -1
    """Generation of the shared texts to which `shared` and `older` refer."""
    shared: Text = _START
    older: Cursor = _NOWHERE
    counted_in: int = -1
    """Generation of the shared texts in which this request was last counted in the younger automaton."""


class _SharedTexts:
    """Outputs of all requests, running or finished; the oldest outputs are dropped.

    An automaton cannot delete tokens. There are therefore two automata. Tokens are added to the younger automaton; when
    the younger automaton is full, it becomes the older one, and a new automaton is begun.
    """

    def __init__(self, max_tokens: int, max_requests: int | None) -> None:
        self.max_tokens = 0 if max_requests == 0 else max_tokens
        self._max_requests = max_requests
        self.younger, self.older = SuffixAutomaton(), SuffixAutomaton()
        self.generation = self.num_requests = 0

    def extend(self, request: KnownText, token_id: int) -> None:
        """Append a token of a request's output to the shared texts."""
        if not self.max_tokens:
            return
        is_new, most = request.counted_in != self.generation, self._max_requests
        is_full = is_new and most is not None and self.num_requests >= max(most // 2, 1)
        if is_full or self.younger.num_tokens >= self.max_tokens // 2:
            self.younger, self.older = SuffixAutomaton(), SuffixAutomaton() if most == 1 else self.younger
            self.generation, self.num_requests, is_new = self.generation + 1, 0, True
        self.num_requests += is_new
        request.counted_in = self.generation
        self._join(request)
        self._append(request, token_id)

    def places(self, request: KnownText) -> list[_Match]:
        """Cursors at the end of a request's text, in the two shared automata."""
        if not self.max_tokens:
            return []
        self._join(request)
        return [_Match(self.younger, request.shared.cursor), _Match(self.older, request.older)]

    def _join(self, request: KnownText) -> None:
        if request.generation != self.generation:
            request.generation = self.generation
            request.shared, request.older = _START, _NOWHERE
            for token_id in request.tail:
                self._append(request, token_id)

    def _append(self, request: KnownText, token_id: int) -> None:
        request.shared = self.younger.extend(request.shared, token_id)
        request.older = self.older.advance(request.older, token_id)


class SuffixTexts:
    """Texts of requests: one automaton per request for its whole text, and shared automata for all outputs.

    Drafts are grown by a Python loop, because each node is a few dictionary look-ups that need the previous node's
    result.

    Args:
        speculation: shape of the trees.
        max_shared_tokens: see `MAX_SHARED_TOKENS`; 0 means that drafts for a request are made only from the request's
            own text.
        limits: further limits.
    """

    def __init__(
        self,
        speculation: SpeculationConfig,
        max_shared_tokens: int = MAX_SHARED_TOKENS,
        limits: SuffixLimits = SuffixLimits(),
    ) -> None:
        self.speculation, self.limits = speculation, limits
        self._shared = _SharedTexts(max_shared_tokens, limits.max_cached_requests)

    def take_in(self, request: KnownText, token_ids: Sequence[int]) -> None:
        """Append one or more tokens to a request's text."""
        own, text = request.own, request.text
        for index, token_id in enumerate(token_ids, request.num_known):
            text = own.extend(text, token_id)
            if index >= request.shared_from:
                self._shared.extend(request, token_id)
            request.tail.append(token_id)
        request.text = text
        request.num_known += len(token_ids)
        request.last_token_id = token_ids[-1]

    def _match(self, request: KnownText) -> _Match | None:
        """The longest context that has followers; if two are equally long, the request's own automaton is used."""
        places = [_Match(request.own, request.text.cursor), *self._shared.places(request)]
        followed = [_Match(place.automaton, place.automaton.longest_followed(place.cursor)) for place in places]
        best = max(followed, key=lambda match: match.cursor.length)
        return best if best.cursor.length else None

    def grow(self, request: KnownText, levels: int, least_context: int = 1) -> list["TextNode"]:
        """Nodes below the last token of a known text, likeliest path first, so that parents precede children.

        The list is empty if no context of at least `least_context` tokens is known.
        """
        match = self._match(request)
        if match is None or match.cursor.length < least_context:
            return []
        automaton, top_k = match.automaton, self.speculation.draft_top_k
        depth_limit = min(levels, self.limits.levels(match.cursor.length))
        least_share = self.limits.min_token_prob
        if top_k == 1:
            return _chain(match, min(depth_limit, self.speculation.num_nodes - 1), least_share)
        heap: list[tuple[float, int, TextNode]] = []
        nodes: list[TextNode] = []
        num_seen, parent, depth, score, share = 0, 0, 0, 0.0, 1.0
        # For the first token, shorter contexts are also used, because all deeper nodes depend on the first token.
        followers = automaton.continuations(match.cursor, top_k) if depth_limit else []
        while True:
            for follower in followers:
                child_score, child_share = score + log(follower.probability), share * follower.share
                if _is_likely(child_score, child_share, least_share):
                    num_seen += 1
                    child = TextNode(follower.token_id, parent, depth + 1, child_score, child_share, follower.cursor)
                    heapq.heappush(heap, (-child_score, num_seen, child))
            if not heap or len(nodes) == self.speculation.num_nodes - 1:
                return nodes
            node = heapq.heappop(heap)[2]
            nodes.append(node)
            parent, depth, score, share = len(nodes), node.depth, node.score, node.share
            followers = automaton.longest_followers(node.cursor, top_k) if depth < depth_limit else []


class TextNode(NamedTuple):
    """Node of a draft; `parent` is 0 for the root, else 1 + the parent's index among the nodes."""

    token_id: int
    parent: int
    depth: int
    score: float
    """Estimated log-probability of the path from the root to the node."""
    share: float
    """Product of the shares of the path's tokens; see `Follower.share`."""
    cursor: Cursor


def _chain(match: _Match, depth: int, least_share: float | None) -> list[TextNode]:
    """Nodes of a chain, which is the result of `SuffixTexts.grow` if top_k is 1."""
    nodes: list[TextNode] = []
    score, share, follower = 0.0, 1.0, match.automaton.likeliest(match.cursor)
    while follower is not None and len(nodes) < depth:
        score += log(follower.probability)
        share *= follower.share
        if not _is_likely(score, share, least_share):
            break
        nodes.append(TextNode(follower.token_id, len(nodes), len(nodes) + 1, score, share, follower.cursor))
        follower = match.automaton.likeliest(follower.cursor)
    return nodes


def _is_likely(score: float, share: float, least_share: float | None) -> bool:
    return score >= _LEAST_SCORE if least_share is None else share >= least_share
