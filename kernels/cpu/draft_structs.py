"""ctypes mirrors, field by field, of the C++ structs for drafting.

Sources: `growth.h`, `draft.h`, `walks.h`, `block.h`, `rounds.h` and `trees.h`.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from typing import Any, NamedTuple

from wingbeat.kernels.cpu.structs import Layer, Matrix


class Norm(Structure):
    """Root-mean-square norm; a null weight leaves rows unchanged."""

    _fields_ = [("weight", c_void_p), ("eps", c_float)]


class Embedding(Structure):
    """Embedding table, with its strides and number kind."""

    _fields_ = [("weight", c_void_p), ("row", c_int64), ("column", c_int64), ("count", c_int64), ("kind", c_int64)]


class Head(Structure):
    """EAGLE or P-EAGLE draft head."""

    _fields_ = [
        ("layer", Layer),
        ("embedding", Embedding),
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
        ("behind", POINTER(Layer)),
        ("num_behind", c_int64),
        ("mask_features", c_void_p),
        ("mask_token", c_int64),
    ]


class Markov(Structure):
    """Correction of a slot's logits by the preceding token; rank 0 means no correction."""

    _fields_ = [
        ("tokens", Embedding),
        ("rank", c_int64),
        ("scores", Matrix),
        ("gate", Matrix),
        ("joint", Matrix),
        ("confidence", Matrix),
        ("confidence_reads_token", c_int64),
    ]


class Lattice(Structure):
    """Number of candidates per slot, and the weights that score pairs of neighbours; 0 candidates mean no lattice."""

    _fields_ = [
        ("predecessors", Embedding),
        ("successors", Embedding),
        ("projection", Matrix),
        ("rank", c_int64),
        ("num_candidates", c_int64),
    ]


class BlockHead(Structure):
    """Block-drafting head (DFlash body)."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        ("causal", c_void_p),
        ("num_layers", c_int64),
        ("embedding", Embedding),
        ("embedding_scale", c_float),
        ("mask", c_void_p),
        ("taps_width", c_int64),
        ("fused", Matrix),
        ("context_norm", Norm),
        ("context", POINTER(Matrix)),
        ("output_norm", Norm),
        ("logits", Matrix),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("draft_token_ids", c_void_p),
        ("num_slots", c_int64),
        ("first_slot", c_int64),
        ("markov", Markov),
        ("lattice", Lattice),
    ]


class Sequences(Structure):
    """Per-slot state of the sequences that a pass reads and writes."""

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
        ("deltas", c_void_p),
    ]


class Decided(Structure):
    """Decided pairs of some sequences: tokens with the taps before them."""

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
    """Stopping rule for the trees [begin, end)."""

    _fields_ = [
        ("begin", c_int64),
        ("end", c_int64),
        ("min_reach", c_double),
        ("price", c_double),
        ("table", c_void_p),
        ("by_kind", c_int64),
    ]


class GrowthRules(Structure):
    """Stopping rules of a pass, with the confidence bins that they share."""

    _fields_ = [
        ("rules", POINTER(GrowthRule)),
        ("num_rules", c_int64),
        ("num_bins", c_int64),
        ("edges", c_void_p),
    ]


class Trees(Structure):
    """Output buffers for drafted trees."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("parents", c_void_p),
        ("depths", c_void_p),
        ("scores", c_void_p),
        ("num_valid", c_void_p),
        ("num_nodes", c_int64),
    ]


class SamplingRules(Structure):
    """Sampling rules by slot; null `numbers` mean that no slot has any."""

    _fields_ = [("numbers", c_void_p), ("token_ids", c_void_p), ("biases", c_void_p)]


class Roots(Structure):
    """Last committed tokens of some sequences, and parameters of the trees to grow from them."""

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
        ("by_slot", c_int64),
        ("sampling", SamplingRules),
    ]


class Outcome(Structure):
    """Buffers of a round's outcome, which a drafter reads."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            *("header", "decode_slots", "decode_positions", "decode_num_tokens", "decode_token_ids", "decode_taps"),
            *("chunk_slots", "chunk_positions", "chunk_lens", "chunk_next_token_ids", "chunk_taps", "proposal_slots"),
            *("epochs", "committed_lens", "block_tables", "temperatures", "seeds", "position_deltas"),
            *("growth_limits", "acceptance_table", "allowed_tokens", "sampling_rules", "biased_token_ids", "biases"),
        )
    ]


class Reply(Structure):
    """Buffers of a round's reply, which a drafter writes."""

    _fields_ = [("epochs", c_void_p), ("committed_lens", c_void_p), ("trees", Trees)]


class Channel(Structure):
    """Outcome and reply buffers of a channel, with its limits."""

    _fields_ = [
        ("outcome", Outcome),
        ("reply", Reply),
        ("token_ids", c_void_p),
        ("num_slots", c_int64),
        ("max_path", c_int64),
        ("taps_size", c_int64),
        ("max_blocks", c_int64),
        ("history_width", c_int64),
        ("allowed_words", c_int64),
        ("top_k", c_int64),
        ("least_levels", c_int64),
        ("max_levels", c_int64),
        ("bin_edges", c_void_p),
        ("num_bins", c_int64),
        ("max_chunk_tokens", c_int64),
    ]


class DraftFunctions(NamedTuple):
    """Library functions that draft with one kind of head."""

    take_in: Any
    grow: Any
    answer: Any


def declare_drafts(library: ctypes.CDLL) -> dict[type[Structure], DraftFunctions]:
    """Sets the argument types of the library's drafting functions; returns the functions by kind of head."""
    found = {}
    for kind, name in ((Head, "wingbeat_"), (BlockHead, "wingbeat_block_")):
        functions = DraftFunctions(*(getattr(library, name + verb) for verb in DraftFunctions._fields))
        for function, batch in zip(functions, (Decided, Roots, Channel), strict=True):
            function.argtypes = [POINTER(kind), POINTER(Sequences), POINTER(batch)]
            function.restype = c_int64
        functions.take_in.restype = None
        found[kind] = functions
    return found
