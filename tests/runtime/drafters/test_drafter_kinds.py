"""Drafters by word, folder or import path."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.optional import kept
from tests.runtime.models import DEMO_PAIR
from wingbeat.kernels.parts import load_function
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.choice import CHECKPOINT, FALLBACK, KINDS, NAMES, parse_drafter
from wingbeat.runtime.drafters.registry import kind_of, load_drafter
from wingbeat.runtime.heads.target import TargetDescription

HEADS = {
    "EAGLE-1": {"layers.0.self_attn.q_proj.weight": (4, 4), "fc.weight": (4, 8)},
    "SafeAILab": {"midlayer.self_attn.q_proj.weight": (4, 8), "midlayer.hidden_norm.weight": (4,)},
    "speculators": {"layers.0.self_attn.q_proj.weight": (4, 8), "layers.0.hidden_norm.weight": (4,)},
    "EAGLE-4, which is refused by name later": {"fc.weight": (4, 12), "efficient_lm_head.weight": (4, 4)},
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}


def checkpoint(folder: Path, config: dict, tensors: dict[str, tuple[int, ...]]) -> Path:
    """Write a checkpoint folder whose tensors are all zero."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_a_name_means_itself(name):
    choice = parse_drafter(name, None)
    assert (choice.kind, choice.source, choice.label) == (name, name, name)
    assert choice.drafts == (name != "none")


@pytest.mark.parametrize("tensors", kept(HEADS).values(), ids=kept(HEADS))
def test_a_folder_with_a_head_is_one_though_its_config_names_a_language_model(tmp_path, tensors):
    assert kind_of(checkpoint(tmp_path, LLAMA, tensors)) == "eagle"


def test_the_demo_folders_are_what_they_are():
    assert kind_of(DEMO_PAIR / "drafter") == "eagle"
    whole_models = [kind.name for kind in KINDS.values() if kind.folder and kind.claims is None]
    if whole_models:
        assert kind_of(DEMO_PAIR / "verifier") in whole_models
    else:
        with pytest.raises(ValueError, match="must be 'auto', 'none'"):
            kind_of(DEMO_PAIR / "verifier")


def test_a_folder_goes_before_an_import_path_of_the_same_letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if any(kind.find_problem is not None for kind in KINDS.values()):
        assert parse_drafter("heads.mine", None).is_class
    checkpoint(tmp_path / "heads.mine", LLAMA, HEADS["SafeAILab"])
    choice = parse_drafter("heads.mine", None)
    assert (choice.kind, choice.source, choice.label) == (CHECKPOINT, Path("heads.mine"), "heads.mine")


def test_auto_is_the_demos_head_without_a_model():
    choice = parse_drafter("auto", None)
    assert (choice.kind, choice.source, choice.label) == (CHECKPOINT, DEMO_PAIR.resolve() / "drafter", "demo")


@pytest.mark.parametrize("word", ["eagel", "/no/such/folder", "", "a..b", "./head", "module.path:Class", "1.5"])
def test_anything_else_is_refused_with_what_is_allowed(word):
    with pytest.raises(ValueError, match=r"must be 'auto', 'none', .*the folder of an EAGLE head"):
        parse_drafter(word, None)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        parse_drafter(tmp_path, None)


@pytest.mark.parametrize(("name", "kind"), [("ngram", "NgramDrafter"), ("suffix", "SuffixDrafter")])
def test_kinds_without_weights_are_built_by_name(name, kind, tmp_path):
    target = TargetDescription(checkpoint(tmp_path, LLAMA, {"lm_head.weight": (4, 4)}), 4, 2, 4)
    assert type(load_drafter(name, target, SpeculationConfig())).__name__ == kind


def test_none_is_no_drafter(tmp_path):
    target = TargetDescription(checkpoint(tmp_path, LLAMA, {"lm_head.weight": (4, 4)}), 4, 2, 4)
    assert load_drafter("none", target, SpeculationConfig()) is None


def test_auto_is_the_fallback_where_nothing_better_is_known(tmp_path):
    assert parse_drafter("auto", checkpoint(tmp_path, LLAMA, {"lm_head.weight": (4, 4)})) == FALLBACK


def test_every_kind_can_be_loaded():
    for kind in KINDS.values():
        paths = (kind.build, kind.claims, kind.find_problem, kind.modules)
        assert all(callable(load_function(path)) for path in paths if path is not None), kind.name
