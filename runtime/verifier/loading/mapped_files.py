"""Copies small tensors out of mapped weight files, so that these tensors do not keep large files mapped."""

import ctypes

from torch import nn
from transformers import PreTrainedModel

SMALL_BYTES = 1 << 20


def copy_what_stays(model: PreTrainedModel) -> None:
    """Copies the CPU tensors that are used as they were loaded: vectors, and embedding tables that are not tied.

    A file stays mapped, and its pages count as this process's memory, while any of its tensors is in use. Matrices of
    linear layers need no copy here, because they are copied when they are packed, or are read from the mapped file
    while serving.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - matrices
    for tensor in (*model.parameters(), *model.buffers()):
        is_packed = tensor.untyped_storage().nbytes() < tensor.nbytes  # a packed weight holds a single number
        if tensor.device.type == "cpu" and not is_packed and (tensor.nbytes <= SMALL_BYTES or id(tensor) in tables):
            tensor.data = tensor.data.clone()


def give_back_freed() -> None:
    """Returns memory that Python and torch have freed to the operating system; does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
