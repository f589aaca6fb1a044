"""Every served family with experts: fused, they give the logits of transformers' own experts."""

import pytest
import torch

from tests.runtime.verifier.test_architectures import architectures, measured
from wingbeat.runtime.experts.forward import fuse_mixtures

__all__ = ["architectures"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", measured())
@torch.inference_mode()
def test_fused_mixtures_of_every_family(architectures, model_type):
    model = architectures.tiny_model(model_type).float().eval()
    if not any(hasattr(module, "_apply_gate") for module in model.modules()):
        pytest.skip("no experts")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("bias"):
            tensor.data.normal_(0, 0.1)
    model.set_experts_implementation("eager")
    tokens = torch.arange(1, 20)[None]
    expected = model(input_ids=tokens, use_cache=False).logits
    fuse_mixtures(model)
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
