"""A draft head with weights of eight bits: drafting reads half of the bytes, and the verifier decides as ever."""

import torch
from torch import Tensor, nn

from wingbeat.kernels.layer.fp8 import Fp8Weight, fp8_linear, to_fp8
from wingbeat.runtime.fp8_devices import check_fp8
from wingbeat.runtime.heads.layer import DecoderHead


class Fp8Linear(nn.Module):
    """A frozen linear layer whose weight is rounded to float8, with a scale for each output channel."""

    values: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = to_fp8(linear.weight)
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return fp8_linear(inputs, Fp8Weight(self.values, self.scales), self.bias)


@torch.no_grad()
def use_fp8(head: DecoderHead) -> None:
    """Round the weights of a head's products, in its present dtype and on its device; embeddings and norms stay.

    Raises:
        ValueError: the device has no float8.
    """
    check_fp8("drafter_weights", head.device)
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Fp8Linear(child))
