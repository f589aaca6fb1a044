"""Drafting with the draft engine: the trees of `EagleDrafter`, each level one proposal of the whole tree so far."""

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterNeeds
from wingbeat.runtime.drafters.draft_pool import check_tree_shape, grown
from wingbeat.runtime.drafters.growth import Growth, Level, of_parents
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.tensorrt.draft_runner import DraftOutput, DraftRunner
from wingbeat.runtime.tensorrt.engine_config import DraftEngineConfig
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.session import EngineSession


class EngineDrafter(Drafter):
    """The draft engine and its linear KV: a sequence's row is its verifier's block.

    Args:
        session: of `eagle_draft`.
        draft_token_ids: int64 [draft_vocab_size], the target's id of each draft id.
        graph_device: captures proposal and accept; None runs them eagerly.

    Raises:
        ValueError: the trees are larger than the engine's.
    """

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
        self.growth = Growth(speculation, draft_token_ids.to(self.device))
        self.top_k, self.max_depth = speculation.draft_top_k, speculation.max_path - 1
        self.tree_size = (self.max_depth - 1) * self.top_k
        if self.tree_size > config.limits.max_draft_tree_size:
            raise ValueError(
                f"draft_steps and draft_top_k grow {self.tree_size} nodes: the engine was built with "
                f"max_draft_tree_size {config.limits.max_draft_tree_size}"
            )
        capacity, layer = config.limits.capacity, config.layer
        token_bytes = layer.kv_size * self.dtype.itemsize
        self.needs = DrafterNeeds(config.tap_layers, keeps_context=True, token_bytes=token_bytes)
        self._new_kv = lambda rows: LinearKV([layer], rows, capacity, self.dtype, self.device)
        self._graph_device = graph_device
        self.runner: DraftRunner | None = None
        self._hidden = self._logits = torch.zeros(0)
        """By slot: the head's output at the last committed pair."""

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        config = self.config
        if spec.taps_size != config.base_model_hidden_size:
            raise ValueError(
                f"the verifier sends taps of size {spec.taps_size}: this engine needs {config.base_model_hidden_size}"
            )
        check_tree_shape(spec, self.speculation.num_nodes, self.speculation.max_path)
        if spec.max_blocks_per_seq != 1:
            raise ValueError(f"a sequence has {spec.max_blocks_per_seq} KV blocks: linear KV is one block a sequence")
        longest = config.limits.max_kv_cache_capacity
        if spec.max_model_len > longest:
            raise ValueError(f"max_model_len is {spec.max_model_len}: the engine has max_kv_cache_capacity {longest}")
        with torch.inference_mode(mode=False):
            self._hidden = grown(self._hidden, (num_slots, config.draft_model_hidden_size), self.dtype, self.device)
            self._logits = grown(self._logits, (num_slots, config.draft_vocab_size), self.dtype, self.device)
            self._make_room(num_blocks, spec.max_path)

    def commit(self, batch: DraftBatch) -> None:
        """Prefill of chunks, accept of decodes; see `Drafter.commit`."""
        begin = 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            self._prefill(batch, slot, start, slice(begin, begin + length))
            begin += length
        if not batch.decode_slots.numel():
            return
        slots = batch.decode_slots.tolist()
        output = self.runner.accept(
            self._rows(batch, slots),
            batch.decode_token_ids.contiguous(),
            batch.decode_taps.to(self.dtype).contiguous(),
            batch.decode_positions.contiguous(),
            batch.decode_num_tokens,
        )
        self._keep(slots, output)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Grow a tree per proposal slot; see `Drafter.propose`."""
        slots = batch.proposal_slots.tolist()
        rows = self._rows(batch, slots)
        roots = self.growth.roots(batch, upload(slots, self.device))
        tree = _GrowingTree(self, rows, roots.positions[:, 0] - 1, self._hidden[slots][:, None])
        return self.growth.grow(roots, self._logits[slots][:, None], tree.expand, batch.growth_rules)

    def _prefill(self, batch: DraftBatch, slot: int, start: int, pairs: slice) -> None:
        """A chunk, in as many passes as the engine's input length asks for."""
        rows, most = self._rows(batch, [slot]), self.config.limits.max_input_len
        for begin in range(pairs.start, pairs.stop, most):
            part = slice(begin, min(begin + most, pairs.stop))
            starts = upload([start + begin - pairs.start], self.device)
            lengths = upload([part.stop - part.start], self.device)
            ids, taps = batch.chunk_next_token_ids[part][None], batch.chunk_taps[part][None]
            output = self.runner.prefill(rows, ids.contiguous(), taps.to(self.dtype).contiguous(), starts, lengths)
        self._keep([slot], output)

    def _keep(self, slots: list[int], output: DraftOutput) -> None:
        self._hidden[slots], self._logits[slots] = output.hidden, output.logits

    def _rows(self, batch: DraftBatch, slots: list[int]) -> list[int]:
        """KV rows of sequences; on an accelerator this waits for their block tables."""
        return batch.block_tables[slots, 0].tolist()

    def _make_room(self, num_rows: int, max_path: int) -> None:
        old = self.runner
        if old is not None and old.kv.num_blocks >= num_rows:
            return
        kv = self._new_kv(num_rows)
        runner = DraftRunner(self.session, self.config, kv, self._graph_device)
        if old is not None:
            for new_pair, old_pair in zip(kv.layers, old.kv.layers, strict=True):
                for new, part in zip(new_pair, old_pair, strict=True):
                    new[: len(part)] = part
            runner.committed[: len(old.committed)] = old.committed
        if self._graph_device is not None:
            runner.capture(max(self.tree_size, 1), self.top_k, max_path)
        self.runner = runner


class _GrowingTree:
    """The rows of one growth, padded to the largest tree: a proposal looks at all of them."""

    def __init__(self, drafter: EngineDrafter, rows: list[int], starts: Tensor, hidden: Tensor) -> None:
        self.drafter, self.rows, self.starts = drafter, rows, starts.contiguous()
        self.hidden = hidden
        num_seqs, size, width = len(rows), drafter.tree_size, drafter.top_k
        device = drafter.device
        self.token_ids = torch.zeros(num_seqs, size, dtype=torch.int64, device=device)
        self.parents_hidden = torch.zeros(num_seqs, size, hidden.shape[2], dtype=hidden.dtype, device=device)
        self.depths = (torch.arange(size, device=device) // max(width, 1)).expand(num_seqs, -1).contiguous()
        # Padding sees itself, so that no row sees nothing.
        self.visible = torch.eye(size, dtype=torch.bool, device=device).expand(num_seqs, -1, -1).clone()

    def expand(self, level: Level) -> Tensor:
        """Logits of what follows each node of a level."""
        width = level.token_ids.shape[1]
        now, so_far = slice((level.depth - 1) * width, level.depth * width), level.depth * width
        parents = self.hidden if level.visible is None else of_parents(self.hidden, level)
        self.token_ids[:, now], self.parents_hidden[:, now] = level.token_ids, parents
        self.visible[:, now, :so_far] = True if level.visible is None else level.visible
        selected = torch.arange(now.start, now.stop, device=self.starts.device).expand(len(self.rows), -1).contiguous()
        output = self.drafter.runner.proposal(
            self.rows, self.token_ids, self.parents_hidden, self.depths, self.visible, self.starts, selected
        )
        self.hidden = output.hidden
        return output.logits
