"""A one-pass head as an exportable graph; the same graph commits positions and runs the slots of a block.

An input row is a committed position or a slot of a block. A committed position has taps and the token id COMMITTED; its
keys and values are computed from the taps alone. A slot has its token's id, or vocab_size if the slot is masked.
"""

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Attend
from wingbeat.runtime.one_pass.config import LayerMask
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.tensorrt.graph_ops import GraphOps

COMMITTED = -1
"""Value of `input_ids` at committed positions."""
NUM_PLAIN_INPUTS = 5
"""Number of inputs before the masks."""


def layer_masks(head: OnePassHead) -> tuple[LayerMask, ...]:
    """The distinct masks of the head's layers, in layer order."""
    return tuple(dict.fromkeys(head.config.masks))


class BlockGraph(nn.Module):
    """A one-pass head in the form to be exported; the walk from slot to slot is not part of the graph.

    Raises:
        ValueError: the head has attention sinks.
    """

    def __init__(self, head: OnePassHead, ops: GraphOps) -> None:
        super().__init__()
        if head.config.sinks:
            raise ValueError("this head has attention sinks, which the ONNX operator Attention does not support")
        self.head = head
        self.ops = ops

    def forward(
        self,
        input_ids: Tensor,
        hidden_states_input: Tensor,
        attention_pos_id: Tensor,
        kvcache_start_index: Tensor,
        last_token_ids: Tensor,
        attention_masks: list[Tensor],
        caches: list[Tensor],
    ) -> list[Tensor]:
        """Run the graph.

        Args:
            input_ids: int64 [batch, rows]: target ids of slots, vocab_size for masked slots, COMMITTED for committed
                positions.
            hidden_states_input: [batch, rows, taps_size], the verifier's taps at committed positions.
            attention_pos_id: int64 [batch, rows].
            kvcache_start_index: int64 [batch].
            last_token_ids: int64 [batch, selected], rows whose outputs are computed.
            attention_masks: bool [batch, 1, rows, capacity], one for each of `layer_masks`.
            caches: key and value cache of each layer in turn, [batch, kv_heads, capacity, dim].

        Returns:
            logits [batch, selected, draft_vocab_size], hidden states [batch, selected, hidden_size], and the caches.
        """
        head, written = self.head, []
        rotary = head.rotary(attention_pos_id)
        context = head.context(head.fuse(hidden_states_input), rotary)
        committed = (input_ids == COMMITTED)[..., None, None]
        masks = dict(zip(layer_masks(head), attention_masks, strict=True))

        def layer(index: int) -> Attend:
            def attend(query: Tensor, *own: Tensor) -> Tensor:
                now = []
                for cache, new, known in zip(caches[2 * index : 2 * index + 2], own, context[index], strict=True):
                    update = torch.where(committed, known, new).transpose(1, 2)
                    now.append(self.ops.scatter(cache, update, kvcache_start_index))
                written.extend(now)
                scaling = head.config.head_dim**-0.5
                mask = masks[head.config.masks[index]]
                return self.ops.attention(query.transpose(1, 2), *now, mask, scaling).transpose(1, 2)

            return attend

        attends = [layer(index) for index in range(head.config.num_layers)]
        hidden = head.run_stream(self._embedded(input_ids), rotary, attends)
        hidden = hidden.gather(1, last_token_ids[..., None].expand(-1, -1, hidden.shape[-1]))
        return [head.logits(hidden), hidden, *written]

    def arguments(self, inputs: list) -> tuple:
        """Groups a flat list with one entry per graph input, in order, into the arguments of `forward`."""
        caches = NUM_PLAIN_INPUTS + len(layer_masks(self.head))
        return *inputs[:NUM_PLAIN_INPUTS], inputs[NUM_PLAIN_INPUTS:caches], inputs[caches:]

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """Inputs [batch, rows, H] of the layers; committed positions get an arbitrary finite value."""
        head, size = self.head, self.head.config.vocab_size
        embedded = head.embed_tokens(input_ids.clamp(0, size - 1))
        masked = (input_ids == size)[..., None]
        return head.scaled(torch.where(masked, head.mask_vector, embedded))
