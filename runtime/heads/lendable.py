"""Weights that a loaded verifier lends to a head on the same device."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.target import EMBEDDING, LM_HEAD
from wingbeat.runtime.verifier.layers.linears import Packable

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def lendable(loaded: "LoadedModel", dtype: torch.dtype) -> dict[str, Tensor | str]:
    """Embedding and output matrix [vocab_size, hidden_size] by name suffix. If one of the two cannot be lent, its entry
    is a string with the reason.

    Args:
        loaded: the verifier.
        dtype: dtype of the head's weights.
    """
    modules = {EMBEDDING: loaded.model.get_input_embeddings(), LM_HEAD: loaded.model.get_output_embeddings()}
    return {name: _weight(module, dtype) for name, module in modules.items()}


def _weight(module: nn.Module | None, dtype: torch.dtype) -> Tensor | str:
    if isinstance(module, Packable) and module.packed is not None:
        return "the verifier holds it packed"
    weight = getattr(module, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter):  # e.g. a tensor class of a quantised weight
        return "the verifier holds it in another form"
    if weight.dtype != dtype:
        return f"the verifier's is {_name(weight.dtype)} and the drafter's {_name(dtype)}"
    return weight.detach()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
