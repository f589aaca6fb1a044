"""The verifier's weights with which a new head is initialised, taken from a loaded model or read from the verifier's
files.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier

_EMBEDDING = "embed_tokens.weight"


class VerifierWeights(NamedTuple):
    """Shapes, embedding, output matrix and last layer of a verifier."""

    config: PretrainedConfig
    """Config of the text model."""
    embedding: Tensor
    """Embedding [vocab_size, hidden_size]."""
    lm_head: Tensor
    """Output matrix [vocab_size, hidden_size]."""
    last_layer: dict[str, Tensor]
    """Tensors of the last layer by name within the layer, and the final norm as `final_norm.weight`."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.embedding.shape[0]


def weights_of_model(verifier: FrozenVerifier) -> VerifierWeights:
    """The weights of a loaded verifier."""
    layer = dict(verifier.layers[-1].named_parameters())
    final_norm = getattr(getattr(verifier.model, "model", None), "norm", None)
    if isinstance(final_norm, nn.Module):
        layer["final_norm.weight"] = final_norm.weight
    return VerifierWeights(verifier.model.config.get_text_config(), verifier.embedding, verifier.lm_head, layer)


def weights_of_checkpoint(target: TargetDescription) -> VerifierWeights:
    """The weights of a verifier that is not loaded, read from its safetensors files; a verifier in another format is
    loaded as a whole.

    Raises:
        ValueError: the files hold no embedding or no output matrix of a known name.
    """
    if not target.tensor_files:
        return weights_of_model(FrozenVerifier(str(target.path), None, "cpu", torch.float32))
    embedding, lm_head = target.embedding(), target.lm_head()
    if embedding is None or lm_head is None:
        missing = "lm_head.weight" if lm_head is None else _EMBEDDING
        raise ValueError(f"{target.path} holds no tensor {missing}: train without recordings, which loads the verifier")
    prefix = min((name for name in target.tensor_files if name.endswith(_EMBEDDING)), key=len).removesuffix(_EMBEDDING)
    layer_prefix = f"{prefix}layers.{target.num_layers - 1}."
    layer = {
        name.removeprefix(layer_prefix): target.tensor(name)
        for name in target.tensor_files
        if name.startswith(layer_prefix)
    }
    if f"{prefix}norm.weight" in target.tensor_files:
        layer["final_norm.weight"] = target.tensor(f"{prefix}norm.weight")
    return VerifierWeights(target.config, embedding, lm_head, layer)
