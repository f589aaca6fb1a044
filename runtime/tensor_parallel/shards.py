"""A rank's part of a model: transformers' plan says which part of which weight, and where the ranks add up.

transformers reads the parts from the checkpoint and keeps them as distributed tensors. For inference a part is a plain
tensor: layers then run as those of a whole model do, and the plan's sums are hooks (Megatron-LM, arXiv 1909.08053).
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.hugging_face import one_line
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.tensor_parallel.divisible import check_divisible
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.verifier.checkpoints.checkpoint import check_files, check_finite, load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.exact import HALVES
from wingbeat.runtime.verifier.loading.loader import prepare_model, written_tokens
from wingbeat.runtime.verifier_errors import UnsupportedModelError


def load_shard(path: Path, dtype: torch.dtype, ranks: Ranks, limits: EngineConfig) -> LoadedModel:
    """`load_model` on every rank at once: each pass of the trial is one of them all.

    Args:
        limits: of rank 0's engine, as far as parts of the runtime read them.

    Raises:
        ModelCheckpointError, UnsupportedModelError: as `load_model`.
        ValueError: the model cannot be divided; one line that names the field.
        BackendLost: another rank failed.
    """
    file = ConfigFile.read(path)
    check_divisible(file, load_config(file), ranks.size)
    check_files(file)
    model = load_weights(file, dtype, distributed_config=DistributedConfig(tp_size=ranks.size)).to(ranks.device)
    with one_line(file.name):
        use_plain_tensors(model, ranks)
        check_finite(model)
        ranks.wait_for_all()
        written = written_tokens(path) if model.dtype in HALVES else []
        loaded = prepare_model(model, path.name, division=ranks, written=written)
    for extend in hooks("extend_shard"):
        extend(loaded, ranks, limits)
    return loaded


def use_plain_tensors(model: PreTrainedModel, ranks: Ranks) -> None:
    """Let each rank compute with its parts alone.

    Raises:
        UnsupportedModelError: the model's plan has a rule that we do not know.
    """
    plain: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            if isinstance(weight, DTensor):  # tied ones stay tied
                part = plain.get(id(weight)) or nn.Parameter(weight.to_local(), requires_grad=False)
                module._parameters[key] = plain[id(weight)] = part
        rule = model.tp_plan.get(replace_layer_number_by_wildcard(name))
        if rule is None:
            continue
        if rule not in _RULES:
            raise UnsupportedModelError(f"{name} is divided by the rule {rule!r}, which is not served")
        vars(module).pop("forward", None)  # transformers' own, which wraps the class's
        _RULES[rule](module, ranks)


def _as_it_is(module: nn.Module, ranks: Ranks) -> None:
    """What such a module makes of its input is this rank's part already."""


def _summed(module: nn.Module, ranks: Ranks) -> None:
    """The ranks' outputs are addends."""
    if ranks.rank and getattr(module, "bias", None) is not None:
        module.bias = None  # counts once
    module.register_forward_hook(lambda module, args, output: ranks.sum(output))


def _gathered(module: nn.Module, ranks: Ranks) -> None:
    """The ranks' outputs are columns of one."""
    module.register_forward_hook(lambda module, args, output: ranks.gather(output))


def _words(embedding: nn.Embedding, ranks: Ranks) -> None:
    """Each rank knows some of the words; for the others it adds nothing."""
    count = len(embedding.weight)
    embedding.padding_idx = None
    absent: list[Tensor] = []

    def own(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        local = args[0] - ranks.rank * count
        absent[:] = [(local < 0) | (local >= count)]
        return (local.masked_fill(absent[0], 0),)

    embedding.register_forward_pre_hook(own)
    embedding.register_forward_hook(lambda module, args, output: ranks.sum(output.masked_fill(absent[0][..., None], 0)))


_RULES: dict[str, Callable[[nn.Module, Ranks], None]] = {
    "colwise": _as_it_is,
    "local_params": _as_it_is,
    "mla_kv_a_proj": _as_it_is,
    "packed_colwise": _as_it_is,
    "packed_rowwise": _as_it_is,
    "replicate": _as_it_is,
    "replicated_with_grad_allreduce": _as_it_is,
    "rowwise": _summed,
    "moe_tp_experts": _summed,
    "all_reduce": _summed,
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,
    "embedding_rowwise": _words,
}
"""By transformers' names for them."""
