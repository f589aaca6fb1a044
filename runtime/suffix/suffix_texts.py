"""What suffix automata know of the texts of requests, and the drafts that continue a text: no tensors, no verifier.

Source: Oliaro et al., SuffixDecoding (2024): the longest context that occurred before is continued, best-first by how
often each token followed, and deeper the longer it is.
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
"""Levels drafted for each token of the context that matched: the paper's alpha, which it takes from 1 to 4."""
MIN_PROBABILITY = 0.01
"""Nodes whose path is estimated less likely are not drafted."""
TAIL_TOKENS = 8
"""Tokens before an output, or before a part of it, that go with it to the shared texts, so that its beginning is
matched too."""
MAX_SHARED_TOKENS = 1 << 17
"""Outputs remembered beyond their requests, in tokens; some 500 bytes each."""
_LEAST_SCORE = log(MIN_PROBABILITY)
_START, _NOWHERE = Text(), Cursor()


class _Match(NamedTuple):
    """Where a draft begins."""

    automaton: SuffixAutomaton
    cursor: Cursor


@dataclass
class KnownText:
    """As much of a sequence's text as is known."""

    epoch: int
    shared_from: int
    """Tokens from here on go to the shared texts."""
    num_known: int = 0
    last_token_id: int = -1
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    text: Text = _START
    tail: deque[int] = field(default_factory=lambda: deque(maxlen=TAIL_TOKENS))
    """The latest known tokens."""
    generation: int = -1
    """Of the shared texts that the next two are places of."""
    shared: Text = _START
    older: Cursor = _NOWHERE


class _SharedTexts:
    """Outputs of all requests, running ones too, the oldest dropped.

    An automaton cannot forget: there is a younger one that grows, and when it is full it takes the place of the older.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.younger, self.older = SuffixAutomaton(), SuffixAutomaton()
        self.generation = 0

    def extend(self, request: KnownText, token_id: int) -> None:
        """Append a token to a request's output."""
        if not self.max_tokens:
            return
        if self.younger.num_tokens >= self.max_tokens // 2:
            self.younger, self.older = SuffixAutomaton(), self.younger
            self.generation += 1
        self._join(request)
        self._append(request, token_id)

    def places(self, request: KnownText) -> list[_Match]:
        """Where a request's text ends."""
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
    """Texts of requests, each with an automaton of its own, and of all their outputs.

    A loop over nodes in Python: each step is a few dictionary look-ups that depend on the last one.

    Args:
        max_shared_tokens: as `MAX_SHARED_TOKENS`. With 0 requests draft from their own text alone.
    """

    def __init__(self, speculation: SpeculationConfig, max_shared_tokens: int = MAX_SHARED_TOKENS) -> None:
        self.speculation = speculation
        self._shared = _SharedTexts(max_shared_tokens)

    def take_in(self, request: KnownText, token_ids: Sequence[int]) -> None:
        """Append tokens, one or more, to a request's text."""
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
        """The longest context with followers: of the request itself where others know no longer one."""
        places = [_Match(request.own, request.text.cursor), *self._shared.places(request)]
        followed = [_Match(place.automaton, place.automaton.longest_followed(place.cursor)) for place in places]
        best = max(followed, key=_context_length)
        return best if best.cursor.length else None

    def grow(self, request: KnownText, levels: int) -> list["TextNode"]:
        """Nodes below the last token of a known text, likeliest path first, so that parents come before their
        children; none where its context is new."""
        match = self._match(request)
        if match is None:
            return []
        automaton, top_k = match.automaton, self.speculation.draft_top_k
        depth_limit = min(levels, max(int(match.cursor.length * LEVELS_PER_TOKEN), 1))
        if top_k == 1:
            return _chain(match, min(depth_limit, self.speculation.num_nodes - 1))
        heap: list[tuple[float, int, TextNode]] = []
        nodes: list[TextNode] = []
        num_seen, parent, depth, score = 0, 0, 0, 0.0
        # Everything hangs on the first token: shorter contexts may have a say there.
        followers = automaton.continuations(match.cursor, top_k)
        while True:
            for follower in followers:
                child_score = score + log(follower.probability)
                if child_score >= _LEAST_SCORE:
                    num_seen += 1
                    child = TextNode(follower.token_id, parent, depth + 1, child_score, follower.cursor)
                    heapq.heappush(heap, (-child_score, num_seen, child))
            if not heap or len(nodes) == self.speculation.num_nodes - 1:
                return nodes
            node = heapq.heappop(heap)[2]
            nodes.append(node)
            parent, depth, score = len(nodes), node.depth, node.score
            followers = automaton.longest_followers(node.cursor, top_k) if depth < depth_limit else []


class TextNode(NamedTuple):
    """Node of a draft; the number of its parent is 0 for the root, else 1 + its place among the nodes."""

    token_id: int
    parent: int
    depth: int
    score: float
    """Log-probability of the path, estimated."""
    cursor: Cursor


def _chain(match: _Match, depth: int) -> list[TextNode]:
    """Nodes without branches, as `SuffixTexts.grow` has them."""
    nodes: list[TextNode] = []
    score, follower = 0.0, match.automaton.likeliest(match.cursor)
    while follower is not None and len(nodes) < depth:
        score += log(follower.probability)
        if score < _LEAST_SCORE:
            break
        nodes.append(TextNode(follower.token_id, len(nodes), len(nodes) + 1, score, follower.cursor))
        follower = match.automaton.likeliest(follower.cursor)
    return nodes


def _context_length(match: _Match) -> int:
    return match.cursor.length
