"""Models as verifiers: refusals are named, and accepted models write what transformers writes."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.needs import needs
from tests.runtime.models import (
    HIDDEN_SIZE,
    TREE,
    engine_config,
    generate,
    greedy,
    greedy_params,
    random_model,
    random_prompts,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.loading.loader import load_model, prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

REFUSED = {
    "Falcon": FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_would_be_silently_wrong_are_refused_by_name(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(REFUSED[name])
    with pytest.raises(UnsupportedModelError, match=name):
        prepare_model(model, "x")


@needs("model_trial")
def test_attention_that_differs_from_eager_is_refused(monkeypatch):
    """A model that does something to its attention which is not in the arguments of the attention function."""
    model = random_model("llama")
    original = LlamaAttention.forward

    def warmer(self, *args, **kwargs):
        out, weights = original(self, *args, **kwargs)
        return (out, weights) if weights is None else (out * 1.5, weights)

    monkeypatch.setattr(LlamaAttention, "forward", warmer)
    with pytest.raises(UnsupportedModelError, match=r"Llama.*differ"):
        prepare_model(model, "x")


def test_folders_that_hold_no_causal_model_are_refused(tmp_path):
    with pytest.raises(ModelCheckpointError, match="is empty"):
        load_model(tmp_path, torch.float32, torch.device("cpu"))
    config = T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, architectures=["T5Model"]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelCheckpointError, match="T5"):
        load_model(tmp_path, torch.float32, torch.device("cpu"))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_unusual_attention(name):
    """Soft caps, sinks and values narrower than keys, through prefill, decoding and trees."""
    model = random_model(name)
    prompts = random_prompts((5, 30, 19))
    expected = greedy(model, prompts, 8)[0]
    loaded = prepare_model(model, name)
    sequences = [prompt + more for prompt, more in zip(prompts, expected, strict=True)]
    told = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    for drafter in (None, told):
        tokens, engine = generate(loaded, engine_config(TREE), drafter, prompts, greedy_params(8))
        assert tokens == expected
    assert engine.speculation.num_accepted_tokens > 0


def test_what_the_probe_learns():
    layers = prepare_model(random_model("deepseek_v3"), "x").layers
    assert {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers} == {(4, 24, 12)}
    loaded = prepare_model(random_model("gpt_oss"), "x")
    assert [layer.sliding_window for layer in loaded.layers] == [16, None, 16, None]
    assert loaded.windows == (0, 16)
    assert (loaded.hidden_size, loaded.vocab_size, len(loaded.decoder_layers)) == (HIDDEN_SIZE, 97, 4)


def test_a_saved_model_loads_with_its_end_tokens(tmp_path):
    model = random_model("llama", eos_token_id=[3, 5])
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert loaded.eos_token_ids == {3, 5}
    assert loaded.max_position_embeddings == 512
    assert loaded.dtype == torch.float32


@pytest.mark.parametrize(("stored", "said"), [(torch.float32, "of float32 weights"), (None, "of weights")], ids=str)
def test_another_dtype_than_the_files_is_said_in_a_line(tmp_path, caplog, stored, said):
    random_model("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    if stored is None:
        del fields["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
    caplog.set_level(logging.INFO)
    load_model(tmp_path, torch.bfloat16, torch.device("cpu"))
    [line] = [message for message in caplog.messages if message.startswith("reading ")]
    assert f"{said} of LlamaForCausalLM" in line
    assert line.endswith("to run in bfloat16")
