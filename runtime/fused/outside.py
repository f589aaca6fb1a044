"""Deterministic mode of a verifier: refuses weights outside the decoder layers that run on other kernels."""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from wingbeat.runtime.fused.layers import FusedNorm
from wingbeat.runtime.verifier.layers.rows_alike import ASKED_ALIKE
from wingbeat.runtime.verifier_errors import UnsupportedModelError


def check_outside(model: PreTrainedModel, layers: nn.ModuleList, is_ours: Callable[[nn.Module], bool]) -> None:
    """Refuses a model with weights outside the decoder layers that the runtime's own kernels do not handle.

    Allowed are embeddings, fused norms, and an output head on the runtime's kernels.
    """
    head, inside = model.get_output_embeddings(), set(layers.modules())
    for name, module in model.named_modules():
        if module in inside or not list(module.parameters(recurse=False)):
            continue
        is_head = module is head and is_ours(module)
        if not is_head and not isinstance(module, FusedNorm | nn.Embedding):
            raise UnsupportedModelError(
                f"{ASKED_ALIKE}, but its {name} ({type(module).__name__}) does not run on wingbeat's kernels"
            )
