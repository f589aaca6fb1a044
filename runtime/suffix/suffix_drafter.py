"""Drafting by what followed before: suffix automata over each request and over the outputs of all requests.

Source: Oliaro et al., SuffixDecoding (2024): the longest context that occurred before is continued, best-first by how
often each token followed, and deeper the longer it is. Needs no model and no hidden states.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.suffix.suffix_automaton import Cursor, SuffixAutomaton, Text

LEVELS_PER_TOKEN = 4.0
"""Levels drafted for each token of the context that matched: the paper's alpha, which it takes from 1 to 4."""
MIN_PROBABILITY = 0.01
"""Nodes whose path is estimated less likely are not drafted."""
TAIL_TOKENS = 8
"""Tokens before an output, or before a part of it, that go with it to the shared texts, so that its beginning is
matched too."""
_PREFIX = "suffix_decoding_"
_LEAST_SCORE = log(MIN_PROBABILITY)
_START, _NOWHERE = Text(), Cursor()


class SuffixLimits(NamedTuple):
    """Bounds of what is matched, remembered and drafted, of which None is as the drafter is best by itself."""

    max_tree_depth: int | None = None
    """Tokens of a context and of the draft behind it, together."""
    max_cached_requests: int | None = None
    """Requests whose outputs are remembered; 0 has none."""
    max_spec_factor: float | None = None
    """Levels for each token of a context."""
    min_token_prob: float | None = None
    """Share of the times that a context occurred by which a draft's tokens followed."""

    def levels(self, context_length: int) -> int:
        """Most levels of a draft behind a context of this length, or an end of it, which has matched too."""
        factor = LEVELS_PER_TOKEN if self.max_spec_factor is None else self.max_spec_factor
        if self.max_tree_depth is None:
            return _levels(context_length, factor)
        lengths = range(1, min(context_length, self.max_tree_depth - 1) + 1)
        return max((min(_levels(length, factor), self.max_tree_depth - length) for length in lengths), default=0)


def _levels(context_length: int, factor: float) -> int:
    return int(context_length * factor + 1e-6)


class _Match(NamedTuple):
    """Where a draft begins."""

    automaton: SuffixAutomaton
    cursor: Cursor


@dataclass
class _Request:
    """What is known of the sequence in a slot."""

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
    counted_in: int = -1
    """Generation whose younger automaton counts this request."""

    def begins(self, history: Tensor, length: int) -> bool:
        """Whether the known tokens may be the first of a history: another verifier may have taken over the slot, and
        its epochs are its own. Only the last one is compared; a wrong guess costs speed."""
        known = self.num_known
        return known <= length and (not known or history[known - 1].item() == self.last_token_id)


class _SharedTexts:
    """Outputs of all requests, running ones too, the oldest dropped.

    An automaton cannot forget: there is a younger one that grows, and when it is full it takes the place of the older.
    """

    def __init__(self, max_tokens: int, max_requests: int | None) -> None:
        self.max_tokens = 0 if max_requests == 0 else max_tokens
        self._max_requests = max_requests
        self.younger, self.older = SuffixAutomaton(), SuffixAutomaton()
        self.generation = self.num_requests = 0

    def extend(self, request: _Request, token_id: int) -> None:
        """Append a token to a request's output."""
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

    def places(self, request: _Request) -> list[_Match]:
        """Where a request's text ends."""
        if not self.max_tokens:
            return []
        self._join(request)
        return [_Match(self.younger, request.shared.cursor), _Match(self.older, request.older)]

    def _join(self, request: _Request) -> None:
        if request.generation != self.generation:
            request.generation = self.generation
            request.shared, request.older = _START, _NOWHERE
            for token_id in request.tail:
                self._append(request, token_id)

    def _append(self, request: _Request, token_id: int) -> None:
        request.shared = self.younger.extend(request.shared, token_id)
        request.older = self.older.advance(request.older, token_id)


class SuffixDrafter(Drafter):
    """Chains, or trees where the configuration has branches, copied from earlier text.

    A loop over requests and nodes in Python: each step is a few dictionary look-ups that depend on the last one.

    Args:
        max_shared_tokens: outputs remembered beyond their requests, in tokens; some 500 bytes each. With 0 requests
            draft from their own text alone.
        max_tokens_per_pass: most tokens taken in per pass: a long prompt is taken in over several, and its request
            drafts nothing meanwhile, rather than that all others wait for it.
        limits: beside the trees' shape.
    """

    def __init__(
        self,
        speculation: SpeculationConfig,
        max_shared_tokens: int = 1 << 17,
        max_tokens_per_pass: int = 1024,
        limits: SuffixLimits = SuffixLimits(),
    ) -> None:
        self.speculation, self.limits = speculation, limits
        self.max_tokens_per_pass = max_tokens_per_pass
        self._requests: dict[int, _Request] = {}
        self._shared = _SharedTexts(max_shared_tokens, limits.max_cached_requests)

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Requests are kept by slot as they come; see `Drafter.resize`."""

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """One pass; see `Drafter.draft`."""
        self.commit(batch)
        return self._propose(batch) if batch.proposal_slots.numel() else None

    def commit(self, batch: DraftBatch) -> None:
        """Take in what the history of decoding sequences and of those that want a tree has gained."""
        lens, epochs = batch.committed_lens.tolist(), batch.epochs.tolist()
        budget = self.max_tokens_per_pass
        for slot in dict.fromkeys(batch.proposal_slots.tolist() + batch.decode_slots.tolist()):
            request = self._requests.get(slot)
            history, length = batch.token_ids[slot], lens[slot]
            if request is None or request.epoch != epochs[slot] or not request.begins(history, length):
                request = self._requests[slot] = _Request(epochs[slot], shared_from=length)
            until = min(length, request.num_known + budget)
            if until > request.num_known:
                budget -= until - request.num_known
                self._take_in(request, history[request.num_known : until].tolist())

    def propose(self, batch: DraftBatch) -> TokenTree:
        """The likeliest continuations of the longest context known; bare roots where there is none."""
        self.commit(batch)
        return self._propose(batch)

    def _propose(self, batch: DraftBatch) -> TokenTree:
        slots = batch.proposal_slots
        lens = batch.committed_lens[slots]
        roots = batch.token_ids[slots, lens - 1].tolist()
        most = self.speculation.max_path - 1
        levels = most if batch.max_levels is None else min(most, batch.max_levels)
        trees = _Trees([], [], [], [], [])
        for slot, length, root in zip(slots.tolist(), lens.tolist(), roots, strict=True):
            match = self._match(self._requests[slot], length)
            trees.add(root, self._grow(match, levels), self.speculation.num_nodes)
        return trees.tensors()

    def _take_in(self, request: _Request, token_ids: list[int]) -> None:
        own, text = request.own, request.text
        for index, token_id in enumerate(token_ids, request.num_known):
            text = own.extend(text, token_id)
            if index >= request.shared_from:
                self._shared.extend(request, token_id)
            request.tail.append(token_id)
        request.text = text
        request.num_known += len(token_ids)
        request.last_token_id = token_ids[-1]

    def _match(self, request: _Request, length: int) -> _Match | None:
        """The longest context with followers: of the request itself where others know no longer one."""
        if request.num_known < length:
            return None
        places = [_Match(request.own, request.text.cursor), *self._shared.places(request)]
        followed = [_Match(place.automaton, place.automaton.longest_followed(place.cursor)) for place in places]
        best = max(followed, key=_context_length)
        return best if best.cursor.length else None

    def _grow(self, match: _Match | None, levels: int) -> list["_Node"]:
        """Nodes below the root, likeliest path first, so that parents come before their children."""
        if match is None:
            return []
        automaton, top_k = match.automaton, self.speculation.draft_top_k
        depth_limit = min(levels, self.limits.levels(match.cursor.length))
        least_share = self.limits.min_token_prob
        heap: list[tuple[float, int, _Node]] = []
        nodes: list[_Node] = []
        num_seen, parent, depth, score, share = 0, 0, 0, 0.0, 1.0
        # Everything hangs on the first token: shorter contexts may have a say there.
        followers = automaton.continuations(match.cursor, top_k) if depth_limit else []
        while True:
            for follower in followers:
                child_score, child_share = score + log(follower.probability), share * follower.share
                if child_score >= _LEAST_SCORE if least_share is None else child_share >= least_share:
                    num_seen += 1
                    child = _Node(follower.token_id, parent, depth + 1, child_score, child_share, follower.cursor)
                    heapq.heappush(heap, (-child_score, num_seen, child))
            if not heap or len(nodes) == self.speculation.num_nodes - 1:
                return nodes
            node = heapq.heappop(heap)[2]
            nodes.append(node)
            parent, depth, score, share = len(nodes), node.depth, node.score, node.share
            followers = automaton.longest_followers(node.cursor, top_k) if depth < depth_limit else []


class _Node(NamedTuple):
    token_id: int
    parent: int
    depth: int
    score: float
    share: float
    cursor: Cursor


class _Trees(NamedTuple):
    """Columns of a `TokenTree`, row by row."""

    token_ids: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    scores: list[list[float]]
    num_valid: list[int]

    def add(self, root: int, nodes: list[_Node], num_nodes: int) -> None:
        padding = [0] * (num_nodes - 1 - len(nodes))
        self.token_ids.append([root, *(node.token_id for node in nodes), *padding])
        self.parents.append([-1, *(node.parent for node in nodes), *padding])
        self.depths.append([0, *(node.depth for node in nodes), *padding])
        self.scores.append([0.0, *(node.score for node in nodes), *(float("-inf") for _ in padding)])
        self.num_valid.append(1 + len(nodes))

    def tensors(self) -> TokenTree:
        return TokenTree(
            torch.tensor(self.token_ids),
            torch.tensor(self.parents),
            torch.tensor(self.depths),
            torch.tensor(self.scores, dtype=torch.float32),
            torch.tensor(self.num_valid),
        )


def _context_length(match: _Match) -> int:
    return match.cursor.length


def build_suffix(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> SuffixDrafter:
    """For `wingbeat.runtime.drafters.registry`."""
    given = {name.removeprefix(_PREFIX): value for name, value in options.settings.items()}
    return SuffixDrafter(speculation, limits=SuffixLimits(**given))
