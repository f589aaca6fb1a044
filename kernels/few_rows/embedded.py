"""Queries, keys and values of a draft head's rows, from token ids and features: torch reference.

On GPUs `kernels.gpu.embedded` computes them in one launch.
"""

from torch import Tensor
from torch.nn import functional

from wingbeat.kernels import choice
from wingbeat.kernels.layer.draft_rows import Pairs, Projection, Stored
from wingbeat.kernels.layer.reference import embed_beside, rotate_and_store


def embed_to_heads(pairs: Pairs, projection: Projection, stored: Stored, *, normed: bool) -> tuple[Tensor, Tensor]:
    """Computes the rows' queries, keys and values as `embed_beside`, a product and `rotate_and_store` do.

    The kernel divides the product by the root mean squares, and rounds the rows once, after they are multiplied by the
    norm weights.

    Args:
        normed: whether the second result is normalised.

    Returns:
        The rotated queries [num_rows, num_heads, dim], and the rows' features [num_rows, size], normalised if `normed`.
    """
    if kernels := choice.compiled("embed_to_heads", pairs.features):
        return kernels.embed_to_heads(pairs, projection, stored, normed)
    token_ids, table, features, parents = pairs
    inputs, kept = embed_beside(token_ids, table, features, projection.norms, projection.eps, parents, normed)
    qkv = functional.linear(inputs, projection.weight, projection.bias)
    qkv = qkv.unflatten(-1, (-1, stored.key_cache.shape[3]))
    return rotate_and_store(qkv, *stored, *projection.head_norms), kept
