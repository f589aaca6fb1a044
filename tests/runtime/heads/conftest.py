"""A head, and the folder it is saved in."""

import pytest
import torch

from tests.runtime.heads.head_folder import DRAFT_VOCAB, HIDDEN, VOCAB
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.save import save_eagle_head


@pytest.fixture
def head() -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(
        EagleHeadConfig(
            hidden_size=HIDDEN,
            intermediate_size=20,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            target_hidden_size=HIDDEN,
            tap_layers=(2, 4, 5),
            vocab_size=VOCAB,
            draft_vocab_size=DRAFT_VOCAB,
        )
    ).requires_grad_(False)
    head.draft_token_ids.copy_(torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values)
    for parameter in head.parameters():
        parameter.copy_(torch.randn_like(parameter).bfloat16())
    return head


@pytest.fixture
def folder(head, tmp_path):
    save_eagle_head(head, tmp_path)
    return tmp_path
