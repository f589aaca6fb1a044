"""Deterministic mode of a verifier: selects a device type's module, and refuses weights that run on other kernels."""

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
    """Imports and returns the module that runtime parts register under `rows_alike` for a device type.

    Raises:
        UnsupportedModelError: no part supports the device; the message does not contain the model's name.
    """
    path = merged("rows_alike").get(device.type)
    if path is None:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, but this installation has no kernels for deterministic mode")
    return import_module(path)


def check_outside(model: PreTrainedModel, layers: nn.ModuleList, is_ours: Callable[[nn.Module], bool]) -> None:
    """Refuses a model with weights outside the decoder layers that the runtime's own kernels do not handle.

    Allowed are embeddings, fused norms, and an output head on the runtime's kernels.
    """
    head, inside = model.get_output_embeddings(), set(layers.modules())
    for name, module in model.named_modules():
        if module in inside or not list(module.parameters(recurse=False)):
            continue
        is_head = module is head and is_ours(module)
        if not is_head and not isinstance(module, FusedNorm | nn.Embedding):
            raise UnsupportedModelError(
                f"{ASKED_ALIKE}, but its {name} ({type(module).__name__}) does not run on wingbeat's kernels"
            )
