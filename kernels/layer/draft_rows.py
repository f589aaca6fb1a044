"""Arguments of the projection of a draft head's rows, on every device: see `wingbeat.kernels.few_rows.embedded`."""

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """Tokens and the features paired with them; all floating tensors have one dtype."""

    token_ids: Tensor
    """int64 [num_rows]"""
    table: Tensor
    """[vocab_size, size]: embeddings."""
    features: Tensor
    """[num_rows, size], contiguous; with `parents` [num_reqs, num_nodes, size]."""
    parents: Tensor | None = None
    """int64 [num_reqs, width]: index of each row's features among its request's; None if every row has its own."""


class Projection(NamedTuple):
    """Weights of a layer's queries, keys and values."""

    weight: Tensor
    """[(num_heads + 2 * num_kv_heads) * dim, 2 * size], contiguous: columns of embeddings, then of features."""
    bias: Tensor | None
    norms: tuple[Tensor, Tensor]
    """Norm weights [size] of embeddings and of features."""
    eps: float
    counters: Tensor
    """int32 [num_heads + 2 * num_kv_heads], all zero when no kernel runs."""
    head_norms: tuple = ()
    """Query norm, key norm and their epsilon, if heads are normalised: see `rotate_and_store`."""


class Stored(NamedTuple):
    """Rotation of the rows, and the addresses of their keys and values; the fields are those of `rotate_and_store`."""

    cos: Tensor
    sin: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
