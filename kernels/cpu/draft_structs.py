"""The structures of `draft.h` and `trees.h`, field for field."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p

from wingbeat.kernels.cpu.structs import Layer, Matrix


class Norm(Structure):
    """A root-mean-square norm; without a weight rows stay as they are."""

    _fields_ = [("weight", c_void_p), ("eps", c_float)]


class Head(Structure):
    """An EAGLE head."""

    _fields_ = [
        ("layer", Layer),
        ("embedding", c_void_p),
        ("embedding_row", c_int64),
        ("embedding_column", c_int64),
        ("num_embeddings", c_int64),
        ("embedding_norm", Norm),
        ("feature_norm", Norm),
        ("output_norm", Norm),
        ("joined", Matrix),
        ("tap_norms", POINTER(Norm)),
        ("num_taps", c_int64),
        ("tap_width", c_int64),
        ("taps_norm", Norm),
        ("fused", Matrix),
        ("logits", Matrix),
        ("draft_token_ids", c_void_p),
        ("norms_feedback", c_int64),
        ("norms_residual", c_int64),
    ]


class Sequences(Structure):
    """What a pass reads and writes of the sequences, by slot."""

    _fields_ = [
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("first_private", c_int64),
        ("num_private", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_angles", c_int64),
        ("hidden", c_void_p),
    ]


class Decided(Structure):
    """Decided pairs of some sequences."""

    _fields_ = [
        ("num_reqs", c_int64),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("num_tokens", c_void_p),
        ("token_ids", c_void_p),
        ("taps", c_void_p),
        ("token_stride", c_int64),
        ("taps_stride", c_int64),
    ]


class GrowthRule(Structure):
    """Where some trees stop."""

    _fields_ = [
        ("begin", c_int64),
        ("end", c_int64),
        ("min_reach", c_double),
        ("price", c_double),
        ("table", c_void_p),
    ]


class GrowthRules(Structure):
    """Those of a pass."""

    _fields_ = [
        ("rules", POINTER(GrowthRule)),
        ("num_rules", c_int64),
        ("num_bins", c_int64),
        ("edges", c_void_p),
    ]


class Trees(Structure):
    """Where trees are written."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("parents", c_void_p),
        ("depths", c_void_p),
        ("scores", c_void_p),
        ("num_valid", c_void_p),
        ("num_nodes", c_int64),
    ]


class Roots(Structure):
    """The last committed tokens of some sequences, and the trees that are to grow from them."""

    _fields_ = [
        ("num_reqs", c_int64),
        ("slots", c_void_p),
        ("lens", c_void_p),
        ("history", c_void_p),
        ("temperatures", c_void_p),
        ("seeds", c_void_p),
        ("history_stride", c_int64),
        ("history_width", c_int64),
        ("allowed", c_void_p),
        ("allowed_words", c_int64),
        ("top_k", c_int64),
        ("num_levels", c_int64),
        ("rules", GrowthRules),
        ("trees", Trees),
        ("by_slot", Trees),
    ]


def declare_drafts(library: ctypes.CDLL) -> None:
    """Tell ctypes the types of the library's functions that draft."""
    library.wingbeat_take_in.argtypes = [POINTER(Head), POINTER(Sequences), POINTER(Decided)]
    library.wingbeat_take_in.restype = None
    library.wingbeat_grow.argtypes = [POINTER(Head), POINTER(Sequences), POINTER(Roots)]
    library.wingbeat_grow.restype = c_int64
