"""MTP modules are found in a verifier's checkpoint in the published names; what cannot be read is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.needs import needs
from tests.runtime.draft_world import World, channel_spec
from tests.runtime.heads.test_lent_weights import Verifier
from tests.runtime.models import CHAIN, HIDDEN_SIZE, VOCAB_SIZE
from tests.runtime.mtp.mtp_world import NUM_LAYERS, Modules
from tests.runtime.slow_growth import assert_tree, slow_tree
from wingbeat.runtime.drafters.choice import KINDS, holds_modules
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.load import CheckpointError
from wingbeat.runtime.heads.target import EMBEDDING, LM_HEAD, TargetDescription
from wingbeat.runtime.mtp import mtp_loader
from wingbeat.runtime.mtp.mtp_drafter import MtpDrafter
from wingbeat.runtime.mtp.mtp_loader import load_mtp_modules, num_mtp_modules

PREFIX = f"model.layers.{NUM_LAYERS}."


def written(folder, family="glm4_moe", count=1, **options):
    modules = Modules.random(family, count)
    modules.save(folder, **options)
    return modules


def load(folder, **options):
    return load_mtp_modules(TargetDescription.from_checkpoint(folder), **options)


def change(folder, edit):
    """Rewrite the checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_drafts(folder, modules):
    drafter = MtpDrafter(load(folder), CHAIN, NUM_LAYERS)
    spec = channel_spec(CHAIN, HIDDEN_SIZE)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    world = World(CHAIN, HIDDEN_SIZE, (9,))
    world.feed(drafter)
    slot = world.slots[0]
    tokens = world.tokens[slot, :9].tolist()
    with torch.inference_mode():
        tree = drafter.propose(world.batch(proposals=[slot]))
        assert_tree(tree, 0, slow_tree(tokens, modules.logits_of(tokens, world.taps[slot, :8]), CHAIN))


@pytest.mark.parametrize(
    ("family", "count", "options"),
    [
        ("deepseek_v3", 2, {}),
        ("glm4_moe", 1, {"copies": False}),
        ("qwen3", 1, {"copies": False}),
        ("qwen3", 1, {"layout": "qwen", "copies": False}),
        ("glm4_moe", 1, {"layout": "qwen", "copies": False}),
    ],
    ids=["deepseek", "no-copies", "dense", "qwen-dense", "qwen-experts"],
)
def test_published_layouts_are_read(tmp_path, family, count, options):
    modules = written(tmp_path, family, count, **options)
    assert num_mtp_modules(TargetDescription.from_checkpoint(tmp_path)) == count
    assert holds_modules(KINDS["mtp"], tmp_path)
    assert_drafts(tmp_path, modules)


def test_the_word_mtp_means_the_verifiers_own_modules(tmp_path):
    written(tmp_path)
    target = TargetDescription.from_checkpoint(tmp_path)
    for word in ("mtp", "auto"):
        drafter = load_drafter(word, target, CHAIN)
        assert isinstance(drafter, MtpDrafter)
        assert drafter.needs.tap_layers == (NUM_LAYERS,)


def test_copies_of_the_verifiers_matrices_are_held_once(tmp_path):
    written(tmp_path, count=2)
    first, second = load(tmp_path).items
    assert first.embedding is second.embedding
    assert first.head is second.head

    def another(tensors):
        tensors[f"{PREFIX}shared_head.head.weight"] *= 2

    change(tmp_path, another)
    first, second = load(tmp_path).items
    assert first.embedding is second.embedding
    assert torch.equal(first.head, 2 * second.head)


def test_a_module_in_bfloat16_keeps_what_must_not_be_rounded(tmp_path):
    written(tmp_path, "deepseek_v3")
    module = load(tmp_path, dtype=torch.bfloat16).items[0]
    assert module.eh_proj.weight.dtype == module.embedding.dtype == torch.bfloat16
    assert module.block.mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_a_verifier_without_modules_says_which_tensor_is_missing(tmp_path):
    written(tmp_path)
    change(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)])
    assert num_mtp_modules(TargetDescription.from_checkpoint(tmp_path)) == 0
    assert not holds_modules(KINDS["mtp"], tmp_path)
    with pytest.raises(CheckpointError, match=r"no MTP module: model\.layers\.2\.eh_proj\.weight"):
        load(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.mtp_layers.0.input_proj.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"not supported \(model\.mtp_layers\.0\.input_proj\.weight among 1\)"):
        load(tmp_path)


def in_blocks(tensors: dict[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    """The plain tensors that a checkpoint in float8, with a scale for each square block, stands for; it is rewritten
    to that checkpoint, as FineGrainedFP8 and DeepSeek-V3 have it: norms, embeddings, outputs and routers stay."""
    plain = dict(tensors)
    for name, weight in plain.items():
        if weight.ndim != 2 or not name.endswith("_proj.weight"):
            continue
        rows, columns = (-(-size // block) for size in weight.shape)
        scales = torch.rand(rows, columns) * 0.01 + 0.001
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        plain[name] = tensors[name].float() * spread
    return plain


@needs("quantised")
@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3"])
def test_modules_in_float8_are_read_as_their_numbers(tmp_path, family, layout):
    written(tmp_path / "fp8", family, layout=layout, copies=layout == "deepseek")
    shutil.copytree(tmp_path / "fp8", tmp_path / "plain")
    held = load_file(tmp_path / "fp8" / "model.safetensors")
    save_file(in_blocks(held, 32), tmp_path / "plain" / "model.safetensors")
    save_file(held, tmp_path / "fp8" / "model.safetensors")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    read, expected = load(tmp_path / "fp8"), load(tmp_path / "plain")
    weights = expected.state_dict()
    assert read.state_dict().keys() == weights.keys()
    for name, weight in read.state_dict().items():
        assert torch.equal(weight, weights[name]), name


WRONG = {
    "missing": (lambda t: t.pop(f"{PREFIX}hnorm.weight"), r"lacks tensors: hnorm\.weight \(1 in all\)"),
    "missing-expert": (lambda t: t.pop(f"{PREFIX}mlp.experts.3.up_proj.weight"), "experts without all of gate_proj"),
    "unexpected": (lambda t: t.update({f"{PREFIX}extra.weight": torch.zeros(2)}), r"unexpected tensors: block\.extra"),
    "shape": (
        lambda t: t.update({f"{PREFIX}eh_proj.weight": torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)}),
        r"eh_proj\.weight of MTP module 0 is \[64, 64\], not \[64, 128\]",
    ),
    "head-shape": (
        lambda t: t.update({f"{PREFIX}shared_head.head.weight": torch.zeros(8, HIDDEN_SIZE)}),
        rf"shared_head\.head\.weight of MTP module 0 is \[8, 64\], not \[{VOCAB_SIZE}, 64\]",
    ),
    "quantised": (
        lambda t: t.update({f"{PREFIX}eh_proj.weight_scale_2": torch.ones(1)}),
        "a head quantised by ",
    ),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_tensors_are_named(tmp_path, edit, message):
    written(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_more_modules_than_attention_has_room_for_are_refused(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.setattr(mtp_loader, "MOST_MODULES", 0)
    with pytest.raises(CheckpointError, match="has 1 MTP modules: 0 at most are supported"):
        load(tmp_path)


def test_modules_of_another_kind_of_layer_are_refused(tmp_path):
    written(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_layer_types": ["sliding_attention"]}))
    with pytest.raises(CheckpointError, match=r"mtp_layer_types=.*the verifier's last layer is 'full_attention'"):
        load(tmp_path)


def test_mtp_modules_hold_what_is_lent_and_of_their_own_what_differs(tmp_path):
    Modules.random("glm4_moe", 2).save(tmp_path)
    plain = TargetDescription.from_checkpoint(tmp_path)
    verifier = Verifier(embed_tokens__weight=plain.embedding(), lm_head__weight=plain.lm_head())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith("layers.3.shared_head.head.weight")]
    tensors[name] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    first, second = load_mtp_modules(TargetDescription.from_checkpoint(tmp_path, verifier)).items
    for module in (first, second):
        assert module.embedding.data_ptr() == verifier.lent[EMBEDDING].data_ptr()
    assert first.head.data_ptr() == verifier.lent[LM_HEAD].data_ptr()
    assert torch.equal(second.head, 2 * verifier.lent[LM_HEAD])
