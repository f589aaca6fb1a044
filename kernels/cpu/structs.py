"""ctypes mirrors, field by field, of the C++ structs; `kind` is the number format that a pointer refers to."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes -> values of the C++ enumeration `Kind`."""


class Scales(Structure):
    """Scales by panel. If `by` is given, each of its entries multiplies `each` neighbouring entries of `numbers`."""

    _fields_ = [("numbers", c_void_p), ("by", c_void_p), ("kind", c_int64), ("each", c_int64)]


class Groups(Structure):
    """Groups of `size` inputs with a scale and a shift (`group_panels.GroupPanels`).

    If `rounded` is set, matrix products round input rows to int8.
    """

    _fields_ = [
        ("scales", Scales),
        ("shifts", Scales),
        ("size", c_int64),
        ("offset", c_float),
        ("are_zeros", c_int32),
        ("rounded", c_int64),
    ]


class Matrix(Structure):
    """Weights [inputs, columns] with an optional float32 bias.

    Rows are `stride` elements apart: whole rows if `panel` is 0, else the rows of a panel. Sums of int8 weights are
    multiplied by their columns' `scales`.
    """

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int64),
        ("stride", c_int64),
        ("panel", c_int64),
        ("kind", c_int64),
        ("scales", c_void_p),
        ("groups", Groups),
    ]


class Segment(Structure):
    """Rows of requests that have the same number of new rows in a batch."""

    _fields_ = [
        ("start", c_int64),
        ("num_reqs", c_int64),
        ("num_query", c_int64),
        ("num_new", c_int64),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("width", c_int64),
        ("context", c_void_p),
        ("positions", c_void_p),
        ("position_stride", c_int64),
        ("mask", c_void_p),
        ("mask_stride", c_int64),
        ("mask_words", c_int64),
        ("row_starts", c_void_p),
    ]


class Heads(Structure):
    """Dimensions and parameters of an attention layer."""

    _fields_ = [
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
    ]


class Convolution(Structure):
    """Convolutions before and after a sublayer; 0 taps mean none."""

    _fields_ = [("base", c_void_p), ("dynamic", Matrix), ("num_taps", c_int64), ("group", c_int64)]


class Layer(Structure):
    """Decoder layer."""

    _fields_ = [
        ("hidden", c_int64),
        ("inputs", c_int64),
        ("intermediate", c_int64),
        ("heads", Heads),
        ("input_norm", c_void_p),
        ("input_eps", c_float),
        ("query_eps", c_float),
        ("output_eps", c_float),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("query_key_value", Matrix * 3),
        ("output", Matrix),
        ("output_norm", c_void_p),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("captured", c_void_p),
        ("kind", c_int64),
        ("added_qkv", c_void_p),
        ("added_output", c_void_p),
        ("added_gate_up", c_void_p),
        ("added_down", c_void_p),
        ("attention_conv", Convolution),
        ("mlp_conv", Convolution),
        ("attended_norm", c_void_p),
        ("left_norm", c_void_p),
        ("attended_eps", c_float),
        ("left_eps", c_float),
        ("gate_kind", c_int64),
    ]


class Batch(Structure):
    """Rows of a forward pass."""

    _fields_ = [
        ("num_rows", c_int64),
        ("block_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slot_mapping", c_void_p),
        ("segments", POINTER(Segment)),
        ("num_segments", c_int64),
        ("add", c_void_p),
        ("added", c_void_p),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        ("num_slots", c_int64),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the argument and result types of the library's functions."""
    library.wingbeat_threads.argtypes = [ctypes.c_int]
    library.wingbeat_product.argtypes = [c_void_p, c_int64, c_int64, POINTER(Matrix), ctypes.c_int, c_void_p]
    library.wingbeat_panel.argtypes, library.wingbeat_panel.restype = [], c_int64
    library.wingbeat_pack.argtypes = [c_void_p, *[c_int64] * 5, c_void_p]
    library.wingbeat_columns.argtypes = [POINTER(Matrix), c_int64, c_void_p, c_int64, c_void_p]
    library.wingbeat_columns.restype = ctypes.c_bool
    library.wingbeat_norm.argtypes = [c_void_p, c_int64, c_int64, c_void_p, ctypes.c_float, c_void_p]
    library.wingbeat_attention.argtypes = [
        POINTER(Heads),
        POINTER(Segment),
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
    ]
    library.wingbeat_layers.argtypes = [POINTER(Layer), c_int64, POINTER(Batch), c_void_p, c_void_p]
    for name in ("threads", "product", "norm", "attention", "layers"):
        getattr(library, f"wingbeat_{name}").restype = None
    return library


def matrix_of(weight: Tensor, bias: Tensor | None) -> Matrix:
    """Describes a linear layer's input-major weight [out, in] and its float32 bias.

    Raises:
        ValueError: the weight is not input-major, not on the CPU, or of a dtype outside `KINDS`.
    """
    if weight.dtype not in KINDS or weight.device.type != "cpu" or weight.stride(0) != 1:
        raise ValueError(
            f"weight is {weight.dtype} with strides {weight.stride()}: float32, bfloat16 or float16 on the CPU with "
            "first stride 1 needed"
        )
    bias_address = None if bias is None else bias.data_ptr()
    return Matrix(weight.data_ptr(), bias_address, weight.shape[0], weight.stride(1), 0, KINDS[weight.dtype], None)


def layer_of(heads: Heads, hidden: int, intermediate: int, **fields: object) -> Layer:
    """Builds a `Layer` from its fields by name; `inputs` defaults to `hidden`."""
    layer = Layer(hidden=hidden, inputs=hidden, intermediate=intermediate, heads=heads)
    for name, value in fields.items():
        if name == "query_key_value":
            layer.query_key_value = (Matrix * 3)(*value)
        else:
            setattr(layer, name, value)
    return layer
