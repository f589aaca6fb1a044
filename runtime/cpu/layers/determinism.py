"""Deterministic mode on CPUs: the bits of a row's result do not depend on the other rows in the same pass.

All matrix products, norms and attention must run on the C++ kernels, whose order of summation depends neither on other
rows nor on a tree's shape. For a model with any other module that computes rows, an error is raised that names the
module.
"""

from torch import nn
from transformers import PreTrainedModel

from wingbeat.kernels.cpu.ops import KINDS, cpu_kernels, pack_segments
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear
from wingbeat.runtime.fused.outside import check_outside
from wingbeat.runtime.verifier.layers.rows_alike import ASKED_ALIKE
from wingbeat.runtime.verifier_errors import UnsupportedModelError

__all__ = ["check", "check_limits", "make", "pack_segments"]


def check(model: PreTrainedModel) -> None:
    """Raises an error if there are no deterministic kernels on this machine or for the model's dtype.

    Raises:
        UnsupportedModelError: there are no such kernels; the message does not contain the model's name.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in KINDS:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, and its dtype is {dtype}")
    if cpu_kernels() is None:
        raise UnsupportedModelError(f"{ASKED_ALIKE}, and there are no CPU kernels: a C++ compiler is needed")


def check_limits(config: EngineConfig) -> None:
    """Accepts all limits, because deterministic mode on CPUs restricts none of them."""


def make(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Checks that every layer runs on the kernels, then makes the output head return float32.

    Args:
        layers: the decoder's layers, swapped for kernels where possible; `wingbeat.runtime.fused.layers.fuse`
            logs why a layer was not swapped.

    Raises:
        UnsupportedModelError: a module does not run on the kernels; the message does not contain the model's name.
    """
    for layer in layers:
        if not isinstance(layer, CpuLayer):
            raise UnsupportedModelError(
                f"{ASKED_ALIKE}, but its layers ({type(layer).__name__}) do not run on wingbeat's kernels"
            )
    check_outside(model, layers, lambda head: isinstance(head, InputMajorLinear))
    model.get_output_embeddings().wide = True
