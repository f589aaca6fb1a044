"""An EAGLE head as an exportable graph over linear KV; prefill, proposal and accept use the same graph.

A committed pair has the verifier's hidden state as input, and zeros in place of the head's hidden state. A drafted pair
has the head's hidden state as input, and zeros in place of the verifier's. If the verifier takes media and the head
uses them, the graph also has media embeddings and multi-axis RoPE positions as inputs.
"""

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Attend, DraftHead
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.tensorrt.engine_config import DraftMedia, EngineEncoder
from wingbeat.runtime.tensorrt.graph_ops import GraphOps

NUM_PLAIN_INPUTS = 7
"""Number of inputs before media and caches."""
_NUM_SHOWN = 2


def media_of(head: DecoderHead | OnePassHead, encoder: EngineEncoder | None) -> DraftMedia:
    """Media inputs of a head's graph; one-pass heads have none.

    Args:
        head: the head.
        encoder: encoder of its verifier; None if the verifier takes no media.
    """
    if encoder is None or isinstance(head, OnePassHead):
        return DraftMedia()
    config = head.config
    width = head.embedding_width if head.embedding_width == config.target_hidden_size else 0
    return DraftMedia(encoder.num_axes if config.mrope_section else 0, width)


class DraftGraph(nn.Module):
    """A draft head in the form to be exported.

    Args:
        head: the head.
        ops: operators of the export.
        media: media inputs of the graph.
    """

    def __init__(self, head: DraftHead, ops: GraphOps, media: DraftMedia = DraftMedia()) -> None:
        super().__init__()
        self.head = head
        self.ops = ops
        self.media = media

    def forward(
        self,
        input_ids: Tensor,
        hidden_states_input: Tensor,
        hidden_states_from_draft: Tensor,
        attention_pos_id: Tensor,
        kvcache_start_index: Tensor,
        last_token_ids: Tensor,
        attention_mask: Tensor,
        others: list[Tensor],
    ) -> list[Tensor]:
        """Run the graph.

        Args:
            input_ids: int64 [batch, rows], target ids.
            hidden_states_input: [batch, rows, taps_size], the verifier's taps; zeros in drafted pairs.
            hidden_states_from_draft: [batch, rows, hidden_size], hidden state of each pair's parent; zeros in committed
                pairs.
            attention_pos_id: int64 [batch, rows]; [batch, 3, rows] for a head with multi-axis RoPE.
            kvcache_start_index: int64 [batch].
            last_token_ids: int64 [batch, selected], rows whose outputs are computed.
            attention_mask: bool [batch, 1, rows, capacity].
            others: two groups, in this order. First, for a head that reads media embeddings, a mask of the pairs whose
                tokens belong to media, bool [batch, rows], and the embeddings [batch, rows, width]. Second, the key
                and value cache of each layer in turn, [batch, kv_heads, capacity, dim].

        Returns:
            logits [batch, selected, draft_vocab_size], hidden states [batch, selected, hidden_size], and the caches.
        """
        head, ops, num_shown = self.head, self.ops, _NUM_SHOWN if self.media.width else 0
        shown, caches, written = others[:num_shown], others[num_shown:], []

        def layer(*pair: Tensor) -> Attend:
            def attend(query: Tensor, *update: Tensor) -> Tensor:
                now = [
                    ops.scatter(cache, new.transpose(1, 2), kvcache_start_index)
                    for cache, new in zip(pair, update, strict=True)
                ]
                written.extend(now)
                return ops.attention(query.transpose(1, 2), *now, attention_mask, head.scaling).transpose(1, 2)

            return attend

        # A committed pair takes its features from the verifier's taps, a drafted pair from the head's hidden states.
        # The graph selects one of the two sources instead of adding both: `fc` maps the zero taps of a drafted pair to
        # the bias of `fc`, which would then be added.
        drafted = hidden_states_from_draft.abs().amax(dim=-1, keepdim=True) > 0
        features = torch.where(drafted, head.feedback(hidden_states_from_draft), head.fuse(hidden_states_input))
        attends = [layer(*pair) for pair in zip(caches[::2], caches[1::2], strict=True)]
        by_axes = self.media.num_axes > 0
        rotary = head.rotary_in_grids(attention_pos_id.transpose(0, 1)) if by_axes else head.rotary(attention_pos_id)
        tokens = input_ids
        if shown:
            stands, embeddings = shown
            tokens = torch.where(stands[..., None], embeddings, head.embed(input_ids))
        hidden = head.run_layers(tokens, features, rotary, attends)
        hidden = hidden.gather(1, last_token_ids[..., None].expand(-1, -1, hidden.shape[-1]))
        return [head.logits(hidden), hidden, *written]

    def arguments(self, inputs: list) -> tuple:
        """Groups a flat list with one entry per graph input, in order, into the arguments of `forward`."""
        # The media inputs and the caches form a single list. With several lists, torch would leave free dimensions
        # unnamed if one of the lists is empty.
        return *inputs[:NUM_PLAIN_INPUTS], inputs[NUM_PLAIN_INPUTS:]
