"""The head computes EAGLE-3's formula, for known tokens and for drafted ones."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig

HIDDEN, TARGET_HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB = 24, 20, 6, 2, 8, 50, 17
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_head(**changes) -> EagleHead:
    torch.manual_seed(3)
    fields = dict(
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        target_hidden_size=TARGET_HIDDEN,
        tap_layers=(1, 3, 5),
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
    )
    head = EagleHead(EagleHeadConfig(**fields | changes)).requires_grad_(False)
    for name, parameter in head.named_parameters():
        # Norm weights of one would hide a norm that is applied twice or not at all.
        parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.3)
    return head


class GrowingCache:
    """Causal attention over everything seen so far, in plain loops."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = []
        for row in range(len(query)):
            self.keys.append(key[row])
            self.values.append(value[row])
            heads = []
            for head in range(query.shape[1]):
                kv = head // (query.shape[1] // key.shape[1])
                scores = torch.stack([k[kv] @ query[row, head] for k in self.keys]) / math.sqrt(query.shape[-1])
                heads.append(scores.softmax(0) @ torch.stack([v[kv] for v in self.values]))
            rows.append(torch.stack(heads))
        return torch.stack(rows)


class Formula:
    """EAGLE-3 written from the paper, in float64, one token at a time."""

    def __init__(self, head: EagleHead) -> None:
        self.config = head.config
        self.w = {name: tensor.double() for name, tensor in head.state_dict().items()}
        self.cache = GrowingCache()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.config.rms_norm_eps) * self.w[f"{name}.weight"]

    def rope(self, heads: Tensor, position: int) -> Tensor:
        out, half = heads.clone(), HEAD_DIM // 2
        for i in range(half):
            angle = position / self.config.rope_parameters["rope_theta"] ** (2 * i / HEAD_DIM)
            a, b = heads[:, i], heads[:, i + half]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def fuse(self, taps: Tensor) -> Tensor:
        parts = taps.double().split(TARGET_HIDDEN)
        if self.config.fc_norm:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return self.w["fc.weight"] @ torch.cat(list(parts))

    def step(self, token: int, g: Tensor, position: int) -> Tensor:
        normed = self.norm(g, "hidden_norm")
        x = torch.cat([self.norm(self.w["embed_tokens.weight"][token], "input_layernorm"), normed])
        q, k, v = (self.w["qkv_proj.weight"] @ x).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        q = self.rope(q.view(HEADS, HEAD_DIM), position)
        k = self.rope(k.view(KV_HEADS, HEAD_DIM), position)
        mixed = self.cache(q[None], k[None], v.view(1, KV_HEADS, HEAD_DIM))[0]
        h = (normed if self.config.norm_before_residual else g) + self.w["o_proj.weight"] @ mixed.flatten()
        gate, up = (self.w["gate_up_proj.weight"] @ self.norm(h, "post_attention_layernorm")).chunk(2)
        return h + self.w["down_proj.weight"] @ (functional.silu(gate) * up)

    def logits(self, h: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ self.norm(h, "norm")

    def feedback(self, h: Tensor) -> Tensor:
        return self.norm(h, "norm") if self.config.norm_output else h


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": True}, {"norm_output": True, "fc_norm": True}],
    ids=["eagle3", "norm_before_residual", "eagle3.1"],
)
def test_prefill_and_drafted_steps_equal_the_formula(changes):
    head = make_head(**changes)
    formula, cache = Formula(head), GrowingCache()
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(7, 3 * TARGET_HIDDEN, generator=generator)
    tokens = torch.randint(VOCAB, (7,), generator=generator)

    hidden = head(tokens, head.fuse(taps), head.rotary(torch.arange(7)), cache)
    expected = torch.stack([formula.step(int(t), formula.fuse(taps[i]), i) for i, t in enumerate(tokens)])
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-4, atol=1e-4)

    hidden, expected = hidden[-1:], expected[-1]
    for position in range(7, 11):
        torch.testing.assert_close(head.logits(hidden)[0].double(), formula.logits(expected), rtol=1e-3, atol=1e-3)
        token = head.draft_token_ids[head.logits(hidden).argmax(-1)]
        hidden = head(token, head.feedback(hidden), head.rotary(torch.tensor([position])), cache)
        expected = formula.step(int(token), formula.feedback(expected), position)


def test_leading_dimensions_do_not_mix():
    head = make_head()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 3, 4), generator=generator)
    features = torch.randn(2, 3, 4, HIDDEN, generator=generator)
    positions = torch.arange(4).expand(2, 3, 4) + torch.arange(3)[:, None]

    def attend(query, key, value):
        return query + key.repeat_interleave(HEADS // KV_HEADS, -2) + value.repeat_interleave(HEADS // KV_HEADS, -2)

    together = head(tokens, features, head.rotary(positions), attend)
    alone = head(tokens[1, 2], features[1, 2], head.rotary(positions[1, 2]), attend)
    torch.testing.assert_close(together[1, 2], alone)


def test_frequencies_stay_float32_in_a_bfloat16_head():
    head = make_head(rope_parameters=LLAMA3_ROPE)
    before = head.signed_inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.fc.weight.dtype is torch.bfloat16
    assert torch.equal(head.signed_inv_freq, before)


def test_scaled_rope_slows_low_frequencies_only():
    plain = make_head(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}).signed_inv_freq
    scaled = make_head(rope_parameters=LLAMA3_ROPE).signed_inv_freq
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[HEAD_DIM // 2 - 1], plain[HEAD_DIM // 2 - 1] / 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
        ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size={VOCAB + 1}"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic'"),
    ],
)
def test_impossible_configs_are_refused_by_field(changes, message):
    with pytest.raises(ValueError, match=message):
        make_head(**changes)


def test_one_set_of_weights_can_be_read_two_ways():
    head = make_head()
    convention = head.convention._replace(norm_output=True, norm_before_residual=True, tap_layers=(0, 2, 4))
    other = head.with_convention(convention)
    assert other.convention == convention
    assert head.convention == HeadConvention((1, 3, 5))
    assert other.fc.weight is head.fc.weight
    taps, tokens = torch.randn(2, 3 * TARGET_HIDDEN), torch.arange(2)
    same = make_head(norm_output=True, norm_before_residual=True, tap_layers=(0, 2, 4))
    outputs = [h(tokens, h.fuse(taps), h.rotary(tokens), lambda q, k, v: q) for h in (other, same)]
    assert torch.equal(*outputs)
    assert torch.equal(other.feedback(outputs[0]), same.feedback(outputs[1]))
    with pytest.raises(ValueError, match="reads 3 taps"):
        head.with_convention(HeadConvention((1, 2)))


def test_two_readings_of_the_same_weights_turn_by_their_own_bases():
    head = make_head(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    other = head.with_convention(head.convention._replace(rope_theta=10000.0))
    assert torch.equal(other.signed_inv_freq, make_head().signed_inv_freq)
    assert torch.equal(head.signed_inv_freq, make_head(rope_parameters=head.config.rope_parameters).signed_inv_freq)
    assert not torch.equal(head.signed_inv_freq, other.signed_inv_freq)
    again = other.with_convention(head.convention)
    assert torch.equal(again.signed_inv_freq, head.signed_inv_freq)
    assert (again.convention, other.convention.rope_theta) == (head.convention, 10000.0)
    assert again.config == head.config
