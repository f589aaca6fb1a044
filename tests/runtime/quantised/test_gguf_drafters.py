"""EAGLE-3 heads in GGUF files, as llama.cpp's converter lays them out, draft as the heads that they were made from."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.needs import needs
from tests.runtime.models import CHAIN, TREE, engine_config, greedy, greedy_params, random_head, random_prompts
from tests.runtime.quantised.gguf_world import TOKENS, turned, write_model
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.cli.main import main
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.layouts import SPECFORGE, file_tensors
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.loading.loader import prepare_model

NUM_TOKENS, NUM_LAYERS = 24, 4
PROMPTS = random_prompts((5, 23, 11), len(TOKENS))
NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "hidden_norm": "blk.0.attn_norm_2",
    "input_layernorm": "blk.0.attn_norm",
    "post_attention_layernorm": "blk.0.ffn_norm",
    "q_proj": "blk.0.attn_q",
    "k_proj": "blk.0.attn_k",
    "v_proj": "blk.0.attn_v",
    "o_proj": "blk.0.attn_output",
    "gate_proj": "blk.0.ffn_gate",
    "up_proj": "blk.0.ffn_up",
    "down_proj": "blk.0.ffn_down",
}


class Pair(NamedTuple):
    model: Path
    meant: LlamaForCausalLM
    head: EagleHead


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    file = tmp_path_factory.mktemp("pair") / "tiny.gguf"
    meant = write_model(file, "Q4_1")
    return Pair(file, meant, new_head(meant))


def new_head(meant: LlamaForCausalLM, **options: Any) -> EagleHead:
    head = random_head(prepare_model(deepcopy(meant), "tiny"), **options)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())  # as other files hold them
    return head


@torch.no_grad()
def write_head(
    file: Path,
    head: EagleHead,
    form: str = "F32",
    taps: str = "target_layers",
    without: tuple[str, ...] = (),
    factors: np.ndarray | None = None,
    **more: Any,
) -> None:
    """Write a head, which gets the numbers that its matrices stand for.

    Args:
        taps: name of the field of the tapped layers.
        without: tensors to leave out.
        factors: float32 [head_dim / 2], by which rotary angles are divided.
        more: further fields, or other values of them.
    """
    config, writer = head.config, GGUFWriter(str(file), "eagle3")
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": 1,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        taps: list(config.tap_layers),
        "norm_before_residual": config.norm_before_residual,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    for name, value in (fields | more).items():
        kinds = {list: writer.add_array, bool: writer.add_bool, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            kinds.get(type(value), writer.add_uint32)(f"eagle3.{name}", value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for canonical, tensor in head.state_dict().items():
        if canonical == "draft_token_ids":
            if len(tensor) < config.vocab_size:
                writer.add_tensor("d2t", tensor.numpy(), raw_dtype=GGMLQuantizationType.I64)
            continue
        for name, part in file_tensors(SPECFORGE, config, canonical, tensor).items():
            own = name.split(".")[-2]
            if own in without:
                continue
            if part.dim() == 1:
                writer.add_tensor(f"{NAMES[own]}.weight", part.numpy())
                continue
            kind = GGMLQuantizationType[form if part.shape[1] % 32 == 0 else "F16"]
            blocks = quantize(part.numpy(), kind)
            part.copy_(torch.from_numpy(dequantize(blocks, kind)))
            if own in heads:
                blocks = turned(torch.from_numpy(blocks), heads[own]).numpy()
            writer.add_tensor(f"{NAMES[own]}.weight", np.ascontiguousarray(blocks), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def loaded(path: Path, pair: Pair) -> EagleHead:
    return load_eagle_head(path, TargetDescription.from_checkpoint(pair.model))


@pytest.mark.parametrize(
    ("form", "options", "taps"),
    [
        ("F32", {}, "target_layers"),
        ("Q8_0", {}, "extract_layers"),
        ("Q4_0", {"draft_vocab_size": 100}, "target_layers"),
    ],
)
def test_a_head_is_read_as_the_numbers_that_its_file_stands_for(form, options, taps, pair, tmp_path):
    head = new_head(pair.meant, **options)
    write_head(tmp_path / "head.gguf", head, form, taps)
    found = loaded(tmp_path / "head.gguf", pair)
    assert found.config.rms_norm_eps == pytest.approx(head.config.rms_norm_eps)
    assert found.config == replace(head.config, rms_norm_eps=found.config.rms_norm_eps)
    assert found.convention == head.convention
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_norms_before_residuals_and_stretched_angles_are_the_files(pair, tmp_path):
    head = new_head(pair.meant)
    head = head.with_convention(head.convention._replace(norm_before_residual=True))
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    write_head(tmp_path / "head.gguf", head, **scaling)
    found = loaded(tmp_path / "head.gguf", pair)
    assert found.convention == head.convention
    assert found.config.rope_parameters["rope_type"] == "linear"


def test_angles_of_llama_3_1_are_found_in_the_factors_of_the_file(pair, tmp_path):
    angles = {"rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
    angles |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    head = new_head(pair.meant)
    head.config = replace(head.config, rope_parameters=angles)
    head_dim = head.config.head_dim
    plain = 500000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    stretched = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=head_dim, rope_parameters=angles), "cpu")[0]
    write_head(tmp_path / "head.gguf", head, factors=(plain / stretched).numpy())
    assert loaded(tmp_path / "head.gguf", pair).config.rope_parameters == angles


def test_paths_of_two_words_are_files_before_they_are_names_of_the_hub(pair, tmp_path, monkeypatch):
    (tmp_path / "heads").mkdir()
    write_head(tmp_path / "heads/head.gguf", pair.head)
    monkeypatch.chdir(tmp_path)
    for word in ("heads/head.gguf", "heads"):
        assert kind_of(word) == "eagle"
        assert checkpoint_folder(word) == checkpoint_folder(tmp_path / "heads/head.gguf")


def test_embedding_and_output_matrix_may_be_the_verifiers(pair, tmp_path):
    head = new_head(pair.meant, hidden_size=pair.meant.config.hidden_size)
    write_head(tmp_path / "head.gguf", head, without=("embed_tokens", "lm_head"))
    found = loaded(tmp_path / "head.gguf", pair)
    assert torch.equal(found.embed_tokens.weight, pair.meant.get_input_embeddings().weight)
    assert torch.equal(found.lm_head.weight, pair.meant.lm_head.weight)


def drafted(pair: Pair, drafter: Path, speculation: SpeculationConfig = TREE) -> list[tuple[list[int], Any]]:
    llm = LLM(pair.model, drafter, engine_config(speculation), InProcessChannel, device="cpu", allow_bad_drafter=True)
    written = llm.generate(PROMPTS, [greedy_params(NUM_TOKENS)] * len(PROMPTS))
    return [(one.token_ids, one.metrics.num_drafts, one.metrics.num_accepted_tokens_per_pos) for one in written]


def test_a_file_drafts_what_the_head_drafts_that_it_was_made_from(pair, tmp_path):
    save_eagle_head(pair.head, tmp_path / "folder")
    write_head(tmp_path / "head.gguf", pair.head)
    found = drafted(pair, tmp_path / "head.gguf")
    assert found == drafted(pair, tmp_path / "folder")
    assert [tokens for tokens, _, _ in found] == greedy(pair.meant, PROMPTS, NUM_TOKENS)[0]
    assert kind_of(tmp_path / "head.gguf") == "eagle"
    assert parse_drafter(tmp_path / "head.gguf", None).label == "head.gguf"


@needs("draft_model")
def test_a_small_model_in_a_file_drafts_too(pair, tmp_path):
    write_model(tmp_path / "small.gguf", "Q8_0")
    found = drafted(pair, tmp_path / "small.gguf", CHAIN)
    assert [tokens for tokens, _, _ in found] == greedy(pair.meant, PROMPTS, NUM_TOKENS)[0]
    assert all(num_drafts for _, num_drafts, _ in found)
    assert kind_of(tmp_path / "small.gguf") == "draft_model"


@needs("inspection")
def test_inspect_shows_a_head(pair, tmp_path, capsys):
    write_head(tmp_path / "head.gguf", pair.head, "Q8_0")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "head.gguf"), "--model", str(pair.model), "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["shapes"]["draft_vocab_size"]) == ("eagle", len(TOKENS))


@pytest.mark.parametrize(
    ("fields", "without", "says"),
    [
        ({"target_layers": None}, (), r"head.gguf \(eagle3\): eagle3.target_layers = None"),
        ({"target_layers": [1, 2, 9]}, (), "taps enter layers"),
        ({"block_count": 2}, (), r"head.gguf \(eagle3\): eagle3.block_count = 2"),
        ({"expert_count": 4}, (), r"head.gguf \(eagle3\): eagle3.expert_count = 4 is not supported"),
        ({"embedding_length": None}, (), r"head.gguf \(eagle3\) has no field eagle3.embedding_length"),
        ({"target_hidden_size": 32}, (), "target_hidden_size=32 differs"),
        ({}, ("o_proj",), r"missing tensor midlayer.self_attn.o_proj.weight"),
        ({"attention.head_count": 8}, (), r"q_proj.weight"),
    ],
)
def test_what_is_wrong_with_a_head_is_named(fields, without, says, pair, tmp_path):
    write_head(tmp_path / "head.gguf", pair.head, without=without, **fields)
    with pytest.raises((CheckpointError, ModelCheckpointError), match=says) as refused:
        loaded(tmp_path / "head.gguf", pair)
    assert "\n" not in str(refused.value)


def test_a_damaged_file_is_refused_by_its_name(pair, tmp_path):
    write_head(tmp_path / "head.gguf", pair.head)
    whole = (tmp_path / "head.gguf").read_bytes()
    folder = checkpoint_folder(tmp_path / "head.gguf")
    (tmp_path / "head.gguf").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        loaded(folder, pair)


def test_files_that_are_cut_or_changed_anywhere_are_refused_in_one_line_or_read(pair, tmp_path):
    write_head(tmp_path / "whole.gguf", new_head(pair.meant, draft_vocab_size=100))
    whole, chance = (tmp_path / "whole.gguf").read_bytes(), torch.Generator().manual_seed(0)
    before_weights = whole.index(b"blk.0.ffn_down.weight")
    file, said = tmp_path / "head.gguf", []
    for place in torch.randint(4, before_weights, (100,), generator=chance).tolist():
        for damaged in (whole[:place], whole[:place] + b"\0" * 4 + whole[place + 4 :]):
            file.write_bytes(damaged)
            try:
                loaded(file, pair)
            except (CheckpointError, ModelCheckpointError) as error:
                said.append(str(error))
    assert len(said) > 100
    assert not any("\n" in one for one in said)


def test_a_head_is_no_model(pair, tmp_path):
    write_head(tmp_path / "head.gguf", pair.head)
    with pytest.raises(
        ModelCheckpointError, match=r"head-\w+: transformers .* knows no model_type 'eagle3'"
    ) as refused:
        LLM(tmp_path / "head.gguf", "none", engine_config(), InProcessChannel, device="cpu")
    assert "\n" not in str(refused.value)
