"""Models of every architecture that is read from GGUF files answer as the model whose numbers they hold."""

import math

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGUFWriter

from tests.runtime.models import TREE, engine_config, generate, greedy, greedy_params, random_prompts
from tests.runtime.quantised.gguf_architectures import CASES, write_architecture
from tests.runtime.quantised.gguf_world import TOKENS, write_tokens
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.quantised import gguf_weights
from wingbeat.runtime.quantised.gguf_config import ARCHITECTURES
from wingbeat.runtime.quantised.gguf_file import read_gguf
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint import Place, load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile
from wingbeat.runtime.verifier.loading.loader import load_model

CPU = torch.device("cpu")
PROMPTS = random_prompts((5, 40), len(TOKENS))


def test_each_architecture_has_a_case():
    assert {architecture for architecture, _, _ in CASES.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_text_are_those_of_the_model(case, tmp_path):
    meant = write_architecture(tmp_path / "tiny.gguf", case)
    folder, ids = checkpoint_folder(tmp_path), torch.tensor([PROMPTS[1]])
    held = load_weights(ConfigFile.read(folder), torch.float32, Place(CPU, torch.float32))
    with torch.inference_mode():
        theirs, ours = meant(ids).logits, held(ids).logits
    assert float((theirs - ours).abs().max() / theirs.std()) < 2e-5
    found = generate(load_model(folder, torch.float32, CPU), engine_config(TREE), None, PROMPTS, greedy_params(16))[0]
    assert found == greedy(meant, PROMPTS, 16)[0]


def write_head(file, architecture, **fields):
    writer = GGUFWriter(str(file), architecture)
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64}
    for name, value in (sizes | {"attention.head_count": 4} | fields).items():
        add = {str: writer.add_string, bool: writer.add_bool}.get(type(value), writer.add_uint32)
        add(f"{architecture}.{name}", value)
    write_tokens(writer)
    writer.add_tensor("token_embd.weight", torch.zeros(len(TOKENS), 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "fields", "says"),
    [
        ("falcon", {}, r"tiny.gguf \(falcon\) has an unsupported architecture: llama, "),
        ("llama", {"logit_scale": 2}, r": llama.logit_scale = 2 is not supported"),
        ("llama", {"rope.dimension_count": 8}, "RoPE over a part of each head is not supported"),
        ("llama", {"rope.scaling.type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
        ("llama", {"attention.value_length": 8}, "keys and values of different width are not supported"),
        ("llama", {"attention.head_count": 0}, "cannot be read: ZeroDivisionError"),
        ("llama", {"block_count": "many"}, "block_count is 'many', not a number"),
        ("qwen2moe", {"expert_count": 4, "expert_used_count": 0}, "cannot be read: ZeroDivisionError"),
        ("olmoe", {"expert_feed_forward_length": 32}, ": olmoe.expert_feed_forward_length = 32 is not supported"),
        ("granitemoe", {"rope.scaling.finetuned": False}, "layers without RoPE are not supported"),
        ("deepseek2", {}, r"tiny.gguf \(deepseek2\) has an unsupported architecture"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, architecture, fields, says):
    write_head(tmp_path / "tiny.gguf", architecture, **fields)
    with pytest.raises(ModelCheckpointError, match=says):
        checkpoint_folder(tmp_path / "tiny.gguf")


def test_widths_of_experts_that_a_file_leaves_out_are_parts_of_the_whole(tmp_path):
    write_head(tmp_path / "tiny.gguf", "qwen2moe", expert_count=4, expert_used_count=2)
    fields = ConfigFile.read(checkpoint_folder(tmp_path)).fields
    assert (fields["moe_intermediate_size"], fields["shared_expert_intermediate_size"]) == (32, 64)


def test_gates_and_ups_of_unlike_forms_are_held_as_numbers(tmp_path):
    meant = write_architecture(tmp_path / "tiny.gguf", "gpt-oss", "Q4_0", others={"ffn_up_exps": "F16"})
    held = load_weights(ConfigFile.read(checkpoint_folder(tmp_path)), torch.float32, Place(CPU, torch.float32))
    for name, weight in meant.state_dict().items():
        if ".experts." in name:
            assert torch.equal(held.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("blk.2.ffn_up_exps.weight", (64, 96, 3), r"tensor blk.2.ffn_up_exps.weight has shape \[3, 96, 64\], \[4, "),
        ("blk.1.ffn_down_exps.weight", (32, 64, 4), r"down of expert 0 of model.layers.1.mlp.experts has shape"),
        ("blk.0.ffn_gate_exps.bias", (48, 4), r"tensor blk.0.ffn_gate_exps.bias has shape \[4, 48\], \[4, 96\] is"),
        ("blk.3.ffn_down_exps.bias", None, "tensor blk.3.ffn_down_exps.bias of the model's experts is missing"),
        ("blk.3.attn_sinks.weight", None, r"model.layers.3.self_attn.sinks"),
    ],
)
def test_what_is_wrong_with_experts_is_named(name, shape, says, tmp_path, monkeypatch):
    write_architecture(tmp_path / "tiny.gguf", "gpt-oss")

    def read(file):
        found = read_gguf(file)
        tensors = {one.name: one for one in found.tensors}
        own = tensors.pop(name)
        if shape is not None:
            num_bytes = own.num_bytes * math.prod(shape) // math.prod(own.shape)
            tensors[name] = own._replace(shape=shape, num_bytes=num_bytes)
        return found._replace(tensors=list(tensors.values()))

    monkeypatch.setattr(gguf_weights, "read_gguf", read)
    with pytest.raises(ModelCheckpointError, match=says) as refused:
        load_weights(ConfigFile.read(checkpoint_folder(tmp_path)), torch.float32, Place(CPU, torch.float32))
    assert "\n" not in str(refused.value)
    assert "tiny" in str(refused.value)


def test_files_that_are_cut_or_changed_anywhere_are_refused_or_read(tmp_path):
    write_head(tmp_path / "whole.gguf", "llama")
    whole, chance = (tmp_path / "whole.gguf").read_bytes(), torch.Generator().manual_seed(0)
    file, said = tmp_path / "tiny.gguf", []
    for place in torch.randint(4, len(whole), (150,), generator=chance).tolist():
        for damaged in (whole[:place], whole[:place] + b"\xff" * 8 + whole[place + 8 :]):
            file.write_bytes(damaged)
            try:
                checkpoint_folder(file)
            except ModelCheckpointError as error:
                said.append(str(error))
    assert len(said) > 150
    assert not any("\n" in one for one in said)
