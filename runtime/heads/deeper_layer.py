"""Decoder layers after the first of an EAGLE-3 head with several layers."""

from torch import Tensor, nn

from wingbeat.kernels.layer.reference import silu_mul
from wingbeat.runtime.heads.contract import Attend, Rotary
from wingbeat.runtime.heads.layer import DecoderHeadConfig, HeadNorm, norm_weights
from wingbeat.runtime.heads.rotary import rotate


class DeeperLayer(nn.Module):
    """A decoder layer after the first; its only input is the residual stream, which the layer normalises."""

    def __init__(self, config: DecoderHeadConfig) -> None:
        super().__init__()
        hidden, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.head_dim = (heads, kv_heads, kv_heads), dim
        self.input_layernorm = HeadNorm(hidden, eps)
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * dim, bias=config.attention_bias)
        self.q_norm = HeadNorm(dim, eps) if config.qk_norm else None
        self.k_norm = HeadNorm(dim, eps) if config.qk_norm else None
        self.o_proj = nn.Linear(heads * dim, hidden, bias=config.output_bias)
        self.post_attention_layernorm = HeadNorm(hidden, eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, stream: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Returns the residual stream [..., T, H] after the layer, or [n, H] with `rows`; see `DraftHead.forward`."""
        qkv = self.qkv_proj(self.input_layernorm(stream)).unflatten(-1, (sum(self.heads), self.head_dim))
        stream = stream if rows is None else stream[rows]
        if getattr(attend, "in_fused_steps", False):
            mixed = attend.fused(qkv, rotary, norm_weights(self), rows)
        else:
            query, key, value = qkv.split(self.heads, dim=-2)
            if self.q_norm is not None and self.k_norm is not None:
                query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
            query = rotate(query, *rotary)
            mixed = attend(query if rows is None else query[rows], rotate(key, *rotary), value)
        stream = stream + self.o_proj(mixed.flatten(-2)).view(stream.shape)
        gate_up = self.gate_up_proj(self.post_attention_layernorm(stream))
        return stream + self.down_proj(silu_mul(gate_up.flatten(0, -2))).view(stream.shape)
