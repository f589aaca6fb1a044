"""What a round costs: measured tables, interpolated, and scaled by what rounds really take.

Seconds throughout. `verify` is one forward pass of the verifier; `draft` is the wait for trees.
"""

from dataclasses import dataclass

import numpy as np

from wingbeat.runtime.speculation.cost_fit import CostFit

_MIX_STEP = 0.01
"""Weight of one round in the mix of prompts and answers: prompts come seldom."""
_HOST_S = 1e-3
"""What the host may take of a round, before one was seen."""


@dataclass(frozen=True)
class CostTables:
    """Measured medians, over batch sizes in ascending order.

    Raises:
        ValueError: a table does not have the shape of its axes.
    """

    batch_sizes: tuple[int, ...]
    extra_nodes: tuple[int, ...]
    """Drafted nodes per sequence, ascending, 0 first."""
    verify_s: tuple[tuple[float, ...], ...]
    """[batch size][extra nodes], at a short context."""
    context_s: tuple[float, ...]
    """[batch size]: added by each token of context of each sequence."""
    draft_base_s: tuple[float, ...]
    """[batch size]: of a draft, beside its levels."""
    draft_level_s: tuple[float, ...]
    """[batch size]: of each level."""
    padding_share: float = 1.0
    """What a padded node takes of a real one's time, 0 to 1: it takes part in attention alone."""

    def __post_init__(self) -> None:
        rows = (self.verify_s, self.context_s, self.draft_base_s, self.draft_level_s)
        if any(len(row) != len(self.batch_sizes) for row in rows):
            raise ValueError("cost tables need one row per batch size")
        if any(len(row) != len(self.extra_nodes) for row in self.verify_s):
            raise ValueError("verify_s needs one column per entry of extra_nodes")


class RoundCosts:
    """Predicts rounds from tables, corrected by the rounds seen.

    Prompt chunks are told apart from what they share a round with, and are in no prediction: a token costs its share
    of a prompt however it is decoded. A tree round runs beside the drafter, on warm or on contended cores, so plain and
    tree rounds are corrected each by themselves.
    """

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self.tree_fit = CostFit((1.0, 1.0, 1.0, tables.padding_share))
        """Of the roots, the drafted nodes, prompt chunks, and what pads trees of unequal sizes."""
        self.plain_fit = CostFit((1.0, 1.0))
        """Of the roots and prompt chunks."""
        self.draft_fit = CostFit((1.0, 1.0, 1.0))
        """Of a draft's base, its levels, and the prompt chunks that the drafter takes in before it."""
        self._host_fit = {False: CostFit((0.5, 0.0)), True: CostFit((1.0, 0.0))}
        """By whether trees were drafted: of any round, and of prompts in it."""
        self._publish_fit = {False: CostFit((0.5, 0.0)), True: CostFit((0.5, 0.0))}
        """By whether trees were asked for, likewise."""
        self._prompt_tokens = self._new_tokens = 0.0
        self._chunk_token_s, self._draft_chunk_token_s = _chunk_tokens_s(tables)
        self._by_batch: dict[int, _BatchCosts] = {}

    def verify_s(self, num_reqs: int, num_extra: np.ndarray, mean_context: float) -> np.ndarray:
        """Time of a forward pass over `num_reqs` roots and `num_extra` [n] drafted nodes in all: float64 [n].

        What stands at 0 is a plain round.
        """
        batch = self._batch(num_reqs)
        least, added, _, _ = self.tree_fit.factors
        roots_s = batch.roots_s(mean_context)
        trees = least * roots_s + added * (batch.verify(num_extra) - batch.plain_s)
        return np.where(np.asarray(num_extra) > 0, trees, self._plain_factor() * roots_s)

    def verify_up_to_s(self, num_reqs: int, most_extra: int, mean_context: float) -> np.ndarray:
        """`verify_s` of 0, 1, .. `most_extra` drafted nodes: float64 [most_extra + 1]."""
        batch = self._batch(num_reqs)
        least, added, _, _ = self.tree_fit.factors
        roots_s = batch.roots_s(mean_context)
        seconds = added * batch.dense(most_extra) + (least * roots_s - added * batch.plain_s)
        seconds[0] = self._plain_factor() * roots_s
        return seconds

    @property
    def padding_share(self) -> float:
        """`CostTables.padding_share`, by the rounds seen."""
        _, added, _, padding = self.tree_fit.factors
        return min(padding / added, 1.0)

    def draft_s(self, num_reqs: int, levels: np.ndarray) -> np.ndarray:
        """Wait for trees of `levels` [n] levels for `num_reqs` sequences: float64 [n]."""
        batch = self._batch(num_reqs)
        base, level, _ = self.draft_fit.factors
        return base * batch.draft_base_s + level * batch.draft_level_s * np.asarray(levels)

    def level_s(self, num_reqs: int) -> float:
        """Time of one more level."""
        return self.draft_fit.factors[1] * self._batch(num_reqs).draft_level_s

    def context_s(self) -> float:
        """What the drafter takes per new token to know the prompts: seconds."""
        prompt_token_s = self.draft_fit.factors[2] * self._draft_chunk_token_s
        return prompt_token_s * self._prompt_tokens / max(self._new_tokens, 1.0)

    def observe_prompts(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Note how much was read and written in a round."""
        self._prompt_tokens += _MIX_STEP * (num_prompt_tokens - self._prompt_tokens)
        self._new_tokens += _MIX_STEP * (num_new_tokens - self._new_tokens)

    def observe_verify(
        self,
        seconds: float,
        num_reqs: int,
        num_extra: int,
        mean_context: float,
        *,
        num_padding: int = 0,
        num_chunk_tokens: int = 0,
    ) -> None:
        """Correct the prediction by a round that really ran.

        Args:
            num_extra: rows beside the roots, padding included where trees were not packed.
            num_padding: nodes that pad packed trees.
            num_chunk_tokens: rows of prompts.
        """
        batch = self._batch(num_reqs)
        roots_s, chunks_s = batch.roots_s(mean_context), self._chunk_token_s * num_chunk_tokens
        if num_extra:
            table = batch.dense(num_extra + num_padding)
            added_s, padding_s = float(table[num_extra]) - batch.plain_s, float(table[-1] - table[num_extra])
            self.tree_fit.observe(seconds, (roots_s, added_s, chunks_s, padding_s))
        else:
            self.plain_fit.observe(seconds, (roots_s, chunks_s))

    def observe_draft(self, seconds: float, num_reqs: int, levels: float, num_chunk_tokens: int = 0) -> None:
        """Correct the prediction by a wait that really was.

        Args:
            num_chunk_tokens: context that the drafter took in first.
        """
        batch = self._batch(num_reqs)
        chunks_s = self._draft_chunk_token_s * num_chunk_tokens
        self.draft_fit.observe(seconds, (batch.draft_base_s, batch.draft_level_s * levels, chunks_s))

    def observe_host(self, seconds: float, with_tree: bool, with_prompts: bool = False) -> None:
        """Note what a round spent outside of models, telling the drafter aside."""
        self._host_fit[with_tree].observe(seconds, (_HOST_S, _HOST_S * with_prompts))

    def observe_publish(self, seconds: float, asked: bool, with_prompts: bool = False) -> None:
        """Note what telling the drafter took."""
        self._publish_fit[asked].observe(seconds, (_HOST_S, _HOST_S * with_prompts))

    def host_s(self, drafting: bool) -> float:
        """What a round takes outside of models, where every round is drafted, or none; prompts left out."""
        return _HOST_S * (self._host_fit[drafting].factors[0] + self._publish_fit[drafting].factors[0])

    def _plain_factor(self) -> float:
        """Until a plain round was seen, tree rounds say how fast the machine is."""
        return (self.plain_fit if self.plain_fit.seen else self.tree_fit).factors[0]

    def _batch(self, num_reqs: int) -> "_BatchCosts":
        if num_reqs not in self._by_batch:
            self._by_batch[num_reqs] = _BatchCosts(self.tables, num_reqs)
        return self._by_batch[num_reqs]


class _BatchCosts:
    """The tables at one batch size, before any scale."""

    def __init__(self, tables: CostTables, num_reqs: int) -> None:
        low, high, share = _bracket(tables.batch_sizes, num_reqs)

        def between(column: tuple) -> np.ndarray:
            return (1 - share) * np.asarray(column[low]) + share * np.asarray(column[high])

        self._num_reqs = num_reqs
        self._columns = np.asarray(tables.extra_nodes, dtype=np.float64)
        self._measured = between(tables.verify_s)
        self.plain_s = float(self._measured[0])
        self.context_s = float(between(tables.context_s))
        self.draft_base_s = float(between(tables.draft_base_s))
        self.draft_level_s = float(between(tables.draft_level_s))
        self._dense = np.zeros(0)

    def roots_s(self, mean_context: float) -> float:
        """Seconds of a plain round."""
        return self.plain_s + self.context_s * mean_context

    def verify(self, num_extra: np.ndarray) -> np.ndarray:
        """Seconds by drafted nodes of the whole batch."""
        return _interpolate(np.asarray(num_extra) / max(self._num_reqs, 1), self._columns, self._measured)

    def dense(self, most_extra: int) -> np.ndarray:
        """`verify` of 0, 1, .. most_extra; computed once, as far as it is needed."""
        if len(self._dense) <= most_extra:
            self._dense = self.verify(np.arange(max(most_extra + 1, 2 * len(self._dense))))
        return self._dense[: most_extra + 1]


def _chunk_tokens_s(tables: CostTables) -> tuple[float, float]:
    """What a token of a prompt may take the verifier and the drafter: about what a row of the largest batch does."""
    most, level = tables.batch_sizes[-1], tables.draft_level_s
    rows = (tables.extra_nodes[-1] - tables.extra_nodes[0]) * most
    verify_s = (tables.verify_s[-1][-1] - tables.verify_s[-1][0]) / max(rows, 1)
    draft_s = (level[-1] - level[0]) / max(most - tables.batch_sizes[0], 1)
    return max(verify_s, 0.0), max(draft_s, 0.0)


def _interpolate(at: np.ndarray, points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Piecewise linear through (points, values); beyond the last point by the last slope."""
    inside = np.interp(at, points, values)
    if len(points) < 2:
        return inside
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return inside + np.maximum(at - points[-1], 0.0) * max(slope, 0.0)


def _bracket(points: tuple[int, ...], at: int) -> tuple[int, int, float]:
    """Neighbouring indices around a value, and how far it lies towards the second; beyond the ends the end itself."""
    high = int(np.searchsorted(points, at))
    if high >= len(points):
        return len(points) - 1, len(points) - 1, 0.0
    if high == 0 or points[high] == at:
        return high, high, 0.0
    low = high - 1
    return low, high, (at - points[low]) / (points[high] - points[low])
