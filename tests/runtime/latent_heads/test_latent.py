"""A head of compressed attention (MLA) computes what transformers' own DeepSeek layer does."""

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from wingbeat.runtime.latent_heads.latent_head import LatentEagleConfig, LatentEagleHead

NUM_ROWS, HIDDEN, HEADS = 7, 16, 4
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 32, "rope_theta": 50000.0}
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}
SHAPE = dict(
    hidden_size=HIDDEN,
    intermediate_size=20,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    head_dim=14,
    target_hidden_size=HIDDEN,
    tap_layers=(1, 2, 3),
    vocab_size=30,
    draft_vocab_size=30,
    kv_rank=12,
    rope_dim=6,
    value_dim=10,
    max_position_embeddings=256,
)


def causal(query, key, value, scaling):
    """[T, heads, D] each, [T, heads, V]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    scores = scores.masked_fill(torch.ones(NUM_ROWS, NUM_ROWS, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), value)


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("query_rank", [None, 8])
@pytest.mark.parametrize("interleaved", [True, False])
@torch.inference_mode()
def test_its_attention_is_that_of_transformers(rope, query_rank, interleaved):
    torch.manual_seed(2)
    head = LatentEagleHead(
        LatentEagleConfig(**SHAPE, rope_parameters=rope, query_rank=query_rank, rope_interleaved=interleaved)
    ).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = DeepseekV3Config(
        hidden_size=2 * HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=query_rank,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=10,
        rope_parameters=rope,
        rope_interleave=interleaved,
        max_position_embeddings=256,
        attention_bias=False,
        attn_implementation="eager",
    )
    theirs = DeepseekV3Attention(config, layer_idx=0).eval()
    theirs.o_proj = torch.nn.Identity()
    own = {name: tensor for name, tensor in head.state_dict().items() if name in theirs.state_dict()}
    theirs.load_state_dict(own)
    inputs, positions = torch.randn(NUM_ROWS, 2 * HIDDEN), 90 + torch.arange(NUM_ROWS)
    mask = torch.full((NUM_ROWS, NUM_ROWS), float("-inf")).triu(1)[None, None]
    rotary = DeepseekV3RotaryEmbedding(config)(inputs[None], positions[None])
    expected = theirs(inputs[None], position_embeddings=rotary, attention_mask=mask)[0][0]

    mixed = []

    def attend(query, key, value):
        mixed.append(causal(query, key, value, head.scaling).flatten(1))
        return mixed[0].unflatten(1, (HEADS, -1))

    head._layer(inputs, torch.zeros(NUM_ROWS, HIDDEN), head.rotary(positions), attend, None)
    torch.testing.assert_close(mixed[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_dim": 5}, "qk_rope_head_dim=5 is odd"),
        ({"kv_rank": 0}, "kv_rank=0 is not a positive integer"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2: MLA attention has keys for each of 4 heads"),
        ({"num_layers": 2}, "2 decoder layers of MLA attention: only heads with one layer are supported"),
    ],
)
def test_shapes_that_it_cannot_have_are_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        LatentEagleConfig(**SHAPE | fields)


def test_the_elements_that_turn_do_so_by_three_axes():
    head = LatentEagleHead(LatentEagleConfig(**SHAPE, mrope_section=(1, 1, 1)))
    positions = torch.tensor([[5, 9], [2, 30], [7, 0]])
    for ours, *theirs in zip(head.rotary_in_grids(positions), *map(head.rotary, positions), strict=True):
        by_axis = torch.stack(theirs).unflatten(-1, (2, 3))
        assert torch.equal(ours.unflatten(-1, (2, 3)), torch.stack([by_axis[axis, ..., axis] for axis in range(3)], -1))
    with pytest.raises(ValueError, match=r"mrope_section=\[3, 2, 2\] is not three counts that add up to 3 frequencies"):
        LatentEagleConfig(**SHAPE, mrope_section=(3, 2, 2))
