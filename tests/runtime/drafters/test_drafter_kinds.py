"""Which drafter a word, a folder or an import path means."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.runtime.models import DEMO_PAIR
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.choice import CHECKPOINT, NAMES, USER, holds_mtp, parse_drafter
from wingbeat.runtime.drafters.registry import KINDS, kind_of, load_drafter
from wingbeat.runtime.heads.target import TargetDescription

HEADS = {
    "EAGLE-1": {"layers.0.self_attn.q_proj.weight": (4, 4), "fc.weight": (4, 8)},
    "SafeAILab": {"midlayer.self_attn.q_proj.weight": (4, 8), "midlayer.hidden_norm.weight": (4,)},
    "speculators": {"layers.0.self_attn.q_proj.weight": (4, 8), "layers.0.hidden_norm.weight": (4,)},
    "EAGLE-4, which is refused by name later": {"fc.weight": (4, 12), "efficient_lm_head.weight": (4, 4)},
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}


def checkpoint(folder: Path, config: dict, tensors: dict[str, tuple[int, ...]]) -> Path:
    """A folder of zeros."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / "model.safetensors")
    return folder


def mtp_checkpoint(folder: Path, layer: int = 2, **fields) -> Path:
    """A verifier of two layers that says it has a prediction layer, and has one as layer number `layer`."""
    tensors = {"model.layers.1.mlp.up_proj.weight": (2, 2), f"model.layers.{layer}.eh_proj.weight": (2, 4)}
    return checkpoint(folder, LLAMA | {"num_nextn_predict_layers": 1} | fields, tensors)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_a_name_means_itself(name):
    choice = parse_drafter(name, None)
    assert (choice.kind, choice.source, choice.label) == (name, name, name)
    assert choice.drafts == (name != "none")


@pytest.mark.parametrize("tensors", list(HEADS.values()), ids=list(HEADS))
def test_a_folder_with_a_head_is_one_though_its_config_names_a_language_model(tmp_path, tensors):
    assert kind_of(checkpoint(tmp_path, LLAMA, tensors)) == "eagle"


@pytest.mark.parametrize("name", ["fc.weight", "model.fc.weight"])
def test_a_folder_with_a_head_that_drafts_in_one_pass_is_one(tmp_path, name):
    assert kind_of(checkpoint(tmp_path, LLAMA | {"dflash_config": {}}, {name: (4, 8)})) == "one_pass"


def test_a_folder_with_a_whole_model_is_a_draft_model(tmp_path):
    assert kind_of(checkpoint(tmp_path, LLAMA, {"model.layers.0.self_attn.q_proj.weight": (4, 4)})) == "draft_model"


def test_the_demo_folders_are_what_they_are():
    assert kind_of(DEMO_PAIR / "drafter") == "eagle"
    assert kind_of(DEMO_PAIR / "verifier") == "draft_model"


def test_a_folder_goes_before_an_import_path_of_the_same_letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_drafter("heads.mine", None).kind == USER
    checkpoint(tmp_path / "heads.mine", LLAMA, HEADS["SafeAILab"])
    choice = parse_drafter("heads.mine", None)
    assert (choice.kind, choice.source, choice.label) == (CHECKPOINT, Path("heads.mine"), "heads.mine")


def test_auto_is_the_demos_head_without_a_model():
    choice = parse_drafter("auto", None)
    assert (choice.kind, choice.source, choice.label) == (CHECKPOINT, DEMO_PAIR.resolve() / "drafter", "demo")


def test_auto_is_prompt_lookup_where_the_model_predicts_one_token(tmp_path):
    assert parse_drafter("auto", checkpoint(tmp_path, LLAMA, {"lm_head.weight": (4, 4)})).kind == "ngram"


def test_auto_is_the_models_own_prediction_where_its_layers_are_there(tmp_path):
    assert parse_drafter("auto", mtp_checkpoint(tmp_path)).kind == "mtp"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    assert holds_mtp(tmp_path)


def test_auto_knows_qwens_prediction_layers_too(tmp_path):
    assert parse_drafter("auto", checkpoint(tmp_path, LLAMA, {"mtp.fc.weight": (2, 4)})).kind == "mtp"


def test_a_config_that_promises_prediction_layers_is_not_believed_without_their_tensors(tmp_path):
    assert not holds_mtp(mtp_checkpoint(tmp_path, layer=1))
    assert parse_drafter("auto", tmp_path).kind == "ngram"


def test_prediction_layers_are_found_in_shards(tmp_path):
    mtp_checkpoint(tmp_path, layer=1)
    save_file({"model.layers.2.eh_proj.weight": torch.zeros(2, 4)}, tmp_path / "model-00002-of-00002.safetensors")
    assert holds_mtp(tmp_path)


@pytest.mark.parametrize("word", ["eagel", "/no/such/folder", "", "a..b", "./head", "module.path:Class", "1.5"])
def test_anything_else_is_refused_with_what_is_allowed(word):
    with pytest.raises(ValueError, match=r"must be 'auto', 'none', 'ngram', .*'mtp', the folder of an EAGLE head"):
        parse_drafter(word, None)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        parse_drafter(tmp_path, None)


@pytest.mark.parametrize(
    ("name", "kind"), [("ngram", "NgramDrafter"), ("auto", "NgramDrafter"), ("suffix", "SuffixDrafter")]
)
def test_kinds_without_weights_are_built_by_name(name, kind, tmp_path):
    target = TargetDescription(checkpoint(tmp_path, LLAMA, {"lm_head.weight": (4, 4)}), 4, 2, 4)
    assert type(load_drafter(name, target, SpeculationConfig())).__name__ == kind
    assert load_drafter("none", target, SpeculationConfig()) is None


def test_every_name_is_a_kind():
    named = {name for name in NAMES if name not in ("auto", "none")}
    assert named | {"eagle", "one_pass", "draft_model", "user"} == set(KINDS)
