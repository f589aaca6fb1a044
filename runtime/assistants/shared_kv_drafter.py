"""Drafts with a head that has no keys and values; its queries attend to the verifier's KV (Gemma 4's assistants).

Each layer of the head attends to the keys and values of one verifier layer: the last verifier layer that has the head
layer's type (full or sliding) and computes keys and values. With L committed tokens, positions 0..L - 2 are stored. The
queries of all drafted tokens have the same position, L - 1. No KV is stored for drafted tokens. The only thing that a
step passes on to the next step is a hidden state. The input of a step is cat[embedding of the latest token, hidden
state]; the first hidden state is the verifier's at position L - 2, after the final norm.

The head runs in another process than the verifier. The verifier therefore sends its keys and values with the taps, and
the drafter stores them under the verifier's block ids. As in transformers, a sliding layer sees the keys that are at
most sliding_window before the last position.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping, store_kv
from wingbeat.runtime.assistants.shared_kv_head import SharedKvHead, SharedMetadata, shared_attention_of, shared_layers
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.decided_rows import DecidedRows
from wingbeat.runtime.drafters.draft_pool import DraftPool, grown
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules, of_parents
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter, graph_device_of
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.files import read_tensors
from wingbeat.runtime.heads.load import CheckpointError
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.vocabulary import check_same_vocabulary
from wingbeat.runtime.hugging_face import read_config
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.round.rows import Segment


class SharedKvDrafter(StagedDrafter):
    """Drafter with a head over the verifier's keys and values.

    Args:
        head: the head, on the device to draft on.
        kv_layers: for each layer type of the head, the index of the verifier layer whose KV is read; ascending.
        layers: attention shapes of those layers, in the same order.
        speculation: shape of the trees.
        num_layers: number of layers of the verifier; as a tap index it means the output of the final norm.
        graph_device: see `StagedDrafter`.
    """

    def __init__(
        self,
        head: SharedKvHead,
        kv_layers: dict[str, int],
        layers: list[LayerAttention],
        speculation: SpeculationConfig,
        num_layers: int,
        graph_device: GraphDevice | None = None,
    ) -> None:
        self.head = head
        self.types = tuple(kv_layers)
        device, dtype = head.embedding.device, head.embedding.dtype
        self.hidden_size = head.embedding.shape[1]
        self.taps_size = self.hidden_size + sum(layer.kv_size for layer in layers)
        growth = Growth(speculation, torch.arange(head.lm_head.out_features, device=device))
        # The pool has no rows for drafted tokens, because no KV is stored for them.
        pool = DraftPool(layers, 0, dtype, device)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(
            (num_layers,), keeps_context=True, kv_layers=tuple(kv_layers.values()), token_bytes=pool.token_bytes
        )
        self._hidden = torch.zeros(0)

    def _check_taps(self, spec: ChannelSpec) -> None:
        if spec.taps_size != self.taps_size:
            raise ValueError(
                f"the verifier sends taps of size {spec.taps_size}: {self.taps_size} needed, its hidden states and the "
                f"keys and values of its layers {list(self.needs.kv_layers)}"
            )

    def _resize_state(self, num_rows: int) -> None:
        self._hidden = grown(self._hidden, (num_rows, self.hidden_size), self.dtype, self.device)

    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Stores the keys and values of the chunks, and each chunk's last hidden state."""
        for chunk in self.pool.chunks(batch):
            taps = batch.chunk_taps[None, chunk.rows]
            self._keep(taps, chunk.slot_mapping)
            self._hidden[chunk.slot] = taps[0, -1, : self.hidden_size]

    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Stores the keys and values of the valid columns of `rows`, and each sequence's last hidden state."""
        positions, counted = rows.spread()
        mapping = slot_mapping(block_tables[rows.slots], positions, self.pool.block_size, counted)
        self._keep(rows.taps, mapping)
        last = (rows.num_tokens - 1).clamp_min(0)
        hidden = rows.taps[torch.arange(len(last), device=self.device), last, : self.hidden_size]
        self._hidden[rows.ends] = hidden.to(self.dtype)

    def _keep(self, taps: Tensor, mapping: Tensor) -> None:
        """Stores the keys and values that taps [num_reqs, num_positions, taps_size] contain."""
        rows = taps.flatten(0, 1)[:, self.hidden_size :].to(self.dtype)
        parts = rows.split([layer.kv_size for layer in self.pool.layers], dim=1)
        for layer, part, cache in zip(self.pool.layers, parts, self.pool.caches, strict=True):
            key, value = part.split([layer.num_kv_heads * dim for dim in (layer.key_dim, layer.value_dim)], dim=1)
            shape = (layer.num_kv_heads, -1)
            store_kv(key.unflatten(1, shape), value.unflatten(1, shape), *cache, mapping.flatten())

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Grows a tree from each root; the queries of all its nodes have the same position."""
        lens, tables, hidden = roots.positions[0], block_tables[roots.slots], self._hidden[roots.slots]
        caches = dict(zip(self.types, self.pool.caches, strict=True))

        def run(token_ids: Tensor, inputs: Tensor) -> Tensor:
            nonlocal hidden
            width = token_ids.shape[1]
            metadata = SharedMetadata(caches, self._segment(lens, tables, width))
            positions = (lens - 1)[:, None].expand(-1, width).flatten()
            logits, out = self.head(token_ids.flatten(), inputs.flatten(0, 1), positions, metadata)
            hidden = out.unflatten(0, token_ids.shape)
            return logits.unflatten(0, token_ids.shape)

        def expand(level: Level) -> Tensor:
            return run(level.token_ids, of_parents(hidden, level))

        logits = run(roots.token_ids[:, None], hidden[:, None])
        return self.growth.grow(roots, logits, expand, rules)

    def _segment(self, lens: Tensor, tables: Tensor, width: int) -> Segment:
        """Segment of `width` queries per sequence. Each query sees the keys of positions 0..L - 2, as a causal row at
        position L - 2 does.
        """
        # A padding sequence has one token and no key. Its rows read a key of block 0 instead.
        last, tables = (lens - 2).clamp_min(0).repeat_interleave(width), tables.repeat_interleave(width, dim=0)
        return self.pool.causal_segment(0, last[:, None], last, tables)


def check_shared_kv(source: str | Path, target: TargetDescription) -> None:
    """Refuse an assistant of another verifier, from the two folders' configs and tokenizers.

    Raises:
        CheckpointError: the verifier is of another type or has another hidden size.
        VocabularyError: assistant and verifier number their tokens differently.
    """
    folder = Path(source)
    config = read_config(folder)
    if not target.config.model_type.startswith("gemma4"):
        raise CheckpointError(
            f"{source} is an assistant of Gemma 4: the verifier is of type {target.config.model_type}"
        )
    if config.backbone_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"backbone_hidden_size={config.backbone_hidden_size} differs from the target's {target.hidden_size}"
        )
    check_same_vocabulary(folder, config.get_text_config().vocab_size, target.path, target.vocab_size)


def build_shared_kv(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> SharedKvDrafter:
    """Load an assistant model as the drafter of its verifier.

    Args:
        source: folder of the assistant.
        target: the verifier.
        speculation: shape of the trees.
        options: options of the drafter.

    Raises:
        CheckpointError: the assistant cannot be read, or has other layers than its verifier needs; also the errors of
            `check_shared_kv`.
    """
    check_shared_kv(source, target)
    folder = Path(source)
    config = read_config(folder)
    text = config.get_text_config()
    kv_layers = shared_layers(text, target.config)
    clusters = (config.num_centroids, config.centroid_intermediate_top_k) if config.use_ordered_embeddings else ()
    with torch.device("meta"):
        head = SharedKvHead(text, config.backbone_hidden_size, *clusters)
    layers = shared_attention_of(head, text, target.config, kv_layers)
    device = torch.device(options.device)
    head.load(read_tensors(folder), options.dtype, device)
    embedding = target.embedding()
    if embedding is None:
        raise CheckpointError(f"{target.path} has no embedding to lend: its assistant has none of that width")
    head.lend(embedding.to(device, options.dtype), math.sqrt(target.hidden_size))
    return SharedKvDrafter(
        head, kv_layers, layers, speculation, target.num_layers, graph_device_of(options, head.embedding.device)
    )
