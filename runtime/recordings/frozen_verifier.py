"""The verifier with frozen weights, for training drafters: computes logits and taps, and generates text."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from wingbeat.runtime.heads.conventions import default_tap_layers
from wingbeat.runtime.hugging_face import generation_of, load_files, one_line, quiet, read_config
from wingbeat.runtime.verifier.layers.loaded_model import decoder_layers
from wingbeat.runtime.verifier.model import LayerTaps


class Observation(NamedTuple):
    """Result of one forward pass of the verifier over whole sequences."""

    logits: Tensor
    """[batch, length, vocab_size]; row i predicts token i + 1."""
    taps: Tensor
    """[batch, length, num_taps * hidden_size]: inputs of the tapped layers (the residual stream, not normalised),
    lowest layer first. A tap after the last layer is the input of the output matrix, which is normalised.
    """


class FrozenVerifier:
    """Causal LM in evaluation mode whose hidden states are tapped.

    Args:
        tap_layers: see `LayerTaps`.

    Raises:
        ValueError: the checkpoint cannot be loaded, the model does not have one of the tapped layers, or the model's
            layers cannot be found.
    """

    def __init__(
        self, path: str, tap_layers: tuple[int, ...] | None, device: str | torch.device, dtype: torch.dtype
    ) -> None:
        with one_line(path), quiet():
            model = load_files(AutoModelForCausalLM, path, config=read_config(path), dtype=dtype, **generation_of(path))
        self.model: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        text_config = self.model.config.get_text_config()
        self.hidden_size: int = text_config.hidden_size
        self.num_layers: int = text_config.num_hidden_layers
        self.tap_layers = tap_layers or default_tap_layers(self.num_layers)
        self.layers = decoder_layers(self.model, self.num_layers)
        self._taps = LayerTaps(self.model, self.layers, self.tap_layers)

    @property
    def embedding(self) -> Tensor:
        """Input embedding [vocab_size, hidden_size]."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> Tensor:
        """Output matrix [vocab_size, hidden_size]."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def observe(self, token_ids: Tensor) -> Observation:
        """Computes logits and taps of sequences, int64 [batch, length]."""
        self._taps.clear()
        logits = self.model(input_ids=token_ids, use_cache=False).logits
        return Observation(logits, torch.cat(self._taps.drain(), dim=-1))

    @torch.no_grad()
    def continue_text(
        self, prefix: Tensor, length: int, temperature: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continues prefixes of equal length; each row has its own temperature.

        Args:
            prefix: int64 [batch, prefix_length].
            length: tokens per row of the result, prefix included.
            temperature: [batch]; zero means greedy.
            generator: random generator of the sampling noise, on the CPU; not needed if all rows are greedy.

        Returns:
            int64 [batch, length]. An end-of-text token does not stop a row; the tokens after it form a new document.
        """
        cache = DynamicCache(config=self.model.config)
        rows, new = [prefix], prefix
        scale = temperature.to(prefix.device)[:, None]
        sampled = bool((temperature > 0).any())
        for _ in range(length - prefix.shape[1]):
            logits = (
                self.model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
            )
            if sampled:
                noise = torch.rand(logits.shape, generator=generator).to(logits.device)
                # Gumbel-max trick: the maximum of logits + T * Gumbel noise is a sample from softmax(logits / T).
                logits = logits - scale * (-noise.clamp_min(1e-20).log()).log()
            new = logits.argmax(-1, keepdim=True)
            rows.append(new)
        self._taps.clear()
        return torch.cat(rows, dim=1)
