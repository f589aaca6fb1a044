"""LoRA adapters beside images, audio and recurrent states: the text is what transformers writes with each merged."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file, save_file

from tests.runtime.hybrids import needs_states
from tests.runtime.lora_world import KINDS, merge, write_adapter
from tests.runtime.lossless_table import drafter_of
from tests.runtime.media.media_world import HYBRIDS, NUM_TOKENS, ShownRun, random_model, shown, written
from tests.runtime.media.test_media_together import ROOMS, config_of
from tests.runtime.models import TREE, greedy_params, new_engine
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = needs_states

ADAPTED = ("qwen3_vl", "llava", "qwen2_audio", *HYBRIDS)


class Adapted:
    """A model that takes media, with two adapters, and what transformers writes with each merged and with none."""

    def __init__(self, name):
        self.ref = shown(name)
        self.loaded = prepare_model(random_model(name), name)
        adapters = ModelAdapters(self.loaded.model, self.loaded.decoder_layers, 2, 8, self.loaded.inner_linears)
        self.loaded.add(adapters)
        self.adapters, self.expected = [None], [self.ref.continuations]
        root = Path(mkdtemp())
        for seed, kind in enumerate(("all", "attention")):
            base = random_model(name)
            options = KINDS[kind] | {"targets": self.targets(kind)}
            folder = write_adapter(root / kind, base.model.language_model, seed=seed, **options)
            prefixed(folder)
            self.adapters.append(adapters.inspect(kind, folder))
            pairs = zip(self.ref.prompts, self.ref.media, strict=True)
            merged = merge(base, folder)
            self.expected.append([written(merged, *pair, NUM_TOKENS)[0] for pair in pairs])

    def targets(self, kind):
        """Names of linear layers, those of mixers among them."""
        own = {path.rpartition(".")[2] for path in self.loaded.parts["adapters"].linears}
        return tuple(sorted(own)) if kind == "all" else KINDS[kind]["targets"]

    def requests(self):
        """(request, what it must write), every prompt with every adapter."""
        for number, (adapter, expected) in enumerate(zip(self.adapters, self.expected, strict=True)):
            for index, (prompt, media) in enumerate(zip(self.ref.prompts, self.ref.media, strict=True)):
                name = str(number * len(self.ref.prompts) + index)
                params = greedy_params(NUM_TOKENS)
                yield Request(name, tuple(prompt), params, spans=media, variant=adapter), expected[index]


def prefixed(folder):
    """The names that peft gives the tensors of a whole model."""
    file = folder / "adapter_model.safetensors"
    start = "base_model.model."
    tensors = {f"{start}model.language_model.{name.removeprefix(start)}": one for name, one in load_file(file).items()}
    save_file(tensors, file)


@cache
def adapted(name):
    return Adapted(name)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["roomy", "tight"])
@pytest.mark.parametrize("kind", ["none", "right", "eagle"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_and_media_in_one_batch_write_what_merged_models_write(name, kind, room):
    world = adapted(name)
    requests, expected = map(list, zip(*world.requests(), strict=True))
    sequences = [[*request.prompt_token_ids, *text] for request, text in zip(requests, expected, strict=True)]
    if kind == "right":
        drafter = ScriptedDrafter(sequences, right_tree, world.loaded.vocab_size)
    else:
        drafter = drafter_of(kind, world.ref, TREE)
    engine = new_engine(world.loaded, config_of(name, TREE, **ROOMS[room]), drafter)
    try:
        run = ShownRun(engine, [], [], [])
        run.tokens = [[] for _ in requests]
        for request in requests:
            engine.add_request(request)
        assert run.finish() == expected
    finally:
        engine.model.remove_taps()
    assert len({tuple(text) for text in expected}) == len(expected)
