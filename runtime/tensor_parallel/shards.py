"""Loads a rank's part of a model; transformers' plan defines how weights are divided and where the ranks' outputs are
summed.

transformers reads the parts from the checkpoint as distributed tensors. For inference the distributed tensors are
replaced by plain tensors, so that layers run as in a model that is not divided, and the plan's sums are computed by
hooks (Megatron-LM, arXiv 1909.08053).
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
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
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError


def load_shard(path: Path, dtype: torch.dtype, ranks: Ranks, limits: EngineConfig) -> LoadedModel:
    """Loads a model as `load_model` does, on all ranks at the same time. All ranks run the passes of the trial at load
    together.

    Args:
        limits: config of rank 0's engine; only runtime parts read it.

    Raises:
        ModelCheckpointError, UnsupportedModelError: as `load_model`.
        ValueError: the model cannot be divided; the message is one line that names the field.
        BackendLost: another rank failed.
    """
    file = ConfigFile.read(path)
    check_divisible(file, load_config(file), ranks.size)
    check_files(file)
    model = load_weights(file, dtype, distributed_config=DistributedConfig(tp_size=ranks.size)).to(ranks.device)
    with one_line(file.name):
        shards = use_plain_tensors(model, ranks)
        check_finite(model)
        ranks.wait_for_all()
        loaded = prepare_model(model, path.name, division=ranks, folder=path)
        loaded.shards = shards
    for extend in hooks("extend_shard"):
        extend(loaded, ranks, limits)
    return loaded


class Shards:
    """A rank's parts of the weights. The concatenation of all ranks' parts of a weight is the whole weight."""

    tell: Callable[[str, str, Tensor | None], None] | None = None
    """On rank 0: see `RankMessenger.change_weight`."""
    change_memory: Callable[[tuple[str, str, int | str], Callable[[], object]], str | None] | None = None
    """On rank 0: see `RankMessenger.change_memory`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._places: dict[str, tuple[tuple[int, ...], int]] = {}
        self.problem: str | None = None
        """Reason why weights cannot be written; None if they can be written."""

    def add(self, name: str, weight: DTensor, rule: str | None) -> None:
        """Records how a weight is divided."""
        for place in weight.placements:
            if rule not in _SIDE_BY_SIDE and place.is_shard():
                self.problem = f"{name} is divided by the rule {rule!r}, and cannot be written while it is served"
            elif isinstance(place, Shard):
                self._places[name] = tuple(weight.shape), place.dim

    def shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a whole weight. If the weight is not divided, returns `own`, the shape of this rank's part."""
        return self._places[name][0] if name in self._places else own

    def shard_of(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a whole weight."""
        if name not in self._places:
            return value
        return value.chunk(self._ranks.size, self._places[name][1])[self._ranks.rank]

    def whole_of(self, name: str, own: Tensor) -> Tensor:
        """A whole weight, from the ranks' parts; all ranks call this method together."""
        if name not in self._places:
            return own
        dim = self._places[name][1]
        return self._ranks.gather(own.transpose(dim, -1)).transpose(dim, -1)


def use_plain_tensors(model: PreTrainedModel, ranks: Ranks) -> Shards:
    """Replaces distributed tensors with this rank's parts, and the collectives of transformers' plan with hooks.
    Returns the parts.

    Raises:
        UnsupportedModelError: the model's plan has an unknown rule.
    """
    # Keys are `id`s of distributed tensors. The values contain these tensors, so that no other object can get the same
    # id.
    plain: dict[int, tuple[DTensor, nn.Parameter]] = {}
    shards = Shards(ranks)
    for name, module in model.named_modules():
        rule = model.tp_plan.get(replace_layer_number_by_wildcard(name))
        for key, weight in module.named_parameters(recurse=False):
            if isinstance(weight, DTensor):
                shards.add(f"{name}.{key}", weight, rule)
                if id(weight) not in plain:  # tied weights must share one parameter in the result, too
                    plain[id(weight)] = weight, nn.Parameter(weight.to_local(), requires_grad=False)
                module._parameters[key] = plain[id(weight)][1]
        if rule is None:
            continue
        if rule not in _RULES:
            raise UnsupportedModelError(f"{name} is divided by the rule {rule!r}, which is not supported")
        vars(module).pop("forward", None)  # removes transformers' wrapper around the class's forward
        _RULES[rule](module, ranks)
    return shards


def _as_it_is(module: nn.Module, ranks: Ranks) -> None:
    """Rule without a collective, because the module's output is already this rank's part."""


def _summed(module: nn.Module, ranks: Ranks) -> None:
    """Rule for modules whose outputs are summed over the ranks."""
    if ranks.rank and getattr(module, "bias", None) is not None:
        module.bias = None  # only rank 0 adds the bias, so that the sum contains it once
    module.register_forward_hook(lambda module, args, output: ranks.sum(output))


def _gathered(module: nn.Module, ranks: Ranks) -> None:
    """Rule for modules whose outputs are concatenated over the ranks."""
    module.register_forward_hook(lambda module, args, output: ranks.gather(output))


def _words(embedding: nn.Embedding, ranks: Ranks) -> None:
    """Rule for embeddings. Each rank has the rows of a part of the vocabulary; for other tokens its output is 0, and
    the ranks' outputs are summed.
    """
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
"""Rules by their names in transformers."""
_SIDE_BY_SIDE = {"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise"}
"""Rules with which the whole weight is the concatenation of the ranks' parts."""
