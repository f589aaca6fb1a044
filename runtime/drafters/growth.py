"""Grows chains and EAGLE-2 dynamic trees over any model that scores continuations (arXiv:2406.16858, section 4).

The model is a callback: it receives the nodes of one level and returns their logits. Tensor shapes depend only on the
shapes of the roots, and no operation synchronises with a GPU, so that the growth of whole trees can be captured in a
CUDA graph.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wingbeat.kernels.tree.candidates import new_counters, top_among, top_candidates
from wingbeat.kernels.tree.reference import pack_mask
from wingbeat.kernels.tree.results import Candidates, Coupling, Frontier
from wingbeat.kernels.tree.table import TreeTable
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, GrowthRule
from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.messages import TokenTree

Rules = tuple[tuple[slice, GrowthRule], ...]
"""See `DraftBatch.growth_rules`."""

_WORD_BITS = 64
COMMIT, TREES = "commit", "trees"
"""Names of the marks of a captured pass behind its commit and behind its last step; levels are marked by number."""


class LogitRules(Protocol):
    """Rules of the requests of one draft."""

    def apply(self, given: Continuations, *, is_root: bool = False) -> Continuations:
        """Return the continuations of nodes under the rules; `is_root` if the nodes are the roots."""
        ...


class Roots(NamedTuple):
    """Last committed tokens of several sequences; a tree grows from each token."""

    slots: Tensor
    """int64 [num_reqs]"""
    token_ids: Tensor
    """int64 [num_reqs]"""
    positions: Tensor
    """int64 [depth, num_reqs]: positions of the tokens to draft, one row per level; the first row is the committed
    lengths."""
    temperatures: Tensor
    """float32 [num_reqs]"""
    seeds: Tensor
    """int64 [num_reqs]"""
    rules: LogitRules | None = None
    """None if no request has rules."""
    position_deltas: Tensor | None = None
    """int64 [num_reqs]: offset added to each sequence's positions for RoPE; None if all offsets are 0."""

    def rotated(self, positions: Tensor, by_request: bool = False) -> Tensor:
        """Return the RoPE positions of rows.

        Args:
            positions: positions of the rows, int64 [..., num_reqs], or [num_reqs, width] if `by_request`.
            by_request: whether the request is the first dimension of `positions`, instead of the last.
        """
        deltas = self.position_deltas
        return positions if deltas is None else positions + (deltas[:, None] if by_request else deltas)


class SlotTables(NamedTuple):
    """Tables, indexed by slot and at fixed addresses, from which the roots of a growth are read."""

    committed_lens: Tensor
    """int64 [num_slots]; the next two fields have the same shape and dtype."""
    last_token_ids: Tensor
    seeds: Tensor
    temperatures: Tensor
    """float32 [num_slots]"""
    block_tables: Tensor
    """int64 [num_slots, max_blocks_per_seq]"""
    position_deltas: Tensor | None = None
    """int64 [num_slots]: see `DraftBatch.position_deltas`."""


class Level(NamedTuple):
    """Nodes of one depth that are expanded; `width` is the tree's top_k."""

    depth: int
    """Depth of the nodes, 1 for children of the root."""
    token_ids: Tensor
    """int64 [num_reqs, width]"""
    parents: Tensor
    """int64 [num_reqs, width]: index of each node's parent among the nodes of the previous level; 0 at depth 1."""
    visible: Tensor | None
    """bool [num_reqs, width, depth * width]: which nodes of the levels so far each node sees: the node itself and its
    ancestors. Packed masks are int64 words, see `kernels.tree.reference.pack_mask`. None in a chain, where each node
    sees all nodes so far."""


Expand = Callable[[Level], Tensor | Continuations]
"""Function that maps a level to the logits [num_reqs, width, vocab_size] that follow the level's nodes, or to
`Continuations`."""


class Growth:
    """Grows the trees of one drafter.

    Args:
        speculation: shape of the trees.
        draft_token_ids: int64 [vocab_size], target token id of each logits column, on the drafter's device.
        packed: whether masks are packed into words for the kernels.
        whole: whether further levels take almost no time, so that all levels are always grown and a single depth is
            captured.
    """

    def __init__(
        self, speculation: SpeculationConfig, draft_token_ids: Tensor, packed: bool = False, whole: bool = False
    ) -> None:
        self.speculation = speculation
        self.draft_token_ids = draft_token_ids
        self.rules: Any = first_result("draft_rules", draft_token_ids)
        """A `draft_rules.draft_rules.DraftRules`; None if drafts follow no rules."""
        self.top_k = speculation.draft_top_k
        self.max_depth = speculation.max_path - 1
        self.depths = range(self.max_depth if whole else 1, self.max_depth + 1)
        """Depths that a tree may have."""
        num_levels, num_nodes = self.max_depth - 1, (self.max_depth - 1) * self.top_k
        itself = torch.eye(num_nodes, dtype=torch.bool, device=draft_token_ids.device)
        itself = itself.view(num_levels, self.top_k, num_nodes)
        # Masks, by level, in which each node sees only itself.
        self._itself = pack_mask(itself) if packed else itself
        self._nodes_per_column = _WORD_BITS if packed else 1
        self._steps = torch.arange(self.max_depth, device=draft_token_ids.device)
        self.mark: Callable[[str], object] = lambda name: None
        """Marks a point of a pass that is being captured, see `GraphPool.mark`."""
        self._tables: dict[int, TreeTable] = {}
        self._counters: dict[int, Tensor] = {}
        """Counters of `top_candidates`, by batch size."""

    def depth(self, batch: DraftBatch) -> int:
        """Return the maximum number of levels to grow for a batch."""
        levels = self.max_depth if batch.max_levels is None else batch.max_levels
        return min(max(levels, self.depths[0]), self.max_depth)

    def prepare(self, batch_sizes: Iterable[int]) -> None:
        """Allocate tables and counters for these batch sizes, so that none is allocated while a growth is captured."""
        for num_reqs in batch_sizes:
            if num_reqs not in self._counters:
                self._counters[num_reqs] = new_counters(num_reqs * (self.top_k + 1), self.draft_token_ids.device)
            if self.top_k > 1:
                self._table(num_reqs)

    def roots(self, batch: DraftBatch, slots: Tensor) -> Roots:
        """Return the roots of a batch's proposals.

        Args:
            slots: int64 [num_reqs], the proposals' slots on the drafter's device.
        """
        lens = batch.committed_lens[slots]
        # The index is clamped, because the device may have advanced a sequence past the end of its history in the
        # sequence's last round, which the host has not processed yet.
        last = (lens - 1).clamp(0, batch.token_ids.shape[1] - 1)
        positions = lens + self._steps[: self.depth(batch), None]
        return Roots(
            slots=slots,
            token_ids=batch.token_ids[slots, last],
            positions=positions,
            temperatures=batch.temperatures[slots],
            seeds=batch.seeds[slots],
            rules=None if self.rules is None else self.rules.of_batch(batch, slots),
            position_deltas=None if batch.position_deltas is None else batch.position_deltas[slots],
        )

    def roots_of(self, tables: SlotTables, slots: Tensor, depth: int) -> Roots:
        """Return roots of the sequences in `slots`, int64 [num_reqs], for trees of `depth` levels.

        `tables` are on the device.
        """
        positions = tables.committed_lens[slots] + self._steps[:depth, None]
        deltas = None if tables.position_deltas is None else tables.position_deltas[slots]
        last, temperatures, seeds = tables.last_token_ids[slots], tables.temperatures[slots], tables.seeds[slots]
        return Roots(slots, last, positions, temperatures, seeds, position_deltas=deltas)

    def grow(self, roots: Roots, logits: Tensor | Continuations, expand: Expand, rules: Rules = ()) -> TokenTree:
        """Grow one tree per root.

        Args:
            logits: [num_reqs, 1, vocab_size], logits that follow the roots, or `Continuations`.
            expand: returns the logits that follow a level's nodes.
            rules: rules that stop growth early; empty except on a CPU.
        """
        couplings = couplings_of(roots)
        if roots.rules is not None:
            logits, expand = _ruled(roots.rules, logits, expand)
        if self.top_k == 1:
            return self._grow_chain(roots.token_ids, logits, expand, couplings, rules)
        return self._grow_tree(roots.token_ids, logits, expand, couplings, rules)

    def _grow_chain(
        self,
        roots: Tensor,
        logits: Tensor | Continuations,
        expand: Expand,
        couplings: list[Coupling | None],
        rules: Rules,
    ) -> TokenTree:
        """Drafts the likeliest token after each token.

        The result equals that of `_grow_tree` with top_k 1, with fewer operations.
        """
        token_ids, log_probs = self._candidates(logits, couplings[0])
        self.mark("1")
        drafted, scores = [token_ids[:, 0]], [log_probs[:, 0]]
        only = torch.zeros(len(roots), 1, dtype=torch.int64, device=roots.device)
        for depth in range(1, len(couplings)):
            if rules and not _another_level_pays(rules, log_probs, only):
                break
            logits = expand(Level(depth, drafted[-1], only, None))
            token_ids, log_probs = self._candidates(logits, couplings[depth])
            self.mark(str(depth + 1))
            drafted.append(token_ids[:, 0])
            scores.append(log_probs[:, 0])
        depths = torch.arange(len(drafted) + 1, device=roots.device).repeat(len(roots), 1)
        return TokenTree(
            token_ids=torch.cat([roots[:, None], *drafted], dim=1),
            parents=depths - 1,
            depths=depths,
            scores=torch.cat([torch.zeros_like(scores[0]), *scores], dim=1).cumsum(dim=1),
            num_valid=torch.full_like(roots, len(drafted) + 1),
        )

    def _grow_tree(
        self,
        roots: Tensor,
        logits: Tensor | Continuations,
        expand: Expand,
        couplings: list[Coupling | None],
        rules: Rules,
    ) -> TokenTree:
        """Expands at each level the top_k best nodes of the previous level, or the nodes that a drawn tree selects."""
        table = self._table(len(roots))
        frontier, log_probs = self._enter(table, 0, logits, couplings[0], 1)
        self.mark("1")
        for depth in range(1, len(couplings)):
            begin = table.level_start(depth - 1)
            if rules and not _another_level_pays(rules, log_probs, frontier.table_index - begin):
                break
            seen = frontier.visible[..., : -(-depth * self.top_k // self._nodes_per_column)]
            logits = expand(Level(depth, frontier.token_ids, frontier.frontier_parent, seen))
            frontier, log_probs = self._enter(table, depth, logits, couplings[depth], self.top_k)
            self.mark(str(depth + 1))
        return TokenTree(*table.finalize(roots, self.speculation.num_nodes))

    def _enter(
        self, table: TreeTable, level: int, given: Tensor | Continuations, coupling: Coupling | None, width: int
    ) -> tuple[Frontier, Tensor]:
        """Enters the top_k best tokens after each of `width` nodes; returns the next frontier and log-probabilities."""
        logits, few_token_ids, confidence, _ = _continuations(given)
        # Each expanded node of the level sees only itself; no mask is needed if no further level is grown.
        mask = self._itself[level] if level < len(self._itself) else None
        if isinstance(table, TreeTable) and few_token_ids is None and confidence is None and logits.shape[1] == width:
            counters = self._counters.get(len(logits))
            return table.add_best(level, logits, self.draft_token_ids, _tempered(given, coupling), counters, mask)
        found = self._candidates(given, coupling, width)
        return table.add_level(level, *found, mask), found.log_probs

    def _candidates(self, given: Tensor | Continuations, coupling: Coupling | None, width: int = 1) -> Candidates:
        """Returns the top_k best tokens after each of `width` nodes."""
        (logits, few_token_ids, confidence, _), coupling = _continuations(given), _tempered(given, coupling)
        if few_token_ids is None:
            counters = self._counters.get(len(logits))
            token_ids, log_probs = top_candidates(logits, self.draft_token_ids, self.top_k, coupling, counters)
        else:
            token_ids, log_probs = top_among(logits, few_token_ids, self.top_k, coupling)
        if log_probs.shape[1] < width:
            token_ids, log_probs = token_ids.expand(-1, width, -1), log_probs.expand(-1, width, -1)
        return Candidates(token_ids, log_probs if confidence is None else _sure_of(log_probs, confidence))

    def _table(self, num_reqs: int) -> TreeTable:
        # Tables are never freed, because a captured growth keeps writing into its table.
        if num_reqs not in self._tables:
            device, drawn = self.draft_token_ids.device, self.speculation.draft_tree
            if drawn is None:
                table = TreeTable(num_reqs, self.top_k, self.max_depth, device)
            else:
                table = first_result("tree_table", drawn, num_reqs, self.top_k, device)
            self._tables[num_reqs] = table
        return self._tables[num_reqs]


def of_parents(hidden: Tensor, level: Level) -> Tensor:
    """Map rows of the previous level, [num_reqs, nodes, size], to each node's parent row, [num_reqs, width, size]."""
    return hidden.gather(1, level.parents[..., None].expand(-1, -1, hidden.shape[2]))


def _continuations(given: Tensor | Continuations) -> Continuations:
    return Continuations(given) if isinstance(given, Tensor) else given


def _tempered(given: Tensor | Continuations, coupling: Coupling | None) -> Coupling | None:
    """The coupling for logits that may already be divided by the requests' temperatures."""
    return coupling.tempered() if coupling is not None and _continuations(given).is_tempered else coupling


def _ruled(rules: LogitRules, given: Tensor | Continuations, expand: Expand) -> tuple[Continuations, Expand]:
    """Applies the requests' rules to the roots' logits; the returned `expand` applies the rules at every level."""
    first = rules.apply(_continuations(given), is_root=True)
    return first, lambda level: rules.apply(_continuations(expand(level)))


def _sure_of(log_probs: Tensor, confidence: Tensor) -> Tensor:
    """Replaces the largest of each node's log-probabilities [num_reqs, width, top_k] by the head's own confidence.

    The other tokens share the remaining probability in unchanged proportion, but none gets more than the best token.
    """
    sure, probs = confidence.clamp(1e-6, 1 - 1e-6)[..., None], log_probs.exp()
    others = probs[..., 1:] * (1 - sure) / (1 - probs[..., :1]).clamp_min(1e-6)
    return torch.cat([sure.expand_as(probs[..., :1]), torch.minimum(others, sure)], dim=-1).log()


def couplings_of(roots: Roots) -> list[Coupling | None]:
    """Return a coupling for each depth of expanded nodes.

    All are None if the roots are on the CPU and every request is greedy.
    """
    if roots.temperatures.device.type == "cpu" and not bool((roots.temperatures > 0).any()):
        return [None] * len(roots.positions)
    return [Coupling(roots.temperatures, roots.seeds, positions) for positions in roots.positions]


def _another_level_pays(rules: Rules, log_probs: Tensor, chosen: Tensor) -> bool:
    """Whether the growth rule of some verifier requires another level. Growth rules exist only on the CPU."""
    given, expanded = log_probs.numpy(), chosen.numpy()
    # A list instead of a generator makes sure that every rule is evaluated, since each rule updates the path
    # probabilities of its rows.
    return any([rule.pays(given[rows], expanded[rows]) for rows, rule in rules])
