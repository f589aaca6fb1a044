"""Weights that are read lie in mappings of their files: no small tensor keeps the mapping of a large file."""

import ctypes

from torch import nn
from transformers import PreTrainedModel

SMALL_BYTES = 1 << 20


def copy_what_stays(model: PreTrainedModel) -> None:
    """Copy the tensors on the CPU that are served as they are read: vectors, and embedding tables that stand alone.

    A file stays mapped, and its pages count as this process's memory, as long as any of its tensors is in use. Matrices
    of linear layers are copied where they are packed, or are served from the file.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - matrices
    for tensor in (*model.parameters(), *model.buffers()):
        is_packed = tensor.untyped_storage().nbytes() < tensor.nbytes  # and one number stands for it
        if tensor.device.type == "cpu" and not is_packed and (tensor.nbytes <= SMALL_BYTES or id(tensor) in tables):
            tensor.data = tensor.data.clone()


def give_back_freed() -> None:
    """Return to the system what Python and torch have freed between what stays; does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
