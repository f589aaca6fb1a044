"""A model of which each row has the same bits whatever shares its pass: what that needs.

Every product, norm and attention on a row's way is our CPU kernels', which take sums in an order that neither other
rows nor a tree's shape change. Where a model has anything else on that way, it is refused by name.
"""

from torch import nn
from transformers import PreTrainedModel

from wingbeat.kernels.cpu.ops import KINDS, cpu_kernels, pack_segments
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear
from wingbeat.runtime.verifier.layers.rows_alike import ASKED_ALIKE, check_outside
from wingbeat.runtime.verifier_errors import UnsupportedModelError

__all__ = ["check", "check_limits", "make", "pack_segments"]


def check(model: PreTrainedModel) -> None:
    """Refuse a dtype that has no such kernels.

    Raises:
        UnsupportedModelError: without the model's name.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in KINDS:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, and its dtype is {dtype}")
    if cpu_kernels() is None:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, and there are no CPU kernels: a C++ compiler is needed")


def check_limits(config: EngineConfig) -> None:
    """Any will do."""


def make(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Let the output matrix leave float32, once all that runs is known to be ours.

    Args:
        layers: of the decoder, swapped as far as they can be (`wingbeat.runtime.verifier.layers.fused.fuse`, whose log
            line says why one is left).

    Raises:
        UnsupportedModelError: without the model's name.
    """
    for layer in layers:
        if not isinstance(layer, CpuLayer):
            raise UnsupportedModelError(
                f"{ASKED_ALIKE}, but its layers ({type(layer).__name__}) do not run on wingbeat's kernels"
            )
    check_outside(model, layers, lambda head: isinstance(head, InputMajorLinear))
    model.get_output_embeddings().wide = True
