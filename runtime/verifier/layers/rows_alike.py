"""Deterministic mode of a verifier: selects a device type's module."""

from importlib import import_module
from typing import Any

import torch

from wingbeat.runtime.parts import merged
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
