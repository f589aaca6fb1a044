"""The verifier as an exportable graph: transformers' modeling code over linear KV, one cache row per sequence.

Prefill, verify and plain decoding use this graph, each with its own shapes. The keys and values of input row j of a
sequence are stored in the sequence's cache row, at position start + j. A mask selects the keys that each input row
sees.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from wingbeat.runtime.fused.speed_up import FUNCTION_NAME, Rope
from wingbeat.runtime.tensorrt.engine_config import EngineEncoder
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import shown_names
from wingbeat.runtime.tensorrt.more_inputs import MoreInputs
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME, WINDOW_ATTRIBUTE
from wingbeat.runtime.verifier.layers.linears import PackableLinear
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import LayerTaps
from wingbeat.runtime.verifier_errors import UnsupportedModelError

GRAPH_ATTENTION_NAME = "wingbeat_graph"
_KEYWORD = "wingbeat_graph_pass"
NUM_PLAIN_INPUTS = 4
"""Number of inputs before the masks."""
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _GraphPass(NamedTuple):
    """Inputs of the attention function in addition to q, k and v."""

    ops: GraphOps
    start: Tensor
    masks: dict[int, Tensor]
    """Maps each sliding window in tokens to its mask, bool [batch, 1, rows, capacity]. Key 0 holds the mask of layers
    without a window.
    """
    caches: list[tuple[Tensor, Tensor]]
    written: dict[int, tuple[Tensor, Tensor]]
    """Key and value cache by layer, including the keys and values of this pass."""


class BaseGraph(nn.Module):
    """A loaded causal LM in the form to be exported.

    Args:
        loaded: the model.
        tap_layers: see `LayerTaps`; if empty, the graph has no output `hidden_states`.
        ops: operators of the export.
        more: optional graph inputs that a runtime part adds; None if there are none.
        encoder: vision or audio encoder of the model; None if the model takes no media.

    Raises:
        UnsupportedModelError: the model has a feature that this backend does not support; the message is one line that
            names the feature.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tap_layers: tuple[int, ...],
        ops: GraphOps,
        more: MoreInputs | None = None,
        encoder: EngineEncoder | None = None,
    ) -> None:
        super().__init__()
        check_exportable(loaded)
        self.model = loaded.model
        self.ops = ops
        self.windows = loaded.windows
        self.num_layers = len(loaded.layers)
        self._taps = LayerTaps(loaded.model, loaded.decoder_layers, tap_layers)
        self._rows: list[Tensor] = []
        self._more = None if more is None else more.trace(loaded.model)
        self._num_more = 0 if more is None else len(more.specs(loaded.dtype))
        self.encoder = encoder
        self._num_shown = 0 if encoder is None else 1 + len(shown_names(encoder))
        self._deep: list[Tensor] = []
        deep = loaded.decoder_layers[: 0 if encoder is None else encoder.num_deep]
        self._deep_hooks = [layer.register_forward_hook(self._adding(index)) for index, layer in enumerate(deep)]
        head = loaded.model.get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._choose_rows)

    def forward(
        self,
        input_ids: Tensor,
        attention_pos_id: Tensor,
        kvcache_start_index: Tensor,
        last_token_ids: Tensor,
        others: list[Tensor],
    ) -> list[Tensor]:
        """Run the graph.

        Args:
            input_ids: int64 [batch, rows].
            attention_pos_id: int64 [batch, rows], logical positions; or [batch, 3, rows], RoPE positions on three axes.
            kvcache_start_index: int64 [batch], cache position of the first row of each sequence.
            last_token_ids: int64 [batch, selected], rows whose logits are computed.
            others: four groups, in this order. First, one mask for each of `windows`. Second, for models that take
                media, a mask of rows with media embeddings, bool [batch, rows], and the inputs of `shown_names`.
                Third, the optional inputs of a runtime part, in the order of `TracedInputs.enter`. Fourth, the key and
                value cache of each layer in turn, [batch, kv_heads, capacity, dim].

        Returns:
            logits [batch, selected, vocab_size], taps [batch, rows, taps_size] if there are any, and the caches.
        """
        counts = (len(self.windows), self._num_shown, self._num_more, 2 * self.num_layers)
        ends = list(accumulate(counts, initial=0))
        attention_masks, shown, more, caches = (others[begin:end] for begin, end in pairwise(ends))
        self._taps.clear()
        self._rows[:] = [last_token_ids]
        if self._more is not None:
            self._more.enter(more)
        pairs = list(zip(caches[::2], caches[1::2], strict=True))
        masks = dict(zip(self.windows, attention_masks, strict=True))
        now = _GraphPass(self.ops, kvcache_start_index, masks, pairs, {})
        given: dict[str, Tensor] = {"input_ids": input_ids}
        if self.encoder is not None:
            rows, embeddings, *self._deep[:] = shown
            own = self.model.get_input_embeddings()(input_ids)
            given = {"inputs_embeds": torch.where(rows[..., None], embeddings, own)}
            attention_pos_id = attention_pos_id.transpose(0, 1) if self.encoder.num_axes else attention_pos_id
        output = self.model(**given, position_ids=attention_pos_id, use_cache=False, **{_KEYWORD: now})
        taps = self._taps.drain()
        written = [part for layer in range(self.num_layers) for part in now.written[layer]]
        return [output.logits, *([torch.cat(taps, dim=-1)] if taps else []), *written]

    def arguments(self, inputs: list) -> tuple:
        """Groups a flat list with one entry per graph input, in order, into the arguments of `forward`."""
        # The masks, the optional inputs and the caches form a single list. With several lists, torch would leave free
        # dimensions unnamed if one of the lists is empty.
        return *inputs[:NUM_PLAIN_INPUTS], inputs[NUM_PLAIN_INPUTS:]

    def release(self) -> None:
        """Remove the hooks from the model."""
        self._taps.remove()
        for hook in (self._hook, *self._deep_hooks):
            hook.remove()
        if self._more is not None:
            self._more.remove()

    def _adding(self, index: int) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
        return lambda module, args, hidden: hidden + self._deep[index]

    def _choose_rows(self, module: nn.Module, args: tuple) -> tuple:
        hidden = args[0]
        rows = self._rows[0][..., None].expand(-1, -1, hidden.shape[-1])
        return (hidden.gather(1, rows), *args[1:])


def check_exportable(loaded: LoadedModel) -> None:
    """Raise an error for models whose results in a graph would be wrong.

    Raises:
        UnsupportedModelError: the model has a feature that graphs do not support; the message is one line that names
            the feature.
    """
    if loaded.keeps_states:
        raise UnsupportedModelError(
            f"{loaded.name} has recurrent states: TensorRT engines support attention layers only"
        )
    config = loaded.model.config.get_text_config()
    for name in _EXPERT_FIELDS:
        if (getattr(config, name, None) or 0) > 1:
            raise UnsupportedModelError(
                f"{loaded.name} is a mixture of experts ({name}): TensorRT engines support dense models only"
            )


def graph_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over the caches of a `BaseGraph`; query, key, value [batch, heads, rows, dim].

    Raises:
        UnsupportedModelError: the layer has attention sinks.
    """
    if s_aux is not None:
        raise UnsupportedModelError("attention sinks are not supported: the ONNX operator Attention has none")
    now: _GraphPass = kwargs[_KEYWORD]
    layer = module.layer_idx
    window = module.__dict__.get(WINDOW_ATTRIBUTE, sliding_window) or 0
    key_cache, value_cache = now.caches[layer]
    key_cache, value_cache = (
        now.ops.scatter(cache, new, now.start) for cache, new in ((key_cache, key), (value_cache, value))
    )
    now.written[layer] = key_cache, value_cache
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = now.ops.attention(query, key_cache, value_cache, now.masks[window], scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def as_graph(loaded: LoadedModel, ops: GraphOps) -> Iterator[None]:
    """In this context the model uses `graph_attention` and the graph's RoPE operator."""
    ropes = [rope for module in loaded.model.modules() if (rope := _rope_of(module)) is not None]
    originals = [rope.original for rope in ropes]
    # `PackableLinear` layers multiply by a view of their weights. An export would store this view as a second copy of
    # the weights, so the layers are plain `nn.Linear` layers during the export.
    linears = {module: type(module) for module in loaded.model.modules() if isinstance(module, PackableLinear)}

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)

    try:
        loaded.model.set_attn_implementation(GRAPH_ATTENTION_NAME)
        for rope in ropes:
            # Replacing `original` suffices, because `Rope` calls `original` while torch compiles or exports, and `Rope`
            # wraps only functions that were verified to compute rotate-half RoPE.
            rope.original = rotate
        for linear in linears:
            linear.unpack()
            linear.__class__ = nn.Linear
        yield
    finally:
        loaded.model.set_attn_implementation(ATTENTION_NAME)
        for rope, original in zip(ropes, originals, strict=True):
            rope.original = original
        for linear, kind in linears.items():
            linear.__class__ = kind


def _rope_of(module: nn.Module) -> Rope | None:
    rope = getattr(type(module).forward, "__globals__", {}).get(FUNCTION_NAME)
    return rope if isinstance(rope, Rope) else None


AttentionInterface.register(GRAPH_ATTENTION_NAME, graph_attention)
