"""Many blocks of a head that drafts in one pass, in one pass: where they begin, what they see, and the passes.

The heads are those that draft; only what they attend to is laid out otherwise: all blocks of a sequence lie beside its
positions, and each sees what it would see alone. Source: Chen et al., DFlash (arXiv 2602.06036).
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.runtime.heads.one_pass.backbone import Backbone, KeyValue
from wingbeat.runtime.heads.one_pass.config import LayerMask
from wingbeat.runtime.heads.one_pass.parallel_eagle import ParallelEagleHead


def draw_anchors(seed: int, step: int, rows: range, learnt: Tensor, num_drafted: int, num_anchors: int) -> Tensor:
    """Positions at which blocks begin, ascending -> int64 [len(rows), num_anchors or as many as there are].

    Each row of a batch has a random stream of its own, so that parts of a batch make up the batch. Positions before
    tokens that are not to be learnt are drawn where there are no others.

    Args:
        rows: numbers of the sequences in the step's batch.
        learnt: bool [len(rows), length]: whether predicting a token is to be learnt.
        num_drafted: tokens behind each that must be there.
    """
    drawn = []
    count = learnt.shape[1] - 1 - num_drafted
    for row, wanted in zip(rows, learnt[:, 2 : 2 + count].numpy(), strict=True):
        order = np.random.default_rng((seed, step, row)).permutation(count)
        chosen = order[np.argsort(~wanted[order], kind="stable")][:num_anchors]
        drawn.append(1 + np.sort(chosen))
    return torch.from_numpy(np.stack(drawn))


def block_mask(anchors: Tensor, num_slots: int, length: int, mask: LayerMask) -> Tensor:
    """What the slots of blocks see -> bool [batch, 1, A * num_slots, length + A * num_slots].

    Args:
        anchors: int64 [batch, A]: the position of each block's first slot, which sees what lies before it.
        length: positions of the context, the first keys; those of the slots follow.
    """
    batch, num_blocks = anchors.shape
    slots = torch.arange(num_slots, device=anchors.device)
    positions = (anchors[..., None] + slots).flatten(1)
    context = torch.arange(length, device=anchors.device)
    before = context < anchors.repeat_interleave(num_slots, dim=1)[..., None]
    block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(num_slots)
    own = (block[:, None] == block).expand(batch, -1, -1)
    if mask.causal:
        index = slots.repeat(num_blocks)
        own = own & (index[:, None] >= index)
    visible = torch.cat([before, own], dim=-1)
    if mask.window is not None:
        keys = torch.cat([context.expand(batch, -1), positions], dim=1)
        visible = visible & (positions[..., None] - keys[:, None] < mask.window)
    return visible[:, None]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Queries [batch, N, Hq, D] over keys and values [batch, M, Hkv, D], where a mask [batch, 1, N, M] lets them."""
    heads = (part.to(value.dtype).transpose(1, 2) for part in (query, key, value))
    return functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


class BlockAttention:
    """Attention of the blocks of a batch in one layer.

    Args:
        context: of all positions [batch, length, Hkv, D].
        mask: see `block_mask`.
    """

    def __init__(self, context: KeyValue, mask: Tensor) -> None:
        self.context, self.mask = context, mask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [batch * A, num_slots, Hq, D], key and value [batch * A, num_slots, Hkv, D] -> as the query."""
        batch = len(self.mask)
        query_rows, own_key, own_value = (part.reshape(batch, -1, *part.shape[2:]) for part in (query, key, value))
        keys = torch.cat([self.context.key.to(value.dtype), own_key], dim=1)
        values = torch.cat([self.context.value.to(value.dtype), own_value], dim=1)
        return masked_attention(query_rows, keys, values, self.mask).reshape(query.shape)


def block_states(head: Backbone, token_ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
    """States [batch * A, num_drafted, H], for `logits`, of the blocks at anchors int64 [batch, A].

    Args:
        token_ids: int64 [batch, length].
        taps: [batch, length, taps_size].
    """
    batch, length = token_ids.shape
    size = head.config.block_size
    context = head.context(
        head.fuse(taps.flatten(0, 1)).unflatten(0, (batch, length)),
        head.rotary(torch.arange(length, device=anchors.device)),
    )
    masks = {mask: block_mask(anchors, size, length, mask) for mask in set(head.config.masks)}
    attends = [BlockAttention(pair, masks[mask]) for pair, mask in zip(context, head.config.masks, strict=True)]
    positions = anchors.flatten()[:, None] + torch.arange(size, device=anchors.device)
    return head.run_block(token_ids.gather(1, anchors).flatten(), head.rotary(positions), list(attends))


def parallel_states(
    head: ParallelEagleHead, token_ids: Tensor, taps: Tensor, anchors: Tensor, num_drafted: int
) -> tuple[Tensor, Tensor]:
    """States of all pairs [batch, length - 1, H], and of masked slots [batch, A, num_drafted - 1, H] behind anchors.

    The pair at index i has the token at i + 1; masked slots see the pairs up to their anchor's, and those of their own
    group to their left. Source: P-EAGLE (arXiv 2602.01469).
    """
    batch, num_pairs, num_masked = len(token_ids), token_ids.shape[1] - 1, num_drafted - 1
    num_slots = anchors.shape[1] * num_masked
    slots = (anchors[..., None] + torch.arange(num_masked, device=anchors.device)).flatten(1)
    pairs = torch.arange(num_pairs, device=anchors.device)
    # Under autocast fc gives bfloat16; the residual stream stays in the weights' precision.
    known = head.fuse(taps[:, :-1].to(head.dtype)).to(head.dtype)
    features = torch.cat([known, head.masked_features().to(head.dtype).expand(batch, num_slots, -1)], dim=1)
    tokens = torch.cat([token_ids[:, 1:], torch.full_like(slots, head.mask_token_id)], dim=1)
    of_pairs = (pairs[:, None] >= torch.cat([pairs, torch.full_like(slots[0], num_pairs)])).expand(batch, 1, -1, -1)
    mask = torch.cat([of_pairs, block_mask(anchors, num_masked, num_pairs, LayerMask(causal=True))], dim=2)
    positions = torch.cat([pairs.expand(batch, -1), slots], dim=1)
    attend = partial(masked_attention, mask=mask)
    states = head.run_layers(tokens, features, head.rotary(positions), [attend] * head.config.num_layers)
    return states[:, :num_pairs], states[:, num_pairs:].unflatten(1, (-1, num_masked))
