"""A head's level by own products of few rows against the head's own steps, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels import choice
from wingbeat.kernels.layer.draft_rows import Pairs
from wingbeat.runtime.drafters.paged_attend import PagedAttend
from wingbeat.runtime.fused.levels import FusedLevel
from wingbeat.runtime.heads.contract import OfParents
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig

BLOCK_SIZE = 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "target_hidden_size": 32,
    "tap_layers": (0, 1),
    "vocab_size": 20,
    "draft_vocab_size": 20,
}
KERNELS = ("few_rows_product", "embed_to_heads")


class Echo(PagedAttend):
    """Stores keys and values, and returns the queries."""

    def over(self, query: torch.Tensor) -> torch.Tensor:
        return query


@pytest.mark.parametrize("normed", [False, True], ids=["features", "normed"])
@pytest.mark.parametrize("as_tree", [False, True], ids=["chain", "tree"])
@torch.inference_mode()
def test_a_level_by_own_products_is_the_heads(as_tree, normed, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted here")
    torch.manual_seed(0)
    head = EagleHead(EagleHeadConfig(**SIZES, norm_before_residual=normed)).eval()
    for parameter in head.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    token_ids, hidden = torch.randint(0, 20, (2, 3)), torch.randn(2, 3, 32)
    parents = torch.tensor([[2, 0, 0], [1, 2, 1]]) if as_tree else None
    rotary = head.rotary(torch.arange(6).view(2, 3))
    results = []
    for own in (False, True):
        caches = tuple(torch.zeros(8, BLOCK_SIZE, 2, 8) for _ in range(2))
        attend = Echo(caches, BLOCK_SIZE + torch.arange(6), [], 1.0)
        if own:
            monkeypatch.setattr(choice, "compiled", lambda name, _: choice.module_of(name) if name in KERNELS else None)
            level = FusedLevel(head)
            for product in level.products.values():
                product.own = (True,) * len(product.own)
            features = hidden.clone() if as_tree else hidden.clone().view(-1, 32)
            pairs = Pairs(token_ids.flatten(), head.embed_tokens.weight, features, parents)
            out = level.run(pairs, rotary, attend, normed=normed)
            results.append((out, level.logits(out), *caches))
        else:
            features = OfParents(hidden, parents) if as_tree else hidden
            out = head(token_ids, features, rotary, attend).flatten(0, 1)
            results.append((out, head.logits(out), *caches))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
