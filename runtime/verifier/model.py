"""The verifier's forward pass: a flattened batch in, logits of chosen rows and tapped hidden states out."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.runtime.state.round_states import RoundStates
from wingbeat.runtime.verifier.attention import ATTENTION_NAME, METADATA_KEYWORD, AttentionMetadata
from wingbeat.runtime.verifier.loaded_model import LoadedModel
from wingbeat.runtime.verifier.taps import LayerTaps


class ForwardBatch(NamedTuple):
    """Rows of one forward pass: decodes and trees first, prompt chunks behind them."""

    token_ids: Tensor
    """int64 [1, num_tokens]"""
    positions: Tensor
    """int64 [1, num_tokens], logical (depth-based in trees)."""
    logits_rows: Tensor | None
    """int64 [num_rows]: rows whose logits are needed; None needs all."""
    attention: AttentionMetadata
    chunk_rows: Tensor | None = None
    """int64 [num_chunk_tokens]: rows of prompt chunks, behind the decodes'; None where there is no other."""


class ModelOutput(NamedTuple):
    """What a forward pass yields."""

    logits: Tensor
    """float [num_rows, vocab_size]"""
    taps: Tensor | None
    """[num_tokens, taps_size]: residual stream entering the tapped layers, low to high, then keys and values."""


def taps_size(loaded: LoadedModel, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]) -> int:
    """Numbers that are tapped of one token: hidden states, then keys and values."""
    return len(tap_layers) * loaded.hidden_size + sum(loaded.layers[layer].kv_size for layer in kv_layers)


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
        self.adapters = loaded.adapters
        self.mixers = loaded.mixers
        self.taps = LayerTaps(loaded.model, loaded.decoder_layers, tap_layers)
        self.tap_layers = tap_layers
        self.kv_layers = kv_layers
        self.taps_size = taps_size(loaded, tap_layers, kv_layers)

    def remove_taps(self) -> None:
        """Detach the hooks from the model, which outlives this object where several share it."""
        self.taps.remove()

    @torch.inference_mode()
    def observe(self, token_ids: Tensor) -> Tensor | None:
        """Taps of whole sequences, int64 [num_seqs, length] -> [num_seqs, length, taps_size], without our KV cache.

        None where nothing is tapped.
        """
        self.taps.clear()
        if self.adapters is not None:
            self.adapters.rows = None
        self.model.set_attn_implementation("eager")
        try:
            self.model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        parts = self.taps.take()
        return torch.cat(parts, dim=-1) if parts else None

    def forward(self, batch: ForwardBatch) -> ModelOutput:
        """Run the batch; KV is written into the caches of `batch.attention`, and its states go on."""
        self.taps.clear()
        if self.adapters is not None:
            self.adapters.rows = batch.attention.adapters
        self._tell_mixers(batch.attention.states)
        captured = dict.fromkeys(self.kv_layers)
        output = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=0 if batch.logits_rows is None else batch.logits_rows,
            **{METADATA_KEYWORD: batch.attention._replace(captured=captured) if captured else batch.attention},
        )
        self._tell_mixers(None)
        parts = [tap[0] for tap in self.taps.take()] + [captured[layer] for layer in self.kv_layers]
        taps = torch.cat(parts, dim=-1) if parts else None
        return ModelOutput(output.logits[0], taps)

    def _tell_mixers(self, states: RoundStates | None) -> None:
        """Of the pass to come; None lets each run on its own."""
        for mixer in self.mixers:
            mixer.states = states
