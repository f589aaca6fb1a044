"""Runs many blocks of a one-pass head at once: attention masks, drafts, and comparison of drafts with the text.

The heads are the same as in drafting, but attention has another layout. All blocks of a sequence come after the
sequence's positions in the same pass, and a mask lets each block see only the keys that it would see if it ran alone.
Source: Chen et al., DFlash (arXiv 2602.06036).
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.runtime.one_pass.backbone import KeyValue
from wingbeat.runtime.one_pass.config import LayerMask
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead

_ANCHORS_AT_ONCE = 16
"""Number of blocks per sequence that `block_matches` runs in one pass."""


def block_mask(anchors: Tensor, num_slots: int, length: int, mask: LayerMask) -> Tensor:
    """Visibility mask of the slots of blocks -> bool [batch, 1, A * num_slots, length + A * num_slots].

    Args:
        anchors: int64 [batch, A]: position of each block's first slot; the block sees the context before it.
        num_slots: slots per block.
        length: number of context positions, which are the first keys; the slots' keys follow.
        mask: causality and window of the layer.
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
    """Attention of queries [batch, N, Hq, D] over keys and values [batch, M, Hkv, D] under a mask [batch, 1, N, M]."""
    heads = (part.to(value.dtype).transpose(1, 2) for part in (query, key, value))
    return functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


class BlockAttention:
    """Attention of the blocks of a batch in one layer.

    Args:
        context: keys and values of all positions [batch, length, Hkv, D].
        mask: see `block_mask`.
    """

    def __init__(self, context: KeyValue, mask: Tensor) -> None:
        self.context, self.mask = context, mask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [batch * A, num_slots, Hq, D], key and value [batch * A, num_slots, Hkv, D] -> the query's shape."""
        batch = len(self.mask)
        query_rows, own_key, own_value = (part.reshape(batch, -1, *part.shape[2:]) for part in (query, key, value))
        keys = torch.cat([self.context.key.to(value.dtype), own_key], dim=1)
        values = torch.cat([self.context.value.to(value.dtype), own_value], dim=1)
        return masked_attention(query_rows, keys, values, self.mask).reshape(query.shape)


def block_states(head: OnePassHead, token_ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
    """Hidden states of the slots that predict a token, [batch * A, num_drafted, H], for blocks at A anchors per
    sequence.

    Args:
        token_ids: int64 [batch, length].
        taps: [batch, length, taps_size].
        anchors: int64 [batch, A].
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
    """Hidden states of all pairs [batch, length - 1, H] and of masked slots [batch, A, num_drafted - 1, H].

    The masked slots form groups of num_drafted - 1, one group per anchor. The pair at index i has the token at i + 1 as
    input. A masked slot sees the pairs up to its anchor's pair, and the slots to its left in its own group. Source:
    P-EAGLE (arXiv 2602.01469).
    """
    batch, num_pairs, num_masked = len(token_ids), token_ids.shape[1] - 1, num_drafted - 1
    num_slots = anchors.shape[1] * num_masked
    slots = (anchors[..., None] + torch.arange(num_masked, device=anchors.device)).flatten(1)
    pairs = torch.arange(num_pairs, device=anchors.device)
    # Under autocast `fc` returns bfloat16; the conversion keeps the residual stream in the weights' precision.
    known = head.fuse(taps[:, :-1].to(head.dtype)).to(head.dtype)
    features = torch.cat([known, head.masked_features().to(head.dtype).expand(batch, num_slots, -1)], dim=1)
    tokens = torch.cat([token_ids[:, 1:], torch.full_like(slots, head.mask_token_id)], dim=1)
    of_pairs = (pairs[:, None] >= torch.cat([pairs, torch.full_like(slots[0], num_pairs)])).expand(batch, 1, -1, -1)
    mask = torch.cat([of_pairs, block_mask(anchors, num_masked, num_pairs, LayerMask(causal=True))], dim=2)
    positions = torch.cat([pairs.expand(batch, -1), slots], dim=1)
    attend = partial(masked_attention, mask=mask)
    states = head.run_layers(tokens, features, head.rotary(positions), [attend] * head.config.num_layers)
    return states[:, :num_pairs], states[:, num_pairs:].unflatten(1, (-1, num_masked))


def block_drafts(
    head: OnePassHead | ParallelEagleHead, token_ids: Tensor, taps: Tensor, anchors: Tensor, num_steps: int
) -> Tensor:
    """Greedy drafts int64 [batch, A, num_steps] of the blocks at anchors int64 [batch, A], given the text before each
    anchor.
    """
    if isinstance(head, ParallelEagleHead):
        pairs, slots = parallel_states(head, token_ids, taps, anchors, num_steps)
        batch = torch.arange(len(anchors), device=anchors.device)[:, None]
        hidden = torch.cat([pairs[batch, anchors - 1][:, :, None], slots], dim=2)
        return head.draft_token_ids[head.logits(hidden).argmax(-1)]
    hidden = block_states(head, token_ids, taps, anchors)
    walk, none = head.walk(hidden), torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
    drafted = []
    for depth in range(num_steps):
        following = walk.step(depth, token_ids.gather(1, anchors + depth).flatten()[:, None], none)
        best = following.logits[:, 0].argmax(-1, keepdim=True)
        ids = head.draft_token_ids[best] if following.token_ids is None else following.token_ids.gather(1, best)
        drafted.append(ids.view(anchors.shape))
    return torch.stack(drafted, dim=-1)


@torch.no_grad()
def block_matches(head: OnePassHead | ParallelEagleHead, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
    """Whether the greedy draft of each step equals the sequence's token -> bool [batch, N, num_steps].

    Block i starts at position i + 1, so that its results are comparable with those of chain i of `unroll.matches`,
    whose first token is also at position i + 1.
    """
    anchors, hits = torch.arange(1, token_ids.shape[1] - num_steps, device=token_ids.device), []
    steps = torch.arange(1, num_steps + 1, device=token_ids.device)
    for some in anchors.split(_ANCHORS_AT_ONCE):
        drafted = block_drafts(head, token_ids, taps, some.expand(len(token_ids), -1), num_steps)
        hits.append(drafted == token_ids[:, some[:, None] + steps])
    return torch.cat(hits, dim=1)
