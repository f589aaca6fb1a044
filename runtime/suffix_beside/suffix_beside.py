"""Suffix automata in the engine's process, in addition to a drafter. In each round, each sequence uses the tree with
the larger expected number of accepted tokens.

A tree that continues earlier text (a text tree) needs no drafter. Its expected number of accepted tokens is the sum of
its nodes' path probabilities, which are estimated from counts and corrected by the acceptance of earlier text trees.
The drafter's tree does not exist yet when the choice is made, so that tree's acceptance is estimated as the average of
the sequence's earlier drafter trees. With either tree, the output equals that of plain decoding.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import exp, inf
from typing import Any, NamedTuple

import numpy as np

from wingbeat.runtime.adaptive.acceptance import EDGES, FORGET_ROUNDS
from wingbeat.runtime.adaptive.policy import HOLD, PLAIN_PROBE
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.engine.speculation import Speculation
from wingbeat.runtime.engine.text_drafts import TextDrafts
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.suffix.suffix_texts import KnownText, SuffixTexts, TextNode

MAX_TOKENS_PER_ROUND = 1024
"""Maximum number of tokens added per round.

A longer prompt is added over several rounds, in which its sequence gets no text tree.
"""
LOOK_ROUNDS = 2 * HOLD
"""Number of rounds with text trees between two checks of `Speculation.text_pays`: whether these rounds took less time
per token than the best other way of drafting.
"""
FIRST_ROUNDS = 6 * HOLD
"""Number of rounds after an engine's start in which the drafter is always used, so that its cost and acceptance are
measured.
"""
SURE_CONTEXT = 4
"""Number of tokens that must have occurred before, so that a text tree is built although the last `LOOK_ROUNDS` rounds
used none: a tree that is not used costs a few hundredths of a small model's round.
"""
NEWEST, NEWEST_OF_ALL = 1 / 8, 1 / 64
"""Weight of the latest drafter tree in the average of its sequence, and in the average of all sequences."""
RETURNS = 1 / 32
"""In each round without a drafter tree, a sequence's average moves towards the average of all sequences by this share
of the difference between the two.
"""
_EDGES = EDGES.tolist()


class TextTree(NamedTuple):
    """A text tree and the expected number of its accepted tokens."""

    seq: Sequence
    nodes: list[TextNode]
    expected: float
    """Expected number of accepted tokens."""


@dataclass
class _Drafted:
    """Average acceptance of the drafter's trees for the sequence in a slot."""

    epoch: int
    average: float


class SuffixBeside(TextDrafts):
    """Builds text trees with `SuffixTexts`, and uses a text tree if it is expected to be better than the drafter's
    tree.

    Args:
        shape: shape of all trees.
        speculation: speculation controller of the same engine.
    """

    def __init__(self, shape: SpeculationConfig, speculation: Speculation) -> None:
        self._levels = shape.max_path - 1
        self._texts, self._speculation = SuffixTexts(shape), speculation
        self._known: dict[int, KnownText] = {}
        self._drafted: dict[int, _Drafted] = {}
        self._average = self._levels / 3
        """Mean number of accepted tokens per drafter tree, over all sequences; the initial value assumes a mediocre
        drafter.
        """
        self._num_drafts, self._first_left = 0, FIRST_ROUNDS
        self._until_probe = self._probe_left = 0
        """Number of rounds with text trees alone until the next probe of the drafter, and remaining rounds of the
        current probe.
        """
        self._probe_every = HOLD
        self._num_rounds = self._paused = 0
        """Number of rounds with text trees so far, and remaining rounds of a pause of text trees."""
        self._pause = LOOK_ROUNDS
        self._num_unused = 0
        """Number of rounds since a text tree was used."""
        self._launched: deque[list[tuple[Sequence, bool]]] = deque()
        """For each round in flight, its decodes and whether a drafter tree was requested."""

    def choose(self, seqs: list[Sequence], flight: RoundInFlight) -> bool:
        """See `TextDrafts.choose`."""
        if not (seqs and self._speculation.takes_texts):
            return True
        if self._paused:
            self._paused -= 1
            return True
        trees = self._trees(seqs, flight)
        if self._speculation.is_probing:
            return True
        if self._first_left and any(seq.draft.complete for seq in seqs):
            self._first_left -= 1
            return True
        self._num_unused += 1
        if not any(tree.nodes for tree in trees):
            self._probe_left = 0
            return True
        slower = self._speculation.slow_down(flight.plan.decodes or seqs, len(seqs))
        drafted = [self._of(tree.seq).average if slower and tree.seq.draft.complete else 0.0 for tree in trees]
        by_text = [tree.expected > brings for tree, brings in zip(trees, drafted, strict=True)]
        # If all sequences use text trees, the round needs no draft. If only some sequences use text trees, the draft
        # costs as much as for all sequences.
        alone = sum(1.0 + tree.expected for tree in trees)
        mixed = sum(1.0 + max(tree.expected, brings) for tree, brings in zip(trees, drafted, strict=True))
        asks = not any(by_text) or (slower is not None and not all(by_text) and alone * slower < mixed)
        if self._probes(is_chosen=not asks and slower is not None):
            asks, by_text = True, [False] * len(trees)
        if any(by_text):
            self._num_unused = 0
            self._pause_unless_it_pays()
        for tree, is_longer in zip(trees, by_text, strict=True):
            tree.seq.draft.text_tree = (tree.nodes or None) if is_longer or not asks else None
        return asks

    def launched(self, flight: RoundInFlight) -> None:
        """Record for which decodes a drafter tree was requested."""
        asked = flight.plan.with_trees()
        self._launched.append(list(zip(flight.plan.decodes, asked, strict=True)))

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Update the averages with the acceptance of drafter trees."""
        for (seq, asked), live, token_ids in zip(self._launched.popleft(), flight.live, result.token_ids, strict=False):
            if not live:
                continue
            own = self._of(seq)
            if asked:
                self._num_drafts += 1
                weight = max(NEWEST_OF_ALL, 1.0 / self._num_drafts)
                own.average += max(NEWEST, weight) * (len(token_ids) - 1 - own.average)
                self._average += weight * (len(token_ids) - 1 - self._average)
            else:
                own.average += RETURNS * (self._average - own.average)

    def abandoned(self) -> None:
        """See `RoundObserver.abandoned`."""
        self._launched.clear()

    def _pause_unless_it_pays(self) -> None:
        """Pause text trees for some rounds if rounds with text trees took more time per token than the best other way
        of drafting. Each further pause is twice as long, up to a maximum.
        """
        self._num_rounds += 1
        if self._num_rounds % LOOK_ROUNDS == 0:
            if self._speculation.text_pays:
                self._pause = LOOK_ROUNDS
            else:
                self._paused, self._pause = self._pause, min(2 * self._pause, FORGET_ROUNDS // 4)

    def _probes(self, *, is_chosen: bool) -> bool:
        """Whether to use the drafter in this round although text trees were chosen. This is needed because only trees
        that are used can be measured.
        """
        if not is_chosen:
            self._probe_left = 0
        elif self._probe_left:
            self._probe_left -= 1
            return True
        elif self._until_probe:
            self._until_probe -= 1
        else:
            self._probe_left, self._until_probe = PLAIN_PROBE - 1, self._probe_every
            self._probe_every = min(2 * self._probe_every, FORGET_ROUNDS // 4)
            return True
        return False

    def _trees(self, seqs: list[Sequence], flight: RoundInFlight) -> list[TextTree]:
        """A text tree for each sequence; the tree has no nodes if no known text continues the sequence, or if none of
        the nodes is worth its verification.
        """
        budget, new, table = MAX_TOKENS_PER_ROUND, flight.tokens_by_slot(), self._speculation.text_table()
        made, paths = [], []
        least_context = SURE_CONTEXT if self._num_unused >= LOOK_ROUNDS else 1
        for seq in seqs:
            text, length = self._text_of(seq), len(seq.token_ids) + len(new[seq.slot])
            until = min(length, text.num_known + budget)
            if until > text.num_known:
                budget -= until - text.num_known
                missing = seq.token_ids[text.num_known : until]
                missing += new[seq.slot][
                    max(text.num_known - len(seq.token_ids), 0) : max(until - len(seq.token_ids), 0)
                ]
                self._texts.take_in(text, missing)
            nodes = self._texts.grow(text, self._levels, least_context) if text.num_known == length else []
            made.append(nodes)
            paths.append(
                _path_probabilities(nodes, None if table is None else table[int(seq.request.params.temperature > 0)])
            )
        least = self._least_probability(flight.plan.decodes or seqs, paths)
        expected = [sum(path for path in tree if path >= least) for tree in paths]
        return [
            TextTree(seq, nodes if gain else [], gain) for seq, nodes, gain in zip(seqs, made, expected, strict=True)
        ]

    def _least_probability(self, running: list[Sequence], paths: list[list[float]]) -> float:
        """The least path probability of a node that a round of text trees alone would verify; infinite if that round
        would verify no node.
        """
        ranked = sorted((path for tree in paths for path in tree), reverse=True)
        prices = self._speculation.text_prices(running, len(ranked)) if ranked else None
        if prices is None:
            return 0.0
        worth = np.cumsum(ranked) - (prices[1:] - prices[0])
        best = int(worth.argmax())
        return ranked[best] if worth[best] > 0 else inf

    def _text_of(self, seq: Sequence) -> KnownText:
        text = self._known.get(seq.slot)
        if text is None or text.epoch != seq.epoch:
            text = self._known[seq.slot] = KnownText(seq.epoch, shared_from=len(seq.token_ids))
        return text

    def _of(self, seq: Sequence) -> _Drafted:
        own = self._drafted.get(seq.slot)
        if own is None or own.epoch != seq.epoch:
            own = self._drafted[seq.slot] = _Drafted(seq.epoch, self._average)
        return own


def _path_probabilities(nodes: list[TextNode], table: Any) -> list[float]:
    """Probabilities that the nodes of a tree and all their ancestors are accepted.

    Args:
        table: measured acceptance by bin of estimated probability; with None, the estimated probabilities are used.
    """
    scores, paths = [0.0], [1.0]
    for node in nodes:
        given = node.score - scores[node.parent]
        scores.append(node.score)
        step = exp(given) if table is None else float(table[bisect_left(_EDGES, given)])
        paths.append(step * paths[node.parent])
    return paths[1:]
