"""Deterministic mode of a verifier: its module by type of device, and the refusal of weights outside of layers."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from wingbeat.runtime.parts import merged
from wingbeat.runtime.verifier.layers.fused import FusedNorm
from wingbeat.runtime.verifier_errors import UnsupportedModelError

ASKED_ALIKE = "deterministic is True"


def rows_alike(device: torch.device) -> Any:
    """Module of `runtime.parts: rows_alike` for a type of device.

    Raises:
        UnsupportedModelError: no part has one; without the model's name.
    """
    path = merged("rows_alike").get(device.type)
    if path is None:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, and this installation has no kernels for that")
    return import_module(path)


def check_outside(model: PreTrainedModel, layers: nn.ModuleList, is_ours: Callable[[nn.Module], bool]) -> None:
    """Refuse weights outside of the decoder's layers but embeddings, our norms, and an output matrix that is ours.

    Raises:
        UnsupportedModelError: without the model's name.
    """
    head, inside = model.get_output_embeddings(), set(layers.modules())
    for name, module in model.named_modules():
        if module in inside or not list(module.parameters(recurse=False)):
            continue
        is_head = module is head and is_ours(module)
        if not is_head and not isinstance(module, FusedNorm | nn.Embedding):
            raise UnsupportedModelError(f"{ASKED_ALIKE}, and its {name} ({type(module).__name__}) is not our kernels'")
