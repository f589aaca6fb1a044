"""The verifier's forward pass: a flattened batch in, logits of chosen rows and tapped hidden states out."""

from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from wingbeat.kernels.cpu.ops import pack_segments, reads_in_place
from wingbeat.runtime.round.rows import ROWS_KEYWORD, ModelOutput, Rows
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.cpu_layers import KNOWN_DECODERS, LayersAtOnce, Taps
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

_STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotation that depend on the position alone, not on how long a text is."""
_MOST_ROTATIONS = 1 << 14
"""Positions whose rotations are kept."""
_KNOWN_INPUTS = {"input_ids", "position_ids", "logits_to_keep", ROWS_KEYWORD}


def taps_size(loaded: LoadedModel, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]) -> int:
    """Numbers that are tapped of one token: hidden states, then keys and values."""
    return len(tap_layers) * loaded.hidden_size + sum(loaded.layers[layer].kv_size for layer in kv_layers)


class LayerTaps(Taps):
    """Keeps the residual stream that enters chosen layers (EAGLE-3 section 3.1).

    Args:
        layers: of the decoder, as `decoder_layers` finds them.
        tap_layers: layers whose *input* is tapped, ascending; the number of layers stands for what enters the output
            head, the final norm's result. Empty taps nothing.

    Raises:
        ValueError: there is no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, tap_layers: tuple[int, ...]) -> None:
        bad = [layer for layer in tap_layers if not 0 <= layer <= len(layers)]
        if bad:
            raise ValueError(
                f"tap_layers {bad} do not exist: {type(model).__name__} has layers 0..{len(layers) - 1}, and "
                f"{len(layers)} is what enters its output matrix"
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
        """Forget what the passes so far left; before each pass."""
        self._taps = []

    def take(self) -> list[Tensor]:
        """Of the pass since `clear`: [batch, length, hidden_size] each, low layers first."""
        taps, self._taps = self._taps, []
        return taps

    def remove(self) -> None:
        """Detach the hooks from the model, which outlives this object where several share it."""
        for hook in self._hooks:
            hook.remove()

    def _tap(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._taps.append(args[0] if args else kwargs["hidden_states"])

    def _tap_output(self, module: nn.Module, args: tuple, output: BaseModelOutputWithPast) -> None:
        self._taps.append(output.last_hidden_state)


class VerifierModel(nn.Module):
    """A loaded causal LM whose hidden states are tapped.

    Args:
        tap_layers: as for `LayerTaps`.
        kv_layers: layers whose keys and values are taps, too; see `wingbeat.runtime.drafters.base.DrafterNeeds`.
    """

    def __init__(self, loaded: LoadedModel, tap_layers: tuple[int, ...] = (), kv_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        bad = [layer for layer in kv_layers if not 0 <= layer < len(loaded.layers)]
        if bad:
            raise ValueError(f"tap layers {bad} do not exist: {loaded.name} has layers 0..{len(loaded.layers) - 1}")
        self.model = loaded.model
        self._layers = (loaded.decoder_layers,)  # in a tuple: they are the model's submodules, and no others
        self.taps = LayerTaps(loaded.model, loaded.decoder_layers, tap_layers)
        self.tap_layers = tap_layers
        self.kv_layers = kv_layers
        self.taps_size = taps_size(loaded, tap_layers, kv_layers)
        self._rotations = KeptRotations()

    def remove_taps(self) -> None:
        """Detach the hooks from the model, which outlives this object where several share it."""
        self.taps.remove()

    @torch.inference_mode()
    def observe(self, token_ids: Tensor) -> Tensor | None:
        """Taps of whole sequences, int64 [num_seqs, length] -> [num_seqs, length, taps_size], without our KV cache.

        None where nothing is tapped.
        """
        self.taps.clear()
        self.model.set_attn_implementation("eager")
        try:
            self.model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        parts = self.taps.take()
        return torch.cat(parts, dim=-1) if parts else None

    def forward(self, rows: Rows) -> ModelOutput:
        """Run the rows; KV is written into their caches, and states go on."""
        self.taps.clear()
        captured = dict.fromkeys(self.kv_layers)
        keys = rows.caches[0][0]
        if reads_in_place(keys.dtype, keys.device):
            rows = rows._replace(packed=pack_segments(rows.segments))
        inputs = {
            "input_ids": rows.token_ids,
            "position_ids": rows.positions,
            "logits_to_keep": 0 if rows.logits_rows is None else rows.logits_rows,
            ROWS_KEYWORD: rows._replace(captured=captured) if captured else rows,
        }
        with ExitStack() as entered:
            for enter in rows.around:
                entered.enter_context(enter(inputs))
            (layers,) = self._layers
            if isinstance(layers, LayersAtOnce):
                entered.enter_context(layers.entered(rows))
            if _goes_straight(self.model, layers, inputs):
                logits = _straight_logits(self.model, layers, self._rotations, inputs)
            else:
                logits = self.model(use_cache=False, **inputs).logits
        parts = [tap[0] for tap in self.taps.take()] + [captured[layer] for layer in self.kv_layers]
        taps = torch.cat(parts, dim=-1) if parts else None
        return ModelOutput(logits[0], taps)


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


@cache
def _is_known(kind: type[nn.Module]) -> bool:
    """Whether a class is the causal LM around a known decoder: decoder, rows to keep, output matrix, nothing else."""
    decoder = f"{kind.__module__}.{kind.__qualname__}".replace("ForCausalLM", "Model")
    return decoder in KNOWN_DECODERS and kind.__qualname__.endswith("ForCausalLM")


def _goes_straight(model: nn.Module, layers: nn.ModuleList, inputs: dict[str, Any]) -> bool:
    """Whether `_straight_logits` is what the model makes of the inputs; asked within `LayersAtOnce.entered`."""
    if not (isinstance(layers, LayersAtOnce) and layers.is_one_step and _is_known(type(model))):
        return False
    around = (model, model.model)
    watched = any(one._forward_hooks or one._forward_pre_hooks or "forward" in one.__dict__ for one in around)
    # Other packages put functions of their own in the place of a class's.
    replaced = any(type(one).forward.__module__ != type(one).__module__ for one in around)
    return not (watched or replaced) and inputs.keys() <= _KNOWN_INPUTS


def _straight_logits(model: nn.Module, layers: LayersAtOnce, kept: KeptRotations, inputs: dict[str, Any]) -> Tensor:
    """Logits [1, num_rows, vocab_size], as the code of the model's class computes them, without what it does beside.

    What transformers does around each module takes a tenth of a millisecond and more, whatever the model's size.
    """
    decoder, rows = model.model, inputs[ROWS_KEYWORD]
    hidden = decoder.embed_tokens(inputs["input_ids"])
    rotations = kept.take(decoder.rotary_emb, hidden, inputs["position_ids"])
    hidden = decoder.norm(layers.run_all(hidden, position_embeddings=rotations, **{ROWS_KEYWORD: rows}))
    keep = inputs["logits_to_keep"]
    return model.lm_head(hidden if isinstance(keep, int) else hidden[:, keep])
