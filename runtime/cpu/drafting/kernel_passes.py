"""Drafting passes on the CPU with C++ kernels. A pass first commits the decided pairs, then grows the trees.

The trees are the same as with torch operations. For a small head, torch operations would take several times as long.
If the drafter has a single verifier, a round is one C++ call on the buffers of the verifier's channel. A single call
matters because the verifier's work between two drafts evicts the CPU caches, so that Python code takes several times
longer than in a tight loop.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.cpu.draft_structs import (
    Channel,
    Decided,
    GrowthRule,
    GrowthRules,
    Reply,
    Roots,
    SamplingRules,
    Sequences,
    Trees,
)
from wingbeat.kernels.cpu.draft_structs import Outcome as OutcomeBuffers
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.runtime.cpu.heads.kernel_head import AnyKernelHead
from wingbeat.runtime.cpu.timing.cpu_threads import tried
from wingbeat.runtime.cpu.timing.round_trial import ROWS
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.growth import Rules
from wingbeat.runtime.drafters.head_drafter import HeadDrafter, HeadPasses
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import Outcome, RoundHeader, TokenTree

_LEAST_ANGLES = 2048


def draft_passes(drafter: HeadDrafter) -> HeadPasses | None:
    """Returns CPU passes for a drafter; None if the kernels do not support the drafter's head or the shape of its
    trees.
    """
    kernels, growth = cpu_kernels(), drafter.growth
    fits = growth.top_k <= len(drafter.head.draft_token_ids)
    fits &= drafter.speculation.draft_tree is None or growth.top_k == 1
    if kernels is None or drafter.device.type != "cpu" or not fits:
        return None
    kernel_head = first_result("kernel_head", drafter.head)
    return None if kernel_head is None else KernelPasses(kernels, drafter, kernel_head)


class KernelPasses(HeadPasses):
    """Passes of one drafter on the CPU.

    Args:
        kernel_head: the drafter's head in the form that the kernels read.
    """

    def __init__(self, kernels: CpuKernels, drafter: HeadDrafter, kernel_head: AnyKernelHead) -> None:
        self.kernels, self._drafter = kernels, drafter
        self._pool, speculation = drafter.pool, drafter.speculation
        self.num_threads: int | None = None
        """Number of threads that share a pass; None means torch's number."""
        self._least_levels = drafter.growth.depths[0]
        self._top_k, self._num_nodes = speculation.draft_top_k, speculation.num_nodes
        self._max_path = speculation.max_path
        edges = first_result("bin_edges")
        self._edges = torch.zeros(0) if edges is None else torch.from_numpy(edges)
        self._angles: tuple[Tensor, ...] = ()
        self._channels: dict[int, tuple[Channel | None, object]] = {}
        """Maps the address of an outcome's header to the addresses of the outcome's and the reply's buffers, and to the
        objects that own these buffers.
        """
        self._kernel_head = kernel_head
        self.resized()

    def prepare(self, head: Any) -> AnyKernelHead | None:
        """See `HeadPasses.prepare`."""
        return first_result("kernel_head", head)

    def use_weights(self, prepared: AnyKernelHead) -> None:
        """See `HeadPasses.use_weights`."""
        self._struct = prepared.over(self._pool.caches)
        self._kernel_head, self._angles = prepared, ()

    def resized(self) -> None:
        """See `HeadPasses.resized`."""
        self._drafter.hidden = self._drafter.hidden.float()
        self._struct = self._kernel_head.over(self._pool.caches)

    def try_threads(self, most: int) -> None:
        """See `HeadPasses.try_threads`."""
        self.num_threads = tried("drafter", ROWS, self.nobodys, most)

    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """See `HeadPasses.answer`; returns False if the round needs `commit` and `propose` instead."""
        header = RoundHeader.read(outcome.header)
        key = outcome.header.data_ptr()
        if key not in self._channels:
            self._channels[key] = (self._channel(end, outcome), (end, outcome))
        channel = self._channels[key][0]
        if channel is None or not header.max_len or header.has_inputs:
            return False
        if not self.kernels.answer_round(self._struct, self._sequences(None, header.max_len, None), channel):
            raise ValueError(f"a round refers to slots or positions outside its channel: {header}")
        return True

    def _channel(self, end: DrafterEnd, outcome: Outcome) -> Channel | None:
        """Returns the addresses of an outcome's and its reply's buffers. Returns None if the taps are not float32, or
        if a buffer is not contiguous host memory.
        """
        spec, reply = end.spec, end.reply
        tensors = [*outcome, *reply, end.token_ids]
        if spec.taps_dtype != torch.float32 or not all(t.device.type == "cpu" and t.is_contiguous() for t in tensors):
            return None
        return Channel(
            OutcomeBuffers(*(getattr(outcome, name).data_ptr() for name, _ in OutcomeBuffers._fields_)),
            Reply(reply.epochs.data_ptr(), reply.committed_lens.data_ptr(), _struct(TokenTree(*reply[3:]))),
            end.token_ids.data_ptr(),
            spec.num_slots,
            spec.max_path,
            spec.taps_size,
            spec.max_blocks_per_seq,
            end.token_ids.shape[1],
            outcome.allowed_tokens.shape[1],
            self._top_k,
            self._least_levels,
            self._max_path - 1,
            self._edges.data_ptr(),
            len(self._edges) + 1,
            spec.max_prefill_tokens,
        )

    def commit(self, batch: DraftBatch) -> None:
        """See `HeadPasses.commit`."""
        sequences, begin = self._sequences(batch.block_tables, batch.max_committed_len, batch.position_deltas), 0
        for chunk in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            end = begin + chunk[-1]
            numbers = torch.tensor(chunk)[:, None]
            self._take_in(
                sequences, *numbers, batch.chunk_next_token_ids[None, begin:end], batch.chunk_taps[None, begin:end]
            )
            begin = end
        if len(batch.decode_slots):
            columns = (batch.decode_slots, batch.decode_positions, batch.decode_num_tokens)
            self._take_in(sequences, *columns, batch.decode_token_ids, batch.decode_taps)

    def _take_in(
        self,
        sequences: Sequences,
        slots: Tensor,
        positions: Tensor,
        num_tokens: Tensor,
        token_ids: Tensor,
        taps: Tensor,
    ) -> None:
        if taps.dtype != torch.float32:
            taps = taps.float()
        decided = Decided(
            len(slots),
            slots.data_ptr(),
            positions.data_ptr(),
            num_tokens.data_ptr(),
            token_ids.data_ptr(),
            taps.data_ptr(),
            token_ids.stride(0),
            taps.stride(0),
        )
        self.kernels.take_in(self._struct, sequences, decided)

    def propose(self, batch: DraftBatch, depth: int) -> TokenTree:
        """See `HeadPasses.propose`."""
        num_reqs, history, allowed = len(batch.proposal_slots), batch.token_ids, batch.allowed_tokens
        rules, held = self._rules(batch.growth_rules)
        trees = _room(num_reqs, self._num_nodes)
        roots = Roots(
            num_reqs,
            batch.proposal_slots.data_ptr(),
            batch.committed_lens.data_ptr(),
            history.data_ptr(),
            batch.temperatures.data_ptr(),
            batch.seeds.data_ptr(),
            history.stride(0),
            history.shape[1],
            None if allowed is None else allowed.data_ptr(),
            0 if allowed is None else allowed.shape[1],
            self._top_k,
            depth,
            rules,
            _struct(trees),
            0,
            SamplingRules(*(column.data_ptr() for column in batch.sampling_rules or ())),
        )
        sequences = self._sequences(batch.block_tables, batch.max_committed_len, batch.position_deltas)
        num_levels = self.kernels.grow(self._struct, sequences, roots)
        del held  # `rules` contains pointers to the tensors in `held`, so `held` must live until here
        if self._top_k > 1:
            return trees
        return TokenTree(*(field[:, : num_levels + 1] for field in trees[:-1]), trees.num_valid)

    def nobodys(self, num_threads: int) -> list[Callable[[], TokenTree]]:
        """Passes for timing, one for each number of sequences in `ROWS`, with full trees.

        The passes use the spare slot after all slots of requests, and block 0, so that no request's state changes.
        """
        pool, self.num_threads = self._pool, num_threads
        by_slot = torch.zeros(pool.num_slots + 1, dtype=torch.int64)
        depth = self._max_path - 1

        def pass_of(num_reqs: int) -> Callable[[], TokenTree]:
            rows = torch.full((min(num_reqs, pool.num_slots),), pool.num_slots)
            batch = DraftBatch(
                *(rows, torch.zeros_like(rows), torch.ones_like(rows)),
                decode_token_ids=torch.zeros(len(rows), 1, dtype=torch.int64),
                decode_taps=torch.zeros(len(rows), 1, self._drafter.head.taps_size),
                chunk_slots=[],
                chunk_positions=[],
                chunk_lens=[],
                chunk_next_token_ids=by_slot[:0],
                chunk_taps=torch.zeros(0, self._drafter.head.taps_size),
                proposal_slots=rows,
                epochs=by_slot,
                committed_lens=by_slot + 2,
                block_tables=by_slot[:, None],
                temperatures=by_slot.float(),
                seeds=by_slot,
                token_ids=by_slot[:, None].expand(-1, 2).contiguous(),
                max_committed_len=2,
            )

            def run() -> TokenTree:
                self.commit(batch)
                return self.propose(batch, depth)

            return run

        return [pass_of(num_reqs) for num_reqs in ROWS]

    def _sequences(self, tables: Tensor | None, longest: int, deltas: Tensor | None) -> Sequences:
        self.kernels.use_threads(self.num_threads or torch.get_num_threads())
        longest += max(self._max_path, self._pool.num_drafted) + 1
        if not self._angles or len(self._angles[0]) < longest:
            most = max(_LEAST_ANGLES, 1 << (longest - 1).bit_length())
            rotary = self._drafter.head.rotary(torch.arange(most))
            self._angles = tuple(factors.squeeze(1).float().contiguous() for factors in rotary)
        cos, sin = self._angles
        pool = self._pool
        return Sequences(
            *((None, 0, 0) if tables is None else (tables.data_ptr(), tables.stride(0), tables.shape[1])),
            pool.block_size,
            pool.num_blocks,
            pool.num_private,
            cos.data_ptr(),
            sin.data_ptr(),
            len(cos),
            self._drafter.hidden.data_ptr(),
            None if deltas is None else deltas.data_ptr(),
        )

    def _rules(self, rules: Rules) -> tuple[GrowthRules, list[Tensor]]:
        """Returns the rules as C structs, and the tensors that own the memory of these structs."""
        tables = [torch.from_numpy(rule.table).float().contiguous() for _, rule in rules]
        made = (GrowthRule * len(rules))(
            *(
                (rows.start, rows.stop, rule.growth.min_reach, rule.growth.price, table.data_ptr(), 0)
                for (rows, rule), table in zip(rules, tables, strict=True)
            )
        )
        pointer = ctypes.cast(made, ctypes.POINTER(GrowthRule))
        return GrowthRules(pointer, len(rules), len(self._edges) + 1, self._edges.data_ptr()), [*tables, made]


def _room(num_reqs: int, num_nodes: int) -> TokenTree:
    columns = [torch.empty(num_reqs, num_nodes, dtype=torch.int64) for _ in range(3)]
    return TokenTree(*columns, torch.empty(num_reqs, num_nodes), torch.ones(num_reqs, dtype=torch.int64))


def _struct(trees: TokenTree) -> Trees:
    return Trees(*(field.data_ptr() for field in trees), trees.token_ids.shape[1])
