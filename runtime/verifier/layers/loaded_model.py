"""A verifier that has passed every check, with the extensions that runtime parts attached to it."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.pool import KVCache, LayerAttention, PoolMemory, block_bytes, kv_dtype
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.scheduling.scheduler import Seats
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.layers.division import WeightShards
from wingbeat.runtime.verifier.layers.linears import held_bytes
from wingbeat.runtime.verifier.layers.model_part import ModelPart, SpanReader
from wingbeat.runtime.verifier_errors import UnsupportedModelError

logger = logging.getLogger(__name__)


@dataclass
class LoadedModel:
    """A verifier that is ready for the model runner."""

    model: PreTrainedModel
    name: str
    layers: list[LayerAttention]
    decoder_layers: nn.ModuleList
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    """End-of-text ids within the vocabulary. Ids outside the vocabulary are left out: they are never generated, and
    token tables have no row for them."""
    parts: dict[str, ModelPart] = field(default_factory=dict)
    """Runtime parts attached to the model, by name."""
    deterministic: bool = False
    """Whether a row has the same bits whatever other rows are in its pass; every layer then runs on the runtime's own
    kernels."""
    eight_bits: bool = False
    """Whether the weights of linear layers are rounded to eight bits."""
    shards: WeightShards | None = None
    """Weight shards of this process; None if the process has the whole weights."""
    pool_memory: PoolMemory | None = None
    """Allocates keys and values; see `KVCache`."""
    takes: dict[str, str] = field(default_factory=dict)
    """State of each kind of media span for which the checkpoint has an encoder: `served`, or the reason why the kind is
    not served."""

    def __post_init__(self) -> None:
        outside = sorted(token_id for token_id in self.eos_token_ids if not 0 <= token_id < self.vocab_size)
        if outside:
            self.eos_token_ids -= frozenset(outside)
            logger.warning(
                "%s: eos_token_id names %s, outside the vocabulary of %d: ignored, because never generated",
                self.name,
                ", ".join(map(str, outside)),
                self.vocab_size,
            )

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and KV."""
        return next(self.model.parameters()).dtype

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of the output head's logits."""
        return torch.float32 if getattr(self.model.get_output_embeddings(), "wide", False) else self.dtype

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return held_bytes(self.model)

    def add(self, part: ModelPart) -> None:
        """Attaches a runtime part."""
        self.parts[part.name] = part

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep recurrent states, which cannot be rolled back."""
        return any(part.keeps_states for part in self.parts.values())

    @property
    def inner_linears(self) -> frozenset[nn.Module]:
        """Linear layers that process only some rows of a batch in a call, such as those of experts."""
        return frozenset().union(*(part.inner_linears for part in self.parts.values()))

    def limits(self, config: EngineConfig) -> EngineConfig:
        """Returns an engine's configuration, adjusted to the model; raises ValueError for unsupported settings."""
        for part in self.parts.values():
            config = part.limits(config, self.name)
        return config

    def seq_bytes(self) -> int:
        """Bytes that a running sequence needs besides keys and values."""
        return sum(part.seq_bytes() for part in self.parts.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes that parts hold on the device outside torch's allocator."""
        return sum(part.mapped_bytes for part in self.parts.values())

    def budget(self, config: EngineConfig, budget: int) -> tuple[int, EngineConfig]:
        """Returns the bytes of `budget` that are left for keys and values, and the adjusted configuration."""
        for part in self.parts.values():
            budget, config = part.budget(config, budget)
        return budget, config

    def block_bytes(self, config: EngineConfig) -> int:
        """Returns the bytes by which KV memory grows with each block."""
        size = block_bytes(self.layers, config.block_size, kv_dtype(config, self.dtype))
        for part in self.parts.values():
            size = part.block_bytes(config, size)
        return size

    def kv_bytes(self, config: EngineConfig) -> int:
        """Returns the bytes of KV memory of an engine with this configuration, a result of `fit_to_memory`."""
        fixed = sum(part.fixed_kv_bytes(config) for part in self.parts.values())
        return config.num_kv_blocks * self.block_bytes(config) + fixed

    def make_cache(self, config: EngineConfig) -> KVCache:
        """Creates the KV cache of an engine, for a result of `limits`; raises like `KVCache`."""
        found = (part.make_cache(config, self.pool_memory) for part in self.parts.values())
        cache = next((one for one in found if one is not None), None)
        return KVCache(self.layers, config, self.dtype, self.device, self.pool_memory) if cache is None else cache

    def manage_blocks(self, config: EngineConfig, cache: KVCache) -> BlockManager:
        """Creates the block manager, including the bookkeeping of what is kept for cached blocks beside their KV.

        `config` is a result of `limits`.
        """
        found = (part.beside(config, cache.num_blocks) for part in self.parts.values())
        beside = next((one for one in found if one is not None), cache.beside)
        return BlockManager(cache.num_blocks, config.block_size, config.enable_prefix_caching, beside)

    @property
    def computed_by(self) -> str:
        """Description of all settings that change the model's logits, such as int8 rounding.

        The text is empty if torch computes with unchanged weights.
        """
        return "".join(("int8" if self.eight_bits else "", *(part.computed_by for part in self.parts.values())))

    @property
    def own_features(self) -> tuple[Feature, ...]:
        """Features that this model adds to batches, in addition to the features of all models. None in this class."""
        return ()

    @property
    def seats(self) -> Seats | None:
        """Seats (such as memory for an adapter) that some requests need besides a slot; None if no request needs
        any."""
        return next((part.seats for part in self.parts.values() if part.seats is not None), None)

    def requests(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[str, str] | None:
        """Returns labels of the running and waiting requests for metrics; None if no part provides labels."""
        found = (part.requests(running, waiting) for part in self.parts.values())
        return next((labels for labels in found if labels is not None), None)

    @property
    def reader(self) -> SpanReader | None:
        """Part that reads media spans of prompts; None if the verifier serves no kind of span."""
        return next((part for part in self.parts.values() if isinstance(part, SpanReader)), None)

    def check_length(self, max_model_len: int) -> None:
        """Raises ValueError if the model has fewer than `max_model_len` positions."""
        if max_model_len > self.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {max_model_len}: {self.name} has {self.max_position_embeddings} positions"
            )

    def check(self, request: Request, most_at_once: int) -> None:
        """Raises ValueError for token ids outside the vocabulary, and for spans that `SpanReader.check` refuses."""
        request.check_token_ids(self.vocab_size)
        if not request.spans:
            return
        if (reader := self.reader) is None:
            kind = request.spans[0].kind
            raise ValueError(f"{kind} cannot be used: {self.takes.get(kind, 'the model does not accept this kind')}")
        reader.check(request, most_at_once)

    def channel_fields(self, embedding_width: int | None) -> dict[str, int]:
        """Returns fields of a `ChannelSpec`: the vocabulary size, and fields for media spans.

        Args:
            embedding_width: width of the embeddings that the drafter reads; None if the drafter keeps no context.
        """
        spec, reader = {"vocab_size": self.vocab_size}, self.reader
        if reader is None or embedding_width is None:
            return spec
        return spec | reader.channel_fields(embedding_width if embedding_width == self.hidden_size else 0)

    def part_figures(self) -> dict[str, dict[str, float]]:
        """Returns the parts' metrics, by part name; parts without metrics are left out."""
        return {name: figures for name, part in self.parts.items() if (figures := part.figures())}

    def part_seconds(self) -> dict[str, float]:
        """Returns the device seconds of the parts' stages, by stage."""
        return {stage: seconds for part in self.parts.values() for stage, seconds in part.seconds().items()}

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct sliding windows of the layers that have attention; 0 stands for layers without a window."""
        return tuple(sorted({layer.sliding_window or 0 for layer in self.layers if layer.num_heads}))


def features_of(
    loaded: LoadedModel, slots: SlotState, config: EngineConfig, blocks: BlockManager, cache: KVCache
) -> tuple[Feature, ...]:
    """Returns the features that an engine with this model adds to its batches."""
    found: list[Feature] = [*(feature(loaded) for feature in hooks("feature")), *loaded.own_features]
    own = (part.feature(slots, config, blocks, cache) for part in loaded.parts.values())
    found += [one for one in own if one is not None]
    return tuple(found)


def num_words(table: nn.Module) -> int:
    """Returns the number of rows of an embedding or output matrix, including rows held by other processes."""
    whole = getattr(table, "out_features", None) or getattr(table, "num_embeddings", None)
    return whole or len(table.weight)


def end_of_text_ids(model: PreTrainedModel) -> frozenset[int]:
    """Returns the end-of-text tokens of a model's generation config.

    If the generation config has none, returns those of the model's config.
    """
    generation = model.generation_config
    eos = None if generation is None else generation.eos_token_id
    eos = getattr(model.config.get_text_config(), "eos_token_id", None) if eos is None else eos
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)


def decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """Returns the decoder's layer list: the outermost ModuleList in which each member contains one attention module.

    Raises:
        UnsupportedModelError: the model has no such list.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            owners = [{getattr(part, "layer_idx", None) for part in layer.modules()} - {None} for layer in module]
            if all(owner == {index} for index, owner in enumerate(owners)):
                return module
    raise UnsupportedModelError("no list of its modules holds one attention per layer, which drafters tap by number")
