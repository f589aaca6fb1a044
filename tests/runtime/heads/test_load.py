"""Every supported checkpoint loads as the same head; every other one is refused by name."""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.heads.head_folder import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    VOCAB,
    edit_config,
    edit_tensors,
    load,
    same_head,
)
from wingbeat.runtime.heads import head_config, plain_weights
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError
from wingbeat.runtime.heads.load import CheckpointError, head_conventions
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription

Q_PROJ = "midlayer.self_attn.q_proj.weight"


def readings(folder):
    return head_conventions(folder, TargetDescription(folder, HIDDEN, LAYERS, VOCAB))


def test_what_is_saved_is_loaded(head, folder):
    loaded = load(folder)
    assert same_head(loaded, head)
    assert loaded.config == head.config
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_both_layouts_give_equal_outputs(head, folder, caplog):
    ours = load(folder)
    # A file as SafeAILab writes it: no eagle_config, so default taps; no embedding; v4 rope fields; pickles; old
    # buffers.
    dropped = ("eagle_config", "rope_parameters", "target_hidden_size", "wingbeat_convention")
    edit_config(folder, drop=dropped, rope_theta=10000.0, architectures=["LlamaForCausalLM"])
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("embed_tokens.weight").float()
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with caplog.at_level(logging.INFO):
        theirs = load(folder, embedding=embedding)
    assert same_head(ours, theirs)
    assert theirs.config == ours.config
    assert "EAGLE-3 in SafeAILab layout, taps enter layers [2, 4, 5] (by default" in caplog.text
    tokens, features, positions = torch.arange(3), torch.randn(3, HIDDEN), torch.arange(3)
    outputs = [h.logits(h(tokens, features, h.rotary(positions), lambda q, k, v: q)) for h in (ours, theirs)]
    assert torch.equal(*outputs)


def test_tap_ids_of_files_name_the_output_of_layers(folder):
    ids = json.loads((folder / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [1, 3, 4]
    assert load(folder).config.tap_layers == (2, 4, 5)


def test_shards_are_joined(head, folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for shard, part in enumerate((names[:7], names[7:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{shard}.safetensors")
        index |= dict.fromkeys(part, f"model-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert same_head(load(folder), head)


def test_an_absent_embedding_is_shared_with_the_target(head, folder):
    save_eagle_head(head, folder, with_embedding=False)
    target = torch.randn(VOCAB, HIDDEN)
    loaded = load(folder, embedding=target)
    assert loaded.embed_tokens.weight.data_ptr() == target.data_ptr()


def test_an_absent_output_matrix_is_the_targets_when_every_token_is_drafted(folder):
    target = torch.randn(VOCAB, HIDDEN)

    def full_vocabulary(tensors):
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]

    edit_tensors(folder, full_vocabulary)
    edit_config(folder, draft_vocab_size=VOCAB)
    loaded = load(folder, lm_head=target)
    assert torch.equal(loaded.lm_head.weight, target)
    assert torch.equal(loaded.draft_token_ids, torch.arange(VOCAB))


def test_a_convention_can_be_overridden(folder):
    assert not load(folder).config.norm_output
    assert load(folder, convention=HeadConvention((1, 3, 4), norm_output=True)).config.norm_output


@pytest.mark.parametrize("name", [Q_PROJ, "fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "d2t"])
def test_a_missing_tensor_is_named(folder, name):
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"missing tensor {name}"):
        load(folder)


@pytest.mark.parametrize("name", [Q_PROJ, "fc.weight", "midlayer.mlp.up_proj.weight", "d2t", "t2d"])
def test_a_misshaped_tensor_is_named(folder, name):
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    with pytest.raises(CheckpointError, match=f"tensor {name} has shape"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"midlayer.extra.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensor midlayer\.extra\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"].add_(VOCAB), "d2t points outside"),
        (lambda t: t["d2t"].copy_(-torch.arange(DRAFT_VOCAB)), "d2t maps two draft ids"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d marks other"),
    ],
    ids=["out of range", "duplicate", "t2d disagrees"],
)
def test_a_broken_token_map_is_refused(folder, change, message):
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_hidden_size": 99}, "target_hidden_size=99"),
        ({"vocab_size": 99}, "vocab_size=99"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(folder, fields, message):
    edit_config(folder, drop=("wingbeat_convention",), **fields)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("drop", "fields", "message"),
    [
        ((), {"wingbeat_convention": {"taps": [1]}}, "wingbeat_convention={'taps': [1]} is not a convention"),
        ((), {"wingbeat_convention": {"tap_layers": [1, 3, LAYERS]}}, "taps enter layers (1, 3, 8)"),
        (
            ("target_hidden_size",),
            {"target_is": 20},
            "fc.weight reads 48 values: 3 taps of a target with hidden_size=20",
        ),
        (
            ("wingbeat_convention",),
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}},
            "fc.weight reads 48 values: 4 taps of a target with hidden_size=16 are 64",
        ),
        (("wingbeat_convention", "eagle_config", "target_hidden_size"), {"target_is": 24}, "no eagle_aux_hidden_state"),
        ((), {"hidden_size": "wide"}, 'hidden_size is "wide", it must be a positive whole number'),
        ((), {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_a_head_for_another_target_is_refused_by_its_numbers(folder, drop, fields, message):
    hidden = fields.pop("target_is", HIDDEN)
    edit_config(folder, drop=drop, **fields)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(folder, hidden_size=hidden)


def test_ids_beside_eagle_config_name_inputs(folder):
    edit_config(folder, drop=("wingbeat_convention", "eagle_config"), eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    assert [reading.tap_layers for reading in readings(folder)] == [(1, 3, 6), (2, 4, 7)]


def test_a_reading_that_is_left_open_is_logged(folder, caplog):
    edit_config(folder, drop=("wingbeat_convention",), norm_output=True)
    with caplog.at_level(logging.INFO):
        assert load(folder).convention == readings(folder)[0]
    assert "norm_output=True, norm_before_residual=False, RoPE default of base 10000, one of 2 readings" in caplog.text


def test_speculators_may_have_trained_either_residual(head, folder):
    save_eagle_head(head, folder, layout="speculators")
    edit_config(folder, drop=("wingbeat_convention", "norm_before_residual"))
    assert [reading.norm_before_residual for reading in readings(folder)] == [False, True]


def test_a_missing_config_field_is_named(folder):
    edit_config(folder, drop=("intermediate_size",))
    with pytest.raises(CheckpointError, match="intermediate_size"):
        load(folder)


def rename(old: str, new: str):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name[len(old) :]] = tensors.pop(name)

    return edit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters='by layer type' is not supported"),
    ],
)
def test_a_body_that_is_not_computed_is_refused_by_field(folder, fields, message):
    edit_config(folder, **fields)
    with pytest.raises(UnsupportedCheckpointError, match=re.escape(message)):
        load(folder)


FLOAT8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("fields", "edit", "way"),
    [
        ({"quantization_config": FLOAT8}, None, "quant_method='fp8'"),
        ({"transformer_layer_config": {"compression_config": FLOAT8}}, None, "quant_method='fp8'"),
        ({}, rename("fc.weight", "fc.qweight"), "fc.qweight"),
        ({}, rename("fc.weight", "fc.weight_packed"), "fc.weight_packed"),
        ({}, lambda tensors: tensors.update({"fc.weight_scale_inv": torch.ones(1)}), "fc.weight_scale_inv"),
    ],
)
def test_a_quantised_head_is_refused_where_no_part_reads_it(folder, fields, edit, way, monkeypatch):
    edit_config(folder, **fields)
    if edit is not None:
        edit_tensors(folder, edit)
    monkeypatch.setattr(plain_weights, "first_result", lambda *given: None)
    with pytest.raises(UnsupportedCheckpointError, match=f"^a head quantised by {way} is not supported: no "):
        load(folder)


def test_a_head_of_compressed_attention_is_refused_where_no_part_reads_it(folder, monkeypatch):
    edit_config(folder, kv_lora_rank=8)
    monkeypatch.setattr(head_config, "first_result", lambda *given: None)
    with pytest.raises(CheckpointError, match=r"^a head with compressed attention \(MLA\) is not supported$"):
        load(folder)
