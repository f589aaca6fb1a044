"""The verifier's forward pass: a flattened batch in, logits of chosen rows and tapped hidden states out."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from wingbeat.runtime.verifier.attention import ATTENTION_NAME, METADATA_KEYWORD, AttentionMetadata
from wingbeat.runtime.verifier.loaded_model import LoadedModel


class ForwardBatch(NamedTuple):
    """Rows of one forward pass: decodes and trees first, prompt chunks behind them."""

    token_ids: Tensor
    """int64 [1, num_tokens]"""
    positions: Tensor
    """int64 [1, num_tokens], logical (depth-based in trees)."""
    logits_rows: Tensor | None
    """int64 [num_rows]: rows whose logits are needed; None needs all."""
    attention: AttentionMetadata


class ModelOutput(NamedTuple):
    """What a forward pass yields."""

    logits: Tensor
    """float [num_rows, vocab_size]"""
    taps: Tensor | None
    """[num_tokens, taps_size]: residual stream entering the tapped layers, low to high, then keys and values."""


class VerifierModel(nn.Module):
    """A loaded causal LM with pre-hooks on the tapped layers (EAGLE-3 section 3.1).

    Args:
        tap_layers: layers whose *input* is tapped, ascending; the number of layers stands for what enters the output
            head, the final norm's result. Empty taps nothing.
        kv_layers: layers whose keys and values are taps, too; see `wingbeat.runtime.drafters.base.DrafterNeeds`.
    """

    def __init__(self, loaded: LoadedModel, tap_layers: tuple[int, ...] = (), kv_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        bad = [layer for layer in tap_layers if not 0 <= layer <= len(loaded.layers)]
        bad += [layer for layer in kv_layers if not 0 <= layer < len(loaded.layers)]
        if bad:
            raise ValueError(f"tap layers {bad} do not exist: {loaded.name} has layers 0..{len(loaded.layers) - 1}")
        self.model = loaded.model
        self.tap_layers = tap_layers
        self.kv_layers = kv_layers
        self.taps_size = len(tap_layers) * loaded.hidden_size
        self.taps_size += sum(loaded.layers[layer].kv_size for layer in kv_layers)
        self._taps: list[Tensor] = []
        self._hooks = [
            loaded.decoder_layers[layer].register_forward_pre_hook(self._tap, with_kwargs=True)
            for layer in tap_layers
            if layer < len(loaded.layers)
        ]
        if len(loaded.layers) in tap_layers:
            self._hooks.append(loaded.decoder.register_forward_hook(self._tap_output))

    def _tap(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._taps.append(args[0] if args else kwargs["hidden_states"])

    def _tap_output(self, module: nn.Module, args: tuple, output: BaseModelOutputWithPast) -> None:
        self._taps.append(output.last_hidden_state)

    def remove_taps(self) -> None:
        """Detach the hooks from the model, which outlives this object where several share it."""
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def observe(self, token_ids: Tensor) -> Tensor:
        """Taps of whole sequences, int64 [num_seqs, length] -> [num_seqs, length, taps_size], without our KV cache."""
        self._taps = []
        self.model.set_attn_implementation("eager")
        try:
            self.model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        return torch.cat(self._taps, dim=-1)

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """Run the batch; KV is written into the caches of `batch.attention`."""
        self._taps = []
        captured = dict.fromkeys(self.kv_layers)
        output = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=0 if batch.logits_rows is None else batch.logits_rows,
            **{METADATA_KEYWORD: batch.attention._replace(captured=captured) if captured else batch.attention},
        )
        parts = [tap[0] for tap in self._taps] + [captured[layer] for layer in self.kv_layers]
        taps = torch.cat(parts, dim=-1) if parts else None
        return ModelOutput(output.logits[0], taps)
