"""Adapters on models with recurrent states write what merged models write; what lies within mixers has none."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from tests.runtime.hybrids import CONFIGS, hybrid, needs_states, random_hybrid
from tests.runtime.lora_world import merge, write_adapter
from tests.runtime.models import TREE, Run, engine_config, greedy, greedy_params, new_engine
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.lora.adapter import AdapterError
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = needs_states
NUM_TOKENS = 20
ROOMS = {
    "roomy": {},
    "tight": {"max_model_len": 96, "num_kv_blocks": 32, "max_num_batched_tokens": 24, "num_saved_states": 3},
}
INNER = {"jamba": ("x_proj", "dt_proj")}
"""Linear layers that see one sequence after the other."""


class World:
    """A hybrid with two adapters, and what transformers writes with each merged and with none."""

    def __init__(self, name):
        self.prompts = hybrid(name).prompts
        self.loaded = prepare_model(random_hybrid(name), name)
        adapters = ModelAdapters(self.loaded.model, self.loaded.decoder_layers, 2, 8, self.loaded.inner_linears)
        self.loaded.add(adapters)
        self.names = {path.rpartition(".")[2] for path in adapters.linears}
        self.adapters = [None]
        self.expected = [greedy(random_hybrid(name), self.prompts, NUM_TOKENS)[0]]
        root = Path(mkdtemp())
        for seed in range(2):
            base = random_hybrid(name)
            folder = write_adapter(root / str(seed), base, targets=tuple(sorted(self.names)), rank=4 + seed, seed=seed)
            self.adapters.append(adapters.inspect(str(seed), folder))
            self.expected.append(greedy(merge(base, folder), self.prompts, NUM_TOKENS)[0])


@cache
def world(name):
    return World(name)


@pytest.mark.few(1)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("kind", ["none", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_several_adapters_write_what_merged_models_write(name, kind, room):
    check(world(name), kind, room)


def check(here, kind, room):
    pairs = [
        (
            Request(f"{number * len(here.prompts) + index}", tuple(prompt), greedy_params(NUM_TOKENS), variant=adapter),
            text,
        )
        for number, (adapter, texts) in enumerate(zip(here.adapters, here.expected, strict=True))
        for index, (prompt, text) in enumerate(zip(here.prompts, texts, strict=True))
    ]
    limits = {"block_size": 4, "state_interval": 8, "num_kv_blocks": 400} | ROOMS[room]
    sequences = [[*request.prompt_token_ids, *text] for request, text in pairs]
    drafter = ScriptedDrafter(sequences, right_tree, here.loaded.vocab_size) if kind == "right" else None
    engine = new_engine(here.loaded, engine_config(TREE, **limits), drafter)
    try:
        run = Run(engine, [], [])
        run.tokens = [[] for _ in pairs]
        for request, _ in pairs:
            engine.add_request(request)
        assert run.finish() == [text for _, text in pairs]
    finally:
        engine.model.remove_taps()


@pytest.mark.slow
@pytest.mark.parametrize("name", INNER)
def test_an_adapter_of_a_layer_within_a_mixer_is_refused_by_name(name, tmp_path):
    here = world(name)
    assert not here.names & set(INNER[name])
    assert {"in_proj", "out_proj"} <= here.names
    write_adapter(tmp_path, random_hybrid(name), targets=INNER[name])
    with pytest.raises(AdapterError, match="not a linear layer of the model's decoder layers"):
        here.loaded.parts["adapters"].inspect("inner", tmp_path)


@pytest.mark.slow
def test_mixers_edges_have_adapters():
    with torch.no_grad():
        assert {"in_proj_qkv", "out_proj"} <= world("qwen3_5").names
