"""Runs a Llama-like model on CPUs without its per-layer loop, if all its layers are in one stack.

This avoids transformers' overhead. For small layers the overhead per module exceeds the time of the layer, and creating
the model's output objects takes a tenth of a millisecond for a model of any size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows
from wingbeat.runtime.verifier.layers.same_code import known_as
from wingbeat.runtime.verifier.model import LayerTaps

_STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE types whose angles depend only on the position, not on the text's length."""
_MOST_ROTATIONS = 1 << 14
"""Number of positions whose cosines and sines are cached."""
KNOWN_DECODERS, KNOWN_CAUSAL_LMS = (
    frozenset(
        f"transformers.models.{family}.modeling_{family}.{name}{suffix}"
        for family, name in {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}.items()
    )
    for suffix in ("Model", "ForCausalLM")
)
"""Class names of decoders whose forward only embeds tokens, passes each layer's output to the next layer, and
normalises the last output; and of models that multiply the result by the output head alone.
"""


class KeptRotations:
    """Cached cosines and sines of positions, as a model's rotary module computes them."""

    def __init__(self) -> None:
        self._table: tuple[Tensor, Tensor] | None = None

    def take(self, module: nn.Module, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [1, num_rows, size] of positions [1, num_rows], bit-equal to the module's."""
        end = int(positions.max()) + 1
        if module.rope_type not in _STEADY_ROPES or end > _MOST_ROTATIONS:
            return module(hidden, position_ids=positions)
        # The attribute is read only once, because an engine in another thread may share the model and replace the
        # attribute.
        table = self._table
        if table is None or table[0].dtype != hidden.dtype or len(table[0]) < end:
            every = torch.arange(1 << (end - 1).bit_length(), device=positions.device)
            self._table = table = tuple(part[0] for part in module(hidden, position_ids=every[None]))
        cos, sin = table
        return cos[positions[0]][None], sin[positions[0]][None]


class StackedDecoder(nn.Module):
    """Base class that a known decoder has in front of its own class. The forward method runs all layers as one step.

    Weights, parameter names and submodules stay as they are.
    """

    _rotations: KeptRotations

    def forward(
        self,
        input_ids: Tensor | None = None,
        *args: Any,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Runs all layers in one step. Runs transformers' code if a layer has hooks, or if the call does not come from
        Wingbeat's engine.
        """
        rows: Rows | None = kwargs.get(ROWS_KEYWORD)
        if rows is None or not self.is_one_step(rows):
            return super().forward(input_ids, *args, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return BaseModelOutputWithPast(last_hidden_state=self.run(hidden, position_ids, rows))

    def is_one_step(self, rows: Rows) -> bool:
        """Whether these rows and the state of the layers allow all layers to run as one step."""
        layers = self.layers._modules.values()
        return rows.packed is not None and all(map(_is_plain, layers)) and next(iter(layers)).stack.fits(rows)

    def run(self, hidden: Tensor, position_ids: Tensor, rows: Rows) -> Tensor:
        """Runs all layers on embeddings [1, num_tokens, hidden_size]; returns the input of the output head."""
        rotations = self._rotations.take(self.rotary_emb, hidden, position_ids)
        left: list[Tensor] = []
        for index, layer in enumerate(self.layers._modules.values()):
            _tap(layer._forward_pre_hooks, hidden)
            if not left:
                left = layer.__dict__["_stack"].run_on(index, hidden, rotations, rows)
            hidden = left.pop(0)
        return self.norm(hidden)


class Logits(NamedTuple):
    """Output of a `StackedCausalLM`."""

    logits: Tensor
    """Logits [1, num_rows, vocab_size]."""


class StackedCausalLM(nn.Module):
    """Base class that a known causal LM with a `StackedDecoder` has in front of its own class. The forward method
    creates none of transformers' output objects.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Computes logits from tokens in one step. Runs transformers' code if there are other arguments, or if the
        decoder has hooks.
        """
        decoder, rows = self.model, kwargs.get(ROWS_KEYWORD)
        plain = rows is not None and len(kwargs) == 1 and inputs_embeds is None and _is_plain_decoder(decoder)
        if not plain or not decoder.is_one_step(rows):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                labels=labels,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
        hidden = decoder.run(decoder.embed_tokens(input_ids), position_ids, rows)
        _tap(decoder._forward_hooks, hidden)
        return Logits(self.lm_head(hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]))


def _tap(hooks: Mapping[int, Any], hidden: Tensor) -> None:
    for tap in hooks.values():
        tap.__self__.keep(hidden)


def _only_taps(hooks: Mapping[int, Any]) -> bool:
    return not hooks or all(isinstance(getattr(hook, "__self__", None), LayerTaps) for hook in hooks.values())


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is in a stack, its forward was not replaced, and it has no hooks other than taps of its input."""
    changed = "forward" in layer.__dict__ or layer._forward_hooks
    return "_stack" in layer.__dict__ and not changed and _only_taps(layer._forward_pre_hooks)


def _is_plain_decoder(decoder: nn.Module) -> bool:
    """Whether a decoder's forward was not replaced, and it has no hooks other than taps of its output."""
    changed = "forward" in decoder.__dict__ or decoder._forward_pre_hooks
    return not changed and _only_taps(decoder._forward_hooks)


def join_model(model: nn.Module, layers: nn.ModuleList) -> None:
    """Makes a known decoder and causal LM run as one step, if one stack contains all layers."""
    decoder = next((module for module in model.modules() if layers in list(module.children())), None)
    joined = all(isinstance(layer, CpuLayer) and layer.stack is not None for layer in layers)
    known = decoder is not None and known_as(type(decoder), KNOWN_DECODERS)
    if not joined or not known or len(layers) != decoder.config.num_hidden_layers:
        return
    is_known = known_as(type(model), KNOWN_CAUSAL_LMS) is not None and getattr(model, "model", None) is decoder
    # A class whose forward another package has replaced is not changed.
    if type(decoder).forward.__module__ == type(decoder).__module__:
        _put_before(decoder, StackedDecoder)
        decoder.__dict__["_rotations"] = KeptRotations()
        if is_known and type(model).forward.__module__ == type(model).__module__:
            _put_before(model, StackedCausalLM)


def _put_before(module: nn.Module, first: type[nn.Module]) -> None:
    kind = type(module)
    # The new class has the name and module of the old class, because transformers uses them to find the class's source
    # file and its records.
    module.__class__ = type(
        kind.__name__, (first, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
