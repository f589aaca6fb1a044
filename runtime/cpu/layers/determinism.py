"""A model of which each row has the same bits whatever shares its pass: what that needs, and a trial of it.

Every product, norm and attention on a row's way is our CPU kernels', which take sums in an order that neither other
rows nor a tree's shape change. Where a model has anything else on that way, it is refused by name.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from wingbeat.kernels.cpu.ops import KINDS, cpu_kernels
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear
from wingbeat.runtime.refusals import Feature, problem
from wingbeat.runtime.verifier.layers.fused import FusedNorm
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.reference import PARENTS, PATHS, TrialText
from wingbeat.runtime.verifier.loading.trial import Trial
from wingbeat.runtime.verifier_errors import UnsupportedModelError

_ASKED = "deterministic is True"


def check_rows_can_be_alike(model: PreTrainedModel) -> None:
    """Refuse a device or a dtype that has no such kernels.

    Raises:
        UnsupportedModelError: without the model's name.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        said = {Feature.DETERMINISTIC: _ASKED, Feature.CUDA: f"device is {parameter.device.type}"}
        raise UnsupportedModelError(problem(said))
    if parameter.dtype not in KINDS:
        raise UnsupportedModelError(f"{_ASKED}, and its dtype is {parameter.dtype}")
    if cpu_kernels() is None:
        raise UnsupportedModelError(f"{_ASKED}, and there are no CPU kernels: a C++ compiler is needed")


def make_rows_alike(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Let the output matrix leave float32, once all that runs is known to be ours.

    Args:
        layers: of the decoder, swapped as far as they can be (`wingbeat.runtime.verifier.layers.fused.fuse`, whose log
            line says why one is left).

    Raises:
        UnsupportedModelError: without the model's name.
    """
    for layer in layers:
        if not isinstance(layer, CpuLayer):
            raise UnsupportedModelError(f"{_ASKED}, and its layers ({type(layer).__name__}) are not our kernels'")
    head, inside = model.get_output_embeddings(), set(layers.modules())
    for name, module in model.named_modules():
        if module in inside or not list(module.parameters(recurse=False)):
            continue
        linear = isinstance(module, InputMajorLinear) and module is head
        if not linear and not isinstance(module, FusedNorm | nn.Embedding):
            raise UnsupportedModelError(f"{_ASKED}, and its {name} ({type(module).__name__}) is not our kernels'")
    head.wide = True


@torch.inference_mode()
def try_rows(loaded: LoadedModel, texts: list[TrialText]) -> None:
    """Hold the leaves of token trees, several in a pass, against the same tokens as a prompt alone, bit for bit.

    Raises:
        UnsupportedModelError: without the model's name.
    """
    for text, rows in zip(texts, Trial(loaded, texts).run(), strict=True):
        nodes = rows[len(rows) - len(PARENTS) :]
        for tokens, path in zip(text.paths().tolist(), PATHS, strict=True):
            alone = Trial(loaded, [text._replace(prompt=tokens)]).behind_prompt()
            if not torch.equal(alone, nodes[path[-1]]):
                raise UnsupportedModelError(
                    f"{_ASKED}, and its logits in a token tree are not, bit for bit, those of the same tokens alone"
                )
