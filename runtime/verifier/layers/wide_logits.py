"""Logits in float32 from an output matrix in half precision, on GPUs: rounding makes no two tokens equally likely."""

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)


class WideLinear(nn.Linear):
    """A frozen linear layer on a GPU whose products leave as float32, in which they are summed anyway."""

    wide = True

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> float32 [..., out]"""
        # What transformers does to logits behind it, such as caps and scales, then is in float32, too.
        out = torch.mm(input.reshape(-1, input.shape[-1]), self.weight.t(), out_dtype=torch.float32)
        return (out if self.bias is None else out.add_(self.bias)).view(*input.shape[:-1], self.out_features)


@torch.inference_mode()
def widen_logits(model: nn.Module) -> bool:
    """Let a model's output matrix leave float32 where it is a plain one in half precision on a GPU; whether it does.

    Adapters are on decoder layers alone, and weights stay what they are, tied or not.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not head.weight.is_cuda or head.weight.dtype not in HALVES:
        return False
    head.__class__ = WideLinear
    try:
        head(head.weight.new_zeros(2, head.in_features))
    except RuntimeError as error:  # NotImplementedError is one
        head.__class__ = nn.Linear
        logger.info("logits stay in %s: %s", head.weight.dtype, str(error).splitlines()[0])
        return False
    return True
