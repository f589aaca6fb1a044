"""Linear layers of a model that can take adapters."""

import torch
from torch import Tensor, nn

from tests.runtime.models import random_model
from wingbeat.runtime.lora.adapted import AdaptedLinear, ModelAdapters
from wingbeat.runtime.verifier.loading.loader import prepare_model


class OddLayer(nn.Module):
    """A linear layer over the rows of the batch, and linear layers over other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.twice, self.unused = nn.Linear(8, 6), nn.Linear(8, 8), nn.Linear(8, 8)
        self.heads, self.first_row = nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.twice(x[:, :2]), self.twice(x[:, 2:])], dim=1)
        x = self.heads(x.unflatten(-1, (2, 4))).flatten(2) + self.first_row(x[:, :1])
        return x + self.whole(x).sum()


class OddModel(nn.Module):
    """The parts of a model that `ModelAdapters` uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(9, 8), nn.ModuleList([OddLayer()]), nn.Linear(8, 9)

    def set_attn_implementation(self, name: str) -> None:
        self.attention = name

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int) -> Tensor:
        return self.head(self.layers[0](self.embed(input_ids)))


def test_only_layers_over_the_rows_of_a_batch_are_adapted():
    model = OddModel()
    made = ModelAdapters(model, model.layers, max_loras=2, max_rank=4)
    assert made.linears == {"layers.0.whole": (8, 6)}
    adapted = {name for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    assert adapted == {"layers.0.whole"}
    assert model.attention == "wingbeat"


def test_experts_and_the_output_matrix_are_not_adapted():
    loaded = prepare_model(random_model("qwen3_moe"), "qwen3_moe")
    places = ModelAdapters(loaded.model, loaded.decoder_layers, max_loras=1, max_rank=4).linears
    names = {path.rpartition(".")[2] for path in places}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= names
    assert not any("experts" in path or "head" in path for path in places)
