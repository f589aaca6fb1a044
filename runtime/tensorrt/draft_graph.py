"""An EAGLE head as a graph: its layers over linear KV, the same for prefill, proposal and accept.

Known pairs bring the verifier's hidden states and zeros for the head's own; drafted pairs the other way round. Behind a
verifier that takes images, heads that read these have their embeddings as inputs, and the axes that they turn by.
"""

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Attend, DraftHead
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.tensorrt.engine_config import DraftMedia, EngineVisual
from wingbeat.runtime.tensorrt.graph_ops import GraphOps

NUM_PLAIN_INPUTS = 7
"""Before images and caches."""
_NUM_SHOWN = 2


def media_of(head: DecoderHead | OnePassHead, visual: EngineVisual | None) -> DraftMedia:
    """What the graph of a head takes of its verifier's images; nothing of those that draft a block in one pass.

    Args:
        visual: None where the verifier takes none.
    """
    if visual is None or isinstance(head, OnePassHead):
        return DraftMedia()
    config = head.config
    width = head.embedding_width if head.embedding_width == config.target_hidden_size else 0
    return DraftMedia(visual.num_axes if config.mrope_section else 0, width)


class DraftGraph(nn.Module):
    """A draft head to be exported.

    Args:
        media: what it takes of images.
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
        """One pass.

        Args:
            input_ids: int64 [batch, rows], target ids.
            hidden_states_input: [batch, rows, taps_size], the verifier's; zeros in drafted pairs.
            hidden_states_from_draft: [batch, rows, hidden_size], of each pair's parent; zeros in known pairs.
            attention_pos_id: int64 [batch, rows], or [batch, 3, rows] of a head that turns by axes.
            kvcache_start_index: int64 [batch].
            last_token_ids: int64 [batch, selected], rows whose outputs are wanted.
            attention_mask: bool [batch, 1, rows, capacity].
            others: of a head that reads images the pairs whose tokens stand for some, bool [batch, rows], and
                their embeddings [batch, rows, width]; key and value of each layer in turn, [batch, kv_heads, capacity,
                dim].

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

        # A bias of fc would be added to what the head drafted: the two are chosen between, not summed.
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
        """What `forward` takes, of one thing for each of the graph's inputs in their order."""
        # In one list: torch names no free dimension where one of several is empty.
        return *inputs[:NUM_PLAIN_INPUTS], inputs[NUM_PLAIN_INPUTS:]
