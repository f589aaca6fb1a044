"""Drafts with the multi-token-prediction modules of the verifier's own checkpoint.

Module k drafts the token at depth k + 1. For deeper levels the last module runs again on its own outputs; with a single
module this is EAGLE's loop. Row i of module k has token i + 1 + k, and is stored at index i of the sequence's block
table in layer k of the pool. With L committed tokens, module k therefore has the rows 0..L - 2 - k. When a module runs
for the first time in a tree, it also runs the rows of all tokens drafted before, with the previous module's outputs as
hidden states. Rows of committed tokens are computed from the verifier's hidden states only. If module k needs more
tokens than are committed, its context length is negative; rows before row 0 are computed, but no row sees them and they
are dropped.

At the end of a shared prefix, the last rows depend on tokens after the prefix, which differ between sequences. The
first module keeps the rows of the sequence that ran them first; in other modules, the sequence that ran them last
overwrites them. The only effect is slightly lower acceptance.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.decided_rows import DecidedRows
from wingbeat.runtime.drafters.draft_pool import DraftPool, grown
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules, of_parents
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter, graph_device_of
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.mtp.mtp_loader import load_mtp_modules
from wingbeat.runtime.mtp.mtp_modules import MtpModules
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Rows


class ModulePool(DraftPool):
    """A pool that also holds modules' outputs at committed rows.

    Args:
        size: width of an output.
        count: number of modules whose outputs are held.
    """

    def __init__(
        self,
        layers: list[LayerAttention],
        num_drafted: int,
        dtype: torch.dtype,
        device: torch.device,
        size: int,
        count: int,
    ) -> None:
        super().__init__(layers, num_drafted, dtype, device)
        self._size = size
        self.extras = [torch.zeros(0) for _ in range(count)]
        """Tensors [num_blocks, block_size, size], whose rows have the addresses of the KV."""

    @property
    def token_bytes(self) -> int:
        return super().token_bytes + len(self.extras) * self._size * self.dtype.itemsize

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> bool:
        """See `DraftPool.resize`."""
        if not super().resize(spec, num_slots, num_blocks):
            return False
        shape = (*self.caches[0][0].shape[:2], self._size)
        self.extras = [grown(old, shape, self.dtype, self.device) for old in self.extras]
        return True


class MtpDrafter(StagedDrafter):
    """Drafter with MTP modules and their KV.

    Args:
        modules: prepared modules, on the device to draft on.
        speculation: shape of the trees.
        num_layers: number of layers of the verifier; as a tap index it means the output of the final norm.
        graph_device: see `StagedDrafter`.
    """

    def __init__(
        self,
        modules: MtpModules,
        speculation: SpeculationConfig,
        num_layers: int,
        graph_device: GraphDevice | None = None,
    ) -> None:
        self.modules = modules
        self.num_modules = len(modules.items)
        self.taps_size = modules.config.hidden_size
        device, dtype = modules.device, modules.dtype
        growth = Growth(speculation, torch.arange(len(modules.items[0].head), device=device))
        num_drafted = (speculation.max_path - 2) * speculation.draft_top_k
        # A module's outputs at committed rows are stored per block, because they are the next module's inputs. They are
        # therefore also available after a prefix that another sequence ran.
        pool = ModulePool(modules.layers, num_drafted, dtype, device, self.taps_size, self.num_modules - 1)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(
            (num_layers,), keeps_context=True, token_bytes=pool.token_bytes, embedding_width=self.taps_size
        )
        self._hidden = torch.zeros(0)
        """[num_slots + 1, hidden_size]: the first module's output at each sequence's last committed row."""

    def _check_taps(self, spec: ChannelSpec) -> None:
        if spec.taps_size != self.taps_size:
            raise ValueError(f"the verifier sends taps of size {spec.taps_size}: its modules need {self.taps_size}")

    def _resize_state(self, num_rows: int) -> None:
        self._hidden = grown(self._hidden, (num_rows, self.taps_size), self.dtype, self.device)

    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Runs all modules over the chunks. The tensors' shapes depend on the data, so this is not captured."""
        spans: list[_Span] = []
        chunks, tokens, given = self.pool.chunks(batch), batch.chunk_next_token_ids, batch.chunk_inputs
        rotated = batch.chunk_rotations([chunk.positions for chunk in chunks])
        if given is not None:
            tokens = given.embedded(self.modules.embed(tokens))
        for chunk, start, length in zip(chunks, batch.chunk_positions, batch.chunk_lens, strict=True):
            rows, taps = chunk.rows, batch.chunk_taps[chunk.rows].to(self.dtype)
            last = tuple(upload([[chunk.slot], [length - 1]], self.device))
            counted = torch.ones(1, length, dtype=torch.bool, device=self.device)
            turned, begin = rotated[..., None, rows], chunk.positions[:1]
            spans.append(_Span(begin, start, tokens[None, rows], turned, taps[None], counted, chunk.tables, last))
        for index in range(self.num_modules):
            now = [
                span.after(max(index - span.host_start, 0)) for span in spans if span.host_start + span.width > index
            ]
            if now:
                self._run_spans(index, now)

    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Runs all modules over decoded tokens."""
        positions, counted = rows.spread()
        last = (rows.ends, (rows.num_tokens - 1).clamp_min(0))
        # The start of a decode is known only on the device. The host passes num_modules as lower bound, with which no
        # column is cut.
        start, taps = self.num_modules, rows.taps.to(self.dtype)
        tokens, turned = rows.token_ids, rows.rotated(positions)
        span = _Span(rows.positions, start, tokens, turned, taps, counted, block_tables[rows.slots], last)
        for index in range(self.num_modules):
            self._run_spans(index, [span])

    def _run_spans(self, index: int, spans: list["_Span"]) -> None:
        """Runs one module over the committed tokens of all spans. The keys of all rows are stored before any key is
        read.
        """
        segments, mappings, hidden, begin = [], [], [], 0
        for span in spans:
            rows = span.positions - index
            counted = span.counted & (rows >= 0)
            num_context = span.starts - index
            segments.append(self.pool.causal_segment(begin, rows, num_context, span.tables))
            mappings.append(slot_mapping(span.tables, rows, self.pool.block_size, counted).flatten())
            inputs = span.taps if index == 0 else self.stored(index - 1, span.tables, rows)
            # Padding rows must contain finite values, because their keys are stored in block 0, which attention may
            # read for masked keys.
            hidden.append(torch.where(counted[..., None], inputs, 0).flatten(0, 1))
            begin += rows.numel()
        tokens = torch.cat([span.tokens.flatten(0, 1) for span in spans])
        positions = torch.cat([span.rotated.flatten(-2) for span in spans], dim=-1) + 1
        mapping = torch.cat(mappings)
        rows = Rows(tokens[None], positions[..., None, :], mapping, segments, self.pool.caches)
        out = self.modules.run(index, rows, torch.cat(hidden))
        if index < self.num_modules - 1:
            self.pool.extras[index].flatten(0, 1).index_copy_(0, mapping, out)
        if index == 0:
            begin = 0
            for span in spans:
                of_slots, columns = span.last
                first = begin + torch.arange(len(columns), device=self.device) * span.width
                self._hidden[of_slots] = out[first + columns]
                begin += span.counted.numel()

    def stored(self, index: int, tables: Tensor, rows: Tensor) -> Tensor:
        """A module's outputs at committed rows int64 [num_reqs, num_rows] -> [num_reqs, num_rows, hidden_size]."""
        mapping = slot_mapping(tables, rows.clamp_min(0), self.pool.block_size)
        return self.pool.extras[index].flatten(0, 1)[mapping]

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Grows a tree from each root, starting with the first module's output at the last committed row."""
        hidden = self._hidden[roots.slots][:, None]
        drafting = _Drafting(self, block_tables[roots.slots], roots, hidden)
        return self.growth.grow(roots, self.modules.items[0].logits(hidden), drafting.expand, rules)


class _Span(NamedTuple):
    """Committed tokens of several sequences as rows of equal width; column c of a row is position starts + c."""

    starts: Tensor
    """int64 [num_reqs]: position of each row's first column."""
    host_start: int
    """Lower bound of `starts` on the host, from which the columns to cut are computed; num_modules if no column may be
    cut.
    """
    tokens: Tensor
    """int64 [num_reqs, width]: the token after each position; or embeddings [num_reqs, width, hidden_size]."""
    rotated: Tensor
    """int64 [num_reqs, width] or [3, num_reqs, width]: RoPE positions, see `DraftBatch.chunk_rotations`."""
    taps: Tensor
    """[num_reqs, width, hidden_size]: the verifier's hidden states."""
    counted: Tensor
    """bool [num_reqs, width]: True for valid columns, False for padding."""
    tables: Tensor
    """Block tables of the sequences, int64 [num_reqs, num_table_blocks]."""
    last: tuple[Tensor, Tensor]
    """Slots and last valid columns, int64 [num_reqs] each."""

    @property
    def width(self) -> int:
        return self.counted.shape[1]

    @property
    def positions(self) -> Tensor:
        """int64 [num_reqs, width]: position of each column."""
        return self.starts[:, None] + torch.arange(self.width, device=self.starts.device)

    def after(self, count: int) -> "_Span":
        """The span without its first `count` columns, for a later module that has no rows for these columns."""
        if not count:
            return self
        tokens, taps, counted = (part[:, count:] for part in (self.tokens, self.taps, self.counted))
        rotated = self.rotated[..., count:]
        return self._replace(starts=self.starts + count, tokens=tokens, rotated=rotated, taps=taps, counted=counted)


class _Drafting:
    """The rows that one draft runs, level by level.

    Args:
        drafter: the drafter.
        block_tables: block tables of the roots' sequences.
        roots: roots of the trees.
        hidden: [num_reqs, 1, hidden_size]: the first module's outputs at the last committed rows.
    """

    def __init__(self, drafter: MtpDrafter, block_tables: Tensor, roots: Roots, hidden: Tensor) -> None:
        self.drafter = drafter
        self.pool, self.width = drafter.pool, drafter.growth.top_k
        self.block_tables = block_tables
        self.roots, self.lens = roots, roots.positions[0]
        self.levels: list[Level] = []
        self.out = hidden
        """Latest outputs [num_reqs, num_nodes, hidden_size]: at first the outputs at the last committed row, later the
        outputs of the nodes that ran last.
        """

    def expand(self, level: Level) -> Tensor:
        """See `wingbeat.runtime.drafters.growth.Expand`."""
        self.levels.append(level)
        index = min(level.depth, self.drafter.num_modules - 1)
        first_run = index == level.depth
        run = self.levels if first_run else [level]
        token_ids = torch.cat([part.token_ids for part in run], dim=1)
        hidden = self._inputs_of_all(index) if first_run else of_parents(self.out[:, -self.width :], level)
        self.out = self._run(index, token_ids, hidden, len(run))
        return self.drafter.modules.items[index].logits(self.out[:, -self.width :])

    def _inputs_of_all(self, index: int) -> Tensor:
        """The previous module's outputs at the parents of all nodes drafted so far. For the first level, the parent's
        row is a committed row.
        """
        first = self.levels[0]
        if index == 1:
            return self.out.expand(-1, first.token_ids.shape[1], -1)
        rows = (self.lens - 1 - index)[:, None]
        settled = self.drafter.stored(index - 1, self.block_tables, rows)
        parts = [settled.expand(-1, first.token_ids.shape[1], -1)]
        for depth, level in enumerate(self.levels[1:]):
            parts.append(of_parents(self.out[:, depth * self.width : (depth + 1) * self.width], level))
        return torch.cat(parts, dim=1)

    def _run(self, index: int, token_ids: Tensor, hidden: Tensor, num_levels: int) -> Tensor:
        """Runs a module over the nodes of the last `num_levels` levels -> [num_reqs, num_nodes, hidden_size]."""
        depth, width = self.levels[-1].depth, self.width
        num_context = self.lens - 1 - index
        tables = self.pool.tables(self.block_tables, num_context)
        nodes = torch.arange(depth * width, device=self.lens.device)
        rows = num_context[:, None] + nodes // width
        run = slice((depth - num_levels) * width, None)
        storage = num_context[:, None] + nodes[run]
        mapping = slot_mapping(tables, storage, self.pool.block_size, storage >= 0).flatten()
        visible = self._visible(num_levels, index)
        if visible is None:
            behind = num_context + depth - num_levels
            segment = self.pool.causal_segment(0, rows[:, run], behind, tables)
        else:
            segment = self.pool.tree_segment(rows, visible, num_context, tables)
        positions = (self.roots.rotated(self.lens)[:, None] + nodes // width)[:, run].flatten()
        flat = Rows(token_ids.view(1, -1), positions[None], mapping, [segment], self.pool.caches)
        out = self.drafter.modules.run(index, flat, hidden.flatten(0, 1))
        return out.unflatten(0, token_ids.shape)

    def _visible(self, num_levels: int, index: int) -> Tensor | None:
        """Visibility mask bool [num_reqs, num_levels * width, nodes so far]; None if the tree is a chain."""
        if self.levels[-1].visible is None:
            return None
        size = self.levels[-1].visible.shape[2]
        parts = [level.visible for level in self.levels[-num_levels:]]
        visible = torch.cat([F.pad(part, (0, size - part.shape[2])) for part in parts], dim=1)
        if index < 2:
            return visible
        # If the module needs more tokens than are committed, the first levels have negative row numbers, and other rows
        # must not see them.
        real = self.lens[:, None] - 1 - index + torch.arange(size, device=self.lens.device) // self.width >= 0
        itself = torch.eye(size, dtype=torch.bool, device=self.lens.device)[-visible.shape[1] :]
        return visible & (real[:, None] | itself)


def build_mtp(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> Drafter:
    """The drafter of a verifier's own MTP modules; raises the errors of `load_mtp_modules`.

    Args:
        source: unused, because the modules are in the verifier's checkpoint.
        target: the verifier.
        speculation: shape of the trees.
        options: options of the drafter.
    """
    modules = load_mtp_modules(target, options.dtype, options.device)
    return MtpDrafter(modules, speculation, target.num_layers, graph_device_of(options, modules.device))
