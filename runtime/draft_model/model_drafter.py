"""Drafts with an independent model: any causal LM, over its own paged KV.

Tokens have the verifier's ids everywhere except in `_forward`, where a model with another vocabulary reads and scores
its own tokens.

The KV of token j is stored at index j of the sequence's block table. A pair (position i, token i + 1) from the verifier
means that token i is committed. After a commit, the KV of all tokens but the newest is stored. The newest token is the
root of the next draft. The model runs the root only when that draft starts, because until then the block table may have
no block for the root. A prompt chunk runs the tokens at the chunk's positions, not the tokens one position later, as an
EAGLE head does. Otherwise the first token after a shared prefix would not be run, because no other sequence has run
this token.

Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318; trees as in EAGLE-2.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.decided_rows import DecidedRows
from wingbeat.runtime.drafters.draft_pool import DraftedRows, DraftPool
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter, graph_device_of
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.vocabulary import SharedTokens, VocabularyError, check_same_vocabulary
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.hugging_face import read_config
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Rows, Segment, joined
from wingbeat.runtime.verifier.loading.loader import LoadedModel, load_model
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier_errors import UnsupportedModelError

logger = logging.getLogger(__name__)


class ModelDrafter(StagedDrafter):
    """Drafter with a draft model and its KV.

    Args:
        loaded: the model, on the device to draft on.
        speculation: shape of the trees.
        vocab_size: vocabulary size of the verifier. Rows of the draft model's output matrix beyond this size are
            padding, and their tokens are never drafted.
        graph_device: see `StagedDrafter`.
        shared: the tokens that both vocabularies contain, if the vocabularies differ; None if model and verifier number
            their tokens in the same way.
    """

    reads_history = True

    def __init__(
        self,
        loaded: LoadedModel,
        speculation: SpeculationConfig,
        vocab_size: int | None = None,
        graph_device: GraphDevice | None = None,
        shared: SharedTokens | None = None,
    ) -> None:
        if loaded.keeps_states:
            raise UnsupportedModelError(
                f"{type(loaded.model).__name__}: draft model {loaded.name} has layers with recurrent state, which "
                "drafts would overwrite: use a model without such layers, or another kind of drafter"
            )
        self.model = VerifierModel(loaded)
        self.max_position = loaded.max_position_embeddings - 1
        self.name = loaded.name
        size = min(loaded.vocab_size, vocab_size or loaded.vocab_size)
        # The pool has rows for the root and for every expanded node.
        num_drafted = 1 + (speculation.max_path - 2) * speculation.draft_top_k
        pool = DraftPool(loaded.layers, num_drafted, loaded.dtype, loaded.device)
        self._shared = None if shared is None else shared.to(loaded.device)
        drafted = torch.arange(size, device=loaded.device) if self._shared is None else self._shared.target_ids
        growth = Growth(speculation, drafted, packed=True)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(tap_layers=(), keeps_context=True, token_bytes=pool.token_bytes)

    def _check_taps(self, spec: ChannelSpec) -> None:
        if spec.taps_size:
            raise ValueError(f"the verifier sends taps of size {spec.taps_size}: a draft model takes none")

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        super().resize(spec, num_slots, num_blocks)
        if spec.max_model_len > self.max_position + 1:
            logger.warning(
                "draft model %s supports %d positions, the verifier's sequences have up to %d: acceptance falls beyond",
                self.name,
                self.max_position + 1,
                spec.max_model_len,
            )

    def commit(self, batch: DraftBatch) -> None:
        """Runs the decided tokens; see `Drafter.commit`."""
        if self._stages is not None:
            super().commit(batch)
        elif batch.chunk_slots or batch.decode_slots.numel():
            self._advance(batch, batch.decode_slots.tolist(), [])

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """Runs decided tokens and roots in one pass, then the levels of the trees; see `Drafter.draft`."""
        proposals = batch.proposal_slots.tolist()
        if self._stages is not None or not proposals:
            return super().draft(batch)
        logits = self._advance(batch, batch.decode_slots.tolist(), proposals)
        roots = self.growth.roots(batch, upload(proposals, self.device))
        tables = self.pool.tables(self._tables(batch)[roots.slots], roots.positions[0] - 1)
        return self._grow_from(roots, logits, tables, batch.growth_rules)

    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Runs the tokens of a batch's prompt chunks."""
        self._advance(batch, [], [])

    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Runs the tokens of each decode whose KV is missing: the last token before the round, and the round's tokens
        except the newest.
        """
        token_ids = torch.cat([rows.first_token_ids[:, None], rows.token_ids[:, :-1]], dim=1)
        part = self._pass_rows(token_ids, rows.positions, rows.num_tokens, block_tables[rows.slots])
        self._forward([part], part.slot_mapping[:0])

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Runs the roots, then grows a tree from each."""
        context = roots.positions[0] - 1
        tables = self.pool.tables(block_tables[roots.slots], context)
        part = self._pass_rows(roots.token_ids[:, None], context, torch.ones_like(context), tables)
        return self._grow_from(roots, self._forward([part], None)[:, None], tables, rules)

    def _draft(self, rows: DecidedRows, roots: Roots, block_tables: Tensor) -> TokenTree:
        """Runs decided tokens and roots in one pass. If a sequence has a decode, the root comes after the decode's
        tokens in its row.
        """
        same = roots.slots[:, None] == rows.slots
        decode = same.to(torch.int64).argmax(dim=1)
        num_settled = rows.num_tokens[decode] * same.any(dim=1)
        token_ids = torch.cat([rows.first_token_ids[:, None], rows.token_ids], dim=1)[decode]
        token_ids = token_ids.scatter(1, num_settled[:, None], roots.token_ids[:, None])
        context = roots.positions[0] - 1
        tables = self.pool.tables(block_tables[roots.slots], context)
        part = self._pass_rows(token_ids, context - num_settled, num_settled + 1, tables)
        wanted = torch.arange(len(token_ids), device=self.device) * token_ids.shape[1] + num_settled
        return self._grow_from(roots, self._forward([part], wanted)[:, None], tables)

    def _advance(self, batch: DraftBatch, decodes: list[int], proposals: list[int]) -> Tensor:
        """Runs the model once over chunks, decodes and roots. Each layer stores the keys of all rows before it reads
        any keys, so rows of a pass can see each other.

        Args:
            batch: the batch.
            decodes: slots whose accepted tokens are run.
            proposals: slots whose roots are run; a slot's accepted tokens, if there are any, come before its root.

        Returns:
            Logits [num_proposals, 1, vocab_size] of the tokens after the roots.
        """
        rows = self._rows(batch, decodes, proposals) if decodes or proposals else None
        begin = 0 if rows is None else len(rows.pass_rows.slot_mapping)
        parts = [] if rows is None else [rows.pass_rows]
        parts += self._chunks(batch, begin)
        wanted = rows.roots if rows is not None else parts[0].slot_mapping[:0]
        return self._forward(parts, wanted)[:, None]

    def _rows(self, batch: DraftBatch, decodes: list[int], proposals: list[int]) -> "_Rows":
        """Builds a row of tokens for each slot: first the proposals in order, then the decodes without a proposal."""
        proposed, decode_of = set(proposals), {slot: index for index, slot in enumerate(decodes)}
        slots = proposals + [slot for slot in decodes if slot not in proposed]
        # For a slot without a decode the index is 0, which is the first decode's row, but none of that row's tokens is
        # counted for the slot.
        slot_ids, decode, decoding, rooted = upload(
            [
                slots,
                [decode_of.get(slot, 0) for slot in slots],
                [slot in decode_of for slot in slots],
                [slot in proposed for slot in slots],
            ],
            self.device,
        )
        lens = batch.committed_lens[slot_ids]
        num_accepted = torch.zeros_like(lens)
        width = 1
        if decodes:
            num_accepted = batch.decode_num_tokens[decode] * decoding
            width += batch.decode_token_ids.shape[1]
        starts = lens - 1 - num_accepted
        # Indices are clamped, because a round that ends a sequence may advance the sequence beyond its token history
        # before the host has processed the end.
        known = starts[:, None] + torch.arange(width, device=self.device)
        token_ids = batch.token_ids[slot_ids[:, None], known.clamp(0, batch.token_ids.shape[1] - 1)]
        tables = self.pool.tables(self._tables(batch)[slot_ids], lens - 1)
        last = torch.arange(len(proposals), device=self.device) * width + num_accepted[: len(proposals)]
        return _Rows(self._pass_rows(token_ids, starts, num_accepted + rooted, tables), last)

    def _pass_rows(self, token_ids: Tensor, starts: Tensor, num_counted: Tensor, tables: Tensor) -> Rows:
        """Builds the rows of one pass; the tokens of a request take consecutive positions.

        Args:
            token_ids: int64 [num_reqs, width].
            starts: int64 [num_reqs], position of each request's first token.
            num_counted: int64 [num_reqs], number of valid tokens of each request; the tokens after them are padding.
            tables: int64 [num_reqs, num_blocks], block tables.
        """
        steps = torch.arange(token_ids.shape[1], device=self.device)
        storage, counted = starts[:, None] + steps, steps < num_counted[:, None]
        segment = self.pool.causal_segment(0, storage, starts, tables)
        mapping = slot_mapping(tables, storage, self.pool.block_size, counted)
        token_ids = torch.where(counted, token_ids, 0)
        return self._flat(token_ids, storage, mapping, segment)

    def _flat(self, token_ids: Tensor, positions: Tensor, mapping: Tensor, segment: Segment) -> Rows:
        """Flattens [num_reqs, width] tokens, positions and slot mapping to the rows of one segment."""
        # Positions are clamped, because position embeddings may be a table of limited length. A draft token beyond the
        # table may then be a bad guess, but the lookup does not fail.
        positions = positions.reshape(1, -1).clamp(0, self.max_position)
        return Rows(token_ids.reshape(1, -1), positions, mapping.flatten(), [segment], self.pool.caches)

    def _tables(self, batch: DraftBatch) -> Tensor:
        """Block tables of all slots, shortened to the blocks of committed tokens."""
        return self.pool.table_columns(batch.block_tables, batch.max_committed_len - 1)

    def _chunks(self, batch: DraftBatch, begin: int) -> list[Rows]:
        """Rows of each chunk; every chunk is a segment of its own."""
        return [
            self._flat(
                batch.token_ids[chunk.slot, chunk.positions],
                chunk.positions,
                chunk.slot_mapping,
                self.pool.chunk_segment(chunk, begin),
            )
            for chunk in self.pool.chunks(batch)
        ]

    def _forward(self, parts: list[Rows], wanted: Tensor | None) -> Tensor:
        """Logits [num_wanted, num_drafted] of tokens that may be drafted, for the wanted rows of a flattened batch.

        Args:
            wanted: None means all rows.
        """
        rows, shared = joined(parts)._replace(logits_rows=wanted), self._shared
        if shared is None:
            return self.model(rows).logits[:, : len(self.growth.draft_token_ids)]
        rows = rows._replace(token_ids=shared.read(rows.token_ids, rows.positions))
        return self.model(rows).logits[:, shared.columns]

    def _grow_from(self, roots: Roots, logits: Tensor, tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Grows a tree from each root; the root was run before, and is stored as the first drafted row.

        Args:
            roots: the roots.
            logits: [num_proposals, 1, vocab_size].
            tables: int64 [num_proposals, num_blocks], private blocks included.
            rules: rules that stop growth early.
        """
        lens, num_levels = roots.positions[0], len(roots.positions) - 1
        drafted = DraftedRows(self.pool, tables, lens.contiguous(), num_levels, self.growth.top_k)

        def expand(level: Level) -> Tensor:
            mapping, segment = drafted.slot_mapping(level), drafted.segment(level)
            part = self._flat(level.token_ids, drafted.positions(level), mapping, segment)
            return self._forward([part], None).unflatten(0, level.token_ids.shape)

        return self.growth.grow(roots, logits, expand, rules)


class _Rows(NamedTuple):
    """Decodes and roots of a pass by slot; proposals come first."""

    pass_rows: Rows
    roots: Tensor
    """int64 [num_proposals]: flattened row of each root."""


def build_draft_model(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> Drafter:
    """Load a causal LM as the drafter of a verifier.

    Args:
        source: folder or GGUF file of the draft model.
        target: the verifier.
        speculation: shape of the trees.
        options: options of the drafter.

    Raises:
        FileNotFoundError: the source is not a checkpoint folder.
        VocabularyError: the draft model has other tokens than the verifier, and too few in common.
        UnsupportedModelError: the architecture cannot be run over a paged cache.
    """
    folder = checkpoint_folder(source)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"draft model {source} holds no config.json: give a Hugging Face checkpoint folder")
    config = read_config(folder)
    both, shared = (folder, config.get_text_config().vocab_size, target.path, target.vocab_size), None
    try:
        check_same_vocabulary(*both)
    except VocabularyError:
        if (shared := first_result("shared_tokens", *both)) is None:
            raise
    loaded = load_model(folder, options.dtype, torch.device(options.device))
    return ModelDrafter(loaded, speculation, target.vocab_size, graph_device_of(options, loaded.device), shared)
