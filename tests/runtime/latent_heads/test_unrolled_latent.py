"""A head of compressed attention, unrolled over its own predictions, attends as it does when it drafts."""

import torch

from tests.runtime.latent_heads.test_latent import HIDDEN, NUM_ROWS, PLAIN, SHAPE, causal
from wingbeat.runtime.heads.unroll import unroll
from wingbeat.runtime.latent_heads.latent_head import LatentEagleConfig, LatentEagleHead


@torch.no_grad()
def test_its_chains_attend_to_values_of_another_width_than_keys():
    torch.manual_seed(2)
    head = LatentEagleHead(LatentEagleConfig(**SHAPE, rope_parameters=PLAIN, query_rank=None)).eval()
    tokens, taps = torch.randint(30, (1, NUM_ROWS + 2)), torch.randn(1, NUM_ROWS + 2, 3 * HIDDEN)
    [step] = unroll(head, tokens, taps, 1)

    def attend(query, key, value):
        return causal(query, key, value, head.scaling)

    rotary = head.rotary(torch.arange(NUM_ROWS))
    expected = head(tokens[0, 1 : NUM_ROWS + 1], head.fuse(taps[0, :NUM_ROWS]), rotary, attend)
    torch.testing.assert_close(step.hidden[0], expected, rtol=1e-4, atol=1e-5)
