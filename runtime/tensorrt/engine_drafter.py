"""Drafter that runs the draft engine: it builds the same trees as `EagleDrafter`.

For each level, the proposal stage runs the whole tree drafted so far.
"""

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterNeeds
from wingbeat.runtime.drafters.draft_pool import check_tree_shape, grown
from wingbeat.runtime.drafters.growth import Growth, Level, of_parents
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.tensorrt.draft_runner import DraftedTree, DraftOutput, DraftRunner, KnownPairs
from wingbeat.runtime.tensorrt.engine_config import DraftEngineConfig
from wingbeat.runtime.tensorrt.linear_kv import NO_PAGES, LinearKV, Pages
from wingbeat.runtime.tensorrt.session import EngineSession
from wingbeat.runtime.tensorrt.stage_runner import FIRST_ROW


class EngineDrafter(Drafter):
    """Drafter that runs the draft engine over linear KV. Each slot has a KV row. Pages, which have the verifier's block
    ids, hold a second copy of committed KV.

    Args:
        session: session of the graph `eagle_draft`.
        config: config of the graph.
        draft_token_ids: int64 [draft_vocab_size], target id of each draft id.
        speculation: shape of the trees.
        graph_device: captures proposal and accept; None runs them eagerly.

    Raises:
        ValueError: the trees are larger than the engine's max_draft_tree_size.
    """

    runner_kind = DraftRunner

    def __init__(
        self,
        session: EngineSession,
        config: DraftEngineConfig,
        draft_token_ids: Tensor,
        speculation: SpeculationConfig,
        graph_device: GraphDevice | None = None,
    ) -> None:
        self.session, self.config, self.speculation = session, config, speculation
        self.device, self.dtype = session.device, config.torch_dtype
        self.trained_positions = config.max_position_embeddings
        self.growth = self._growth_of(draft_token_ids.to(self.device))
        self.tree_size = self._rows_behind()
        if self.tree_size > config.limits.max_draft_tree_size:
            raise ValueError(
                f"a draft has {self.tree_size} nodes after its context: the engine was built with "
                f"max_draft_tree_size {config.limits.max_draft_tree_size}"
            )
        token_bytes = sum(layer.kv_size for layer in config.layers) * self.dtype.itemsize
        self.needs = DrafterNeeds(
            config.tap_layers, keeps_context=True, token_bytes=token_bytes, embedding_width=config.media_width
        )
        self._graph_device = graph_device
        self.runner: DraftRunner | None = None
        self._epochs: dict[int, int] = {}
        """Maps a KV row to the epoch of the sequence that used the row at its last decode."""
        self._hidden = self._logits = torch.zeros(0)
        """The head's hidden state and logits at the last committed pair of each slot."""

    def _growth_of(self, draft_token_ids: Tensor) -> Growth:
        return Growth(self.speculation, draft_token_ids)

    def _rows_behind(self) -> int:
        """Number of KV positions that a draft uses after the committed positions."""
        return (self.growth.max_depth - 1) * self.growth.top_k

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        config = self.config
        if spec.taps_size != config.base_model_hidden_size:
            raise ValueError(
                f"the verifier sends taps of size {spec.taps_size}: this engine needs {config.base_model_hidden_size}"
            )
        check_tree_shape(spec, self.speculation.num_nodes, self.speculation.max_path)
        longest = config.limits.max_kv_cache_capacity
        if spec.max_model_len > longest:
            raise ValueError(f"max_model_len is {spec.max_model_len}: the engine has max_kv_cache_capacity {longest}")
        with torch.inference_mode(mode=False):
            self._hidden = grown(self._hidden, (num_slots, config.draft_model_hidden_size), self.dtype, self.device)
            self._logits = grown(self._logits, (num_slots, config.draft_vocab_size), self.dtype, self.device)
            # If each sequence has one block, blocks are never shared, so pages are not needed.
            pages = Pages(num_blocks, spec.block_size) if spec.max_blocks_per_seq > 1 else NO_PAGES
            self._make_room(num_slots + FIRST_ROW, pages, spec.max_path)

    def commit(self, batch: DraftBatch) -> None:
        """Prefill chunks and accept decodes; see `Drafter.commit`."""
        self._prefill(batch)
        if not batch.decode_slots.numel():
            return
        kv_rows, slots = self._rows(batch.decode_slots.tolist())
        # The three columns are stacked, so that the host waits for the device only once to read them.
        columns = (batch.decode_positions, batch.decode_num_tokens, batch.epochs[slots])
        starts, counts, epochs = torch.stack(columns).tolist()
        for index, (row, start, epoch) in enumerate(zip(kv_rows, starts, epochs, strict=True)):
            if self._epochs.get(row) != epoch or self.runner.committed[row] < start:
                # The drafter does not receive the tokens of a cached prefix, so the KV row lacks them: `begin` fills
                # the row from the drafter's pages.
                self.runner.begin(row, start, batch.block_tables[slots[index : index + 1]])
                self._epochs[row] = epoch
        ids, taps = batch.decode_token_ids.contiguous(), batch.decode_taps.to(self.dtype).contiguous()
        steps, rotated = torch.arange(ids.shape[1], device=self.device), None
        if batch.position_deltas is not None:
            rotated = (batch.decode_positions + batch.position_deltas[slots])[:, None] + steps
        self._keep(slots, self.runner.accept(KnownPairs(kv_rows, starts, counts, ids, taps, rotated)))
        self._keep_pages(batch, slots, batch.decode_positions, steps, steps < batch.decode_num_tokens[:, None])

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Grow a tree per proposal slot; see `Drafter.propose`."""
        kv_rows, slots = self._rows(batch.proposal_slots.tolist())
        roots = self.growth.roots(batch, slots)
        starts = (roots.positions[0] - 1).tolist()
        tree = _GrowingTree(self, kv_rows, starts, self._hidden[slots][:, None], roots.position_deltas)
        return self.growth.grow(roots, self._logits[slots][:, None], tree.expand, batch.growth_rules)

    def _prefill(self, batch: DraftBatch) -> None:
        """Commits chunks one after another, each in as many passes as the engine's input length requires."""
        if not batch.chunk_slots:
            return
        most, offset = self.config.limits.max_input_len, 0
        kv_rows, slots = self._rows(batch.chunk_slots)
        rotated, shown = self._media(batch)
        for index, (start, length) in enumerate(zip(batch.chunk_positions, batch.chunk_lens, strict=True)):
            slot = slots[index : index + 1]
            self.runner.begin(kv_rows[index], start, batch.block_tables[slot])
            for begin in range(0, length, most):
                count = min(most, length - begin)
                pairs = slice(offset + begin, offset + begin + count)
                ids, taps = batch.chunk_next_token_ids[pairs][None], batch.chunk_taps[pairs][None]
                known = KnownPairs(
                    [kv_rows[index]],
                    [start + begin],
                    [count],
                    ids,
                    taps.to(self.dtype).contiguous(),
                    None if rotated is None else rotated[..., pairs][None],
                    None if shown is None else (shown[0][pairs][None], shown[1][pairs][None]),
                )
                output = self.runner.prefill(known)
            self._keep(slot, output)
            self._keep_pages(batch, slot, slot.new_tensor([start]), torch.arange(length, device=self.device))
            offset += length

    def _media(self, batch: DraftBatch) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """RoPE positions and image inputs of a batch's chunks, concatenated.

        Returns:
            The RoPE positions from `DraftBatch.chunk_rotations`, or None if they equal the cache positions; and the
            image inputs, which are `KnownPairs.shown` without the dimension num_seqs.
        """
        media, rotated = batch.chunk_inputs, None
        if media is not None or batch.position_deltas is not None:
            chunks = zip(batch.chunk_positions, batch.chunk_lens, strict=True)
            stored = [torch.arange(start, start + length, device=self.device) for start, length in chunks]
            rotated = batch.chunk_rotations(stored)
        width = self.config.media_width
        if media is None or not width or not len(media.shown) or media.embeddings.shape[1] != width:
            return rotated, None
        return rotated, (media.shown > 0, media.embeddings.to(self.dtype))

    def _keep(self, slots: Tensor, output: DraftOutput) -> None:
        self._hidden.index_copy_(0, slots, output.hidden)
        self._logits.index_copy_(0, slots, output.logits)

    def _rows(self, slots: list[int]) -> tuple[list[int], Tensor]:
        """KV rows of slots, and the slots as a tensor on the device."""
        return [slot + FIRST_ROW for slot in slots], upload(slots, self.device)

    def _keep_pages(
        self, batch: DraftBatch, slots: Tensor, starts: Tensor, steps: Tensor, counted: Tensor | None = None
    ) -> None:
        """Copies the KV at each sequence's committed positions, start + `steps`, from rows to pages; `counted` is False
        for padding.
        """
        kv = self.runner.kv
        if kv.pages:
            positions = starts[:, None] + steps
            mapping = slot_mapping(batch.block_tables[slots], positions, kv.page_shape.block_size, counted)
            kv.keep(slots + FIRST_ROW, starts, mapping)

    def _make_room(self, num_rows: int, pages: Pages, max_path: int) -> None:
        old = self.runner
        if old is not None and old.kv.num_rows >= num_rows and old.kv.page_shape.num_blocks >= pages.num_blocks:
            return
        kv = LinearKV(self.config.layers, num_rows, self.config.limits.capacity, self.dtype, self.device, pages)
        runner = self.runner_kind(self.session, self.config, kv, self._graph_device)
        if old is not None:
            kv.take_over(old.kv)
            runner.committed[: old.kv.num_rows] = old.committed
        if self._graph_device is not None:
            runner.capture(self.tree_size, self.growth.top_k, max_path)
        self.runner = runner


class _GrowingTree:
    """The trees that one call of `propose` grows, padded to the full size; each proposal runs all nodes again."""

    def __init__(
        self,
        drafter: EngineDrafter,
        kv_rows: list[int],
        starts: list[int],
        hidden: Tensor,
        deltas: Tensor | None,
    ) -> None:
        num_seqs, size, device = len(kv_rows), drafter.tree_size, drafter.device
        self._runner, self._hidden = drafter.runner, hidden
        # Padding nodes see themselves, because a row that sees no key would give NaN.
        own = torch.eye(size, dtype=torch.bool, device=device)
        self._tree = DraftedTree(
            kv_rows,
            starts,
            token_ids=torch.zeros(num_seqs, size, dtype=torch.int64, device=device),
            draft_hidden=hidden.new_zeros(num_seqs, size, hidden.shape[2]),
            depths=torch.arange(size, device=device) // drafter.growth.top_k,
            visible=own.repeat(num_seqs, 1, 1),
            deltas=deltas,
        )

    def expand(self, level: Level) -> Tensor:
        """Runs the trees, and returns the logits of the token after each node of a level."""
        tree, width = self._tree, level.token_ids.shape[1]
        now, so_far = slice((level.depth - 1) * width, level.depth * width), level.depth * width
        parents = self._hidden if level.visible is None else of_parents(self._hidden, level)
        tree.token_ids[:, now], tree.draft_hidden[:, now] = level.token_ids, parents
        tree.visible[:, now, :so_far] = True if level.visible is None else level.visible
        selected = torch.arange(now.start, now.stop, device=tree.depths.device).repeat(len(tree.kv_rows), 1)
        output = self._runner.proposal(tree, selected)
        self._hidden = output.hidden
        return output.logits
