"""Written heads have their tool's layout, names and fields, and are read back unchanged."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.eagle_formula import Recipe, random_weights
from tests.runtime.head_formats import FORMATS, NUM_LAYERS, VOCAB
from tests.runtime.heads.head_folder import same_head, target_of
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.load import head_conventions, load_eagle_head
from wingbeat.runtime.heads.save import save_eagle_head

HIDDEN = 24
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SHAPE = dict(
    hidden_size=HIDDEN,
    intermediate_size=20,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    target_hidden_size=HIDDEN,
    vocab_size=VOCAB,
)
THREE = dict(SHAPE, tap_layers=(2, 4, 5), draft_vocab_size=40)
EVERYTHING = dict(norm_before_residual=True, norm_output=True, qk_norm=True, attention_bias=True, output_bias=True)
CASES = {
    "specforge": ("specforge", THREE),
    "specforge-3.1": ("specforge", THREE | dict(norm_output=True, fc_norm=True, tap_layers=(0, 3, 6))),
    "specforge-llama3": ("specforge", THREE | dict(rope_parameters=LLAMA3)),
    "speculators": ("speculators", THREE),
    "speculators-qwen3-3.1": ("speculators", THREE | EVERYTHING | dict(fc_norm=True)),
    "speculators-whole-vocabulary": ("speculators", THREE | dict(draft_vocab_size=VOCAB, norm_before_fc=True)),
}
target = partial(target_of, HIDDEN, NUM_LAYERS, VOCAB)


def filled(head):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16())
    size = head.config.draft_vocab_size
    head.draft_token_ids.copy_(torch.randperm(VOCAB, generator=generator)[:size].sort().values)
    return head.requires_grad_(False)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_back_in_one_reading(name, tmp_path):
    layout, fields = CASES[name]
    head = filled(EagleHead(EagleHeadConfig(**fields)))
    save_eagle_head(head, tmp_path, layout=layout)
    loaded = load_eagle_head(tmp_path, target())
    assert same_head(loaded, head)
    assert loaded.config == head.config
    assert head_conventions(tmp_path, target()) == (head.convention,)


def test_an_eagle1_head_is_written_as_safeailab_does(tmp_path):
    config = Eagle1HeadConfig(
        **SHAPE, tap_layers=(NUM_LAYERS,), draft_vocab_size=VOCAB, fc_bias=True, attention_bias=True
    )
    head = filled(Eagle1Head(config))
    save_eagle_head(head, tmp_path, with_embedding=False)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"} & names
    assert {"fc.weight", "fc.bias", "layers.0.self_attn.q_proj.bias"} <= names
    loaded = load_eagle_head(tmp_path, target(embedding=head.embed_tokens.weight, lm_head=head.lm_head.weight))
    assert same_head(loaded, head)
    assert loaded.config == head.config


@pytest.mark.parametrize("name", ["specforge", "speculators-plain", "eagle1-biases-own-embedding"])
def test_the_tensors_are_those_of_the_tool(name, tmp_path):
    """Names are compared with those of `head_formats`, which writes published formats."""
    chosen = FORMATS[name]
    chosen.write(tmp_path / "theirs", random_weights(chosen.recipe, VOCAB, chosen.draft_vocab))
    zeros = torch.zeros(VOCAB, HIDDEN)
    head = load_eagle_head(tmp_path / "theirs", target(embedding=zeros, lm_head=zeros))
    layout = {"specforge": "specforge", "speculators-plain": "speculators"}.get(name)
    save_eagle_head(head, tmp_path / "ours", layout=layout)
    theirs = {
        chosen.name_of(weight): value.shape
        for weight, value in random_weights(chosen.recipe, VOCAB, chosen.draft_vocab).items()
        if weight not in chosen.leaves_out
    }
    ours = {key: value.shape for key, value in load_file(tmp_path / "ours" / "model.safetensors").items()}
    assert ours.pop("t2d", torch.Size([VOCAB])) == (VOCAB,)
    assert ours == theirs


def test_speculators_fields_are_those_its_readers_know(tmp_path):
    head = filled(EagleHead(EagleHeadConfig(**THREE, rope_parameters=LLAMA3)))
    save_eagle_head(head, tmp_path, layout="speculators", verifier="models/verifier")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["speculators_model_type"] == "eagle3"
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "models/verifier"
    methods = {method["proposal_type"] for method in raw["speculators_config"]["proposal_methods"]}
    assert raw["speculators_config"]["default_proposal_method"] in methods
    body = raw["transformer_layer_config"]
    assert (body["model_type"], body["vocab_size"], body["num_hidden_layers"]) == ("llama", VOCAB, 1)
    assert body["rope_theta"] == body["rope_parameters"]["rope_theta"] == 5e5
    assert body["rope_scaling"]["rope_type"] == "llama3"


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_other_engines_readings_are_ours(layout, tmp_path):
    """Without `wingbeat_convention`, which only this project writes, the head is read with the same convention."""
    head = filled(EagleHead(EagleHeadConfig(**THREE | dict(tap_layers=(1, 4, 6)))))
    save_eagle_head(head, tmp_path, layout=layout)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["wingbeat_convention"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert head_conventions(tmp_path, target())[0] == head.convention


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        ("specforge", dict(qk_norm=True), "no qk_norm"),
        ("specforge", dict(norm_before_residual=True), "no norm_before_residual"),
        ("speculators", dict(fc_bias=True), "no fc_bias"),
        ("speculators", dict(attention_bias=True), "no output_bias"),
        ("safeailab", {}, "cannot hold an EAGLE-3 head: specforge or speculators can"),
    ],
)
def test_a_layout_that_cannot_say_it_is_refused(layout, fields, message, tmp_path):
    head = EagleHead(EagleHeadConfig(**THREE | fields))
    with pytest.raises(ValueError, match=message):
        save_eagle_head(head, tmp_path, layout=layout)
    assert not list(tmp_path.iterdir())


def test_an_eagle1_head_has_one_layout(tmp_path):
    recipe = Recipe(family=1, num_taps=1)
    config = Eagle1HeadConfig(**SHAPE, tap_layers=(NUM_LAYERS,), draft_vocab_size=VOCAB, rms_norm_eps=recipe.eps)
    with pytest.raises(ValueError, match="cannot hold an EAGLE-1 head: safeailab can"):
        save_eagle_head(Eagle1Head(config), tmp_path, layout="speculators")
