"""A model of the Llama kind on CPUs whose layers are all of one stack: its loop over them is one step.

Transformers' work around each module takes longer than small layers do, and making its outputs a tenth of a
millisecond, whatever the model's size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows
from wingbeat.runtime.verifier.model import LayerTaps

_STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotation that depend on the position alone, not on how long a text is."""
_MOST_ROTATIONS = 1 << 14
"""Positions whose rotations are kept."""
KNOWN_DECODERS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}Model"
    for family, name in {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}.items()
)
"""Their code embeds tokens, hands what a layer leaves to the next one, and norms what the last one leaves."""


class KeptRotations:
    """Cosines and sines of the positions that occur, as one model's module computes them."""

    def __init__(self) -> None:
        self._table: tuple[Tensor, Tensor] | None = None

    def take(self, module: nn.Module, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[1, num_rows, rotated size] each, of positions [1, num_rows]: what the module says, bit for bit."""
        end = int(positions.max()) + 1
        if module.rope_type not in _STEADY_ROPES or end > _MOST_ROTATIONS:
            return module(hidden, position_ids=positions)
        # Read once, as another thread's engine may have the same model.
        table = self._table
        if table is None or table[0].dtype != hidden.dtype or len(table[0]) < end:
            every = torch.arange(1 << (end - 1).bit_length(), device=positions.device)
            self._table = table = tuple(part[0] for part in module(hidden, position_ids=every[None]))
        cos, sin = table
        return cos[positions[0]][None], sin[positions[0]][None]


class StackedDecoder(nn.Module):
    """A forward that a known decoder has before its own class's. Weights, names and submodules stay."""

    _rotations: KeptRotations

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As the decoder's own class, whose code runs where the batch is not ours, or somebody looks at its layers."""
        rows: Rows | None = kwargs.get(ROWS_KEYWORD)
        if rows is None or not self.is_one_step(rows):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return BaseModelOutputWithPast(last_hidden_state=self.run(hidden, position_ids, rows))

    def is_one_step(self, rows: Rows) -> bool:
        """Whether these rows and the layers are such that the loop may be one step."""
        layers = self.layers._modules.values()
        return rows.packed is not None and all(map(_is_plain, layers)) and next(iter(layers)).stack.fits(rows)

    def run(self, hidden: Tensor, position_ids: Tensor, rows: Rows) -> Tensor:
        """Input of the output matrix, of embeddings [1, num_tokens, hidden_size] of rows of one step."""
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
    """[1, num_rows, vocab_size]"""


class StackedCausalLM(nn.Module):
    """A forward that a known causal LM around a `StackedDecoder` has before its own class's."""

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
        """As the model's own class, whose code runs where more is given than rows of tokens, or somebody looks at its
        decoder."""
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
    """Whether a layer is of its stack, runs as its class says, and nothing but taps looks at what enters it."""
    changed = "forward" in layer.__dict__ or layer._forward_hooks
    return "_stack" in layer.__dict__ and not changed and _only_taps(layer._forward_pre_hooks)


def _is_plain_decoder(decoder: nn.Module) -> bool:
    """Whether a decoder runs as its class says, and nothing but taps looks at what it leaves."""
    changed = "forward" in decoder.__dict__ or decoder._forward_pre_hooks
    return not changed and _only_taps(decoder._forward_hooks)


def join_model(model: nn.Module, layers: nn.ModuleList) -> None:
    """Let a known decoder's loop over its layers be one step, where all of them are of one stack; and a known causal
    LM around it go straight from tokens to logits."""
    decoder = next((module for module in model.modules() if layers in list(module.children())), None)
    joined = all(isinstance(layer, CpuLayer) and layer.stack is not None for layer in layers)
    if not joined or _name(decoder) not in KNOWN_DECODERS or len(layers) != decoder.config.num_hidden_layers:
        return
    is_known = _name(model).endswith("ForCausalLM") and _name(model).replace("ForCausalLM", "Model") == _name(decoder)
    # Other packages put functions of their own in the place of a class's.
    if type(decoder).forward.__module__ == type(decoder).__module__:
        _put_before(decoder, StackedDecoder)
        decoder.__dict__["_rotations"] = KeptRotations()
        if is_known and type(model).forward.__module__ == type(model).__module__:
            _put_before(model, StackedCausalLM)


def _name(module: nn.Module | None) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _put_before(module: nn.Module, first: type[nn.Module]) -> None:
    kind = type(module)
    # transformers looks into the file of a model's class, and keeps what it knows of classes under their names.
    module.__class__ = type(
        kind.__name__, (first, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
