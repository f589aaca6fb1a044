"""Adapters over packed weights write what transformers writes with each merged into the weights that are meant."""

import copy

import pytest
import torch

from tests.runtime.lora.test_adapters_lossless import add, engine_of, finish
from tests.runtime.lora_world import KINDS, LoraWorld, merge, write_adapter
from tests.runtime.models import CHAIN, TREE, random_model
from tests.runtime.quantised.test_checkpoints import CASES, save_quantised
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.verifier.loading.loader import load_model


class PackedWorld(LoraWorld):
    """A verifier of packed weights, and adapters of it."""

    def __init__(self, folder, case):
        super().__init__("llama", kinds={})
        base = random_model("llama")
        base.load_state_dict(save_quantised(folder / "model", *CASES[case]), strict=False)
        self.loaded = load_model(folder / "model", torch.float32, torch.device("cpu"))
        self.loaded.add(ModelAdapters(self.loaded.model, self.loaded.decoder_layers, 4, 8))
        for seed, kind in enumerate(("attention", "patterned")):
            merged = copy.deepcopy(base)
            written = write_adapter(folder / kind, merged, seed=seed, **KINDS[kind])
            self.take(kind, written, merge(merged, written))


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [CHAIN, TREE, None], ids=["chain", "tree", "plain"])
def test_texts_are_those_of_merged_weights(tmp_path, case, shape):
    world = PackedWorld(tmp_path, case)
    asked = [(which, index) for which in (1, 2) for index in range(len(world.prompts))]
    with engine_of(world, shape, max_num_seqs=5) as engine:
        for which, index in asked:
            add(engine, world, which, index, name=f"{which} {index}")
        tokens, _ = finish(engine)
    assert [tokens[f"{which} {index}"] for which, index in asked] == [
        world.expected[which][index] for which, index in asked
    ]
