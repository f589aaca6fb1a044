"""Two ranks in one process, each on the fake GPU: what rank 0 tells lies in a queue, and collectives do nothing."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from tests.runtime.fake_gpu import CUDA, place
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import llama, new_model
from wingbeat.runtime.fused.layers import OPS, fuse
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.tensor_parallel.shards import use_plain_tensors
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

CUTS = {"colwise": 0, "rowwise": 1, "embedding_rowwise": 0, "colwise_gather_output": 0}
"""By transformers' name of a rule: the dimension of the weight that is divided."""


OTHER_NUMBERS = "a trial gives other numbers"


class QueuedRanks(Ranks):
    """A rank of two.

    Args:
        told: messages from rank 0 to rank 1.
    """

    def __init__(self, rank: int, told: deque[tuple[bytes, Tensor]]) -> None:
        self.rank, self.size, self.device = rank, 2, CUDA
        self.told = told
        self._messages = dist.group.WORLD

    def tell(self, form: bytes, numbers: Tensor) -> None:
        super().tell(form, numbers)
        self.told.append((form, numbers))

    def hear(self) -> tuple[bytes, Tensor]:
        return self.told.popleft()

    def agree(self, problem: str | None) -> str | None:
        # A sum that lacks rank 0's addends lacks the residual stream too.
        return None if self.rank and problem == OTHER_NUMBERS else problem


class RankGraphDevice(FakeGraphDevice):
    """Runs what it captures once more: messages of a capture differ from those of its warm-up."""

    def capture(self, function, pool):
        with self.gpu.capture() as launches:
            result = function()
        self.graphs[-1] = launches
        return launches, result


@contextmanager
def group_of_two() -> Iterator[deque[tuple[bytes, Tensor]]]:
    """A process group whose collectives do nothing; yields the queue of its ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield deque()
    finally:
        dist.destroy_process_group()


def shard(ranks: QueuedRanks, num_layers: int) -> LoadedModel:
    """A rank's part of `gpu_world.verifier`, fused."""
    model = new_model(llama(num_layers))
    _cut(model, ranks)
    use_plain_tensors(model, ranks)
    loaded = prepare_model(model, "fake", division=ranks)
    assert fuse(model, loaded.decoder_layers, loaded.layers, OPS["cuda"], division=ranks) == num_layers
    place(model)
    return loaded


@torch.no_grad()
def _cut(model: PreTrainedModel, ranks: QueuedRanks) -> None:
    """Keep the part of each weight that a rank reads by transformers' plan."""
    for name, module in model.named_modules():
        dim = CUTS.get(model.tp_plan.get(replace_layer_number_by_wildcard(name), ""))
        if dim is not None:
            module.weight.data = module.weight.chunk(ranks.size, dim)[ranks.rank].clone()
