"""Suffix automata in the engine's process beside a drafter: per sequence and round, the longer expected tree counts.

A tree that continues earlier text costs no draft. What it brings is the sum of its nodes' probabilities: estimated from
counts, corrected by what was accepted of such trees. What a drafter's tree brings is the sequence's own average, since
its tree is not there when it would have to be asked for. The texts stay those of plain decoding, whoever drafts.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.engine.speculation import Speculation
from wingbeat.runtime.engine.text_drafts import TextDrafts
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.acceptance import EDGES
from wingbeat.runtime.speculation.policy import HOLD, PROBE_ROUNDS, RAREST_PROBE
from wingbeat.runtime.suffix.suffix_texts import KnownText, SuffixTexts, TextNode

MAX_TOKENS_PER_ROUND = 1024
"""Most tokens taken in per round: a long prompt takes several, and nothing is made of its text meanwhile."""
LOOK_ROUNDS = 2 * HOLD
"""Rounds with text from one look at what they took to the next."""
FIRST_ROUNDS = 6 * HOLD
"""Rounds of an engine that are the drafter's alone, so that its costs and its worth are known."""
NEWEST, NEWEST_OF_ALL = 1 / 8, 1 / 64
"""Weight of a sequence's latest draft in its own average, and in that of all."""
RETURNS = 1 / 32
"""Share by which the average of a sequence that is not drafted for goes back to that of all, in each round."""
_EDGES = EDGES.tolist()


class Made(NamedTuple):
    """A tree made of text, and what it brings."""

    seq: Sequence
    nodes: list[TextNode]
    expected: float
    """Accepted tokens."""


@dataclass
class _Drafted:
    """What the drafter's trees bring to the sequence in a slot."""

    epoch: int
    average: float


class SuffixBeside(TextDrafts):
    """Trees that `SuffixTexts` makes, where they are worth more than the drafter's.

    Args:
        shape: of all trees.
        speculation: of the same engine.
    """

    def __init__(self, shape: SpeculationConfig, speculation: Speculation) -> None:
        self._levels = shape.max_path - 1
        self._texts, self._speculation = SuffixTexts(shape), speculation
        self._known: dict[int, KnownText] = {}
        self._drafted: dict[int, _Drafted] = {}
        self._average = self._levels / 3
        """Accepted tokens of a drafter's tree, of all sequences; until there are some, of a middling drafter."""
        self._num_drafts, self._first_left = 0, FIRST_ROUNDS
        self._until_probe = self._probe_left = 0
        """Rounds made of text alone until the next probe, and rounds that the probe goes on for."""
        self._probe_every = HOLD
        self._num_rounds = self._paused = 0
        """Rounds with text, and rounds until texts are looked at again."""
        self._pause = LOOK_ROUNDS
        self._launched: deque[list[tuple[Sequence, bool]]] = deque()
        """By round in flight, its decodes and whether a drafter's tree was asked for."""

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
        slower = self._speculation.slow_down(flight.plan.decodes or seqs, len(seqs))
        drafted = [self._of(tree.seq).average if slower and tree.seq.draft.complete else 0.0 for tree in trees]
        by_text = [tree.expected > brings for tree, brings in zip(trees, drafted, strict=True)]
        # Text alone leaves the draft out; text for some shares it among the others.
        alone = sum(1.0 + tree.expected for tree in trees)
        mixed = sum(1.0 + max(tree.expected, brings) for tree, brings in zip(trees, drafted, strict=True))
        asks = not any(by_text) or (slower is not None and not all(by_text) and alone * slower < mixed)
        if self._probes(is_chosen=not asks and slower is not None):
            asks, by_text = True, [False] * len(trees)
        if any(by_text):
            self._pause_unless_it_pays()
        for tree, is_longer in zip(trees, by_text, strict=True):
            tree.seq.draft.text_tree = (tree.nodes or None) if is_longer or not asks else None
        return asks

    def launched(self, flight: RoundInFlight) -> None:
        """Note whose trees are the drafter's."""
        asked = flight.plan.with_trees()
        self._launched.append(list(zip(flight.plan.decodes, asked, strict=True)))

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Learn what the drafter's trees bring."""
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
        """Leave texts alone for some rounds, the longer the oftener this happens, where rounds of text were slow."""
        self._num_rounds += 1
        if self._num_rounds % LOOK_ROUNDS == 0:
            if self._speculation.text_pays:
                self._pause = LOOK_ROUNDS
            else:
                self._paused, self._pause = self._pause, min(2 * self._pause, RAREST_PROBE)

    def _probes(self, *, is_chosen: bool) -> bool:
        """Whether the drafter is asked though text alone was chosen: what is never asked never shows what it brings."""
        if not is_chosen:
            self._probe_left = 0
        elif self._probe_left:
            self._probe_left -= 1
            return True
        elif self._until_probe:
            self._until_probe -= 1
        else:
            self._probe_left, self._until_probe = PROBE_ROUNDS - 1, self._probe_every
            self._probe_every = min(2 * self._probe_every, RAREST_PROBE)
            return True
        return False

    def _trees(self, seqs: list[Sequence], flight: RoundInFlight) -> list[Made]:
        """By sequence, a tree; one without nodes where nothing is known that continues its text."""
        budget, new, table = MAX_TOKENS_PER_ROUND, flight.tokens_by_slot(), self._speculation.text_table()
        made, price = [], self._speculation.node_price(flight.plan.decodes or seqs)
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
            nodes = self._texts.grow(text, self._levels) if text.num_known == length else []
            row = None if table is None else table[int(seq.request.params.temperature > 0)]
            made.append(Made(seq, nodes, _expected(nodes, row, price)))
        return made

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


def _expected(nodes: list[TextNode], table: Any, price: float = 0.0) -> float:
    """Accepted tokens of a tree, of the nodes that are worth verifying.

    Args:
        table: row of acceptance by bin; None believes what the tree says itself.
        price: of a node, in tokens.
    """
    scores, paths = [0.0], [1.0]
    for node in nodes:
        given = node.score - scores[node.parent]
        scores.append(node.score)
        step = exp(given) if table is None else float(table[bisect_left(_EDGES, given)])
        paths.append(step * paths[node.parent])
    return sum(path for path in paths if path > price) - 1.0
