"""An EAGLE head as a graph: its layers over linear KV, the same for prefill, proposal and accept.

Known pairs bring the verifier's hidden states and zeros for the head's own; drafted pairs the other way round.
"""

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Attend, DraftHead
from wingbeat.runtime.tensorrt.graph_ops import GraphOps

NUM_PLAIN_INPUTS = 7
"""Before the caches."""


class DraftGraph(nn.Module):
    """A draft head to be exported."""

    def __init__(self, head: DraftHead, ops: GraphOps) -> None:
        super().__init__()
        self.head = head
        self.ops = ops

    def forward(
        self,
        input_ids: Tensor,
        hidden_states_input: Tensor,
        hidden_states_from_draft: Tensor,
        attention_pos_id: Tensor,
        kvcache_start_index: Tensor,
        last_token_ids: Tensor,
        attention_mask: Tensor,
        caches: list[Tensor],
    ) -> list[Tensor]:
        """One pass.

        Args:
            input_ids: int64 [batch, rows], target ids.
            hidden_states_input: [batch, rows, taps_size], the verifier's; zeros in drafted pairs.
            hidden_states_from_draft: [batch, rows, hidden_size], of each pair's parent; zeros in known pairs.
            attention_pos_id: int64 [batch, rows].
            kvcache_start_index: int64 [batch].
            last_token_ids: int64 [batch, selected], rows whose outputs are wanted.
            attention_mask: bool [batch, 1, rows, capacity].
            caches: key and value of each layer in turn, [batch, kv_heads, capacity, dim].

        Returns:
            logits [batch, selected, draft_vocab_size], hidden states [batch, selected, hidden_size], and the caches.
        """
        head, ops = self.head, self.ops
        written: list[Tensor] = []

        def layer(*pair: Tensor) -> Attend:
            def attend(query: Tensor, *update: Tensor) -> Tensor:
                now = [
                    ops.scatter(cache, new.transpose(1, 2), kvcache_start_index)
                    for cache, new in zip(pair, update, strict=True)
                ]
                written.extend(now)
                return ops.attention(query.transpose(1, 2), *now, attention_mask, head.scaling).transpose(1, 2)

            return attend

        # A bias of fc would be added to what the head drafted: the two are chosen between, not summed.
        drafted = hidden_states_from_draft.abs().amax(dim=-1, keepdim=True) > 0
        features = torch.where(drafted, head.feedback(hidden_states_from_draft), head.fuse(hidden_states_input))
        attends = [layer(*pair) for pair in zip(caches[::2], caches[1::2], strict=True)]
        hidden = head.run_layers(input_ids, features, head.rotary(attention_pos_id), attends)
        hidden = hidden.gather(1, last_token_ids[..., None].expand(-1, -1, hidden.shape[-1]))
        return [head.logits(hidden), hidden, *written]

    def arguments(self, inputs: list) -> tuple:
        """What `forward` takes, of one thing for each of the graph's inputs in their order."""
        return *inputs[:NUM_PLAIN_INPUTS], inputs[NUM_PLAIN_INPUTS:]
