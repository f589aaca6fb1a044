"""Adapters of a divided model: requests of one batch write what transformers writes with each adapter merged."""

import json

import pytest

from tests.runtime.lora_world import KINDS, merge, write_adapter
from tests.runtime.models import (
    PROMPT_LENS,
    TREE,
    eagle_drafter,
    engine_config,
    greedy,
    greedy_params,
    random_model,
    random_prompts,
)
from tests.runtime.tensor_parallel.recorded_ranks import OPS, RecordedRank
from tests.runtime.tensor_parallel.two_ranks import led_engine, led_model
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.fused import layers as fused
from wingbeat.runtime.fused.layers import FusedLayer
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.lora.adapter import AdapterError
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.loading.loader import prepare_model

LENGTH = 16
EVEN = {"vocab_size": 96}
PROMPTS = random_prompts(PROMPT_LENS, 96)
NAMES = ("all", "attention", "patterned")


def folders(root, model, names=NAMES):
    """By name, an adapter of each kind, and what the model writes with it merged."""
    found = {}
    for seed, kind in enumerate(names):
        base = random_model(model, **EVEN)
        folder = write_adapter(root / kind, base, seed=seed, **KINDS[kind])
        found[kind] = folder, greedy(merge(base, folder), PROMPTS, LENGTH)[0]
    return found


def finish(engine, which):
    """Tokens of every prompt, each with the adapter of its place in `which`; None is the base model."""
    for index, prompt in enumerate(PROMPTS):
        adapter = which[index % len(which)]
        engine.add_request(Request(str(index), tuple(prompt), greedy_params(LENGTH), variant=adapter))
    tokens = {str(index): [] for index in range(len(PROMPTS))}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.failure is None
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape", "max_loras"),
    [("mistral", TREE, 2), ("llama", None, 3), ("llama", TREE, 1), ("qwen3_moe", None, 3)],
    ids=["with drafts", "all at once", "one after the other", "beside experts"],
)
def test_ranks_write_what_each_merged_model_writes(model, shape, max_loras, second, tmp_path):
    kinds, limits = folders(tmp_path, model), engine_config(shape or TREE, max_loras=max_loras, max_lora_rank=8)
    base = random_model(model, **EVEN)
    expected = {None: greedy(base, PROMPTS, LENGTH)[0]}
    drafter = None if shape is None else eagle_drafter(prepare_model(random_model(model, **EVEN), model), shape)
    (tmp_path / "model").mkdir()
    with led_model(second, base, tmp_path / "model", limits) as led:
        which = [None]
        for name, (folder, written) in kinds.items():
            if name != "attention" and model == "qwen3_moe":  # experts are no linear layers
                continue
            which.append(led.loaded.parts["adapters"].inspect(name, folder))
            expected[which[-1]] = written
        engine = led_engine(led, led.limits, drafter)
        found = finish(engine, which)
        assert found == [expected[which[index % len(which)]][index] for index in range(len(PROMPTS))]
        assert len({tuple(map(tuple, written)) for written in expected.values()}) == len(expected)
        engine.model.remove_taps()


def test_captured_rounds_of_fused_layers_have_their_rows_adapters(second, tmp_path, monkeypatch):
    """An adapter takes the place of another between two replays."""
    monkeypatch.setattr(fused, "OPS", {"cpu": OPS})
    kinds, limits = folders(tmp_path, "llama", NAMES[:2]), engine_config(max_num_seqs=4, max_loras=1, max_lora_rank=8)
    base = random_model("llama", **EVEN)
    expected = {None: greedy(base, PROMPTS, LENGTH)[0]}
    (tmp_path / "model").mkdir()
    with led_model(second, base, tmp_path / "model", limits, graph_device=RecordedRank()) as led:
        assert all(isinstance(layer, FusedLayer) for layer in led.loaded.decoder_layers)
        for name, (folder, written) in kinds.items():
            expected[led.loaded.parts["adapters"].inspect(name, folder)] = written
        engine, which = led_engine(led, led.limits, None, RecordedRank()), list(expected)
        found = finish(engine, which)
        assert found == [expected[which[index % len(which)]][index] for index in range(len(PROMPTS))]
    assert engine.stats().graphs.replays[Stage.BASE_DECODING]
    assert not engine.stats().graphs.eager_runs


def test_matrices_are_divided_as_their_layers_are(second, tmp_path):
    kinds = folders(tmp_path, "llama")
    (tmp_path / "model").mkdir()
    limits = engine_config(max_loras=1, max_lora_rank=8)
    with led_model(second, random_model("llama", **EVEN), tmp_path / "model", limits) as led:
        adapters = led.loaded.parts["adapters"]
        whole = {
            path: linear.weight.shape
            for path, linear in random_model("llama", **EVEN).named_modules()
            if path in adapters.linears
        }
        assert {path: (shape.outputs, shape.inputs) for path, shape in adapters.linears.items()} == {
            path: tuple(shape) for path, shape in whole.items()
        }
        for path, place in adapters._places.items():
            divides_inputs = path.endswith(("o_proj", "down_proj"))
            outputs, inputs = whole[path]
            assert place.stack.a.shape[1] == inputs // (2 if divides_inputs else 1), path
            assert place.stack.parts == (outputs // (1 if divides_inputs else 2),), path
        with pytest.raises(AdapterError, match="max_lora_rank is 8"):
            adapters.inspect("tall", write_adapter(tmp_path / "tall", random_model("llama", **EVEN), rank=9))
        adapters.resident.warm(adapters.inspect("all", kinds["all"][0]))
        assert len(adapters.tell(None)[0]) == 1


@pytest.mark.slow
def test_a_rank_that_finds_other_files_ends_the_engine(second, tmp_path):
    """The ranks would otherwise add up results of two adapters."""
    folder, _ = folders(tmp_path, "llama")["all"]
    (tmp_path / "model").mkdir()
    limits = engine_config(max_loras=1, max_lora_rank=8)
    with led_model(second, random_model("llama", **EVEN), tmp_path / "model", limits, ends=False) as led:
        adapter = led.loaded.parts["adapters"].inspect("all", folder)
        led.loaded.parts["adapters"].resident.warm(adapter)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99}))
        with pytest.raises(RoundFailed, match="rank 0 of 2 has lost another rank"):
            finish(led_engine(led, led.limits), [adapter])
        assert "have changed since it was loaded" in second.last_words()
        led.backend.ranks.close()
