"""A head's layer in fused GPU steps computes the same as step by step."""

import pytest
import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import store_kv
from wingbeat.runtime.drafters.paged_attend import PagedAttend
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig

HEADS, KV_HEADS, DIM, NUM_ROWS = 4, 2, 8, 6
SHAPE = {
    "vocab_size": 40,
    "draft_vocab_size": 40,
    "hidden_size": 24,
    "target_hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
}


class Attended:
    """Stores keys and values, and mixes something of both into the queries."""

    fused = PagedAttend.fused

    def __init__(self, *, in_fused_steps: bool) -> None:
        self.in_fused_steps = in_fused_steps
        self.cache = tuple(torch.zeros(2, 16, KV_HEADS, DIM) for _ in range(2))
        self.slot_mapping = 16 + torch.arange(NUM_ROWS)
        self.num_calls = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.num_calls += 1
        store_kv(key.flatten(0, -3), value.flatten(0, -3), *self.cache, self.slot_mapping)
        return self.over(query.flatten(0, -3)).unflatten(0, query.shape[:-2])

    def over(self, query: Tensor) -> Tensor:
        key, value = (part[1, :NUM_ROWS].mean(dim=0).repeat_interleave(HEADS // KV_HEADS, dim=0) for part in self.cache)
        return (query * key).tanh() + value


def head_of(kind: str) -> EagleHead | Eagle1Head:
    torch.manual_seed(3)
    if kind == "eagle-1":
        return Eagle1Head(Eagle1HeadConfig(**SHAPE, tap_layers=(2,), attention_bias=True)).eval()
    config = EagleHeadConfig(**SHAPE, tap_layers=(0, 1), qk_norm=kind == "normed", output_bias=kind == "biased")
    head = EagleHead(config).eval()
    for name, weight in head.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    return head


@pytest.mark.parametrize("lead", [(NUM_ROWS,), (2, 3)], ids=["pairs", "level"])
@pytest.mark.parametrize("kind", ["eagle-3", "normed", "biased", "eagle-1"])
@torch.inference_mode()
def test_fused_steps_are_the_layer(kind, lead):
    head = head_of(kind)
    token_ids, positions = torch.arange(NUM_ROWS).view(lead), 5 + torch.arange(NUM_ROWS).view(lead)
    features = torch.randn(*lead, 24, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([5, 2]) if len(lead) == 1 else None
    ways = Attended(in_fused_steps=False), Attended(in_fused_steps=True)
    apart, fused = (head(token_ids, features, head.rotary(positions), way, rows) for way in ways)
    assert [way.num_calls for way in ways] == [1, 0]
    torch.testing.assert_close(fused, apart, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(ways[1].cache, ways[0].cache, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
