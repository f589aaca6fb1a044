"""The grouped dynamic convolution of DFlash2 over the slots of a block."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.runtime.one_pass.config import LatticeConfig


class GroupedConvolution(nn.Module):
    """Two convolutions, one before and one after a sublayer. Their kernels are the sum of a fixed part and a part that
    is computed from the sublayer's inputs.

    Kernel tap 0 multiplies the slot itself, and tap t multiplies the t-th slot to its left. On the left, the block is
    padded with zeros.
    """

    def __init__(self, hidden_size: int, config: LatticeConfig) -> None:
        super().__init__()
        self.shape = (2, config.num_taps, hidden_size // config.group_size)
        self.base_kernel = nn.Parameter(torch.empty(2, config.num_taps, hidden_size))
        num_dynamic = 2 * config.num_taps * self.shape[2]
        self.kernel_projection = nn.Linear(hidden_size, num_dynamic, bias=False)

    def kernels(self, inputs: Tensor) -> Tensor:
        """Computes kernels [num_reqs, num_slots, 2, taps, H] from normalised inputs [num_reqs, num_slots, H]."""
        dynamic = self.kernel_projection(inputs).unflatten(-1, self.shape)
        return self.base_kernel + dynamic.repeat_interleave(self.base_kernel.shape[2] // self.shape[2], dim=-1)

    def over(self, slots: Tensor, kernels: Tensor, side: int) -> Tensor:
        """Convolves slots [num_reqs, num_slots, H] with the kernels before (side 0) or after (side 1) the sublayer."""
        num_slots = slots.shape[1]
        padded = functional.pad(slots, (0, 0, self.shape[1] - 1, 0))
        parts = [
            kernels[..., side, tap, :] * padded[:, self.shape[1] - 1 - tap :][:, :num_slots]
            for tap in range(self.shape[1])
        ]
        return sum(parts[1:], parts[0])
