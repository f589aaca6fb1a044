"""A draft head's decoder layer as the CPU's kernels read it."""

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.ops import layer_of, matrix_of, part_of
from wingbeat.kernels.cpu.structs import Heads, Layer, Matrix
from wingbeat.runtime.verifier.layers.cpu_kernels import cpu_kernels


class HeadNorm(nn.RMSNorm):
    """A root-mean-square norm that the CPU's kernels compute where nobody asks for gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        weight = self.weight
        ours = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()
        kernels = cpu_kernels() if ours else None
        return super().forward(x) if kernels is None else kernels.rms_norm(x, weight, self.eps)


def kernel_layer(head: nn.Module) -> Layer | None:
    """The layer of a `DecoderHead`, which must outlive it; None where weights are not float32, input by input."""
    config, size = head.config, head.config.intermediate_size
    heads, num_kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    try:
        qkv, gate_up = (matrix_of(linear.weight, linear.bias) for linear in (head.qkv_proj, head.gate_up_proj))
        output, down = (matrix_of(linear.weight, linear.bias) for linear in (head.o_proj, head.down_proj))
    except ValueError:
        return None
    norm = head.post_attention_layernorm
    layer = layer_of(
        Heads(heads, num_kv_heads, dim, dim, head.scaling, 0.0, 0, None),
        config.hidden_size,
        size,
        query_key_value=[qkv, Matrix(), Matrix()],
        output=output,
        output_norm=norm.weight.data_ptr(),
        output_eps=norm.eps,
        gate=part_of(gate_up, 0, size),
        up=part_of(gate_up, size, 2 * size),
        down=down,
    )
    layer.inputs = head.qkv_proj.in_features
    if head.q_norm is not None and head.k_norm is not None:
        layer.query_norm, layer.key_norm = head.q_norm.weight.data_ptr(), head.k_norm.weight.data_ptr()
        layer.query_eps = head.q_norm.eps
    return layer
