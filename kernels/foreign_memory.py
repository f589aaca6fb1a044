"""Tensors over memory that torch's allocators do not own (DLPack 0.8).

With DLPack the caller names the device, so memory of a peer GPU counts as memory of the GPU that mapped it.
"""

import ctypes
from typing import ClassVar

import torch
from torch import Tensor


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, followed by the two fields of DLManagedTensor."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_DL_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_DL_UINT = 1
_libc = ctypes.CDLL(None)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] over existing memory (DLPack 0.8, DLManagedTensor).

    The memory must outlive every use of the tensor.
    """
    shape_at = ctypes.sizeof(_DLTensor)
    # Struct and shape lie in one block of libc memory, and libc's `free` is the deleter. A tensor may outlive the
    # interpreter, but a Python callback may not.
    block = _libc.calloc(1, shape_at + 8)
    ctypes.c_int64.from_address(block + shape_at).value = num_bytes
    managed = _DLTensor.from_address(block)
    managed.data, managed.shape = address, block + shape_at
    managed.device_type, managed.device_id = _DL_DEVICE_TYPES[device.type], device.index or 0
    managed.ndim, managed.dtype_code, managed.dtype_bits, managed.dtype_lanes = 1, _DL_UINT, 8, 1
    managed.deleter = ctypes.cast(_libc.free, ctypes.c_void_p).value
    return torch.from_dlpack(_new_capsule(block, b"dltensor", None))
