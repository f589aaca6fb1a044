"""An EAGLE drafter's pass in fixed shapes: commit, levels and tree as stages of CUDA graphs, all KV in the paged pool.

Drafted pair n of a row is stored at index num_context + n of its block table, behind the committed pairs: what does not
fit into the sequence's last block lies in private blocks of the row, which this pass alone writes and reads. So it
depends neither on what the verifier reserves nor on anything but shapes; without captured graphs it runs eagerly.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.kv.reference import store_kv
from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.kernels.tree.growth import TreeTable
from wingbeat.kernels.tree.results import Candidates, Coupling
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import (
    Bucket,
    GraphPool,
    GraphRunner,
    GraphStats,
    Stage,
    batch_buckets,
    bucket_for,
)
from wingbeat.runtime.heads.contract import Attend, DraftHead
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload

_WORD_BITS = 64


class DraftKV(NamedTuple):
    """What a drafter keeps of its sequences; the last slot belongs to nobody, and padding goes there."""

    key_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]; block 0 takes what is dropped."""
    value_cache: Tensor
    hidden: Tensor
    """[num_slots + 1, hidden_size]: the head's output at each sequence's last committed pair."""
    first_private: int
    """First of the blocks that no verifier owns: `private_blocks` for each of num_slots rows."""


class DecodeRows(NamedTuple):
    """Inputs of `draft_accept`: decided tokens, one sequence a row; without tokens a row is padding."""

    slots: Tensor
    """int64 [num_reqs]"""
    positions: Tensor
    """int64 [num_reqs]: first position computed."""
    num_tokens: Tensor
    """int64 [num_reqs]: pairs that count, 0..max_path."""
    token_ids: Tensor
    """int64 [num_reqs, max_path]"""
    taps: Tensor
    """[num_reqs, max_path, taps_size]"""


class ProposalRows(NamedTuple):
    """Inputs of `draft_proposal`: `DecodeRows`, and beside them the sequences that want a tree."""

    decode_slots: Tensor
    decode_positions: Tensor
    decode_num_tokens: Tensor
    decode_token_ids: Tensor
    decode_taps: Tensor
    slots: Tensor
    """int64 [num_reqs]: need not be those of the decodes."""
    positions: Tensor
    """int64 [num_reqs, depth]: of the tokens to draft; the first is the committed length."""
    root_token_ids: Tensor
    """int64 [num_reqs]"""


class CommittedRows(NamedTuple):
    """Outputs of `draft_accept`."""

    hidden: Tensor
    """[num_reqs, hidden_size]: the head's output at each row's last pair."""


class _Plan(NamedTuple):
    """Where the pairs of each level go and what they see; level l expands nodes of depth l + 1."""

    block_tables: Tensor
    """int64 [num_reqs, max_blocks_per_seq + private blocks]"""
    kv_slots: Tensor
    """int64 [depth - 1, num_reqs * top_k]"""
    num_context: Tensor
    """int64 [depth - 1, num_reqs]: stored pairs that all pairs of a level see."""
    positions: Tensor
    """int64 [num_reqs, (depth - 1) * top_k]: of every pair, in the order they are stored."""
    cos: Tensor
    """[num_reqs, depth - 1, 1, head_dim], as `sin`."""
    sin: Tensor
    couplings: list[Coupling]
    """By depth of the drafted token."""


def private_blocks(speculation: SpeculationConfig, block_size: int) -> int:
    """Blocks a row needs for drafted pairs, wherever in a block its committed pairs end."""
    return -(-(speculation.max_path - 2) * speculation.draft_top_k // block_size)


class EagleStages:
    """The stages of a drafter at every batch bucket and depth.

    Args:
        kv: pool and hidden states, shared with the eager commit of prompt chunks; addresses must not change.
        graph_device: captures the stages; None leaves them eager.
    """

    def __init__(
        self,
        head: DraftHead,
        speculation: SpeculationConfig,
        spec: ChannelSpec,
        kv: DraftKV,
        graph_device: GraphDevice | None,
    ) -> None:
        self.head = head
        self.speculation = speculation
        self.spec = spec
        self.kv = kv
        self.device = kv.hidden.device
        self.scaling = head.scaling
        self.num_private = private_blocks(speculation, spec.block_size)
        self.spare_slot = kv.hidden.shape[0] - 1
        self.max_depth = speculation.max_path - 1
        num_slots, top_k = self.spare_slot, speculation.draft_top_k
        pairs = (self.max_depth - 1) * top_k
        self.buckets = batch_buckets(num_slots)
        with torch.inference_mode(mode=False):
            self._offsets = torch.arange(max(pairs, spec.max_path), device=self.device)
            width = spec.max_blocks_per_seq + self.num_private
            self._block_tables = torch.zeros(num_slots + 1, width, dtype=torch.int64, device=self.device)
            self._temperatures = torch.zeros(num_slots + 1, device=self.device)
            self._seeds = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
            private = torch.arange(num_slots * self.num_private, device=self.device) + kv.first_private
            self._private_blocks = private.view(num_slots, self.num_private)
            self._own_bits = _own_bits(self.max_depth - 1, top_k).to(self.device)
            self._tables = {n: TreeTable(n, top_k, self.max_depth, self.device) for n in self.buckets if top_k > 1}
        self._pool = GraphPool(graph_device or _NoGraphs())
        self._accept = GraphRunner(
            Stage.DRAFT_ACCEPT,
            self._commit,
            self._padding_decode,
            [Bucket(n, spec.max_path) for n in self.buckets],
            self._pool,
        )
        self._proposal = GraphRunner(
            Stage.DRAFT_PROPOSAL,
            self._commit_and_grow,
            self._padding_proposal,
            [Bucket(n, depth) for n in self.buckets for depth in range(1, self.max_depth + 1)],
            self._pool,
        )
        _fill(self._accept, self._padding_decode)
        _fill(self._proposal, self._padding_proposal)
        if graph_device is not None:
            self._pool.capture(self._accept, self._proposal)

    @property
    def stats(self) -> GraphStats:
        """What was captured, what failed, and how often each stage ran."""
        return self._pool.stats

    def fit(self, spec: ChannelSpec) -> bool:
        """Whether the stages serve a channel of this shape too, as far as its slots and blocks have room."""
        mine = self.spec
        return (spec.block_size, spec.max_blocks_per_seq) == (mine.block_size, mine.max_blocks_per_seq)

    def commit(self, batch: DraftBatch) -> None:
        """Draft KV and hidden states of the decodes, of which there is one at least."""
        count = len(batch.decode_slots)
        bucket = Bucket(bucket_for(count, self.buckets), self.spec.max_path)
        rows = self._accept.inputs(bucket)
        self._load_slots(batch)
        rows.slots.copy_(self._upload_slots(bucket.num_reqs, batch.decode_slots)[0])
        _load_decodes(rows, batch)
        self._accept.replay(bucket, count)

    def propose(self, batch: DraftBatch, depth: int) -> TokenTree:
        """Commit the decodes and grow a tree of `depth` levels per proposal slot; valid until the next pass."""
        count = len(batch.proposal_slots)
        bucket = Bucket(bucket_for(max(count, len(batch.decode_slots)), self.buckets), depth)
        rows = self._proposal.inputs(bucket)
        self._load_slots(batch)
        decode_slots, slots = self._upload_slots(bucket.num_reqs, batch.decode_slots, batch.proposal_slots)
        rows.decode_slots.copy_(decode_slots)
        rows.slots.copy_(slots)
        _load_decodes(_decodes_of(rows), batch)
        lens = batch.committed_lens[slots[:count]]
        torch.add(lens[:, None], self._offsets[:depth], out=rows.positions[:count])
        if count < bucket.num_reqs:
            rows.positions[count:].fill_(1)
        # A round that ended a sequence, which its host does not know yet, may have taken it past its history.
        last = (lens - 1).clamp_max(batch.token_ids.shape[1] - 1)
        rows.root_token_ids[:count].copy_(batch.token_ids[slots[:count], last])
        return self._proposal.replay(bucket, count)

    def _load_slots(self, batch: DraftBatch) -> None:
        num_slots, width = batch.block_tables.shape
        self._block_tables[:num_slots, :width].copy_(batch.block_tables)
        self._temperatures[:num_slots].copy_(batch.temperatures)
        self._seeds[:num_slots].copy_(batch.seeds)

    def _upload_slots(self, num_reqs: int, *columns: Tensor) -> Tensor:
        """Host slots on the device, padded with the spare one: int64 [len(columns), num_reqs]."""
        padded = [[*slots.tolist(), *[self.spare_slot] * (num_reqs - len(slots))] for slots in columns]
        return upload(padded, self.device)

    def _padding_decode(self, max_path: int) -> DecodeRows:
        """A row without tokens: its KV is dropped, its hidden state goes to the spare slot."""
        none = torch.zeros(1, dtype=torch.int64, device=self.device)
        taps = torch.zeros(1, max_path, self.head.taps_size, dtype=self.kv.hidden.dtype, device=self.device)
        return DecodeRows(none + self.spare_slot, none, none, none.new_zeros(1, max_path), taps)

    def _padding_proposal(self, depth: int) -> ProposalRows:
        """A decode without tokens, and a tree over no context, whose pairs go into the row's private blocks."""
        decode = self._padding_decode(self.spec.max_path)
        return ProposalRows(*decode, decode.slots, decode.slots.new_ones(1, depth), decode.positions)

    def _commit(self, rows: DecodeRows) -> CommittedRows:
        """`draft_accept`: keys and values of all pairs, and the hidden state of each row's last one."""
        num_reqs, max_path = rows.token_ids.shape
        steps = self._offsets[:max_path]
        positions = rows.positions[:, None] + steps
        tables = self._block_tables[rows.slots]
        counted = steps < rows.num_tokens[:, None]
        kv_slots = torch.where(counted, self._kv_slots(tables, positions), 0).flatten()
        last = (rows.num_tokens - 1).clamp_min(0)
        caches, context = (self.kv.key_cache, self.kv.value_cache), rows.positions + last

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store_kv(key, value, *caches, kv_slots)
            return tree_attention(query[:, None], *caches, tables, context, None, None, self.scaling)[:, 0]

        features = self.head.fuse(rows.taps.flatten(0, 1))
        last_rows = torch.arange(num_reqs, device=self.device) * max_path + last
        hidden = self.head(rows.token_ids.flatten(), features, self.head.rotary(positions.flatten()), attend, last_rows)
        self.kv.hidden[rows.slots] = hidden
        return CommittedRows(hidden)

    def _commit_and_grow(self, rows: ProposalRows) -> TokenTree:
        """`draft_proposal`: all levels of a tree after its sequence's decode."""
        self._commit(_decodes_of(rows))
        hidden = self.kv.hidden[rows.slots][:, None]
        plan = self._plan(rows)
        if self.speculation.draft_top_k == 1:
            return self._grow_chain(rows.root_token_ids, hidden, plan)
        return self._grow_tree(rows.root_token_ids, hidden, plan)

    def _plan(self, rows: ProposalRows) -> _Plan:
        top_k, size = self.speculation.draft_top_k, self.spec.block_size
        num_reqs, depth = rows.positions.shape
        context = rows.positions[:, 0] - 1
        tables = self._block_tables[rows.slots]
        # What does not fit into the sequence's last block begins in the row's first private one.
        full = ((context + size - 1) // size).clamp_max(self.spec.max_blocks_per_seq)
        tables.scatter_(1, full[:, None] + self._offsets[: self.num_private], self._private_blocks[:num_reqs])
        stored = context[:, None] + self._offsets[: (depth - 1) * top_k]
        by_level = self._kv_slots(tables, stored).view(num_reqs, depth - 1, top_k).transpose(0, 1)
        # A chain is causal: what was drafted before is context of what comes next.
        ahead = self._offsets[: depth - 1, None] if top_k == 1 else self._offsets.new_zeros(depth - 1, 1)
        expanded = rows.positions[:, :-1] - 1
        noise_positions = rows.positions.T.contiguous()
        temperatures, seeds = self._temperatures[rows.slots], self._seeds[rows.slots]
        return _Plan(
            tables,
            by_level.reshape(depth - 1, num_reqs * top_k).contiguous(),  # of chains, reshape makes a strided view
            context + ahead,
            expanded.repeat_interleave(top_k, dim=1),
            *self.head.rotary(expanded),
            [Coupling(temperatures, seeds, positions) for positions in noise_positions],
        )

    def _grow_chain(self, root_token_ids: Tensor, hidden: Tensor, plan: _Plan) -> TokenTree:
        """The likeliest token after each token."""
        token_ids, log_probs = self._candidates(hidden, plan.couplings[0])
        drafted, scores = [token_ids[:, 0]], [log_probs[:, 0]]
        depth = len(plan.couplings)
        for level in range(depth - 1):
            hidden = self._expand(level, drafted[-1], hidden, plan, None)
            token_ids, log_probs = self._candidates(hidden, plan.couplings[level + 1])
            drafted.append(token_ids[:, 0])
            scores.append(log_probs[:, 0])
        depths = self._offsets[: depth + 1].repeat(len(root_token_ids), 1)
        return TokenTree(
            token_ids=torch.cat([root_token_ids[:, None], *drafted], dim=1),
            parents=depths - 1,
            depths=depths,
            scores=torch.cat([torch.zeros_like(scores[0]), *scores], dim=1).cumsum(dim=1),
            num_valid=torch.full_like(root_token_ids, depth + 1),
        )

    def _grow_tree(self, root_token_ids: Tensor, hidden: Tensor, plan: _Plan) -> TokenTree:
        """EAGLE-2's dynamic tree: each level expands the top_k best nodes of the level before."""
        table = self._tables[len(root_token_ids)]
        frontier = table.add_level(0, *self._candidates(hidden, plan.couplings[0]))
        words = None
        for level in range(len(plan.couplings) - 1):
            parent = frontier.frontier_parent[..., None]
            features = hidden.gather(1, parent.expand(-1, -1, hidden.shape[2]))
            own = self._own_bits[level]
            if words is None:
                words = own.expand(len(root_token_ids), -1, -1)
            else:
                words = words.gather(1, parent.expand(-1, -1, words.shape[2])) | own
            hidden = self._expand(level, frontier.token_ids, features, plan, words)
            frontier = table.add_level(level + 1, *self._candidates(hidden, plan.couplings[level + 1]))
        return TokenTree(*table.finalize(root_token_ids, self.speculation.num_nodes))

    def _expand(self, level: int, token_ids: Tensor, hidden: Tensor, plan: _Plan, words: Tensor | None) -> Tensor:
        """The head over one level's pairs: (hidden of the parents, tokens), each [num_reqs, top_k, ...]."""
        num_pairs = (level + 1) * token_ids.shape[1]
        if words is not None:
            words = words[..., : -(-num_pairs // _WORD_BITS)]
        rotary = (plan.cos[:, level : level + 1], plan.sin[:, level : level + 1])
        attend = self._attend(
            plan.kv_slots[level], plan.block_tables, plan.num_context[level], plan.positions[:, :num_pairs], words
        )
        return self.head(token_ids, self.head.feedback(hidden), rotary, attend)

    def _attend(
        self, kv_slots: Tensor, tables: Tensor, num_context: Tensor, positions: Tensor | None, words: Tensor | None
    ) -> Attend:
        caches = (self.kv.key_cache, self.kv.value_cache)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store_kv(key.flatten(0, 1), value.flatten(0, 1), *caches, kv_slots)
            return tree_attention(query, *caches, tables, num_context, positions, words, self.scaling)

        return attend

    def _candidates(self, hidden: Tensor, coupling: Coupling) -> Candidates:
        logits = self.head.logits(hidden)
        return top_candidates(logits, self.head.draft_token_ids, self.speculation.draft_top_k, coupling)

    def _kv_slots(self, tables: Tensor, stored: Tensor) -> Tensor:
        size = self.spec.block_size
        return tables.gather(1, (stored // size).clamp_max(tables.shape[1] - 1)) * size + stored % size


class _NoGraphs:
    """Stands for a device where nothing is captured."""

    def new_pool(self) -> None:
        return None


def _decodes_of(rows: ProposalRows) -> DecodeRows:
    return DecodeRows(*rows[: len(DecodeRows._fields)])


def _load_decodes(rows: DecodeRows, batch: DraftBatch) -> None:
    """Copy a batch's decodes into the first of the rows; the others become padding."""
    count, width = batch.decode_token_ids.shape
    rows.positions[:count].copy_(batch.decode_positions)
    rows.num_tokens[:count].copy_(batch.decode_num_tokens)
    rows.token_ids[:count, :width].copy_(batch.decode_token_ids)
    rows.taps[:count, :width].copy_(batch.decode_taps)
    if count < len(rows.slots):
        rows.positions[count:].zero_()
        rows.num_tokens[count:].zero_()


def _own_bits(num_levels: int, top_k: int) -> Tensor:
    """Mask words that hold a pair's own bit alone: int64 [num_levels, top_k, num_words]; bit l * top_k + j."""
    pairs = num_levels * top_k
    index = torch.arange(pairs)
    words = torch.zeros(pairs, max(-(-pairs // _WORD_BITS), 1), dtype=torch.int64)
    words[index, index // _WORD_BITS] = torch.ones_like(index) << index % _WORD_BITS
    return words.view(num_levels, top_k, words.shape[1])


@torch.inference_mode()
def _fill(runner: GraphRunner, padding_row: Callable[[int], tuple]) -> None:
    """Put padding into the static inputs, whose fresh memory may hold tokens that do not exist."""
    for bucket in runner.buckets:
        for view, row in zip(runner.inputs(bucket), padding_row(bucket.size), strict=True):
            view.copy_(row)
