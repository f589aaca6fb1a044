"""The verifier's forward pass, from a flattened batch to logits of chosen rows and tapped hidden states."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from wingbeat.runtime.parts import hooks
from wingbeat.runtime.round.rows import ROWS_KEYWORD, ModelOutput, Rows, Segment
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.rows_alike import rows_alike


def taps_size(loaded: LoadedModel, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]) -> int:
    """Number of elements that are tapped per token: hidden states, followed by keys and values."""
    return len(tap_layers) * loaded.hidden_size + sum(loaded.layers[layer].kv_size for layer in kv_layers)


class LayerTaps:
    """Keeps the inputs (residual stream) of chosen layers (EAGLE-3 section 3.1).

    Args:
        layers: the decoder's layers, as `decoder_layers` finds them.
        tap_layers: layers whose *input* is tapped, ascending. An index equal to the number of layers selects the final
            norm's output, which is the input of the output head. An empty tuple taps nothing.

    Raises:
        ValueError: a tap layer does not exist.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, tap_layers: tuple[int, ...]) -> None:
        bad = [layer for layer in tap_layers if not 0 <= layer <= len(layers)]
        if bad:
            raise ValueError(
                f"tap_layers {bad} do not exist: {type(model).__name__} has layers 0..{len(layers) - 1}, and "
                f"{len(layers)} stands for the input of its output head"
            )
        self._taps: list[Tensor] = []
        self._hooks = [
            layers[layer].register_forward_pre_hook(self._tap, with_kwargs=True)
            for layer in tap_layers
            if layer < len(layers)
        ]
        if len(layers) in tap_layers:
            decoder = next(module for module in model.modules() if layers in list(module.children()))
            self._hooks.append(decoder.register_forward_hook(self._tap_output))

    def clear(self) -> None:
        """Drops taps of earlier passes; called before each pass."""
        self._taps = []

    def drain(self) -> list[Tensor]:
        """Returns and drops the taps since `clear`, lowest layers first; each is [batch, length, hidden_size]."""
        taps, self._taps = self._taps, []
        return taps

    def remove(self) -> None:
        """Removes the hooks from the model, because other objects may go on using the model."""
        for hook in self._hooks:
            hook.remove()

    def keep(self, hidden: Tensor) -> None:
        """Appends the input of the next tapped layer."""
        self._taps.append(hidden)

    def _tap(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.keep(args[0] if args else kwargs["hidden_states"])

    def _tap_output(self, module: nn.Module, args: tuple, output: BaseModelOutputWithPast) -> None:
        self.keep(output.last_hidden_state)


def _leave_segments(segments: list[Segment], dtype: torch.dtype) -> None:
    """Packs no segments and returns None; used if no runtime part registers `pack_segments`."""


class VerifierModel(nn.Module):
    """A loaded causal LM whose hidden states are tapped.

    Args:
        tap_layers: see `LayerTaps`.
        kv_layers: layers whose keys and values are also tapped; see `wingbeat.runtime.drafters.base.DrafterNeeds`.
    """

    def __init__(self, loaded: LoadedModel, tap_layers: tuple[int, ...] = (), kv_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        bad = [layer for layer in kv_layers if not 0 <= layer < len(loaded.layers)]
        if bad:
            raise ValueError(f"tap layers {bad} do not exist: {loaded.name} has layers 0..{len(loaded.layers) - 1}")
        self.model = loaded.model
        self.taps = LayerTaps(loaded.model, loaded.decoder_layers, tap_layers)
        self._output: Any = loaded.model.get_output_embeddings()
        self.tap_layers = tap_layers
        self.kv_layers = kv_layers
        self.taps_size = taps_size(loaded, tap_layers, kv_layers)
        if loaded.deterministic:
            self._pack_segments = rows_alike(loaded.device).pack_segments
        else:
            self._pack_segments = next(iter(hooks("pack_segments")), _leave_segments)

    def remove_taps(self) -> None:
        """Removes the hooks from the model, because other objects may go on using the model."""
        self.taps.remove()

    @torch.inference_mode()
    def observe(self, token_ids: Tensor) -> Tensor | None:
        """Maps whole sequences, int64 [num_seqs, length], to taps [num_seqs, length, taps_size], without a KV cache.

        Returns None if no layer is tapped.
        """
        self.taps.clear()
        self.model.set_attn_implementation("eager")
        try:
            self.model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        parts = self.taps.drain()
        return torch.cat(parts, dim=-1) if parts else None

    def forward(self, rows: Rows) -> ModelOutput:
        """Runs the rows: writes their keys and values into the caches, and advances recurrent states."""
        self.taps.clear()
        captured = dict.fromkeys(self.kv_layers)
        rows = self._packed(rows)
        inputs = {
            "input_ids": rows.token_ids,
            "position_ids": rows.positions,
            "logits_to_keep": 0 if rows.logits_rows is None else rows.logits_rows,
            ROWS_KEYWORD: rows._replace(captured=captured or None),
        }
        with ExitStack() as entered:
            for enter in rows.around:
                entered.enter_context(enter(inputs))
            logits = self._logits(inputs, rows.into)
        parts = [tap[0] for tap in self.taps.drain()] + [captured[layer] for layer in self.kv_layers]
        taps_into = None if rows.into is None else rows.into.taps
        taps = torch.cat(parts, dim=-1, out=taps_into) if parts else None
        return ModelOutput(logits[0], taps)

    def _packed(self, rows: Rows) -> Rows:
        """Packs the segments of all layers."""
        other, dtype = rows.elsewhere, rows.caches[0][0].dtype
        if other is not None:
            other = other._replace(rows=other.rows._replace(packed=self._pack_segments(other.rows.segments, dtype)))
        return rows._replace(packed=self._pack_segments(rows.segments, dtype), elsewhere=other)

    def _logits(self, inputs: dict[str, Any], into: ModelOutput | None) -> Tensor:
        """Returns logits [1, num_rows, vocab_size], in the memory of `into` if the output head supports this."""
        output = self._output
        if into is None or not getattr(output, "wide", False):
            return self.model(use_cache=False, **inputs).logits
        output.into = into.logits
        try:
            return self.model(use_cache=False, **inputs).logits
        finally:
            output.into = None
